"""Exact distributions of programs that flip coins: run them once for every way the coins can fall.

A coin is a uniform on [0, 1), named as `KeyedCoins` names it. What a run learns about it is the
interval in which it lies. ``flip(0.3)`` cuts that interval at 0.3, ``choose`` at the cumulative
edges of its distribution. The run goes on in one part, and is started again for the others. The weight of
a run is the product of the shares taken, so the weights add up to 1. A coin that is used twice is the same
uniform twice, so both uses are correlated, exactly as they would be in production.

    u  0 ------ 0.3 ------------------------ 1      flip(0.3): two runs, weights 0.3 and 0.7
                 |------- 0.5 --|------------|      then choose([.5, .5]) with the same coin, in
                                                    the second run: weights 0.2 / 0.7, 0.5 / 0.7
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from outpace.coins import Coins, Stream
from outpace.types import Law

T = TypeVar("T")
Coin = tuple[int, ...]
"""(seed, stream, level, position, key...)."""
Interval = tuple[float, float]

_ROUNDING = 1e-15
"""Shares of an interval below this are rounding of edges, not chance."""


class Fate:
    """How the coins fall in one run: a script of choices, and what is known of each coin."""

    def __init__(self, known: Mapping[Coin, Interval], script: Sequence[int]) -> None:
        self.known = dict(known)
        self.weight = 1.0
        self.taken: list[tuple[int, int]] = []
        """(choice, number of choices) at every cut so far."""
        self._script = script

    def cell(self, coin: Coin, edges: Sequence[float]) -> int:
        """Which cell of [0, 1), cut at ascending ``edges``, holds the coin."""
        low, high = self.known.get(coin, (0.0, 1.0))
        cells = []
        for index, (a, b) in enumerate(zip((0.0, *edges), (*edges, 1.0), strict=True)):
            a, b = max(a, low), min(b, high)
            if b - a > _ROUNDING * (high - low):
                cells.append((index, a, b))
        choice = 0
        if len(cells) > 1:
            place = len(self.taken)
            choice = self._script[place] if place < len(self._script) else 0
            self.taken.append((choice, len(cells)))
        index, a, b = cells[choice]
        self.weight *= (b - a) / (high - low)
        self.known[coin] = (a, b)
        return index


def fates(run: Callable[[Fate], T], known: Mapping[Coin, Interval] | None = None) -> Iterator[tuple[Fate, T]]:
    """Every way a program can go.

    Args:
        run: deterministic but for the coins that it makes from the fate it is given.
        known: what earlier runs, of which this one is the continuation, learned about coins.

    Yields:
        The fate of a run, with its weight, and what the run returned. Weights add up to 1.
    """
    script: list[int] = []
    while True:
        fate = Fate(known or {}, script)
        yield fate, run(fate)
        taken = fate.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        script = [choice for choice, _ in taken]
        script[-1] += 1


@dataclass(frozen=True, slots=True, eq=False)
class EnumeratingCoins(Coins):
    """Coins whose uniforms are enumerated; names, and so reuse, as in `KeyedCoins`.

    A race is represented by one uniform per absolute position. The winner is its inverse under the
    distribution function. The runners-up follow in cyclic order of their ids. That is another coupling of
    draft and target than Gumbel noise, with other acceptance. What the distribution of the output rests on
    is the same in both:

    - Given the coin of its position, the winner is a function of the distribution.
    - Over the coin, the winner has that distribution.
    - Coins of different positions are independent.
    - The same position gives the same coin at every step and to every user.
    """

    fate: Fate
    seed: int
    position: int
    stream: Stream
    level: int = 0

    def flip(self, prob: float, *key: int) -> bool:
        if prob <= 0.0 or prob >= 1.0:
            return prob >= 1.0
        return self.fate.cell(self._named(*key), (prob,)) == 0

    def choose(self, law: Law, *key: int) -> int:
        ids, probs = law.ids.tolist(), law.prob_S.tolist()
        return int(ids[self.fate.cell(self._named(*key), _edges(probs))])

    def race(self, law: Law, depth: int, count: int = 1) -> list[int]:
        table = sorted(
            (token, prob)
            for token, prob in zip(law.ids.tolist(), law.prob_S.tolist(), strict=True)
            if prob > 0
        )
        coin = (self.seed, int(Stream.RACE), 0, self.position + depth)
        winner = self.fate.cell(coin, _edges([prob for _, prob in table]))
        order = [token for token, _ in table[winner:] + table[:winner]]
        return order[:count]

    def _named(self, *key: int) -> Coin:
        return (self.seed, int(self.stream), self.level, self.position, *key)


def _edges(probs: Sequence[float]) -> list[float]:
    """Inner edges of a distribution along [0, 1)."""
    total = sum(probs)
    return [min(edge / total, 1.0) for edge in accumulate(probs[:-1])]
