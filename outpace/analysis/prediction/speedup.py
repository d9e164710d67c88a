"""What a drafter gains: chains and trees of guesses, from acceptance and cost.

    speed-up = E[tokens] / (c * levels + v(rows))

c is the cost of a level of the draft and v that of the pass that checks it. Both are in steps of plain
decoding, work outside of passes included. Where all guesses are kept, a draft model has not read the last
one. The next draft then begins with two rows. E is 1 and the probabilities that each guess is kept:

    chain    P_i = a_1 * a_2 * ... * a_i
    tree     the b-th guess of a place is kept where those before it were not: a_d * (1 - s)^(b - 2) * s of
             what they left, for b > 1, with s the share that a further guess takes

Sources: Leviathan et al. 2023, arXiv:2211.17192; trees as in Sequoia, arXiv:2402.12374.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outpace.types import ROOT

LONGEST, LARGEST, DEEPEST = 16, 32, 8
"""Guesses of a chain and of a tree that are tried, and levels of a tree."""
SIBLING = 0.15
"""Share of what the guesses before it left that a further guess takes: of a trained head, first to
second guess without replacement (docs/results)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafter:
    """A drafter as numbers."""

    acceptance: tuple[float, ...]
    """By depth: that a guess is kept, given that all before are. The last one goes on."""
    cost: float
    """Of a level, in steps of plain decoding."""
    sibling: float = SIBLING
    second: float = 0.0
    """What a second row adds to a level."""

    def __post_init__(self) -> None:
        if not self.acceptance or not all(0 <= a <= 1 for a in self.acceptance):
            raise ValueError(f"acceptance must be shares from 0 to 1, got {list(self.acceptance)}")
        if not (self.cost >= 0 and 0 <= self.sibling <= 1):
            raise ValueError(f"cost must be at least 0 and sibling a share, got {self.cost}, {self.sibling}")

    def at(self, level: int) -> float:
        """Acceptance at a depth, from 1."""
        return self.acceptance[min(level, len(self.acceptance)) - 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """A draft, and what it gains."""

    parents: tuple[int, ...]
    """Of its guesses."""
    levels: int
    emitted: float
    cost: float
    """Of a step, in plain steps."""

    @property
    def speedup(self) -> float:
        return self.emitted / self.cost


Ratio = Callable[[int], float]
"""Rows -> cost of a step that checks so many, in steps of plain decoding."""


def gain(drafter: Drafter, ratio: Ratio, parents: Sequence[int]) -> Gain:
    """What one tree gains; siblings are guessed in order.

    Args:
        parents: of its guesses, each -1 or an earlier guess.
    """
    reach: list[float] = []
    level: list[int] = []
    left: dict[int, float] = {}
    for parent in parents:
        level.append(1 if parent == ROOT else level[parent] + 1)
        share = drafter.sibling if parent in left else drafter.at(level[-1])
        kept = share * left.get(parent, 1.0)
        left[parent] = left.get(parent, 1.0) - kept
        reach.append(kept * (1.0 if parent == ROOT else reach[parent]))
    deepest = max(level, default=0)
    unread = sum(chance for chance, depth in zip(reach, level, strict=True) if depth == deepest)
    return Gain(
        parents=tuple(parents),
        levels=deepest,
        emitted=1 + sum(reach),
        cost=ratio(1 + len(parents)) + drafter.cost * deepest + drafter.second * unread,
    )


def chains(drafter: Drafter, ratio: Ratio) -> list[Gain]:
    """Chains of no guess, of 1, 2, ..."""
    return [gain(drafter, ratio, range(ROOT, n - 1)) for n in range(LONGEST + 1)]


def best_tree(drafter: Drafter, ratio: Ratio) -> Gain:
    """The tree that gains most, of those that take the likeliest guesses first; empty if none gains."""
    found = [
        gain(drafter, ratio, parents[:n])
        for levels in range(1, DEEPEST + 1)
        for parents in [_likeliest(drafter, levels)]
        for n in range(LARGEST + 1)
    ]
    return max(found, key=lambda one: one.speedup)


def _likeliest(drafter: Drafter, levels: int) -> list[int]:
    """Parents of the guesses that are likeliest to be kept, likeliest first."""
    parents: list[int] = []
    # Chance, parent, level, and the chance that the place is reached and all its guesses so far refused.
    first = drafter.at(1)
    ready = [(-first, ROOT, 1, 1.0 - first)]
    while ready and len(parents) < LARGEST:
        value, parent, level, refused = heapq.heappop(ready)
        node, kept = len(parents), drafter.sibling * refused
        parents.append(parent)
        heapq.heappush(ready, (-kept, parent, level, refused - kept))
        if level < levels:
            below = -value * drafter.at(level + 1)
            heapq.heappush(ready, (-below, node, level + 1, -value - below))
    return parents


@dataclass(frozen=True, slots=True)
class Steps:
    """Costs of steps, from those of passes."""

    over: Callable[[int], float]
    """Rows -> seconds of a pass of the target."""
    host: float = 0.0
    """Seconds of a step outside of its pass; a level of a draft is taken to have as much."""

    def ratio(self, rows: int) -> float:
        return (self.over(rows) + self.host) / (self.over(1) + self.host)

    def given(self, passes: float) -> float:
        """A level whose cost is known, in passes of the target over one row."""
        return passes * self.over(1) / (self.over(1) + self.host)

    def level(self, over: Callable[[int], float]) -> tuple[float, float]:
        """A level of a draft model, and what a second row adds to it.

        Args:
            over: rows -> seconds of a pass of it.
        """
        plain = self.over(1) + self.host
        return (over(1) + self.host) / plain, (over(2) - over(1)) / plain
