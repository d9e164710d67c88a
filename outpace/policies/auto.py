"""The drafter that pays best here and now, or none: chosen per sequence and per step.

All drafters of a sequence are weighed by the tokens per second that the batch is expected to emit
with them. Lookups tell what they would propose, and are taken where they have something to say;
others are judged by what was kept of their drafts lately, and probed at a bounded price while they
are idle. When a drafter suddenly loses, the text has changed: the others are tried at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outpace.policies.base import PolicyRow
from outpace.policies.batch_cost import NONE
from outpace.policies.throughput import ThroughputConfig, ThroughputPolicy
from outpace.types import Budget


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoConfig(ThroughputConfig):
    """Settings of the policy."""

    probe: float = 0.015
    """Share of the time that may be spent on finding out what idle drafters are worth, and half
    as much on passes without drafts, to learn what those cost; 0: on neither."""
    margin: float = 0.04
    """Gain, as a share, below which the drafter is not changed."""


class Auto(ThroughputPolicy):
    """Picks among all drafters of a sequence, and how far each may go."""

    Config = AutoConfig

    def candidates(self, row: PolicyRow) -> Iterable[tuple[str, Budget]]:
        """All but the one that never drafts."""
        return [(name, budget) for name, budget in row.drafters.items() if name != NONE]
