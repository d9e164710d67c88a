"""GliDe's layer in training: it reads the target's keys and values as far as a draft would see them.

    row i    reads token i, and guesses token i + 1
             sees own keys 0 .. i, and the target's 0 .. n - 1, where n is the first row of the block of i

A draft sees what was committed before it, so its guess at depth j lags j rows behind. Blocks of ``block``
rows stand for drafts: the first row of a block is a pending token, the next its first guess. Where blocks
begin changes from batch to batch, so that a token is met at several depths. Rows with nothing before their
block glimpse at nothing, as in a draft behind a single token.

The loss is that of distributions which are part the target's and part the token that came. For ``kl`` that
is a mix of both losses, in one pass over the head. Held-out rows are judged at all depths, each with the
text that a draft would have seen.

Paper: Du et al. 2024 (GliDe with a CaPE), arXiv:2402.02082, which learns tokens alone, in blocks of 5.

Shape letters: B sequences, T tokens, A rows, H hidden size, K key-value heads, G query heads of each, D width
of a head, X heads, Y = X * D, N distributions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.drafters.trained import decoder_to_json, lender
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.methods.glide.drafter import METHOD
from outpace.models.base import HEAD, KV_READ, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.train.ahead import AheadTraining, LayerObjective
from outpace.train.align import DRAFT_MODEL, EAGLE, Aligned, places, rows_at
from outpace.train.batches import Batch, seed_of
from outpace.train.losses import head_loss
from outpace.train.networks import KeyValue, Layer, Norm, Turn, norm_weight, plain_shape, take_layer, turned
from outpace.train.objective import LAST, Step, draft_ids, target_laws
from outpace.train.ranks import judge_ranks
from outpace.train.temper import Tempering

DOUBT = 0.3
"""Scale of the last norm at the start: one layer alone is sure of wrong tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GlideTraining(AheadTraining):
    decay: float = 1.0
    """Weight of a row relative to the one before it in its block."""
    block: int = 5
    """Rows that see the same keys of the target: the deepest guess."""
    labels: float = 0.5
    """Share of the text's own token in what is learned; the rest is the target's distribution."""
    layer: int | None = None
    """Layer of the target whose keys and values are read; the last by default."""
    start: int = 0
    """Layer of the target that attention and MLP start from."""

    def __post_init__(self) -> None:
        AheadTraining.__post_init__(self)
        self.at_least_one(block=self.block)
        if not 0 <= self.labels <= 1:
            raise ValueError(f"labels must be in [0, 1], got {self.labels}")


class Glimpse(nn.Module):
    """Attention to keys and values that are given."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        wide = config.num_heads * config.head_dim
        self._config = config
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)

    def forward(self, u_BAH: Tensor, turn: Turn, held: KeyValue, seen_BA: Tensor) -> Tensor:
        """Mix values, [B, A, H].

        Args:
            held: keys, turned, and values, [B, K, T, D] each.
            seen_BA: how many of the first keys a row sees; it gets nothing where it is 0.
        """
        config, size = self._config, u_BAH.shape[:2]
        q_BAXD = self.q_proj(u_BAH).view(*size, config.num_heads, config.head_dim)
        q_BAXD = turned(q_BAXD, turn) * config.attention_scale
        q_BKGAD = q_BAXD.view(*size, config.num_kv_heads, -1, config.head_dim).permute(0, 2, 3, 1, 4)
        key_BKTD, value_BKTD = (one.to(q_BKGAD.dtype) for one in held)
        score = (q_BKGAD.flatten(2, 3) @ key_BKTD.transpose(2, 3)).float()
        score = score.view(*q_BKGAD.shape[:4], -1)
        key_T = torch.arange(score.shape[-1], device=score.device)
        unseen_BAT = key_T >= seen_BA.clamp_min(1)[..., None]
        share = score.masked_fill(unseen_BAT[:, None, None], -torch.inf).softmax(-1)
        out = (share.to(value_BKTD.dtype).flatten(2, 3) @ value_BKTD).view(q_BKGAD.shape)
        mixed_BAY = out.permute(0, 3, 1, 2, 4).flatten(2) * (seen_BA > 0)[..., None]
        result: Tensor = self.o_proj(mixed_BAY)
        return result


class GlideModule(nn.Module):
    """What is trained; names are those of `outpace.methods.glide.net`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.layer = Layer(config)
        self.glimpse = Glimpse(config)
        self.glimpse_norm = Norm(config.hidden_size, config)
        self.norm = Norm(config.hidden_size, config)

    @torch.no_grad()
    def take(self, target: Decoder, start: int, reads: int) -> None:
        """Begin as one layer of the target, which glimpses as another one attends."""
        take_layer(self.layer, target, start)
        at = f"model.layers.{reads}."

        def read(name: str) -> Tensor:
            return target.checkpoint.tensor(f"{name}.weight", torch.float32).to(target.device)

        self.glimpse.q_proj.weight.copy_(read(f"{at}self_attn.q_proj"))
        self.glimpse.o_proj.weight.copy_(read(f"{at}self_attn.o_proj"))
        self.glimpse_norm.weight.copy_(norm_weight(target, f"{at}input_layernorm"))
        self.norm.weight.copy_(DOUBT * norm_weight(target, "model.norm"))


