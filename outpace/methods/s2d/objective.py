"""Sorted exits in training: one objective over all of them, the target frozen.

    loss = mean over exits of the divergence of head(n + n W) from the target, n = norm(h after e layers)

Norms start as the target's last one, matrices as zeros: an exit that reads the target's own head.
Held-out rows also give how often guesses are right by exit and confidence, and how often the next exit's are
there: by that and by price the drafter goes deeper (`outpace.methods.s2d.drafter`).

Papers: S2D, arXiv:2407.01955 (its sorted fine-tuning trains the layers themselves, which would change
this target; for a model of its own see ``outpace train target``, option ``together``).

Shape letters: X exits, B sequences, A learning rows, R rows, H hidden size, D draft vocabulary, C bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.drafters.trained import head_rows, lender, trained_exits
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.methods.s2d.files import BINS, METHOD
from outpace.models.base import HEAD, LAYERS, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.train.align import DRAFT_MODEL, Aligned
from outpace.train.batches import Batch
from outpace.train.objective import (
    LAST,
    LossTraining,
    Objective,
    Step,
    draft_ids,
    judge_rows,
    laws_for,
    write_drafter,
)

DOUBT = 0.5
"""Scale of the norms at the start: early states are sure of wrong tokens."""
PRIOR = 4.0
"""Guesses, as right as they say, that every share begins with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class S2dTraining(LossTraining):
    exits: str | None = None
    """Numbers of layers, such as ``6+12+18``. Without it, the exits that the target was trained with, or
    a fifth, two fifths and three fifths of its layers."""

    def __post_init__(self) -> None:
        LossTraining.__post_init__(self)
        if self.exits is not None and not all(part.isdecimal() for part in self.exits.split("+")):
            raise ValueError(f"exits must be numbers of layers, as in 6+12, got {self.exits!r}")

    def layers(self, target: Target) -> tuple[int, ...]:
        """The exits, ascending.

        Raises:
            ModelError: layers that the target does not have.
        """
        most = target.num_layers - 1
        if self.exits is None and (trained := trained_exits(target)):
            return trained
        if self.exits is None:
            return tuple(sorted({min(most, max(1, target.num_layers * i // 5)) for i in (1, 2, 3)}))
        layers = tuple(sorted({int(part) for part in self.exits.split("+")}))
        if not 0 < layers[0] <= layers[-1] <= most:
            raise ModelError(f"exits={self.exits}, but {target.name} is left after layer 1 to {most}")
        return layers


class ExitsNet(nn.Module):
    def __init__(self, norm_H: Tensor, exits: int, eps: float, offset: float) -> None:
        super().__init__()
        hidden = len(norm_H)
        self.norms = nn.Parameter(((norm_H + offset) * DOUBT - offset).repeat(exits, 1))
        self.linears = nn.Parameter(torch.zeros(exits, hidden, hidden, device=norm_H.device))
        self._eps, self._offset = eps, offset

    def forward(self, exit_: int, x_BAH: Tensor) -> Tensor:
        """What the head reads, [B, A, H]."""
        weight_H = self.norms[exit_] + self._offset
        n_BAH = F.rms_norm(x_BAH.float(), weight_H.shape, weight_H, self._eps)
        return n_BAH + F.linear(n_BAH, self.linears[exit_])


class S2d(Objective):
    Config = S2dTraining
    method: ClassVar[str] = METHOD
    Net: ClassVar[type[ExitsNet]] = ExitsNet
    module: ExitsNet

    def __init__(self, config: S2dTraining, target: Decoder, vocab: VocabMap | None, net: ExitsNet) -> None:
        self.config, self.target, self.vocab, self.module = config, target, vocab, net
        self.layers = config.layers(target)
        self._head_DH = head_rows(target, vocab)
        self._right = self._fresh()

    def _fresh(self) -> Tensor:
        """[X, C, 3]: guesses of a confidence, those that are right, and those of the next exit that are."""
        share_C = (torch.arange(BINS) + 0.5) / BINS
        start_C3 = torch.stack([torch.ones(BINS), share_C, share_C + (1 - share_C) / 4], 1) * PRIOR
        return start_C3.repeat(len(self.layers), 1, 1)

    @classmethod
    def taps(cls, config: S2dTraining, target: Target) -> tuple[str, ...]:
        return (*(f"hidden.{layer}" for layer in config.layers(target)), LAST)

    @classmethod
    def build(cls, config: S2dTraining, target: Target, vocab: VocabMap | None) -> S2d:
        lent = lender(target, cls.method, LAYERS, TAPS, HEAD)
        norm_H = lent.checkpoint.tensor("model.norm.weight", torch.float32).to(lent.device)
        shape = lent.config
        net = cls.Net(norm_H, len(config.layers(lent)), shape.norm_eps, shape.norm_offset)
        return cls(config, lent, vocab, net.to(lent.device))

    def outputs(self, batch: Batch, aligned: Aligned) -> list[Tensor]:
        """What the head reads at the learning rows, exit by exit."""
        return [
            self.module(i, aligned.rows(batch.feature[f"hidden.{layer}"]))
            for i, layer in enumerate(self.layers)
        ]

    def loss(self, batch: Batch) -> Step:
        aligned, exits = Aligned(batch, DRAFT_MODEL), len(self.layers)
        self._right = self._fresh()
        outputs, ahead = self.outputs(batch, aligned), [DRAFT_MODEL] * exits
        return self.learn(outputs, batch, aligned, ahead, self._head_DH, [1 / exits] * exits)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        """Acceptance of the deepest exit; what all exits are worth by confidence is kept for ``save``."""
        aligned = Aligned(batch, DRAFT_MODEL)
        outputs = self.outputs(batch, aligned)
        _, truth_N = laws_for(batch, aligned, self.target, self.vocab)
        truth_BA = aligned.token(DRAFT_MODEL) if truth_N is None else truth_N[aligned.law(DRAFT_MODEL)]
        real_BA = aligned.teaches(DRAFT_MODEL)
        told = [self._told(y_BAH[real_BA], truth_BA[real_BA]) for y_BAH in outputs]
        for i, (bin_R, right_R) in enumerate(told):
            deeper_R = told[min(i + 1, len(told) - 1)][1]
            counted_R3 = torch.stack([torch.ones_like(right_R), right_R, deeper_R], 1).cpu()
            self._right[i].index_add_(0, bin_R.cpu(), counted_R3)
        return judge_rows(batch, self.target, self.vocab, outputs[-1], self._head_DH)

    def _told(self, y_RH: Tensor, truth_R: Tensor) -> tuple[Tensor, Tensor]:
        """Range of confidence of every guess, and whether it is right, float32."""
        bins, right = [], []
        for part_RH, own_R in zip(torch.split(y_RH, 256), torch.split(truth_R, 256), strict=True):
            top = (part_RH @ self._head_DH.T).softmax(-1).max(-1)
            known_R = draft_ids(own_R, self.vocab)
            bins.append((top.values * BINS).long().clamp_max(BINS - 1))
            right.append((top.indices == known_R).float())
        return torch.cat(bins), torch.cat(right)

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        shares_XC2 = self._right[..., 1:] / self._right[..., :1]
        config = {
            **self.about(self.method, [f"hidden.{layer}" for layer in self.layers]),
            "exits": list(self.layers),
            "right": [[[round(a, 4), round(b, 4)] for a, b in row] for row in shares_XC2.tolist()],
        }
        write_drafter(folder, config, self.named(), self.vocab, provenance)
