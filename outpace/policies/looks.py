"""When to draft nothing for once: what a pass costs without drafts is learned from such passes.

Where every pass checks guesses, only passes with guesses are timed, and what one without them
would take is a guess itself. If that is too high, drafts seem to pay that do not, and nothing
corrects it. So now and then a pass is left plain, as soon as what that loses is a small enough
share of the time since the last one; seldom, while such passes take what was expected. Batches of a
new size begin with plain passes: there a guess costs rows that are dear, and gains are small.
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


@dataclass(slots=True)
class _Wait:
    """For batches of about one size."""

    met: int = 0
    """Passes in all."""
    passes: int = 0
    """Since the last plain one."""
    gap: int = FIRST_GAP
    expected: float = 0.0
    """Seconds of a plain pass, as they were thought to be at the last look."""


class Looks:
    """Remembers when passes were plain, by powers of two of sequences.

    Args:
        share: of the time, that plain passes may lose.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._waits: dict[int, _Wait] = {}

    def begins(self, batch: int) -> bool:
        """Whether batches of about this size begin, so that the pass had better be plain."""
        wait = self._wait(batch)
        wait.met += 1
        return batch > 1 and wait.met <= AT_ONCE

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
