"""When to stop leaving early: a threshold that is learned from what the whole model said.

    confidence   probability that the exit gives its likeliest token
    right        whether the whole model's likeliest token is the same

Confidences of right and of wrong guesses are two Beta distributions, fitted by their moments. A draft goes
on while a guess of such a confidence is more likely right than a share allows. Then the layers above run
for all of its tokens in one pass. That is FREE's synchronised parallel decoding, here as verification, so
that nothing is lost.

Paper: FREE, Bae et al. 2023, arXiv:2310.05424, its adaptive threshold. ``_SHARE`` is zeta, ``_BLEND``
lambda of the posterior's part in a fit; every fit is one step of EM.

Shape letters: S guesses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_SHARE, _BLEND = 0.4, 0.2
_KEPT, _FIT = 512, 16
"""Guesses remembered, and guesses between two fits."""
_RANKS = 4
"""Tokens of a guess whose probabilities are remembered."""
_GRID = 64
"""Confidences at which a threshold may lie."""
_EDGE = 1e-3
"""Confidences are taken to be this far from 0 and 1, where densities have no end."""


Said = tuple[tuple[int, ...], tuple[float, ...]]
"""The likeliest tokens of an exit, target ids, and their probabilities."""


@dataclass(slots=True, eq=False)
class BetaMixture:
    """What one sequence has shown of an exit: component 0 is of wrong guesses, 1 of right ones."""

    a: tuple[float, float] = (1.0, 2.0)
    b: tuple[float, float] = (2.0, 1.0)
    weight: tuple[float, float] = (0.25, 0.75)
    """An exit names the whole model's likeliest token more often than it gives it probability."""
    seen: list[tuple[float, bool]] = field(default_factory=list)
    fresh: int = 0
    """Guesses since the last fit."""
    least: float = 0.18
    """The threshold; at first that of the prior."""

    def copy(self) -> BetaMixture:
        return BetaMixture(self.a, self.b, self.weight, list(self.seen), self.fresh, self.least)

    def learn(self, guesses: Sequence[tuple[float, bool]]) -> None:
        """Take in guesses that were compared with the whole model; fit anew now and then."""
        self.seen = [*self.seen, *guesses][-_KEPT:]
        self.fresh += len(guesses)
        if self.fresh >= _FIT:
            self._fit()
            self.fresh = 0

    def chance(self, confidence_S: Tensor) -> Tensor:
        """How likely guesses of such confidences are right, float64 [S]."""
        x_S = confidence_S.double().clamp(_EDGE, 1 - _EDGE)
        wrong_S, right_S = (
            _log_density(x_S, a, b) + math.log(w) for a, b, w in zip(self.a, self.b, self.weight, strict=True)
        )
        return (right_S - wrong_S).sigmoid()

    def _fit(self) -> None:
        """One step of EM; what is known of every guess counts beside what the mixture believes."""
        x_S = torch.tensor([one for one, _ in self.seen], dtype=torch.float64).clamp(_EDGE, 1 - _EDGE)
        right_S = torch.tensor([float(one) for _, one in self.seen], dtype=torch.float64)
        known_S = _BLEND * self.chance(x_S) + (1 - _BLEND) * right_S
        moments = [_moments(x_S, 1 - known_S), _moments(x_S, known_S)]
        self.a, self.b = (moments[0][0], moments[1][0]), (moments[0][1], moments[1][1])
        share = float(known_S.mean().clamp(0.02, 0.98))
        self.weight = (1 - share, share)
        grid_S = (torch.arange(_GRID, dtype=torch.float64) + 0.5) / _GRID
        doubted = (self.chance(grid_S) < _SHARE).nonzero()
        self.least = 0.0 if len(doubted) == 0 else float((doubted.max() + 1) / _GRID)


def _log_density(x_S: Tensor, a: float, b: float) -> Tensor:
    """Of the Beta distribution."""
    whole = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return (a - 1) * x_S.log() + (b - 1) * (1 - x_S).log() + whole


def _moments(x_S: Tensor, weight_S: Tensor) -> tuple[float, float]:
    """The Beta distribution of these mean and variance, given how much each one counts."""
    total = weight_S.sum() + 1e-6
    mean = float((weight_S * x_S).sum() / total)
    spread = max(float((weight_S * (x_S - mean).square()).sum() / total), 1e-4)
    mean = min(max(mean, 0.02), 0.98)
    both = max(mean * (1 - mean) / spread - 1, 0.2)
    return mean * both, (1 - mean) * both


def said_of(logits_FD: Tensor, id_D: Tensor | None) -> list[Said]:
    """What an exit guesses after each of some nodes: a few tokens, likeliest first."""
    top = logits_FD.softmax(-1).topk(min(_RANKS, logits_FD.shape[1]))
    ids_Fk = top.indices if id_D is None else id_D[top.indices]
    pairs = zip(ids_Fk.tolist(), top.values.tolist(), strict=True)
    return [(tuple(ids), tuple(probs)) for ids, probs in pairs]


def given(said: Said, token: int) -> float:
    """Probability of a token, or that of the last one that is known to be likelier."""
    ids, probs = said
    return probs[ids.index(token)] if token in ids else probs[-1]
