"""The contract of a policy: numbers in, budgets out. It never sees a token or a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.coins import Coins
from outpace.types import Budget, Load, Plan


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One sequence, as its policy sees it."""

    state: Any
    """From ``Policy.begin``."""
    drafters: tuple[str, ...]
    """Method specs that may be picked for this sequence; never empty."""
    limit: Budget
    """What the sequence has room for: no plan may ask for more."""
    coins: Coins
    """Stream POLICY."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one step taught about one sequence."""

    drafter: str
    drafted: int
    depth: int
    """Of the draft."""
    accepted: int
    censored: bool
    """A stop cut the text: acceptance beyond ``accepted`` is unknown."""


class Policy(ABC):
    """Picks drafter and budget for every sequence of a step."""

    def begin(self) -> Any:
        """State of a new sequence; None where the policy keeps none."""
        return None

    @abstractmethod
    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """One plan per row, within its limit. One call per step for the whole batch."""

    def learn(self, rows: Sequence[PolicyRow], evidence: Sequence[Evidence]) -> None:
        """Update the states in ``rows``. Called once per step, after COMMIT."""
        return
