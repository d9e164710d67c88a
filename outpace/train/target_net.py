"""A decoder in training, with exits that share its norm and head: LayerSkip's recipe, and some additions.

Layers drop out, the deeper the more often; from nothing, also more often as training goes on:

    p(l) = p_max D(l) S(t),  D(l) = 2^(l / (L - 1)) - 1,  S(t) = 1, or from nothing 2^t - 1, t from 0 to 1
    loss = (CE(L) + s mean_e((1 - d) CE(e) + d KL(L | e))) / (1 + s)

One step in ``whole`` is such a step. The others end at an exit, and cost what its layers cost: CE(e). With
``distill`` (d) an exit learns the whole model's distribution besides the text. With ``states`` (a) the
layers up to the last exit also learn from as many states of the whole model, evenly spread, in whole steps.
What is added is a times `state_loss` of what the last norm makes of both.

From nothing, there are no layers behind the last exit for the share ``grow`` of the training. They come in
with zeros where they write, so the whole model begins as good as its exit.

Papers: LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710 (l, L, S, D and p_max are its letters;
dropping is per sequence, as there). Layers that come in later: Gong et al. 2019, PMLR 97. Learning from
the whole: FREE, arXiv:2310.05424. ``together`` takes the mean loss of all exits in every step, as S2D does,
arXiv:2407.01955.

Shape letters: B sequences, T tokens, H hidden size, V vocabulary, R rows; of attention, X texts and
heads, K heads, D their width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outpace.errors import ModelError
from outpace.files import replaced, write_whole
from outpace.law import VocabMap
from outpace.models.base import Target
from outpace.models.families import DecoderConfig
from outpace.models.weights import EXITS
from outpace.train.batches import Batch
from outpace.train.llama import hf_config
from outpace.train.losses import head_loss, state_loss
from outpace.train.networks import Layer, Norm, Turn, Turns
from outpace.train.objective import Objective, Step
from outpace.train.target_start import END, Start


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What is made."""

    start: str = "smollm2-135m"
    """Model that training goes on from; ``none``: from nothing, with ``layers``, ``width`` and ``ffn``."""
    layers: int = 24
    """L."""
    width: int = 256
    """H; heads are 64 wide."""
    ffn: int = 704
    """Width of the MLPs."""
    vocab: int = 2048
    """Tokens: so many of the model's that the texts use most, or those of a tokenizer trained on them."""
    exits: str = "3+6"
    """Layers after which a loss is taken."""
    whole: int = 4
    """One step in so many goes through all layers; the others end at an exit."""
    together: bool = False
    """Let these others take the losses of all exits (sorted fine-tuning), and not of one in turn."""
    scale: float = 1.0
    """s: weight of that loss."""
    distill: float = 0.5
    """d: share of an exit's loss that asks for the whole model's distribution."""
    states: float = 0.0
    """Weight of the distance of shallow states from deep ones (FREE has 0.5); 0 has no such loss."""
    grow: float = 0.75
    """Share of a training from nothing in which the layers behind the last exit are left out."""
    dropout: float = 0.1
    """p_max: chance that a sequence skips the last layer, at the end."""
    length: int = 256
    """Tokens of a sequence."""
    batch: int = 4
    """Sequences of a step."""
    seed: int = 0
    """Of the weights, of what is read when, and of what drops out."""

    def __post_init__(self) -> None:
        if not all(part.isdecimal() and int(part) for part in self.exits.split("+")):
            raise ValueError(f"exits must be numbers of layers, as in 3+6, got {self.exits!r}")
        for name in ("layers", "ffn", "vocab", "whole", "length", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("distill", "grow", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name in ("scale", "states"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.width < 64 or self.width % 64:
            raise ValueError(f"width must be a multiple of 64, got {self.width}")

    @property
    def after(self) -> tuple[int, ...]:
        """The exits, ascending."""
        return tuple(sorted({int(part) for part in self.exits.split("+")}))

    @property
    def shape(self) -> DecoderConfig:
        """The decoder, where training begins with nothing."""
        said = {
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.width // 64,
            "num_key_value_heads": self.width // 64,
            "head_dim": 64,
            "vocab_size": self.vocab,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
        }
        return DecoderConfig.from_hf(said)


class ExitNet(nn.Module):
    """A Llama in training; names below ``model.`` are those of its file."""

    def __init__(self, recipe: Recipe, shape: DecoderConfig, start: Start | None = None) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, shape)
        self._turns = Turns(shape.ropes[0], torch.device("cpu"))
        if start is None:
            self._draw(recipe)
            return
        with torch.no_grad():
            for name, one in self.named_parameters():
                one.copy_(start.tensor(f"model.{name}"))

    def _draw(self, recipe: Recipe) -> None:
        """Begin with nothing."""
        coins = torch.Generator().manual_seed(recipe.seed)
        with torch.no_grad():
            for name, one in self.named_parameters():
                if one.dim() == 2:
                    writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                    late = recipe.grow > 0 and name.startswith(_late(recipe))
                    there = recipe.after[-1] if recipe.grow > 0 else recipe.layers
                    spread = 0.02 / (2 * there) ** 0.5 if writes else 0.02
                    one.copy_(spread * torch.randn(one.shape, generator=coins))
                    if writes and late:
                        one.zero_()

    def forward(self, token_BT: Tensor, after: Sequence[int], keep: Sequence[Tensor]) -> list[Tensor]:
        """Normed states [B, T, H] after some layers, ascending.

        Args:
            token_BT: the text.
            after: numbers of layers.
            keep: per layer, the sequences that it is not left out of.
        """
        x_BTH = self.embed_tokens(token_BT).float()
        place_1T = torch.arange(token_BT.shape[1])[None]
        turn, out = self._turns.at(place_1T, token_BT.shape[1]), []
        for i, layer in enumerate(self.layers[: after[-1]]):
            kept = keep[i]
            if len(kept) == len(x_BTH):
                x_BTH = _block(cast(Layer, layer), x_BTH, turn)
            elif len(kept):
                x_BTH = x_BTH.index_copy(0, kept, _block(cast(Layer, layer), x_BTH[kept], turn))
            if i + 1 in after:
                out.append(self.norm(x_BTH))
        return out


def _late(recipe: Recipe) -> tuple[str, ...]:
    """Beginnings of the names of the layers behind the last exit."""
    return tuple(f"layers.{i}." for i in range(recipe.after[-1], recipe.layers))


def _block(layer: Layer, x_BTH: Tensor, turn: Turn) -> Tensor:
    """One layer over whole texts, by a kernel that knows of no gaps."""
    attn, u_BTH = layer.self_attn, layer.input_layernorm(x_BTH)
    k_BKTD, v_BKTD = attn.keys(u_BTH, turn)
    q_BKGTD = attn.queries(u_BTH, turn)
    # On a CPU plain products are twice as fast here as the fused kernel and its gradient.
    count, size = q_BKGTD.shape[2:4]
    later_TT = q_BKGTD.new_full((size, size), -torch.inf).triu(1).repeat(count, 1)
    score_XRT = q_BKGTD.flatten(2, 3).flatten(0, 1) @ k_BKTD.flatten(0, 1).transpose(1, 2) + later_TT
    mixed_XRD = score_XRT.softmax(-1, dtype=score_XRT.dtype) @ v_BKTD.flatten(0, 1)
    mixed_BTH = mixed_XRD.view(q_BKGTD.shape).permute(0, 3, 1, 2, 4).flatten(2)
    return layer.after(x_BTH, attn.o_proj(mixed_BTH))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Numbered(Batch):
    """A batch that knows which it is."""

    number: int = 0


class ExitModel(Objective):
    """The model in training, as the training loop sees a method.

    Args:
        start: what it begins with; None: nothing, and ``tokenizer`` is its own.
    """

    Config = Recipe
    module: ExitNet

    def __init__(self, recipe: Recipe, tokenizer: tokenizers.Tokenizer, start: Start | None = None) -> None:
        self.recipe, self.tokenizer, self.started = recipe, tokenizer, start is not None
        self.end = end_of(tokenizer)
        self.shape = recipe.shape if start is None else start.shape
        if recipe.after[-1] >= self.shape.num_layers:
            raise ModelError(f"exits={recipe.exits}, but there are {self.shape.num_layers} layers")
        self.module = ExitNet(recipe, self.shape, start)

    @classmethod
    def taps(cls, config: Any, target: Target) -> tuple[str, ...]:
        return ()

    @classmethod
    def build(cls, config: Any, target: Target, vocab: VocabMap | None) -> ExitModel:
        raise NotImplementedError("a model of its own has no target")

    @property
    def grown(self) -> bool:
        """Whether the layers behind the last exit are there."""
        return self.started or self.done >= self.recipe.grow

    def loss(self, batch: Batch) -> Step:
        recipe, token_BT = self.recipe, batch.token_BT
        number = cast(Numbered, batch).number
        deep, exits = self.grown and number % recipe.whole == 0, recipe.after
        if not (deep or recipe.together):
            turn = number - number // recipe.whole if self.grown else number
            exits = (exits[turn % len(exits)],)
        last, alike = self.shape.num_layers, deep and recipe.states > 0
        shallow = range(1, recipe.after[-1] + 1) if alike else ()
        goals = [last * i // len(shallow) for i in shallow]
        after = tuple(sorted({*exits, *([last] if deep else []), *shallow, *goals}))
        found = self.module(token_BT[:, :-1], after, self._kept(number, len(token_BT)))
        state = {layer: one.flatten(0, 1) for layer, one in zip(after, found, strict=True)}
        head_VH, label_R = self.module.embed_tokens.weight, token_BT[:, 1:].flatten()
        p_RV, share = None, recipe.distill if deep else 0.0
        whole = state[last] if deep else None
        if whole is not None and share:
            with torch.no_grad():
                p_RV = (whole @ head_VH.T).softmax(-1, dtype=torch.float32)
        loss = torch.stack([self._exit_loss(state[one], label_R, p_RV, share) for one in exits]).mean()
        if whole is not None:
            loss = head_loss(whole, head_VH, "ce", label_R=label_R) + recipe.scale * loss
            loss = loss / (1 + recipe.scale)
        if alike:
            near = state_loss([state[one] for one in shallow], [state[one] for one in goals])
            loss = loss + recipe.states * len(label_R) * near
        return Step(loss / len(label_R), len(label_R))

    def _exit_loss(self, hidden_RH: Tensor, label_R: Tensor, p_RV: Tensor | None, share: float) -> Tensor:
        """What an exit loses against the text, and against the whole model."""
        head_VH = self.module.embed_tokens.weight
        loss = head_loss(hidden_RH, head_VH, "ce", label_R=label_R)
        if p_RV is None:
            return loss
        row_R = torch.arange(len(p_RV))
        kl = head_loss(hidden_RH, head_VH, "kl", p_ND=p_RV, row_R=row_R)
        return (1 - share) * loss + share * kl

    def _kept(self, number: int, size: int) -> list[Tensor]:
        """Per layer, the sequences of a batch that go through it."""
        recipe = self.recipe
        coins = torch.Generator().manual_seed(recipe.seed * 1_000_003 + number)
        most = recipe.dropout * (1.0 if self.started else 2**self.done - 1)
        last = self.shape.num_layers - 1
        depths = [2 ** (i / max(1, last)) - 1 for i in range(last + 1)]
        return [(torch.rand(size, generator=coins) >= most * depth).nonzero().squeeze(1) for depth in depths]

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        recipe, token_BT = self.recipe, batch.token_BT
        everything = [torch.arange(len(token_BT))] * self.shape.num_layers
        last = self.shape.num_layers if self.grown else recipe.after[-1]
        states = self.module(token_BT[:, :-1], sorted({*recipe.after, last}), everything)
        early, whole = states[: len(recipe.after)], states[-1]
        head_VH = self.module.embed_tokens.weight
        label_R, truth_R = token_BT[:, 1:].flatten(), (whole @ head_VH.T).argmax(-1).flatten()
        right = (truth_R == label_R).sum()[None].float()
        same = [((one @ head_VH.T).argmax(-1).flatten() == truth_R).sum() for one in early]
        # The weights that are kept are those of the best whole model, however its exits do.
        counted = torch.full((1,), float(len(label_R)))
        return Step(torch.zeros(()), len(label_R), right, counted, torch.stack(same).float())

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"model.{name}": one.detach().to(torch.bfloat16).contiguous()
            for name, one in self.module.named_parameters()
        }
        with replaced(folder / "model.safetensors") as fresh:
            save_file(tensors, fresh, metadata={"format": "pt"})
        generation = {"eos_token_id": self.end, "do_sample": False}
        config = hf_config(self.shape) | {"bos_token_id": self.end, "eos_token_id": self.end}
        config |= {EXITS: list(self.recipe.after)}
        for name, content in (
            ("provenance.json", provenance),
            ("generation_config.json", generation),
            ("config.json", config),
        ):
            write_whole(folder / name, json.dumps(dict(content), indent=1) + "\n")


def end_of(tokenizer: tokenizers.Tokenizer) -> int:
    """The token that ends a text."""
    end = tokenizer.token_to_id(END)
    assert isinstance(end, int)
    return end
