"""Which layer to leave from: Thompson sampling over a few exits, with censored feedback.

Every exit has a chance t that a guess of its is accepted, known as Beta(a, b). Before each draft
one t is drawn per exit, and the exit goes first whose draw promises most tokens per time:

    (1 - t^(D + 1)) / (1 - t)  over  1 + D c      for a draft of depth D

c is the cost of the exit's pass as a share of a whole one. A draft of which r guesses were kept
shows r successes, and one failure if it was deeper than that. What came after the first refusal
was never judged and counts for nothing; a draft that a stop cut short shows no failure.

Paper: EESD, arXiv:2406.03853 (its Beta-TS; there the draft's length is chosen, not its exit).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outpace.coins import Coins
from outpace.types import Law

_GRID = 64
"""Points of t that a posterior is drawn from."""
_FORGET = 0.97
"""Share of what is known that a round leaves, so that the choice follows the text."""
_KEY = -2
"""First part of the coins' key; below it comes no node of a tree."""


@dataclass(slots=True)
class Belief:
    """What is known of one exit in one sequence: Beta(a, b) of the chance of acceptance."""

    a: float = 1.0
    b: float = 1.0

    def learn(self, accepted: int, depth: int, censored: bool) -> None:
        """Take in one draft of this exit: its depth, and how much of its path was kept."""
        failed = accepted < depth and not censored
        self.a = max(1.0, self.a * _FORGET) + accepted
        self.b = max(1.0, self.b * _FORGET) + failed

    def law(self) -> Law:
        """Its density on the grid, in float64."""
        t_S = (torch.arange(_GRID, dtype=torch.float64) + 0.5) / _GRID
        log_S = (self.a - 1) * t_S.log() + (self.b - 1) * (1 - t_S).log()
        return Law(log_S.softmax(0))


def pick(beliefs: Sequence[Belief], shares: Sequence[float], depth: int, coins: Coins) -> int:
    """Choose an exit before anything is drafted.

    Args:
        shares: cost of each exit's pass, in whole passes.
        depth: of the draft that is wanted.
        coins: stream DRAFT; a coin per exit is used, none if there is one exit only.
    """
    if len(beliefs) == 1:
        return 0
    worth = []
    for i, (belief, share) in enumerate(zip(beliefs, shares, strict=True)):
        t = (coins.choose(belief.law(), _KEY, i) + 0.5) / _GRID
        worth.append((1 - t ** (depth + 1)) / (1 - t) / (1 + depth * share))
    return worth.index(max(worth))
