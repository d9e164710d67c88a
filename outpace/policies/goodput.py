"""As deep as pays here and now: a level is drafted if it raises the tokens emitted per second.

Knows three things: how likely each level is to be kept (learned online, per sequence, from a prior
that all sequences share), what the pass costs with so many rows at this batch and context, and
what a level of drafting costs. Where nothing pays, nothing is drafted, and the drafter is tried
again now and then.

Source of the rule: SmartSpec's goodput, arXiv:2406.14066.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outpace.policies.base import PolicyRow
from outpace.policies.throughput import ThroughputConfig, ThroughputPolicy
from outpace.types import Budget


@dataclass(frozen=True, kw_only=True, slots=True)
class GoodputConfig(ThroughputConfig):
    """Settings of the policy."""

    probe: float = 0.015
    """Share of the time that may be spent on finding out what an idle drafter is worth, and
    half as much on passes without drafts, to learn what those cost; 0: on neither."""
    margin: float = 0.04
    """Gain, as a share, below which drafting is neither begun nor given up."""


class Goodput(ThroughputPolicy):
    """The preferred drafter, cut where its next level costs more than it brings."""

    Config = GoodputConfig

    def candidates(self, row: PolicyRow) -> Iterable[tuple[str, Budget]]:
        """The preferred drafter alone."""
        return [next(iter(row.drafters.items()))]
