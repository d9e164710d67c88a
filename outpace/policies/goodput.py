"""As deep as pays, by moving averages: the rule of SmartSpec, for one drafter or several.

    goodput(d, k) = (1 + a + a**2 + ... + a**k) / seconds(d, k),   a = moving average of acceptance of d

The drafter and the depth with the largest goodput win; where `none` has it, nothing is drafted. A drafter
that is not asked keeps its average, so one that was given up may stay so: `auto` tries it again.

Source: Liu et al. 2024 (SmartSpec), arXiv:2406.14066; costs are those of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.policies.arms import pick
from outpace.policies.base import Evidence, Policy, PolicyRow, within
from outpace.policies.tuning import TUNING
from outpace.types import NOTHING, Budget, Load, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class GoodputConfig:
    """Settings of the policy."""

    weight: float = 0.05
    """Of the latest guess in the moving average of acceptance."""

    def __post_init__(self) -> None:
        if not 0.0 < self.weight <= 1.0:
            raise ValueError(f"weight must be in (0, 1], got {self.weight}")


class Goodput(Policy):
    """The drafter and the depth with the largest goodput, the same acceptance for all sequences."""

    Config = GoodputConfig
    config: GoodputConfig
    deterministic = False

    def __init__(self, config: GoodputConfig) -> None:
        super().__init__(config)
        self._kept: dict[str, float] = {}

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """Cost: some microseconds per drafter and depth, once for all sequences."""
        drafters = {name: own for row in rows for name, own in row.drafters.items() if own.max_nodes}
        best = pick(self, {name: self._chance(name) for name in drafters}, drafters, load)
        if best is None:
            return [Plan("none", NOTHING)] * len(rows)
        return [self._one(row, *best) for row in rows]

    def _one(self, row: PolicyRow, name: str, nodes: int, depth: int) -> Plan:
        own = row.drafters.get(name)
        if own is None:
            return Plan("none", NOTHING)
        asked = Budget(nodes, depth, own.max_rows, shape=own.shape)
        return Plan(name, within(within(asked, own), row.limit))

    def _chance(self, name: str) -> float:
        if name not in self._kept:
            kept_D, tried_D = self.costs.kept(name)
            self._kept[name] = (sum(kept_D) + TUNING.hope) / (sum(tried_D) + 1.0)
        return self._kept[name]

    def learn(self, rows: Sequence[PolicyRow], evidence: Sequence[Evidence]) -> None:
        """Move the averages; an empty draft teaches nothing."""
        for seen in evidence:
            refused = seen.depth > seen.accepted and not seen.censored
            for kept in [1.0] * seen.accepted + [0.0] * refused if seen.depth else ():
                before = self._chance(seen.drafter)
                self._kept[seen.drafter] = before + self.config.weight * (kept - before)
