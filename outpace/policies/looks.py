"""When to draft nothing for once: to learn what a pass costs without drafts, or to save trouble.

Where every pass checks guesses, only passes with guesses are timed, and what one without them
would take is a guess itself. If that is too high, drafts seem to pay that do not, and nothing
corrects it. So now and then a pass is left plain, as soon as what that loses is a small enough
share of the time since the last one; seldom, while such passes take what was expected. Batches of a
new size begin with plain passes: there a guess costs rows that are dear, and gains are small.

Finding out what to draft costs something by itself. Where drafts bring less than that, a batch
rests: nobody is asked for so many passes that what the others lose is a small share. What a batch
gains is a mean over its sequences, which wavers the less the more there are, so large ones may rest
longer, and a single sequence never does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outpace.policies.tally import Tally

FIRST_GAP, LONGEST_GAP = 12, 256
"""Passes between two plain ones, at least."""
AT_ONCE = 2
"""Plain passes with which batches of a new size begin."""
NEWS = 0.05
"""Change of the expected seconds, as a share, that asks for another look soon."""
PAIR = 2
"""The longest rest has a pass for every so many sequences."""
FRESH, TRIALS = 0.1, 16
"""Weight of the latest pass in what drafts gain, and passes that are weighed before the first rest:
until drafters were tried, weighing has to seem in vain."""


@dataclass(slots=True)
class _Wait:
    """For batches of about one size."""

    passes: int = 0
    """Since the last plain one."""
    gap: int = FIRST_GAP
    expected: float = 0.0
    """Seconds of a plain pass, as they were thought to be at the last look."""
    weighed: int = 0
    """Passes in all that were."""
    gain: float = 0.0
    """Tokens per second where drafts are weighed, over those of a batch at rest; lately."""
    left: int = AT_ONCE
    """Passes that it rests yet."""


class Looks:
    """Remembers when passes were plain, and what the others gained, by powers of two of sequences.

    Args:
        share: of the time, that plain passes may lose, and passes between rests; 0: no such passes.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._waits: dict[int, _Wait] = {}
        self._weighed: tuple[int, float] | None = None

    def resting(self, batch: int) -> bool:
        """Whether nobody need be asked what to draft."""
        return self._share > 0 and batch > 1 and self._wait(batch).left > 0

    def rest(self, batch: int) -> bool:
        """Whether this pass is one at rest; counts it."""
        self._weighed, resting = None, self.resting(batch)
        if resting:
            wait = self._wait(batch)
            wait.left, wait.passes = wait.left - 1, 0
        return resting

    def weighed(self, batch: int, slower: float) -> None:
        """Note the pass at hand, whose drafts were weighed.

        Args:
            batch: sequences.
            slower: what it is thought to take, over what a pass at rest would.
        """
        self._weighed = batch, slower

    def learn(self, tokens: float) -> None:
        """Take in what the pass brought, per sequence: rest, if it was not worth the trouble."""
        if self._weighed is None:
            return
        (batch, slower), self._weighed = self._weighed, None
        wait, gain = self._wait(batch), tokens / slower
        wait.weighed += 1
        wait.gain += max(FRESH, 1.0 / wait.weighed) * (gain - wait.gain)
        if self._share and wait.weighed >= TRIALS:
            wait.left = min(batch // PAIR, max(0, math.ceil((1.0 - wait.gain) / self._share)))

    def _wait(self, batch: int) -> _Wait:
        return self._waits.setdefault(round(math.log2(batch)), _Wait())

    def due(self, tally: Tally, drafting: bool) -> bool:
        """Whether the pass had better be plain after all; asked where no drafter is being tried.

        Args:
            tally: of the pass, when all is settled.
            drafting: whether anything is to be drafted.
        """
        wait = self._wait(tally.batch)
        if not drafting:
            wait.passes = 0
            return False
        wait.passes += 1
        if wait.passes < wait.gap:
            return False
        tally.leave_out(-1)
        plain = tally.plain()
        loss = 1.0 - tally.batch / plain / tally.total()
        if loss > self._share * wait.passes:
            return False
        news = not wait.expected or abs(math.log(plain / wait.expected)) > NEWS
        wait.gap = FIRST_GAP if news else min(LONGEST_GAP, 2 * wait.gap)
        wait.passes, wait.expected = 0, plain
        return True
