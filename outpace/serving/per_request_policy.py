"""Sequences of one batch under policies of their own, each of which knows what the others take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outpace.policies.base import Evidence, Policy, PolicyRow
from outpace.types import Load, Plan


@dataclass(slots=True, eq=False)
class Own:
    """A sequence's policy and its state there."""

    policy: Policy
    state: Any
    nodes: int = 0
    """Guesses that it was last planned."""


class PerRequestPolicy(Policy):
    """Hands every sequence on to its own policy.

    Its rows' states are ``Own``. Policies whose plans do not depend on the batch come first, so
    that the others know what they took. Of those behind them, what they took a step ago counts.
    """

    deterministic = False
    reads_previews = True

    def __init__(self) -> None:
        super().__init__(None)

    def wants_previews(self, state: Own, load: Load) -> bool:
        return state.policy.wants_previews(state.state, load)

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        plans: dict[int, Plan] = {}
        for policy, indices in sorted(_by_policy(rows), key=lambda item: not item[0].deterministic):
            mine = set(indices)
            beside = sum(1 + rows[i].state.nodes for i in range(len(rows)) if i not in mine)
            made = policy.plan(_inner(rows, indices), replace(load, beside=load.beside + beside))
            for i, plan in zip(indices, made, strict=True):
                plans[i], rows[i].state.nodes = plan, plan.budget.max_nodes
        return [plans[i] for i in range(len(rows))]

    def learn(self, rows: Sequence[PolicyRow], evidence: Sequence[Evidence]) -> None:
        for policy, indices in _by_policy(rows):
            policy.learn(_inner(rows, indices), [evidence[i] for i in indices])


def _by_policy(rows: Sequence[PolicyRow]) -> list[tuple[Policy, list[int]]]:
    found: dict[int, tuple[Policy, list[int]]] = {}
    for i, row in enumerate(rows):
        policy = row.state.policy
        found.setdefault(id(policy), (policy, []))[1].append(i)
    return list(found.values())


def _inner(rows: Sequence[PolicyRow], indices: Sequence[int]) -> list[PolicyRow]:
    return [replace(rows[i], state=rows[i].state.state) for i in indices]
