"""How much of a draft will be kept: by depth, for one sequence, learned while it runs.

Level i of a draft is kept with chance a_i, given that the levels before it were. A pool learns the
a_i of all sequences; one sequence differs from it by one factor on the odds, which is learned from
all levels at once, so that a few steps are enough:

    odds of a_i here = odds of a_i in the pool * (kept / refused) / (kept / refused by the pool)

A tree that may spread over several nodes per level has chances of its own for every width that it
may be asked for; what one width taught is carried over to those that were never tried:

    1 - a_i(n) = (1 - a_i(m)) ** (n / m) ** SIBLINGS

It is also drafted no further than seems likely, so its size, too, is learned (`Growth`).

The factor rests on a long window, for a small variance. A short window beside it raises the alarm
when the text has changed: then the long one is forgotten. What a stop cut off teaches nothing
(censored feedback: levels behind the first refusal were never tried either).

Source of online acceptance with censoring: EESD, arXiv:2406.03853.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outpace.types import Budget

LEVELS = 32
"""Deeper ones are not weighed."""
PRIOR = 0.6
"""Chance of a level of which nothing is known."""
WEIGHT, HOPE = 4.0, 0.5
"""Observations that the level before is worth, and standard deviations above what was seen."""
OPEN = 6.0
"""Observations that it is worth that a text has changed."""
BEFORE = 40.0
"""Observations that what was measured before the first request counts as, at most."""
LONG, SHORT, POOL = 50.0, 10.0, 300.0
"""Observations that count, of one sequence, of its recent past, of a level of the pool."""
ALARM = 2.3
"""Standard deviations between the short window and what the long one expects."""
SIBLINGS, USUAL = 0.2, 4
"""How much more often a level is kept that has more nodes; nodes for which PRIOR is meant."""
ELSEWHERE = 15.0
"""Observations that those of another width are worth, at most."""
SIZES = 60.0
"""Drafts that count, of the size of a tree."""


def sizes(budget: Budget) -> tuple[int, ...]:
    """Nodes of a draft cut at depth 1, 2, ... of its budget."""
    depth = min(budget.max_depth, budget.max_nodes, LEVELS)
    parent_N = budget.shape.parent_N
    if parent_N is not None:
        depth_N: list[int] = []
        for parent in parent_N[: budget.max_nodes]:
            depth_N.append(1 if parent < 0 else depth_N[parent] + 1)
        return tuple(sum(d <= level for d in depth_N) for level in range(1, depth + 1))
    if budget.shape.beam:
        return tuple(math.ceil(budget.max_nodes * d / depth) for d in range(1, depth + 1))
    return tuple(range(1, depth + 1))


def cuts(budget: Budget) -> tuple[tuple[int, int], ...]:
    """Nodes and depths that a tree may be asked for, of which none is implied by another.

    Thirds of its nodes, since a row costs; and depths, since a level does.
    """
    found, nodes = [], min(budget.max_nodes, LEVELS)
    while nodes > 0:
        deepest = min(nodes, budget.max_depth)
        found += [(nodes, depth) for depth in (1, 2, 3, 4) if depth < deepest]
        found.append((nodes, deepest))
        nodes = math.ceil(nodes / 3) if nodes > 1 else 0
    return tuple(found)


class Growth:
    """How large a tree becomes that may stay smaller than it is asked to be."""

    __slots__ = ("_levels", "_nodes")

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], list[float]] = {}  # asked -> nodes, drafts
        self._levels: dict[tuple[int, int], list[float]] = {}  # nodes, level -> went on, could

    def expect(self, nodes: int, depth: int) -> tuple[float, float]:
        """Nodes and levels of a draft that is asked for so much."""
        levels = reached = 1.0
        for level in range(2, depth + 1):
            went, could = self._levels.get((nodes, level), (0.0, 0.0))
            reached *= (went + 1.5) / (could + 2.0)
            levels += reached
        made, drafts = self._nodes.get((nodes, depth), (0.0, 0.0))
        guess = min(float(nodes), levels * max(1.0, 0.25 * nodes))
        return (made + 2.0 * guess) / (drafts + 2.0), levels

    def learn(self, nodes: int, depth: int, drafted: int, levels: int) -> None:
        """Take in how large a draft became."""
        if drafted:
            _count(self._nodes.setdefault((nodes, depth), [0.0, 0.0]), drafted)
            for level in range(2, min(depth, levels + 1) + 1):
                _count(self._levels.setdefault((nodes, level), [0.0, 0.0]), level <= levels)


def _count(pair: list[float], value: float) -> None:
    if pair[1] >= SIZES:
        pair[0] *= 1.0 - 1.0 / SIZES
        pair[1] *= 1.0 - 1.0 / SIZES
    pair[0] += value
    pair[1] += 1.0


class Pool:
    """Chances by level, over all sequences that a drafter has served.

    Args:
        kept: what was measured of drafts of the full width: by level, those that were kept,
        tried: and those that were tried. Counts as at most ``BEFORE`` observations of a level.
        width: nodes of a full tree; 0 where drafts have but one shape.
    """

    __slots__ = ("_hits", "_tries", "growth", "learned")

    def __init__(self, kept: Sequence[float] = (), tried: Sequence[float] = (), width: int = 0) -> None:
        scale_D = [min(1.0, BEFORE / count) if count else 0.0 for count in tried]
        self._hits = {width: [hits * scale for hits, scale in zip(kept, scale_D, strict=True)]}
        self._tries = {width: [count * scale for count, scale in zip(tried, scale_D, strict=True)]}
        self.growth = Growth()
        self.learned = 0
        """Levels taken in."""

    @property
    def young(self) -> bool:
        """Whether next to nothing is known yet."""
        return sum(tries[0] for tries in self._tries.values() if tries) < WEIGHT

    def chances(self, levels: int, width: int = 0) -> list[float]:
        """Chance of each of the first levels; an unknown one is like the one before it.

        A little too high where little is known: a level that is not tried cannot rise.
        """
        own_D, own_tries_D = self._hits.get(width, ()), self._tries.get(width, ())
        out: list[float] = []
        before = wider(PRIOR, USUAL, width) if width else PRIOR
        for level in range(levels):
            known = level < len(own_tries_D)
            hits, tries = (own_D[level], own_tries_D[level]) if known else (0.0, 0.0)
            other = self._elsewhere(level, width)
            if not known and other is None:
                return out + [before] * (levels - len(out))
            guess, weight = (before, WEIGHT) if other is None else other
            before = min(0.98, max(0.02, (hits + weight * guess) / (tries + weight)))
            doubt = math.sqrt(before * (1.0 - before) / (tries + weight))
            out.append(min(0.98, before + HOPE * doubt))
        return out

    def _elsewhere(self, level: int, width: int) -> tuple[float, float] | None:
        """What the width that is known best there says of this one, and its weight; or nothing."""
        best, found = WEIGHT, None
        for other, tries_D in self._tries.items():
            if other != width and level < len(tries_D) and tries_D[level] > best:
                best = tries_D[level]
                chance = wider(self._hits[other][level] / best, other, width)
                found = chance, min(ELSEWHERE, best)
        return found

    def learn(self, level: int, hit: bool, width: int = 0) -> None:
        """Take in whether a level that was tried was kept."""
        hits_D, tries_D = self._hits.setdefault(width, []), self._tries.setdefault(width, [])
        if level == len(hits_D):
            hits_D.append(0.0)
            tries_D.append(0.0)
        if tries_D[level] >= POOL:
            hits_D[level] *= 1.0 - 1.0 / POOL
            tries_D[level] *= 1.0 - 1.0 / POOL
        hits_D[level] += hit
        tries_D[level] += 1.0
        self.learned += 1


def wider(chance: float, known: int, width: int) -> float:
    """The chance of a level of a tree of ``width`` nodes, from that of one of ``known``."""
    return 1.0 - math.pow(1.0 - min(0.98, chance), math.pow(width / known, SIBLINGS))


class Window:
    """Kept and refused levels, and how many the pool expected of each."""

    __slots__ = ("hits", "misses", "right", "wrong")

    def __init__(self) -> None:
        self.hits = self.misses = self.right = self.wrong = 0.0

    def add(self, hit: bool, chance: float) -> None:
        """One level."""
        self.hits += hit
        self.misses += not hit
        self.right += chance
        self.wrong += 1.0 - chance

    def trim(self, most: float) -> float:
        """Scale to at most so many observations; returns the factor."""
        total = self.hits + self.misses
        scale = min(1.0, most / total) if total else 1.0
        self.hits *= scale
        self.misses *= scale
        self.right *= scale
        self.wrong *= scale
        return scale

    @property
    def odds(self) -> float:
        """Factor on the pool's odds."""
        ours = (self.hits + 1.0) / (self.misses + 1.0)
        return ours * (self.wrong + 1.0) / (self.right + 1.0)

    @property
    def mean(self) -> float:
        """Share that was kept."""
        return (self.hits + 1.0) / (self.hits + self.misses + 2.0)


