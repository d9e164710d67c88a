"""Drafters and depths as arms: which one emits most per second, if acceptance is the same at every level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

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


@cache
def sizes_to_weigh(budget: Budget) -> Sequence[tuple[int, int]]:
    """Nodes and depths to weigh. Of a dynamic tree: all its nodes, about a third of them, and so on."""
    most, deepest = budget.max_nodes, budget.max_depth
    if budget.shape.parent_N is not None:
        depth_N: list[int] = []
        for parent in budget.shape.parent_N[:most]:
            depth_N.append(1 if parent < 0 else depth_N[parent] + 1)
        levels = range(1, min(deepest, max(depth_N, default=0)) + 1)
        return [(sum(d <= n for d in depth_N), n) for n in levels]
    if not budget.shape.beam:
        return [(n, n) for n in range(1, min(most, deepest) + 1)]
    found, nodes = [], most
    while nodes > 0:
        found += [(nodes, depth) for depth in range(1, min(nodes, deepest) + 1)]
        nodes = (nodes + 2) // 3 if nodes > 1 else 0
    return found
