"""The same budget at every step, as far as the sequence has room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.policies.base import Policy, PolicyRow, within
from outpace.types import Load, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedConfig:
    """No settings: the budget is the method spec's ``tree`` and ``tree_size``."""


class Fixed(Policy):
    """Always the preferred drafter, always its own budget."""

    Config = FixedConfig

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """Cost: none worth naming. Reads no evidence."""
        plans = []
        for row in rows:
            drafter, budget = next(iter(row.drafters.items()))
            plans.append(Plan(drafter, within(budget, row.limit)))
        return plans
