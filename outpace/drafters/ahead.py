"""Coins, settings and outcomes of a step on a text that is a guess: ahead of the sequence's own.

Whoever drafts for a draft runs steps between two steps of the target. Their text is the committed
one and what was guessed so far. Nothing here writes to what the target's sequence owns.

Shape letters: V vocabulary, F rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.coins import Coins, Stream
from outpace.sampling import Warp
from outpace.types import Draft, Law, Outcome, Scored, Signals, StopRule, Verdict

UNSEEN = Scored(torch.zeros(0, 1), (0, 0))
"""Of tokens that no pass scored for the drafter that is told of them."""


def written(fed: Sequence[int], emitted: Sequence[int], start: int, forced: bool = False) -> Outcome:
    """What a drafter is told of tokens that came without a draft; arguments as of ``Outcome``."""
    return Outcome(Draft(), UNSEEN, Verdict((), tuple(emitted)), tuple(fed), (), start, forced=forced)


def goes_on(rule: StopRule | None, count: int, token: int, law: Law, logits_V: Tensor, chosen: bool) -> bool:
    """Whether a rule, which reads guesses that are kept alone, lets a draft go on behind its last one.

    Args:
        count: guesses so far.
        law: what the last one was drawn from.
        logits_V: the same, as the model gave it.
        chosen: whether the guess was chosen: then ``law`` does not say how sure the model was.
    """
    if rule is None:
        return True
    q = float(logits_V.float().softmax(0)[token]) if chosen else law.prob(token)
    return bool(rule.more(Signals(torch.tensor([count]), torch.tensor([q]))))


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
        self.greedy = base.greedy or chosen
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
            (best,), _ = self.ranking(logits_V[None], [path], 1, id_V)
            any_one = 0 if id_V is None else int(id_V[0])  # where nothing may follow, see ``Warp.guess``
            return Law.one_hot(best[0] if best else any_one, logits_V.dtype)
        return self._base.guess(logits_V, (*self._path, *path), id_V)

    def ranking(
        self, logits_FV: Tensor, paths: Sequence[Sequence[int]], k: int, id_V: Tensor | None = None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The k likeliest tokens after the guesses so far and each path."""
        return self._base.ranking(logits_FV, [(*self._path, *path) for path in paths], k, id_V)
