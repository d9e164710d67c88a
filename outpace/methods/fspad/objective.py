"""FSPAD: EAGLE's first network learns features and distributions, with two parts as switches.

    depth 1    row t reads the target's state of token t, and token t + 1
    depth j    row t reads its own output, and token t + j

``sampling`` and ``partial`` are the two parts; without both this is plain EAGLE. The parts start so that
it begins there: their last matrices are zero. Outputs learn to be the target's features (``regression``,
SmoothL1), and what the head reads learns its distributions. The paper's base trains one depth with noisy
features; here ``steps`` depths are unrolled, as HASS does, which serves the same end.

Paper: Gui et al. 2024 (FSPAD), arXiv:2408.15562, reconstructed; Li et al. 2024 (EAGLE), arXiv:2401.15077;
Zhang et al. 2024 (HASS), arXiv:2408.15766.

Shape letters: B sequences, T tokens, A learning rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.drafters.trained import decoder_to_json, lender
from outpace.law import VocabMap
from outpace.methods.fspad.drafter import METHOD
from outpace.models.base import HEAD, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.train.ahead import AheadTraining, LayerObjective
from outpace.train.align import EAGLE, Aligned, next_tokens, places
from outpace.train.batches import Batch
from outpace.train.networks import KeyValue, Layer, norm_weight, plain_shape, take_layer
from outpace.train.objective import LAST, Step

SMALL = 0.05
"""Scale of what the layer adds at the start: in the target it adds to a stream of length 20."""

LEAST = 0.1
"""Weights of the target's last norm below this share of their size are not divided by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FspadTraining(AheadTraining):
    steps: int = 3
    """Depths that training unrolls."""
    sampling: float = 2.0
    """Width of the space in which a token samples a feature, in hidden sizes; 0 leaves the part out."""
    partial: bool = True
    """Let the head read more than the next feature."""
    regression: float = 10.0
    """Weight of the features' loss beside that of the distributions; 0 leaves the alignment out."""
    seed: int = 0
    """Of the first weights."""

    def __post_init__(self) -> None:
        AheadTraining.__post_init__(self)
        self.at_least_one(steps=self.steps)
        if self.sampling < 0 or self.regression < 0:
            raise ValueError(
                f"sampling and regression must be at least 0, got {self.sampling} and {self.regression}"
            )


class FspadModule(nn.Module):
    """What is trained; names are those of `outpace.methods.fspad.net`."""

    def __init__(self, config: DecoderConfig, wide: int, partial: bool, seed: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden)
        self.layer = Layer(config)
        self.layer.input_layernorm = nn.Identity()  # type: ignore[assignment]
        self.gate = nn.Linear(hidden, wide, bias=False) if wide else None
        self.up = nn.Linear(hidden, wide, bias=False) if wide else None
        self.down = nn.Linear(wide, hidden, bias=False) if wide else None
        self.read = nn.Linear(hidden, hidden, bias=False) if partial else None
        coins = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.fc.weight.copy_(torch.cat([0.1 * torch.eye(hidden), torch.eye(hidden)], 1))
            self.fc.bias.zero_()
            for drawn in (self.gate, self.up):
                if drawn is not None:
                    drawn.weight.copy_(torch.randn(drawn.weight.shape, generator=coins) * hidden**-0.5)
            for zero in (self.down, self.read):
                if zero is not None:
                    zero.weight.zero_()

    def inputs(self, embed_BAH: Tensor, f_BAH: Tensor) -> Tensor:
        """What enters the layer, float32."""
        if self.gate is not None and self.up is not None and self.down is not None:
            picked = F.silu(self.gate(embed_BAH)) * self.up(f_BAH)
            f_BAH = f_BAH + self.down(picked).float()
        out: Tensor = self.fc(torch.cat([embed_BAH, f_BAH], -1))
        return out.float()

    def head_reads(self, a_BAH: Tensor) -> Tensor:
        return a_BAH if self.read is None else a_BAH + self.read(a_BAH).float()


class Fspad(LayerObjective):
    """The network in training."""

    Config = FspadTraining
    module: FspadModule

    @classmethod
    def build(cls, config: FspadTraining, target: Target, vocab: VocabMap | None) -> Fspad:
        lent = lender(target, METHOD, TAPS, HEAD)
        shape = plain_shape(lent.config, 1, -1)
        wide = round(config.sampling * lent.hidden_size)
        net = FspadModule(shape, wide, config.partial, config.seed).to(lent.device)
        take_layer(net.layer, lent, lent.num_layers - 1, SMALL)
        read_features(net.layer, lent)
        return cls(config, lent, vocab, net, shape, config.steps)

    def features(self, batch: Batch, aligned: Aligned) -> list[Tensor]:
        """Outputs at the learning rows, [B, A, H] for every depth."""
        net, attn, place_BA = self.module, self.module.layer.self_attn, aligned.place_BA
        longest = batch.token_BT.shape[1] + self.config.steps + 1
        x_BTH = net.inputs(self.embed(next_tokens(batch)), batch.feature[LAST].float())
        text = attn.keys(x_BTH, self.turns.at(places(batch), longest))
        x_BAH, own, out = aligned.rows(x_BTH), list[KeyValue](), list[Tensor]()
        for depth in range(1, self.config.steps + 1):
            turn = self.turns.at(place_BA + depth - 1, longest)
            if depth > 1:
                x_BAH = net.inputs(self.embed(aligned.token(depth)), out[-1])
                own.append(attn.keys(x_BAH, turn))
            mixed = attn(attn.queries(x_BAH, turn), text, own, place_BA)
            out.append(net.layer.after(x_BAH, mixed))
        return out

    def states(self, batch: Batch, aligned: Aligned) -> list[Tensor]:
        return [self.module.head_reads(a_BAH) for a_BAH in self.features(batch, aligned)]

    def loss(self, batch: Batch) -> Step:
        """The loss of the distributions and of the features."""
        aligned = Aligned(batch, EAGLE)
        self.ranks.clear()
        features = self.features(batch, aligned)
        states = [self.module.head_reads(a_BAH) for a_BAH in features]
        step = self.learn(states, batch, aligned, EAGLE, self._head_DH, self._weights)
        if not self.config.regression:
            return step
        regression = self.config.regression * self.regression(batch, aligned, features)
        return Step(step.loss + regression / step.tokens, step.tokens)

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        kept = {
            "sampling": 0 if self.module.gate is None else self.module.gate.out_features,
            "partial": self.module.read is not None,
            "decoder": decoder_to_json(self.shape),
        }
        self.save_tree(folder, {**self.about(METHOD, [LAST]), **kept}, provenance)


@torch.no_grad()
def read_features(layer: Layer, target: Decoder) -> None:
    """Let a copy of the target's last layer, without its input norm, read features as that reads its stream.

    A feature is behind the target's last norm, so one vector takes its rows from there to the layer's own.
    Without it values are five times too large, and the output projection learns in leaps.
    """
    at = f"model.layers.{target.num_layers - 1}.input_layernorm"
    ours, theirs = (norm_weight(target, name) for name in (at, "model.norm"))
    least = LEAST * theirs.square().mean().sqrt()
    ratio_H = ours / torch.where(theirs.abs() < least, least.copysign(theirs), theirs)
    for name in ("q", "k", "v"):
        layer.get_parameter(f"self_attn.{name}_proj.weight").mul_(ratio_H)
