"""What an engine begins with: measurements of ``outpace tune``, and what policies learned before."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from outpace.engine.method import Method
from outpace.models.base import Target
from outpace.models.measured import kept, store
from outpace.policies.costs import Costs
from outpace.types import CostCurve, KnownDrafter


def recall(target: Target, costs: Costs) -> None:
    """Put what was measured of a target into costs; nothing is measured now."""
    try:
        curve = kept("passes", target, "", CostCurve.from_json)
        costs.know(kept("profile", target, "", _drafters) or {})
    except OSError:  # a checkpoint that vanished has no digest any more
        return
    if curve is not None:
        costs.start(curve)


def _drafters(data: Any) -> dict[str, KnownDrafter]:
    """Prices and acceptance of a profile, by method spec."""
    return {one["spec"]: KnownDrafter.from_json(one["known"]) for one in data["drafters"]}


def remember(owner: object, target: Target, methods: Mapping[str, Method]) -> weakref.finalize[..., Any]:
    """Give policies what they learned before; write what they know when their owner or the process ends.

    Args:
        owner: the engine.
        target: of the engine.
        methods: of the engine, those that it has now and those that it gets.
    """

    def fill(costs: Costs) -> None:
        recall(target, costs)
        learned = _learned(target)
        for spec, method in methods.items():
            method.policy.recall(learned.get(spec))

    for method in methods.values():
        method.policy.costs.later(partial(fill, method.policy.costs))
    return weakref.finalize(owner, _write, target, methods)


def _learned(target: Target) -> Mapping[str, Any]:
    """What policies learned before, by method spec."""
    return kept("learned", target, "", dict) or {}


def _write(target: Target, methods: Mapping[str, Method]) -> None:
    """Keep what is known now; of methods that were not used, what was known before. At most 64."""
    now = {spec: found for spec, method in methods.items() if (found := method.policy.learned())}
    if now:
        store("learned", target, "", dict(list({**_learned(target), **now}.items())[-64:]))
