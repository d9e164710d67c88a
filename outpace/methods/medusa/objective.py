"""Medusa: residual heads, each trained to guess one token further ahead from the same state.

    row t       h_t, the target's last hidden state     head k guesses token t + 1 + k
    head        x = h + silu(A h + b), a few times; logits = the target's unembedding of x

The first guess of a row is its depth 1, as for EAGLE: token t + 1 is known when drafting begins.
Every head starts as the identity (A = 0, b = 0), so it starts with the target's distribution of the token
before. Only A and b are trained, best with a ``loop.lr`` of some 3e-3; the loss of a deeper head
counts less.

Held-out measurement and the tree that is stored: `outpace.train.ahead`.

Papers: Cai et al. 2024 (Medusa-1), arXiv:2401.10774; Stern et al. 2018, arXiv:1811.03115. Labels
are the target's distributions, not the text alone.

Shape letters: B sequences, A learning rows, K heads, H hidden size, I inputs of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from outpace.drafters.trained import decoder_to_json, lender
from outpace.law import VocabMap
from outpace.methods.medusa.heads import HeadsShape
from outpace.models.base import HEAD, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.train.ahead import AheadObjective, AheadTraining
from outpace.train.align import Aligned
from outpace.train.batches import Batch
from outpace.train.networks import Layer, plain_shape
from outpace.train.objective import LAST


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaTraining(AheadTraining):
    heads: int = 4
    """Tokens that can be guessed at a time."""
    layers: int = 2
    """Blocks of a head."""

    def __post_init__(self) -> None:
        AheadTraining.__post_init__(self)
        self.at_least_one(heads=self.heads, layers=self.layers)


class Head(nn.Module):
    """One head in training; parameters are named as `HeadsShape.tensor_shapes` says."""

    def __init__(self, shape: HeadsShape, number: int) -> None:
        super().__init__()
        hidden, wide = shape.hidden_size, shape.inputs(number)
        self.mix = nn.Linear(wide, hidden, bias=False) if shape.conditioned else None
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(shape.layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        if self.mix is not None:
            nn.init.eye_(self.mix.weight[:, :hidden])

    def forward(self, u_BAI: Tensor) -> Tensor:
        x_BAH = u_BAI if self.mix is None else self.mix(u_BAI).float()
        for block in self.blocks:
            x_BAH = x_BAH + F.silu(block(x_BAH)).float()
        return x_BAH


class HeadsNet(nn.Module):
    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.shape = shape
        self.heads = nn.ModuleList(Head(shape, number) for number in range(shape.heads))
        self.prefix = None if shape.prefix is None else Layer(shape.prefix)


class Medusa(AheadObjective):
    """Heads that read the hidden state alone, in training."""

    Config = MedusaTraining
    method: ClassVar[str] = "medusa"
    conditioned: ClassVar[bool] = False
    module: HeadsNet

    def __init__(
        self, config: MedusaTraining, target: Decoder, vocab: VocabMap | None, net: HeadsNet
    ) -> None:
        super().__init__(config, target, vocab, config.heads)
        self.module = net

    @classmethod
    def build(cls, config: Any, target: Target, vocab: VocabMap | None) -> Medusa:
        lent = lender(target, cls.method, TAPS, HEAD)
        shape = HeadsShape(
            heads=config.heads,
            layers=config.layers,
            hidden_size=lent.hidden_size,
            conditioned=cls.conditioned,
            prefix=plain_shape(lent.config, 1, -1) if getattr(config, "prefix", False) else None,
        )
        return cls(config, lent, vocab, HeadsNet(shape).to(lent.device))

    def inputs(self, hidden_BAH: Tensor, aligned: Aligned) -> Sequence[Tensor]:
        """What the heads read, [B, A, I] each."""
        return [hidden_BAH] * self.config.heads

    def hidden(self, batch: Batch, aligned: Aligned) -> Tensor:
        """The hidden states that heads read at the learning rows, float32 [B, A, H]."""
        return aligned.rows(batch.feature[LAST]).float()

    def states(self, batch: Batch, aligned: Aligned) -> list[Tensor]:
        hidden_BAH = self.hidden(batch, aligned)
        inputs = self.inputs(hidden_BAH, aligned)
        return [head(u_BAI) for head, u_BAI in zip(self.module.heads, inputs, strict=True)]

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        shape = self.module.shape
        config = {**self.about(self.method, [LAST]), "heads": shape.heads, "layers": shape.layers}
        if shape.prefix is not None:
            config["prefix"] = decoder_to_json(shape.prefix)
        self.save_tree(folder, config, provenance)