class Belief:
    """What one sequence taught about one drafter."""

    __slots__ = ("_expected", "_long", "_mean", "_odds", "_short", "_spread")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Believe the pool again."""
        self._long, self._short = Window(), Window()
        self._odds, self._mean, self._expected, self._spread = 1.0, PRIOR, 0.0, 0.0

    def reopen(self, pool: Pool, width: int = 0) -> None:
        """What was known is void, since the text has changed; the pool, too, knows the old one."""
        self.forget()
        chance = pool.chances(1, width)[0]
        self._long.hits, self._long.misses = OPEN * PRIOR, OPEN * (1.0 - PRIOR)
        self._long.right, self._long.wrong = OPEN * chance, OPEN * (1.0 - chance)
        self._settle()

    def reach(self, pool: Sequence[float]) -> list[float]:
        """Expected kept tokens of a draft of 1, 2, ... levels, from the pool's chances."""
        total, whole, out = 0.0, 1.0, []
        for chance in pool:
            whole *= self._here(chance)
            total += whole
            out.append(total)
        return out

    def learn(self, pool: Pool, kept: int, refused: bool, width: int = 0) -> bool:
        """Take in a draft: so many levels were kept, and whether the next one was refused.

        Returns:
            Whether the alarm was raised by less than expected: the text has changed, for worse.
        """
        levels = min(LEVELS, kept + refused)
        if not levels:
            return False
        for level, chance in enumerate(pool.chances(levels, width)):
            hit = level < kept
            here = self._here(chance)
            self._expected += here
            self._spread += here * (1.0 - here)
            self._long.add(hit, chance)
            self._short.add(hit, chance)
            pool.learn(level, hit, width)
        self._long.trim(LONG)
        scale = self._short.trim(SHORT)
        self._expected *= scale
        self._spread *= scale
        off = self._short.hits - self._expected
        alarm = abs(off) > ALARM * math.sqrt(self._spread + 0.25)
        if alarm:
            self._long = self._short
            self._short = Window()
            self._expected = self._spread = 0.0
        self._settle()
        return alarm and off < 0

    def _settle(self) -> None:
        self._odds, self._mean = self._long.odds, self._long.mean

    def _here(self, chance: float) -> float:
        """Of a level that the pool gives this chance.

        Not beyond both the pool's chance and this sequence's mean: what the pool knows of deep
        levels comes from texts that went well, and must not be made better still.
        """
        here = self._odds * chance / (1.0 - chance + self._odds * chance)
        low, high = sorted((chance, self._mean))
        return min(high, max(low, here))
