"""Draft on while it is likely that nothing drafted so far will be refused.

A drafter with a trained acceptance head estimates a_k, the chance that its k-th guess is accepted
if all before it are. A branch goes on while

    1 - a_1 a_2 ... a_(k-1) <= threshold          k guesses drawn, all of them kept and verified

The head reads the state in which the drafter drew the guess after, so the newest guess has no
estimate yet. Scoring it would cost the pass that drafts the next one. The rule reads states of
tokens that are drawn and stay in the draft, and nothing of what is not drawn yet. So it cannot
bias the output.

As a decision process: one more guess costs c1 if it is thrown away, and a verification c2.
Stopping is right once the chance of a refusal is at least (c2 + d) / (c1 + c2 + d), for some
d >= 0. The threshold stands for that; it is lower where a guess is dear beside a pass. Heads are
trained with refusals weighed 6 to 1, so their estimates are lower than true chances, and the
threshold is meant for such.

Pays where some stretches of a text are guessed well and others badly. How long a draft may become
is the drafter's ``tree_size``: give it one that is seldom reached, such as 20. Needs a draft model
with a head from ``outpace train acceptance``, or a drafter whose own head foresees its draws. Those are
``eagle3`` and block drafters trained with ``confidence``, and ``dspark``; others are refused. An own
head says a_k before draw k.

Paper: Huang et al. 2024 (SpecDec++), arXiv:2405.19715 (``threshold`` is h, ``least`` k_min,
``tree_size`` k_max).

Shape letters: F open branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.policies.base import Policy, PolicyRow, within
from outpace.types import Load, Plan, Signals


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecDecPlusPlusConfig:
    """Settings of the policy."""

    threshold: float = 0.7
    """A branch ends once the estimated chance that one of its guesses is refused is above this."""
    least: int = 2
    """Guesses that are drawn whatever the estimate."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}")
        if self.least < 1:
            raise ValueError(f"least must be at least 1, got {self.least}")


@dataclass(frozen=True, slots=True)
class LikelyRefused:
    """Stop rule: something on the branch, its last node apart, is refused with such a chance."""

    threshold: float
    least: int

    def more(self, signals: Signals) -> Tensor:
        """Bool [F]. Without estimates all branches go on, as far as the budget lets them."""
        if signals.reach_F is None:
            return torch.ones_like(signals.depth_F, dtype=torch.bool)
        short_F = signals.depth_F < self.least
        return short_F | (1.0 - signals.reach_F <= self.threshold)


class SpecDecPlusPlus(Policy):
    """The preferred drafter with its own budget, cut short by what its head foresees."""

    Config = SpecDecPlusPlusConfig
    reads_estimates = True

    def __init__(self, config: SpecDecPlusPlusConfig) -> None:
        super().__init__(config)
        self._stop = LikelyRefused(config.threshold, config.least)

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """Cost: per level of a draft, one run of the head and one comparison."""
        plans = []
        for row in rows:
            drafter, budget = next(iter(row.drafters.items()))
            budget = replace(within(budget, row.limit), stop=self._stop, estimate=True)
            plans.append(Plan(drafter, budget))
        return plans
