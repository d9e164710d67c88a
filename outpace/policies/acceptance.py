"""How much of a draft is kept: stated chances, corrected by what they were worth lately.

Every guess has a stated chance. A lookup tells it beforehand; of other drafters it is a constant. What
was kept is compared with what was stated, over all texts and then over the text at hand:

    all    = (kept + w) / (stated + w)                  of all texts
    chance = stated * (kept + w * all) / (stated + w)   of this one

Over all texts each level of a tree of each width counts by itself, and at first like the same level of other
trees. Of one text there is too little for that: all levels of a drafter share one correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from operator import mul
from typing import Any

from outpace.policies.tuning import TUNING, Tuning
from outpace.types import Budget

Kind = tuple[str | int, ...]
"""What is counted: KEPT guesses, by level and width of a tree. Likewise the levels that it HAS, of those
asked for, and its nodes DRAFTED, by width and depth. Each part narrows it down."""
KEPT, HAS, DRAFTED = "kept", "has", "drafted"


class Ratio:
    """Guesses kept, over those that were expected to be; old ones are forgotten."""

    __slots__ = ("expected", "kept")

    def __init__(self, kept: float = 0.0, expected: float = 0.0) -> None:
        if not (0.0 <= kept <= 1e6 and 0.0 <= expected <= 1e6):
            raise ValueError(f"need counts, got {kept} and {expected}")
        self.kept, self.expected = float(kept), float(expected)

    def add(self, kept: float, expected: float, most: float) -> None:
        """Take in what was kept; of all that was seen at most so much stays."""
        kept, expected = self.kept + kept, self.expected + expected
        high = kept if kept > expected else expected
        share = most / high if high > most else 1.0
        self.kept, self.expected = share * kept, share * expected


class Pool:
    """What is known of a drafter over all texts. What was measured beforehand counts no more than one text
    does: by level, drafts that were kept there, of those that were tried.
    """

    def __init__(self, tuning: Tuning = TUNING, kept_D: Sequence[float] = (), tried_D: Sequence[float] = ()):
        self.tuning = tuning
        self.tally: dict[Kind, Ratio] = {}
        for level, (hits, tries) in enumerate(zip(kept_D, tried_D, strict=True)):
            scale = min(1.0, tuning.text / tries) if tries else 0.0
            self.add(hits * scale, tuning.hope * tries * scale, KEPT, level)

    def sizes_to_weigh(self, budget: Budget) -> Sequence[tuple[int, int]]:
        """Nodes and depths to weigh."""
        return sizes_to_weigh(budget)

    def ratio(self, *kind: str | int) -> float:
        """Above 1 where more was kept than expected; that of the wider kind while nothing was seen."""
        value, doubt = 1.0, self.tuning.doubt
        for end in range(1, len(kind) + 1):
            one = self.tally.get(kind[:end])
            if one is not None:
                value = (one.kept + doubt * value) / (one.expected + doubt)
        return value

    def add(self, kept: float, expected: float, *kind: str | int) -> None:
        """Take in what was kept of such guesses."""
        for end in range(1, len(kind) + 1):
            one = self.tally.get(kind[:end])
            if one is None:
                one = self.tally[kind[:end]] = Ratio()
            one.add(kept, expected, self.tuning.pool)

    def levels(self, depth: int, width: int) -> list[float]:
        """Levels expected of trees of 1, 2, ..., ``depth`` at most: a drafter may stop earlier by itself."""
        further = [self.ratio(HAS, level, width) for level in range(1, depth)]
        return list(accumulate(accumulate(further, mul, initial=1.0)))

    def grew(self, width: int, depth: int, nodes: int, levels: int) -> None:
        """Take in how large a tree became that might have had ``width`` nodes and ``depth`` levels."""
        for level in range(min(depth, levels + 1)):
            self.add(level < levels, 1.0, HAS, level, width)
        self.add(nodes, width, DRAFTED, width, depth)

    def to_json(self) -> list[Any]:
        """Plain data, for ``from_json``."""
        return [[[*kind], one.kept, one.expected] for kind, one in self.tally.items()]

    @classmethod
    def from_json(cls, data: Any, tuning: Tuning = TUNING) -> Pool:
        """Read what ``to_json`` gave; ValueError, TypeError or KeyError if it is something else."""
        pool = cls(tuning)
        for (what, *rest), kept, expected in data:
            if what not in (KEPT, HAS, DRAFTED) or not all(type(part) is int for part in rest):
                raise TypeError(f"need a kind of guess, got {[what, *rest]}")
            pool.tally |= {(what, *rest): Ratio(kept, expected)}
        return pool


@cache
def sizes_to_weigh(budget: Budget) -> Sequence[tuple[int, int]]:
    """Nodes and depths to weigh. Of a dynamic tree: all its nodes, about a third of them, and so on."""
    most, deepest = budget.max_nodes, budget.max_depth
    if budget.shape.parent_N is not None:
        depth_N: list[int] = []
        for parent in budget.shape.parent_N[:most]:
            depth_N.append(1 if parent < 0 else depth_N[parent] + 1)
        levels = range(1, min(deepest, max(depth_N, default=0)) + 1)
        return [(sum(d <= n for d in depth_N), n) for n in levels]
    if not budget.shape.beam:
        return [(n, n) for n in range(1, min(most, deepest) + 1)]
    found, nodes = [], most
    while nodes > 0:
        found += [(nodes, depth) for depth in range(1, min(nodes, deepest) + 1)]
        nodes = (nodes + 2) // 3 if nodes > 1 else 0
    return found
