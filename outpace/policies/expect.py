"""How much of a draft will be kept: by depth, for one sequence, learned while it runs.

Level i of a draft is kept with chance a_i, given that the levels before it were. A pool learns the
a_i of all sequences; one sequence differs from it by one factor on the odds, which is learned from
all levels at once, so that a few steps are enough:

    odds of a_i here = odds of a_i in the pool * (kept / refused) / (kept / refused by the pool)

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


class Pool:
    """Chances by level, over all sequences that a drafter has served."""

    __slots__ = ("_hits", "_tries")

    def __init__(self, kept: Sequence[float] = (), tried: Sequence[float] = ()) -> None:
        """Begin with what was measured, as at most ``BEFORE`` observations of a level."""
        scale_D = [min(1.0, BEFORE / count) if count else 0.0 for count in tried]
        self._hits = [hits * scale for hits, scale in zip(kept, scale_D, strict=True)]
        self._tries = [count * scale for count, scale in zip(tried, scale_D, strict=True)]

    def chances(self, levels: int) -> list[float]:
        """Chance of each of the first levels; an unknown one is like the one before it.

        A little too high where little is known: a level that is not tried cannot rise.
        """
        out, before = [], PRIOR
        for hits, tries in zip(self._hits[:levels], self._tries, strict=False):
            before = min(0.98, max(0.02, (hits + WEIGHT * before) / (tries + WEIGHT)))
            doubt = math.sqrt(before * (1.0 - before) / (tries + WEIGHT))
            out.append(min(0.98, before + HOPE * doubt))
        return out + [before] * (levels - len(out))

    def learn(self, level: int, hit: bool) -> None:
        """Take in whether a level that was tried was kept."""
        if level == len(self._hits):
            self._hits.append(0.0)
            self._tries.append(0.0)
        if self._tries[level] >= POOL:
            self._hits[level] *= 1.0 - 1.0 / POOL
            self._tries[level] *= 1.0 - 1.0 / POOL
        self._hits[level] += hit
        self._tries[level] += 1.0


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

    def reopen(self, pool: Pool) -> None:
        """What was known is void, since the text has changed; the pool, too, knows the old one."""
        self.forget()
        chance = pool.chances(1)[0]
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

    def learn(self, pool: Pool, kept: int, refused: bool) -> bool:
        """Take in a draft: so many levels were kept, and whether the next one was refused.

        Returns:
            Whether the alarm was raised by less than expected: the text has changed, for worse.
        """
        levels = min(LEVELS, kept + refused)
        if not levels:
            return False
        for level, chance in enumerate(pool.chances(levels)):
            hit = level < kept
            here = self._here(chance)
            self._expected += here
            self._spread += here * (1.0 - here)
            self._long.add(hit, chance)
            self._short.add(hit, chance)
            pool.learn(level, hit)
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
