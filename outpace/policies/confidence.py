"""Draft on while the drafter believes in what it drew.

A branch ends after a token that the drafter itself gave less than a threshold. That token is
kept and verified, so the rule cannot bias the output: it reads only what is already drawn.
Pays where a draft pass is dear and the drafter is well calibrated; does nothing for drafters
without laws (lookups).

Source: the idea of transformers' ``assistant_confidence_threshold``; Kangaroo's second exit,
arXiv:2404.18911, stops by the same test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from outpace.policies.base import Policy, PolicyRow, within
from outpace.types import Load, Plan, Signals


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfidenceConfig:
    """Settings of the policy."""

    threshold: float = 0.4
    """A branch grows on while the last token's own probability is at least this."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}")


@dataclass(frozen=True, slots=True)
class Threshold:
    """Stop rule: the last drawn token must have had probability ``least`` under q."""

    least: float

    def more(self, signals: Signals) -> Tensor:
        """Bool [F]."""
        return signals.q_F >= self.least


class Confidence(Policy):
    """The preferred drafter with its own budget, cut short by its own doubt."""

    Config = ConfidenceConfig

    def __init__(self, config: ConfidenceConfig) -> None:
        super().__init__(config)
        self._stop = Threshold(config.threshold)

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """Cost: one comparison per level of a draft. Reads no evidence."""
        plans = []
        for row in rows:
            drafter, budget = next(iter(row.drafters.items()))
            plans.append(Plan(drafter, replace(within(budget, row.limit), stop=self._stop)))
        return plans
