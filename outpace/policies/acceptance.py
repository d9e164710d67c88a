"""How much of a draft is kept: stated chances, corrected by what they were worth lately.

Every guess has a stated chance. A lookup tells it beforehand; of other drafters it is a constant. What
was kept is compared with what was stated, over all texts and over the text at hand:

    chance = stated * (kept + w) / (stated + w) of all texts * (kept + w) / (expected + w) of this one

Over all texts each kind of guess counts by itself: a lookup's by how sure it was, another's by the width
and the level of its tree. Of one text there is too little for that, so one factor serves a drafter.

Shape letters: D depths of a draft, from 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outpace.policies.tuning import TUNING
from outpace.types import Budget

SURE = -1
"""In the place of a width: the kind of guess is one of a lookup."""


class Ratio:
    """Guesses kept, over those that were expected to be; old ones are forgotten."""

    __slots__ = ("expected", "kept")

    def __init__(self, kept: float = 0.0, expected: float = 0.0) -> None:
        self.kept, self.expected = kept, expected

    @property
    def value(self) -> float:
        """Above 1 where more was kept than expected."""
        return (self.kept + TUNING.doubt) / (self.expected + TUNING.doubt)

    def add(self, kept: float, expected: float, most: float) -> None:
        """Take in what was kept; of all that was seen at most so much stays."""
        self.kept += kept
        self.expected += expected
        total = max(self.kept, self.expected)
        if total > most:
            self.kept *= most / total
            self.expected *= most / total


class Pool:
    """What is known of a drafter over all texts.

    Args:
        kept: what was measured beforehand: by level, drafts that were kept there,
        tried: and those that were tried. They count as at most a tenth of what is remembered.
        width: nodes of its full tree; 0 where drafts are chains.
    """

    def __init__(self, kept: Sequence[float] = (), tried: Sequence[float] = (), width: int = 0) -> None:
        self._of: dict[tuple[int, int], Ratio] = {}
        self._values: dict[tuple[int, int], float] = {}  # what ``ratio`` found since the last ``add``
        self._levels: dict[int, list[Ratio]] = {}  # width -> by level: drafts that had it, that might have
        self._nodes: dict[int, Ratio] = {}  # width -> nodes, and levels
        for level, (hits, tries) in enumerate(zip(kept, tried, strict=True)):
            scale = min(1.0, 0.1 * TUNING.pool / tries) if tries else 0.0
            self._of[width, level] = Ratio(hits * scale, TUNING.hope * tries * scale)

    def ratio(self, kind: tuple[int, int]) -> float:
        """Of a kind of guess. It begins as that of the same level in a tree of another width."""
        found = self._values.get(kind)
        if found is None:
            width, level = kind
            near = [
                (abs(n - level), abs(w - width), one.value)
                for (w, n), one in self._of.items()
                if SURE not in (w, width) and (w != width or kind not in self._of)
            ]
            before = min(near)[2] if near and (min(near)[0] == 0 or kind not in self._of) else 1.0
            one = self._of.get(kind, Ratio())
            found = (one.kept + TUNING.doubt * before) / (one.expected + TUNING.doubt)
            self._values[kind] = found
        return found

    def add(self, kind: tuple[int, int], kept: float, stated: float) -> None:
        """Take in what was kept of such guesses."""
        self._of.setdefault(kind, Ratio()).add(kept, stated, TUNING.pool)
        self._values.clear()

    def sizes(self, width: int, depth: int) -> tuple[list[float], list[float]]:
        """Nodes and levels of drafts cut at depth 1, 2, ...: a drafter may stop earlier by itself."""
        seen = self._levels.get(width, [])
        nodes = self._nodes.get(width, Ratio())
        each = (nodes.kept + 1.0) / (nodes.expected + 1.0)
        reached = on = 1.0
        levels, levels_D = 0.0, []
        for level in range(depth):
            if level < len(seen):
                on = (seen[level].kept + 1.0) / (seen[level].expected + 1.0)
            reached *= on if level else 1.0
            levels += reached
            levels_D.append(levels)
        return [min(float(width) or levels, levels * each) for levels in levels_D], levels_D

    def grew(self, width: int, depth: int, nodes: int, levels: int) -> None:
        """Take in how large a draft became that might have had ``depth`` levels."""
        seen = self._levels.setdefault(width, [])
        for level in range(min(depth, levels + 1)):
            if level == len(seen):
                seen.append(Ratio())
            seen[level].add(level < levels, 1.0, TUNING.pool)
        self._nodes.setdefault(width, Ratio()).add(nodes, levels, TUNING.pool)

    def to_json(self) -> dict[str, Any]:
        """Plain data, for ``from_json``."""
        return {
            "kinds": [[*kind, one.kept, one.expected] for kind, one in self._of.items()],
            "levels": [
                [w, [[one.kept, one.expected] for one in levels]] for w, levels in self._levels.items()
            ],
            "nodes": [[w, one.kept, one.expected] for w, one in self._nodes.items()],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Pool:
        """Read what ``to_json`` gave; ValueError, TypeError or KeyError if it is something else."""
        pool = cls()
        pool._of = {(_whole(w), _whole(n)): _ratio(*pair) for w, n, *pair in data["kinds"]}
        pool._levels = {_whole(w): [_ratio(*pair) for pair in pairs] for w, pairs in data["levels"]}
        pool._nodes = {_whole(w): _ratio(*pair) for w, *pair in data["nodes"]}
        return pool


def _whole(number: Any) -> int:
    if not isinstance(number, int):
        raise TypeError(f"need whole numbers, got {number!r}")
    return number


def _ratio(kept: float, expected: float) -> Ratio:
    if not (0.0 <= kept <= 1e6 and 0.0 <= expected <= 1e6):
        raise ValueError(f"need counts, got {kept} and {expected}")
    return Ratio(float(kept), float(expected))


def sure(chance: float) -> tuple[int, int]:
    """The kind of a lookup's draft: the chance of its first guess, in eighths."""
    return SURE, int(8 * chance)


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
