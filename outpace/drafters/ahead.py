"""Coins and settings of a step on a text that is a guess: ahead of the sequence's own.

Whoever drafts for a draft runs steps between two steps of the target. Their text is the committed
one and what was guessed so far. Nothing here writes to what the target's sequence owns.

Shape letters: V vocabulary, F rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outpace.coins import Coins, Stream
from outpace.sampling import Warp
from outpace.types import Law


@dataclass(frozen=True, slots=True, eq=False)
class CoinsAhead(Coins):
    """Coins of an inner step: those of the outer one, under keys that name the inner.

    The outer coins know the outer pending position; a place that is guessed again at a later
    outer step thus meets fresh coins. Level and inner position alone would bring the same back.
    """

    outer: Coins
    level: int
    """Of a cascade, from 1."""
    ahead: int
    """Guesses between the outer pending token and the inner one."""
    stream: Stream

    def flip(self, prob: float, *key: int) -> bool:
        return self.outer.flip(prob, self.level, self.ahead, int(self.stream), *key)

    def choose(self, law: Law, *key: int) -> int:
        return self.outer.choose(law, self.level, self.ahead, int(self.stream), *key)

    def race(self, law: Law, depth: int, count: int = 1) -> list[int]:
        return self.outer.race(law, self.ahead + depth, count)


class WarpAhead(Warp):
    """The sampling settings of a sequence, some guesses further on.

    Args:
        base: of the sequence; only read.
        chosen: give the likeliest token although the sequence samples.
    """

    def __init__(self, base: Warp, chosen: bool) -> None:
        self.params, self.vocab_size = base.params, base.vocab_size
        self.generated = base.generated
        self.greedy, self.temperature = base.greedy or chosen, None
        self._base = base
        self._path: list[int] = []

    @property
    def raw(self) -> bool:
        return False

    @property
    def plain(self) -> bool:
        """As of the sequence; settings that stop acting at some length count as acting."""
        return self._base.plain

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in guesses; the sequence's own history stays as it is."""
        self.generated += len(tokens)
        self._path += tokens

    @property
    def ruled(self) -> bool:
        return self._base.ruled

    def certain(self, path: Sequence[int] = ()) -> int | None:
        return self._base.certain((*self._path, *path))

    def expects(self, path: Sequence[int] = ()) -> Sequence[int]:
        return self._base.expects((*self._path, *path))

    def allows(self, path: Sequence[int], token: int) -> bool:
        return self._base.allows((*self._path, *path), token)

    def law(self, logits_V: Tensor, path: Sequence[int] = (), id_V: Tensor | None = None) -> Law:
        """The distribution after the guesses so far and ``path``."""
        if self.greedy and not self._base.greedy:
            (((token,),), _) = self.ranking(logits_V[None], [path], 1, id_V)
            return Law.one_hot(token, logits_V.dtype)
        return self._base.law(logits_V, (*self._path, *path), id_V)

    def ranking(
        self, logits_FV: Tensor, paths: Sequence[Sequence[int]], k: int, id_V: Tensor | None = None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The k likeliest tokens after the guesses so far and each path."""
        return self._base.ranking(logits_FV, [(*self._path, *path) for path in paths], k, id_V)
