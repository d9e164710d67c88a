"""What an engine begins with: measurements of ``outpace tune``, and what policies learned before."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from outpace.models.base import Target
from outpace.models.measured import change, kept, merged
from outpace.policies.base import Policy
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


def remember(owner: object, target: Target, policies: Mapping[str, Policy]) -> Mapping[str, Any]:
    """Give policies what they learned before, and write what they know when their owner or the process ends.

    Args:
        owner: the engine.
        target: of the engine.
        policies: by method spec, those that there are now and those that are put in later.
    Returns: by method spec, what was learned before; empty until costs are first read.
    """
    begun: dict[str, Any] = {}

    def fill(costs: Costs) -> None:
        recall(target, costs)
        begun.update(kept("learned", target, "", dict) or {})
        for spec, policy in policies.items():
            policy.recall(begun.get(spec))

    for policy in policies.values():
        policy.costs.later(partial(fill, policy.costs))
    weakref.finalize(owner, _write, target, policies, begun)
    return begun


def _write(target: Target, policies: Mapping[str, Policy], begun: Mapping[str, Any]) -> None:
    """Keep what was learned since it ``begun``; else what is kept by now. At most 64 methods."""
    now = {spec: found for spec, policy in policies.items() if (found := policy.learned())}
    if now:
        change("learned", target, lambda found: dict(list(merged(begun, now, found).items())[-64:]))
