"""Draft lengths by Thompson sampling: believe a random one of the plausible acceptance rates.

One rate theta of acceptance per sequence, with a Beta(a, b) posterior. Feedback is censored: the
kept levels are successes, the first one refused is the one failure, and what lay behind it, or
beyond a stop, was never tried. Every step draws theta from the posterior, and drafts as deep as
would emit most per second if theta were true:

    tokens(K) = (1 - theta ** (K + 1)) / (1 - theta),   depth = argmax tokens(K) / seconds(K)

Uncertain posteriors explore by themselves; a forgetting factor keeps them uncertain enough to
follow the text. The coins are the sequence's own.

Source: EESD's Beta-TS, arXiv:2406.03853; costs in place of its coin per token are our own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from outpace.coins import Coins
from outpace.policies.acceptance_model import PRIOR, sizes
from outpace.policies.base import Evidence, Policy, PolicyRow, within
from outpace.types import Budget, Load, Plan

_BITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class BanditConfig:
    """Settings of the policy."""

    forget: float = 0.96
    """What is left of the evidence after each step; 1 never forgets."""
    prior: float | None = None
    """Acceptance believed in at the start, with the weight of two observations; none: what
    `outpace tune` measured here, else 0.6."""

    def __post_init__(self) -> None:
        if not 0.0 < self.forget <= 1.0:
            raise ValueError(f"forget must be in (0, 1], got {self.forget}")
        if self.prior is not None and not 0.0 < self.prior < 1.0:
            raise ValueError(f"prior must be in (0, 1), got {self.prior}")


@dataclass(slots=True)
class Posterior:
    """Evidence of one sequence."""

    kept: float = 0.0
    refused: float = 0.0


class Bandit(Policy):
    """The preferred drafter, as deep as a draw from what is believed of it says."""

    Config = BanditConfig
    config: BanditConfig
    deterministic = False

    def begin(self) -> Posterior:
        """No evidence."""
        return Posterior()

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """Cost: some microseconds per sequence and level."""
        plans = []
        for row in rows:
            drafter, budget = next(iter(row.drafters.items()))
            budget = within(budget, row.limit)
            nodes_D = sizes(budget)
            prior = self._prior(drafter)
            depth = self._depth(draw(row.state, prior, row.coins), drafter, nodes_D, load) if nodes_D else 0
            nodes = nodes_D[depth - 1] if depth else 0
            plans.append(
                Plan(
                    drafter,
                    Budget(nodes, depth, max_rows=budget.max_rows, shape=budget.shape, stop=budget.stop),
                )
            )
        return plans

    def _prior(self, drafter: str) -> float:
        """Acceptance believed in before anything is seen of a sequence."""
        if self.config.prior is not None:
            return self.config.prior
        kept_D, tried_D = self.costs.kept(drafter)
        return (sum(kept_D) + 2.0 * PRIOR) / (sum(tried_D) + 2.0)

    def _depth(self, theta: float, drafter: str, nodes_D: Sequence[int], load: Load) -> int:
        """The depth that pays best if every level is kept with chance ``theta``; at least 1."""
        call, level = self.costs.price(drafter)
        still, planning, more = self.costs.around(load.batch)
        before = still + planning + load.batch * (call + more)
        best, depth = 0.0, 1
        tokens = whole = 1.0
        for levels, nodes in enumerate(nodes_D, 1):
            whole *= theta
            tokens += whole
            rows = load.batch * (1 + nodes)
            seconds = before + level * levels + self.costs.passed(rows, load.context, load.batch)
            rate = load.batch * tokens / seconds
            if rate > best:
                best, depth = rate, levels
        return depth

    def learn(self, rows: Sequence[PolicyRow], evidence: Sequence[Evidence]) -> None:
        """Update the posteriors; an empty draft teaches nothing."""
        for row, seen in zip(rows, evidence, strict=True):
            if seen.depth == 0:
                continue
            state: Posterior = row.state
            state.kept = state.kept * self.config.forget + seen.accepted
            refused = seen.accepted < seen.depth and not seen.censored
            state.refused = state.refused * self.config.forget + refused


def draw(state: Posterior, prior: float, coins: Coins) -> float:
    """An acceptance rate from the posterior; the same coins draw the same one."""
    number = sum(coins.flip(0.5, bit) << bit for bit in range(_BITS))
    generator = random.Random(number)
    return generator.betavariate(state.kept + 2.0 * prior, state.refused + 2.0 * (1.0 - prior))