class GlideObjective(LayerObjective):
    """The layer in training."""

    Config = GlideTraining
    module: GlideModule

    def __init__(
        self,
        config: GlideTraining,
        target: Decoder,
        vocab: VocabMap | None,
        net: GlideModule,
        shape: DecoderConfig,
    ) -> None:
        super().__init__(config, target, vocab, net, shape, config.block)
        self.reads, self.temper = layer_of(config, target), Tempering()

    @classmethod
    def taps(cls, config: GlideTraining, target: Target) -> tuple[str, ...]:
        return (LAST, f"kv.{layer_of(config, target)}")

    @classmethod
    def build(cls, config: GlideTraining, target: Target, vocab: VocabMap | None) -> GlideObjective:
        lent, reads = lender(target, METHOD, TAPS, HEAD, KV_READ), layer_of(config, target)
        if not 0 <= config.start < lent.num_layers:
            raise ModelError(f"glide: start={config.start}, but {lent.name} has 0 to {lent.num_layers - 1}")
        shape = plain_shape(lent.config, 1, reads)
        net = GlideModule(shape).to(lent.device)
        net.take(lent, config.start, reads)
        return cls(config, lent, vocab, net, shape)

    def _attended(self, batch: Batch) -> Tensor:
        """The stream of all rows behind the layer's own attention, [B, T, H]; the same at all depths."""
        layer = self.module.layer
        place_BT = places(batch).expand(batch.token_BT.shape)
        turn = self.turns.at(place_BT, batch.token_BT.shape[1])
        x_BTH = self.embed(batch.token_BT)
        u_BTH = layer.input_layernorm(x_BTH)
        text, query = layer.self_attn.keys(u_BTH, turn), layer.self_attn.queries(u_BTH, turn)
        mixed: Tensor = layer.self_attn(query, text, (), place_BT)
        return x_BTH + mixed

    def _held(self, batch: Batch) -> KeyValue:
        """The target's keys and values, [B, K, T, D]; the halves of a key rotate with each other."""
        shape, kv_BTY = self.shape, batch.feature[f"kv.{self.reads}"].float()
        size = (*kv_BTY.shape[:2], shape.num_kv_heads, shape.head_dim)
        key_BTKD, value_BTKD = (part.reshape(size) for part in kv_BTY.chunk(2, -1))
        key_BTKD = key_BTKD.view(*size[:3], -1, 2).transpose(-1, -2).flatten(-2)
        return key_BTKD.transpose(1, 2), value_BTKD.transpose(1, 2)

    def _states(self, x_BAH: Tensor, place_BA: Tensor, held: KeyValue, seen_BA: Tensor) -> Tensor:
        """What the unembedding reads of rows, given their streams and what they see."""
        net, longest = self.module, held[0].shape[2]
        place_BA = place_BA.clamp_max(longest - 1)
        turn = self.turns.at(place_BA, longest)
        x_BAH = x_BAH + net.glimpse(net.glimpse_norm(x_BAH), turn, held, seen_BA)
        x_BAH = x_BAH + net.layer.mlp(net.layer.post_attention_layernorm(x_BAH))
        out: Tensor = net.norm(x_BAH)
        return out

    def states(self, batch: Batch, aligned: Aligned) -> list[Tensor]:
        """For every depth of a draft behind each learning row, [B, A, H]: all that is held before its pending
        token is seen.
        """
        x_BTH, held, out = self._attended(batch), self._held(batch), list[Tensor]()
        pending_BA = aligned.place_BA + 1
        for depth in range(self.config.block):
            place_BA = (pending_BA + depth).clamp_max(x_BTH.shape[1] - 1)
            out.append(self._states(rows_at(x_BTH, place_BA), place_BA, held, pending_BA))
        return out

    def blockwise(self, batch: Batch, place_BA: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the target's keys rows see, and how far they stand in their block; int64 [B, A]."""
        phase = seed_of(batch) % self.config.block
        offset_BA = (place_BA + phase) % self.config.block
        return (place_BA - offset_BA).clamp_min(0), offset_BA

    def loss(self, batch: Batch) -> Step:
        """All learning rows once, each at the depth that its block gives it."""
        self.ranks.clear()
        self.temper.clear()
        config, aligned = self.config, Aligned(batch, DRAFT_MODEL)
        seen_BA, offset_BA = self.blockwise(batch, aligned.place_BA)
        x_BAH = aligned.rows(self._attended(batch))
        state_BAH = self._states(x_BAH, aligned.place_BA, self._held(batch), seen_BA)
        label_BA = draft_ids(aligned.token(DRAFT_MODEL), self.vocab)
        keep_BA = aligned.teaches(DRAFT_MODEL) & (label_BA >= 0)
        row_R, label_R = aligned.law(DRAFT_MODEL)[keep_BA], label_BA[keep_BA]
        p_ND = None
        if config.loss != "ce":
            last_NH = aligned.laws_of(batch.feature[LAST])
            p_ND = target_laws(self.target, self.vocab, last_NH, config.temperature)
            # Every distribution belongs to one token of the text.
            p_ND.mul_(1 - config.labels)[row_R, label_R] += config.labels
        weight_R = config.decay ** offset_BA[keep_BA].float()
        total = head_loss(
            state_BAH[keep_BA],
            self._head_DH,
            config.loss,
            p_ND=p_ND,
            row_R=row_R,
            label_R=label_R,
            weight_R=weight_R,
        )
        tokens = max(1.0, float(weight_R.sum()))
        return Step(total / tokens, round(tokens))

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        aligned = Aligned(batch, EAGLE)
        states = self.states(batch, aligned)
        return judge_ranks(self.ranks, states, batch, aligned, self, self._head_DH, self.temper)

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        kept = {"layer": self.reads, "decoder": decoder_to_json(self.shape), "temper": self.temper.found()}
        self.save_tree(folder, {**self.about(METHOD, []), **kept}, provenance)


def layer_of(config: GlideTraining, target: Target) -> int:
    """The layer of the target that is read.

    Raises:
        ModelError: it has no such layer.
    """
    last = target.num_layers - 1
    reads = last if config.layer is None else config.layer
    if not 0 <= reads <= last:
        raise ModelError(f"glide: layer={reads}, but {target.name} has 0 to {last}")
    return reads
