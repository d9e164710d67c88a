"""Exploration: passes without drafts, to measure their cost, and pauses where drafting does not pay.

Where every pass checks guesses, the cost of a plain pass is only estimated. An estimate that is too
high makes drafts look good, and nothing corrects it. So this module runs a plain pass now and then.
It waits until the loss is a small share of the time since the last one. While plain passes take
what was expected, they become rare. Batches of a new size begin with plain passes, because there a
guess costs expensive rows and gains are small.

Planning costs time too. When drafting does not pay for a batch, the batch pauses: no drafter is
asked for some passes. The pause is as long as needed to make the loss of the other passes a small
share. The gain of a batch is a mean over its sequences, and a larger batch has a steadier mean, so
it may pause longer. A single sequence never pauses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outpace.policies.batch_cost import BatchCost

FIRST_GAP, LONGEST_GAP = 12, 256
"""Fewest and most passes between two plain ones."""
AT_ONCE = 2
"""Plain passes with which batches of a new size begin."""
NEWS = 0.05
"""Change of the expected seconds, as a share, that asks for another plain pass soon."""
PAIR = 2
"""The longest pause has a pass for every so many sequences."""
FRESH, TRIALS = 0.1, 16
"""Weight of the latest pass in the mean gain, and planned passes before the first pause: until
drafters were tried, planning seems useless."""


@dataclass(slots=True)
class _Wait:
    """For batches of about one size."""

    passes: int = 0
    """Since the last plain one."""
    gap: int = FIRST_GAP
    expected: float = 0.0
    """Seconds of a plain pass, as estimated at the last one."""
    weighed: int = 0
    """Passes in all that were."""
    gain: float = 0.0
    """Tokens per second where drafts are weighed, over those of a paused batch; lately."""
    left: int = AT_ONCE
    """Passes of the pause that are left."""


class Exploration:
    """Record plain passes and the gain of the others, by powers of two of sequences.

    Args:
        share: of the time that plain passes may lose, and passes between pauses; 0: neither.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._waits: dict[int, _Wait] = {}
        self._weighed: tuple[int, float] | None = None

    def paused(self, batch: int) -> bool:
        """Whether the batch pauses, so that no drafter need be asked."""
        return self._share > 0 and batch > 1 and self._wait(batch).left > 0

    def pause(self, batch: int) -> bool:
        """Whether this pass is a pause; counts it."""
        self._weighed, paused = None, self.paused(batch)
        if paused:
            wait = self._wait(batch)
            wait.left, wait.passes = wait.left - 1, 0
        return paused

    def weighed(self, batch: int, slower: float) -> None:
        """Note the pass at hand, whose drafts were weighed.

        Args:
            batch: sequences.
            slower: what it is thought to take, over what a pause pass would.
        """
        self._weighed = batch, slower

    def learn(self, tokens: float) -> None:
        """Take in what the pass brought, per sequence: pause, if it was not worth the trouble."""
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

    def due(self, batch_cost: BatchCost, drafting: bool) -> bool:
        """Whether the pass had better be plain after all; asked where no drafter is being tried.

        Args:
            batch_cost: of the pass, when all is settled.
            drafting: whether anything is to be drafted.
        """
        wait = self._wait(batch_cost.batch)
        if not drafting:
            wait.passes = 0
            return False
        wait.passes += 1
        if wait.passes < wait.gap:
            return False
        batch_cost.leave_out(-1)
        plain = batch_cost.plain()
        loss = 1.0 - batch_cost.batch / plain / batch_cost.total()
        if loss > self._share * wait.passes:
            return False
        news = not wait.expected or abs(math.log(plain / wait.expected)) > NEWS
        wait.gap = FIRST_GAP if news else min(LONGEST_GAP, 2 * wait.gap)
        wait.passes, wait.expected = 0, plain
        return True
