"""How much of a draft is kept: stated chances, corrected by what they were worth lately.

Every guess has a stated chance. A lookup tells it beforehand; of other drafters it is a constant. What
was kept is compared with what was stated, over all texts and over the text at hand:

    chance = stated * (kept + w) / (stated + w) of all texts * (kept + w) / (expected + w) of this one

Over all texts each kind of guess counts by itself: a lookup's by how sure it was, another's by the level and
the width of its tree. A kind of which little is known is taken to be like the next wider one. Of one text
there is too little for that, so one factor serves a drafter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outpace.policies.tuning import TUNING, Tuning
from outpace.types import Budget

Kind = tuple[int, ...]
"""Of a guess; each part narrows it down."""


class Ratio:
    """Guesses kept, over those that were expected to be; old ones are forgotten."""

    __slots__ = ("expected", "kept")

    def __init__(self, kept: float = 0.0, expected: float = 0.0) -> None:
        if not (0.0 <= kept <= 1e6 and 0.0 <= expected <= 1e6):
            raise ValueError(f"need counts, got {kept} and {expected}")
        self.kept, self.expected = float(kept), float(expected)

    def value(self, doubt: float, before: float = 1.0) -> float:
        """Above 1 where more was kept than expected; ``before`` while nothing was seen."""
        return (self.kept + doubt * before) / (self.expected + doubt)

    def add(self, kept: float, expected: float, most: float) -> None:
        """Take in what was kept; of all that was seen at most so much stays."""
        self.kept += kept
        self.expected += expected
        total = max(self.kept, self.expected)
        if total > most:
            self.kept *= most / total
            self.expected *= most / total


class Tally:
    """A ratio for each kind of thing, and for all wider kinds."""

    __slots__ = ("_of", "_tuning")

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._of: dict[Kind, Ratio] = {}

    def ratio(self, kind: Kind) -> float:
        value, doubt = 1.0, self._tuning.doubt
        for end in range(len(kind) + 1):
            one = self._of.get(kind[:end])
            if one is not None:
                value = (one.kept + doubt * value) / (one.expected + doubt)
        return value

    def add(self, kind: Kind, kept: float, expected: float) -> None:
        for end in range(len(kind) + 1):
            one = self._of.get(kind[:end])
            if one is None:
                one = self._of[kind[:end]] = Ratio()
            one.add(kept, expected, self._tuning.pool)

    def to_json(self) -> list[Any]:
        return [[list(kind), one.kept, one.expected] for kind, one in self._of.items()]

    def read(self, data: Sequence[Any]) -> None:
        """Take what ``to_json`` gave; ValueError or TypeError if it is something else."""
        self._of = {tuple(map(int, kind)): Ratio(*pair) for kind, *pair in data}


class Pool:
    """What is known of a drafter over all texts.

    Args:
        kept_D: what was measured beforehand: by level, drafts that were kept there,
        tried_D: and those that were tried. They count as at most a tenth of what is remembered.
    """

    def __init__(
        self, tuning: Tuning = TUNING, kept_D: Sequence[float] = (), tried_D: Sequence[float] = ()
    ) -> None:
        self.kept, self.levels, self.nodes = Tally(tuning), Tally(tuning), Tally(tuning)
        """Guesses kept; levels that drafts had, of those asked for; their nodes, over the levels."""
        self.seen = 0
        """Grows with every draft."""
        for level, (hits, tries) in enumerate(zip(kept_D, tried_D, strict=True)):
            scale = min(1.0, 0.1 * tuning.pool / tries) if tries else 0.0
            self.kept.add((level,), hits * scale, tuning.hope * tries * scale)

    def sizes(self, width: int, depth: int) -> tuple[list[float], list[float]]:
        """Nodes and levels of trees cut at depth 1, 2, ...: a drafter may stop earlier by itself."""
        each, reached, levels, levels_D = self.nodes.ratio((width,)), 1.0, 0.0, []
        for level in range(depth):
            reached *= self.levels.ratio((level, width)) if level else 1.0
            levels += reached
            levels_D.append(levels)
        return [min(float(width), levels * each) for levels in levels_D], levels_D

    def grew(self, width: int, depth: int, nodes: int, levels: int) -> None:
        """Take in how large a tree became that might have had ``depth`` levels."""
        for level in range(min(depth, levels + 1)):
            self.levels.add((level, width), level < levels, 1.0)
        self.nodes.add((width,), nodes, levels)

    def to_json(self) -> dict[str, Any]:
        """Plain data, for ``from_json``."""
        return {name: getattr(self, name).to_json() for name in ("kept", "levels", "nodes")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], tuning: Tuning = TUNING) -> Pool:
        """Read what ``to_json`` gave; ValueError, TypeError or KeyError if it is something else."""
        pool = cls(tuning)
        for name in ("kept", "levels", "nodes"):
            getattr(pool, name).read(data[name])
        return pool


def asks(budget: Budget) -> list[tuple[int, int]]:
    """Nodes and depths to weigh. Of a dynamic tree: all its nodes, about a third of them, and so on."""
    most, deepest = budget.max_nodes, budget.max_depth
    if budget.shape.parent_N is not None:
        depth_N: list[int] = []
        for parent in budget.shape.parent_N[:most]:
            depth_N.append(1 if parent < 0 else depth_N[parent] + 1)
        return [
            (sum(d <= n for d in depth_N), n) for n in range(1, min(deepest, max(depth_N, default=0)) + 1)
        ]
    if not budget.shape.beam:
        return [(n, n) for n in range(1, min(most, deepest) + 1)]
    found, nodes = [], most
    while nodes > 0:
        found += [(nodes, depth) for depth in range(1, min(nodes, deepest) + 1)]
        nodes = (nodes + 2) // 3 if nodes > 1 else 0
    return found
