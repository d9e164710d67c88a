"""Two more after a draft that was kept whole, one fewer after any other.

The rule needs no costs and no probabilities, so it serves where nothing was measured; it swings
around a good length and never drafts nothing.

Source: transformers' ``num_assistant_tokens_schedule="heuristic"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outpace.policies.base import Evidence, Policy, PolicyRow, within
from outpace.types import Load, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Settings of the policy."""

    start: int = 5
    """Depth of the first draft."""
    up: int = 2
    """Levels more after a draft that was kept down to its end."""
    down: int = 1
    """Levels fewer after any other."""

    def __post_init__(self) -> None:
        if self.start < 1 or self.up < 0 or self.down < 0:
            raise ValueError(
                f"need start of at least 1, up and down of at least 0, got {self.start}, "
                f"{self.up} and {self.down}"
            )


@dataclass(slots=True)
class _Depth:
    """Of one sequence."""

    now: int


class Schedule(Policy):
    """The preferred drafter; its depth goes up and down, within the budget of its spec."""

    Config = ScheduleConfig
    config: ScheduleConfig

    def begin(self, key: str = "", greedy: bool = True, ruled: bool = False) -> _Depth:
        """The depth to start with."""
        return _Depth(self.config.start)

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """Cost: none worth naming."""
        plans = []
        for row in rows:
            drafter, budget = next(iter(row.drafters.items()))
            row.state.now = max(1, min(row.state.now, budget.max_depth))
            whole = within(budget, row.limit)
            plans.append(Plan(drafter, replace(whole, max_depth=min(whole.max_depth, row.state.now))))
        return plans

    def learn(self, rows: Sequence[PolicyRow], evidence: Sequence[Evidence]) -> None:
        """Go up or down; an empty draft and one that a stop cut off teach nothing."""
        for row, seen in zip(rows, evidence, strict=True):
            if seen.depth == 0 or (seen.censored and seen.accepted < seen.depth):
                continue
            if seen.accepted == seen.depth:
                # A draft that ended early of itself is no sign that a deeper one would be kept.
                row.state.now += self.config.up if seen.depth >= row.state.now else 0
            else:
                row.state.now = max(1, row.state.now - self.config.down)
