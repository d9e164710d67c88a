"""Medusa: residual heads, each trained to guess one token further ahead from the same state.

    row t       h_t, the target's last hidden state     head k guesses token t + 1 + k
    head        x = h + silu(A h + b), a few times; logits = the target's unembedding of x

The first guess of a row is its depth 1, as for EAGLE: token t + 1 is known when drafting begins.
Every head starts as the identity (A = 0, b = 0), so it starts with the target's distribution of the token
before. Only A and b are trained, best with a ``loop.lr`` of some 3e-3; the loss of a deeper head
counts less.

Held-out rows also give what the static tree is made of: how often the i-th likeliest token of
head k was the target's, among rows where the target's tokens before it were among the likeliest
of their heads. `save` stores it, from the measurement before.

Papers: Cai et al. 2024 (Medusa-1), arXiv:2401.10774; Stern et al. 2018, arXiv:1811.03115. Labels
are the target's distributions, not the text alone.

Shape letters: B sequences, A learning rows, R rows, C rows of a chunk, N distributions, K heads, H hidden
size, I inputs of a head, D draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.drafters.static_tree import LARGEST, likeliest
from outpace.drafters.trained import head_rows, lender
from outpace.files import write_whole
from outpace.law import VocabMap
from outpace.methods.medusa.heads import HeadsShape
from outpace.models.base import HEAD, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.train.align import EAGLE, Aligned
from outpace.train.batches import Batch
from outpace.train.losses import check, depth_weights
from outpace.train.objective import LAST, Objective, Step, write_drafter
from outpace.train.ranks import Ranks, judge_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaTraining:
    heads: int = 4
    """Tokens that can be guessed at a time."""
    layers: int = 2
    """Blocks of a head."""
    decay: float = 0.8
    """Weight of a head relative to the one before."""
    loss: str = "kl"
    """One of the losses of `outpace.train.losses`: ce, kl, rkl, jsd, tv, lk, lk_mix."""
    temperature: float = 1.0
    """Divides the target's logits before they become labels."""

    def __post_init__(self) -> None:
        check(self.loss)
        if self.heads < 1 or self.layers < 1:
            raise ValueError(f"heads and layers must be at least 1, got {self.heads} and {self.layers}")
        if not 0 < self.decay <= 1 or self.temperature <= 0:
            raise ValueError(
                f"decay must be in (0, 1] and temperature above 0, got {self.decay} and {self.temperature}"
            )


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


class Medusa(Objective):
    """Heads that read the hidden state alone, in training."""

    Config = MedusaTraining
    method: ClassVar[str] = "medusa"
    conditioned: ClassVar[bool] = False
    module: HeadsNet

    def __init__(
        self, config: MedusaTraining, target: Decoder, vocab: VocabMap | None, net: HeadsNet
    ) -> None:
        self.config, self.target, self.vocab, self.module = config, target, vocab, net
        self._head_DH = head_rows(target, vocab, target.dtype)
        self._weights = depth_weights(config.heads, config.decay)
        self.ranks = Ranks(config.heads)

    @classmethod
    def taps(cls, config: Any, target: Target) -> tuple[str, ...]:
        return (LAST,)

    @classmethod
    def build(cls, config: Any, target: Target, vocab: VocabMap | None) -> Medusa:
        target.require(frozenset({TAPS, HEAD}), cls.method)
        lent = lender(target, cls.method)
        shape = HeadsShape(
            heads=config.heads,
            layers=config.layers,
            hidden_size=lent.hidden_size,
            conditioned=cls.conditioned,
        )
        return cls(config, lent, vocab, HeadsNet(shape).to(lent.device))

    def inputs(self, hidden_BAH: Tensor, aligned: Aligned) -> Sequence[Tensor]:
        """What the heads read, [B, A, I] each."""
        return [hidden_BAH] * self.config.heads

    def states(self, batch: Batch, aligned: Aligned) -> list[Tensor]:
        """What the unembedding reads at the learning rows, [B, A, H] for every head."""
        hidden_BAH = aligned.rows(batch.feature[LAST]).float()
        inputs = self.inputs(hidden_BAH, aligned)
        return [head(u_BAI) for head, u_BAI in zip(self.module.heads, inputs, strict=True)]

    def loss(self, batch: Batch) -> Step:
        aligned = Aligned(batch, EAGLE)
        self.ranks.clear()
        states = self.states(batch, aligned)
        return self.learn(states, batch, aligned, EAGLE, self._head_DH, self._weights)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        aligned = Aligned(batch, EAGLE)
        return judge_ranks(self.ranks, self.states(batch, aligned), batch, aligned, self, self._head_DH)

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write the drafter folder, and in it the calibrated tree alone, as ``tree.json``.

        ``tree=FOLDER/tree.json`` serves every ``tree_size``; the default ends at its 15th node.
        """
        shape, rates = self.module.shape, self.ranks.acceptance()
        parents = list(likeliest(rates, LARGEST))
        config = {
            **self.about(self.method, [LAST]),
            "heads": shape.heads,
            "layers": shape.layers,
            "acceptance": rates,
            "tree": parents,
        }
        write_drafter(folder, config, self.named(), self.vocab, provenance)
        if parents:
            write_whole(folder / "tree.json", json.dumps({"parents": parents}) + "\n")
