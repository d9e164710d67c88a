"""The network of a trained draft model, and its start: layers of the target, or narrow ones.

Shape letters: B sequences, T tokens, A learning rows, V vocabulary, W width, H hidden size of the
target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from outpace.drafters.trained import head_name, read_embedding
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.models.mlp import dense_weight
from outpace.train.align import Aligned
from outpace.train.networks import KeyValue, Layer, Norm, Turns

DOUBT = 0.3
"""Scale of the last norm at the start: some layers of a model alone are sure of wrong tokens.
Two layers of SmolLM2-135M begin with a divergence of 6.4 instead of 16."""


class DraftNet(nn.Module):
    """Layers between an embedding and a head, either of which may be the target's.

    Args:
        embed: whether it has an embedding of its own.
        head: rows of a head of its own; None borrows.
    """

    def __init__(self, shape: DecoderConfig, device: torch.device, *, embed: bool, head: int | None) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList([Layer(shape, i) for i in range(shape.num_layers)])
        self.norm = Norm(shape.hidden_size, shape)
        size = shape.hidden_size
        self.embed = nn.Embedding(shape.vocab_size, size) if embed else None
        self.lm_head = None if head is None else nn.Linear(size, head, bias=False)
        self._turns = [Turns(rope, device) for rope in shape.ropes]

    def forward(
        self, embed_BTW: Tensor, place_BT: Tensor, aligned: Aligned | None, held: list[KeyValue] | None = None
    ) -> Tensor:
        """Normed last states of the learning rows [B, A, W], or of all rows without ``aligned``.

        Below the last layer all rows are computed; in it, the others give keys and values only.

        Args:
            held: keys and values by layer of the rows before these, which are added to it; empty at first.
        """
        before = held[0][0].shape[2] if held else 0
        # As in the decoder: the scale is rounded to the dtype of the embedding.
        scale = torch.tensor(self.shape.embed_scale, dtype=embed_BTW.dtype)
        stream = embed_BTW.float() * float(scale)
        place_BT = place_BT.expand(stream.shape[:2])
        for i in range(self.shape.num_layers):
            layer = cast(Layer, self.layers[i])
            turns, longest = self._turns[self.shape.rope_of_layer[i]], before + place_BT.shape[1]
            u = layer.input_layernorm(stream)
            text = layer.self_attn.keys(u, turns.at(place_BT, longest))
            if held is not None:
                if before:
                    text = torch.cat([held[i][0], text[0]], 2), torch.cat([held[i][1], text[1]], 2)
                held[i : i + 1] = [text]
            place = place_BT
            if aligned is not None and i == self.shape.num_layers - 1:
                stream, u, place = aligned.rows(stream), aligned.rows(u), aligned.place_BA
            query = layer.self_attn.queries(u, turns.at(place, longest))
            stream = layer.after(stream, layer.self_attn(query, text, (), place))
        return cast(Tensor, self.norm(stream))

    @torch.no_grad()
    def take(self, target: Decoder, layers: Sequence[int], vocab: VocabMap | None) -> None:
        """Start as these layers of the target, with its last norm and head."""
        for name, parameter in self.named_parameters():
            part, _, rest = name.partition(".")
            theirs = head_name(target) if part == "lm_head" else f"model.{name}"
            if part == "layers":
                index, _, rest = rest.partition(".")
                theirs = f"model.layers.{layers[int(index)]}.{rest}"
            value = dense_weight(target.checkpoint, theirs)
            if part == "lm_head" and vocab is not None:
                value = value[vocab.to_target_D]
            parameter.copy_(value)
        if len(layers) < target.num_layers:
            offset = self.shape.norm_offset
            self.norm.weight.add_(offset).mul_(DOUBT).sub_(offset)

    def stored(self) -> dict[str, Tensor]:
        """Its tensors by the names of a Llama of transformers."""
        names = {"embed": "model.embed_tokens", "lm_head": "lm_head"}
        out: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            part, _, rest = name.partition(".")
            out[f"{names[part]}.{rest}" if part in names else f"model.{name}"] = parameter
        return out


def chosen_layers(count: int, take: str | None, target: Decoder) -> tuple[int, ...]:
    """Layers of the target to start from: those named, or the first ones.

    Of seven choices of two layers of SmolLM2-135M the first two began with nearly the highest
    acceptance. After 25 steps they had the highest. The first and the last began with none.

    Raises:
        ModelError: more than there are, or not as many as ``count``.
    """
    last = target.num_layers - 1
    if take is None:
        if count > target.num_layers:
            raise ModelError(f"draft_model: layers={count}, but {target.name} has {last + 1}")
        return tuple(range(count))
    words = take.split(",")
    taken = tuple(int(word) if word.isdecimal() else -1 for word in words)
    if len(taken) != count or not all(0 <= layer <= last for layer in taken):
        raise ModelError(f"draft_model: take={take!r} must name {count} layers of {target.name}, 0 to {last}")
    return taken


def shape_of(theirs: DecoderConfig, taken: Sequence[int], width: int | None) -> DecoderConfig:
    """The shape of a decoder of these layers, or of as many narrower ones.

    Raises:
        ModelError: a width that is no multiple of the target's head width.
    """
    shape = replace(
        theirs.of_layers(taken), mixture=None, tied_head=False, logit_softcap=None, logit_scale=1.0
    )
    if width is None:
        return shape
    if width < theirs.head_dim or width % theirs.head_dim:
        raise ModelError(f"draft_model: width={width} must be a multiple of the head width {theirs.head_dim}")
    heads = width // theirs.head_dim
    keys = next(n for n in range(min(heads, theirs.num_kv_heads), 0, -1) if heads % n == 0)
    ffn = round(theirs.ffn_size * width / theirs.hidden_size / 8) * 8
    return replace(
        shape, hidden_size=width, ffn_size=max(8, ffn), num_heads=heads, num_kv_heads=keys, embed_scale=1.0
    )


@torch.no_grad()
def narrow_start(net: DraftNet, target: Decoder, vocab: VocabMap | None, seed: int) -> None:
    """Random layers between the target's embedding and head, each on its main directions."""
    coins = torch.Generator().manual_seed(seed)
    for name, parameter in net.layers.named_parameters():
        if parameter.dim() == 2:
            spread = parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                spread *= (2 * len(net.layers)) ** -0.5  # the stream starts as the embedding
            parameter.copy_(spread * torch.randn(parameter.shape, generator=coins))
        elif name.endswith("bias"):
            parameter.zero_()
    assert net.embed is not None and net.lm_head is not None
    head_VH = target.checkpoint.tensor(head_name(target), torch.float32)
    rows_DH = head_VH if vocab is None else head_VH[vocab.to_target_D]
    net.lm_head.weight.copy_(_main_directions(rows_DH, net.shape.hidden_size))
    whole_VH = read_embedding(target).float().cpu()
    net.embed.weight.copy_(_main_directions(whole_VH, net.shape.hidden_size))


def _main_directions(rows_VH: Tensor, width: int) -> Tensor:
    """Rows in the basis of their ``width`` largest principal directions, [V, W]."""
    basis_HH: Tensor = torch.linalg.eigh(rows_VH.T @ rows_VH).eigenvectors  # largest last
    return rows_VH @ basis_HH[:, -width:]
