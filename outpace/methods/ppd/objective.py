"""Prompt tokens: vectors that, fed behind a text, make the target guess further ahead.

    row t of a text       the target's own row, which gives token t + 1
    riders P1 ... PK      positions t + 1 ... t + K; they see the text up to t and each other;
                          rider k guesses token t + 1 + k

K vectors (or K ensembles of E) are all that is trained; the target is frozen, and gradients come
down through all of its layers. The text itself is read once, by the target as it drafts. The first guess of
a place is its depth 1, as for EAGLE: token t + 1 is known when drafting begins.

The vectors start as means of embeddings of tokens drawn from a seed, and are learned as a distance from
there. How often each guess was right in held-out text decides the drafter's trees and riders.

Paper: Chen et al. 2024 (PPD), arXiv:2405.18628.

Shape letters: B sequences, G places with riders, K riders, E vectors of each, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.drafters.trained import lender
from outpace.law import VocabMap
from outpace.methods.ppd.files import METHOD, PROMPTS
from outpace.models.base import EMBEDDINGS, TAPS, Target
from outpace.train.align import EAGLE, Aligned
from outpace.train.batches import Batch
from outpace.train.objective import write_drafter
from outpace.train.rider_net import RiderNet
from outpace.train.rider_objective import UNIT, RiderObjective, RiderTraining, mean_embeddings


@dataclass(frozen=True, kw_only=True, slots=True)
class PpdTraining(RiderTraining):
    POSITIVE = ("riders", "ensemble", "places")
    riders: int = 3
    """Prompt tokens: tokens that can be guessed at a time."""
    ensemble: int = 1
    """Vectors for each prompt token; each takes a row in every chain."""


class PromptsNet(nn.Module):
    start_KEH: Tensor

    def __init__(self, start_KEH: Tensor) -> None:
        super().__init__()
        self.register_buffer("start_KEH", start_KEH)
        self.moved_KEH = nn.Parameter(torch.zeros_like(start_KEH))

    def forward(self) -> Tensor:
        return self.start_KEH + UNIT * self.moved_KEH


class Ppd(RiderObjective):
    Config = PpdTraining
    first = EAGLE
    module: PromptsNet

    @classmethod
    def layers(cls, config: PpdTraining, target: Target) -> range:
        return range(target.num_layers)

    @classmethod
    def build(cls, config: PpdTraining, target: Target, vocab: VocabMap | None) -> Ppd:
        lent = lender(target, METHOD, TAPS, EMBEDDINGS)
        start_KEH = mean_embeddings(lent, vocab, config.seed, config.riders, config.ensemble)
        net = PromptsNet(start_KEH).to(lent.device)
        return cls(config, lent, vocab, RiderNet(lent, cls.layers(config, target)), net, config.riders)

    def guesses(self, batch: Batch, aligned: Aligned) -> tuple[list[Tensor], Tensor]:
        text, last_BTH = self.net.texts(batch)
        x_BGKH = self.net(self.module().transpose(0, 1), aligned.place_BA, text).mean(2)
        return list(x_BGKH.unbind(2)), last_BTH

    def named(self) -> Mapping[str, Tensor]:
        """Where the vectors start; ``save`` writes where they have come."""
        return {PROMPTS: self.module.start_KEH}

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        config = self.config
        said = {
            **self.about(METHOD, []),
            "riders": config.riders,
            "ensemble": config.ensemble,
            "acceptance": self.ranks.acceptance(),
        }
        tensors = {PROMPTS: self.module().detach()}
        write_drafter(folder, said, tensors, self.vocab, provenance)
