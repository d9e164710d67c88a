"""Drafters and depths as arms: which one emits most per second, if acceptance is the same at every level."""

from __future__ import annotations

from collections.abc import Mapping

from outpace.policies.acceptance import sizes_to_weigh
from outpace.policies.base import Policy
from outpace.types import Budget, Load

_SUREST = 0.98  # so that the sum over all levels stays finite


def pick(
    policy: Policy, chances: Mapping[str, float], drafters: Mapping[str, Budget], load: Load
) -> tuple[str, int, int] | None:
    """The drafter, nodes and depth that emit most per second if a level is kept with these chances.

    Args:
        policy: whose costs are read.
        chances: by drafter.
        drafters: budgets to stay within.
        load: of the step.

    Returns:
        None where drafting nothing emits most.
    """
    costs, batch = policy.costs, load.batch
    rows = batch + load.beside
    best, found = batch / costs.passed(rows, load.context, batch), None
    for name, budget in drafters.items():
        for nodes, depth in sizes_to_weigh(budget):
            chance = min(_SUREST, chances[name])
            tokens = (1.0 - chance ** (depth + 1)) / (1.0 - chance)
            seconds = costs.passed(rows + batch * nodes, load.context, batch)
            rate = batch * tokens / (seconds + costs.price(name, batch, depth))
            if rate > best:
                best, found = rate, (name, nodes, depth)
    return found
