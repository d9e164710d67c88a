"""Two lines: a lookup while it is sure enough, else a trained drafter, and nothing in a large batch.

The least that a policy over several drafters can be, to compare others with. It measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.policies.base import Policy, PolicyRow, within
from outpace.types import NOTHING, Budget, Load, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoLinesConfig:
    """Settings of the policy."""

    sure: float = 0.3
    """Least chance of a lookup's guess to be drafted."""
    depth: int = 2
    """Of the drafts of the other drafter."""
    batch: int = 4
    """Largest batch for which anything is drafted."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.sure <= 1.0:
            raise ValueError(f"sure must be between 0 and 1, got {self.sure}")
        for name, value in (("depth", self.depth), ("batch", self.batch)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class TwoLines(Policy):
    """Drafts with a lookup that is sure enough, else with the first drafter that does not preview."""

    Config = TwoLinesConfig
    config: TwoLinesConfig
    deterministic = False
    reads_previews = True

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """Cost: none worth naming."""
        return [self._one(row) if load.batch <= self.config.batch else Plan("none", NOTHING) for row in rows]

    def _one(self, row: PolicyRow) -> Plan:
        for name, told in row.previews.items():
            likely = sum(chance >= self.config.sure for chance in told)
            if likely:
                return Plan(name, within(Budget(likely, likely, shape=row.drafters[name].shape), row.limit))
        for name, own in row.drafters.items():
            if name not in row.previews and name != "none":
                asked = Budget(own.max_nodes, min(self.config.depth, own.max_depth), shape=own.shape)
                return Plan(name, within(asked, row.limit))
        return Plan("none", NOTHING)
