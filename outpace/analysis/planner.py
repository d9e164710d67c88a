"""Which drafter to train: size x tokens -> loss -> acceptance -> speed-up on a device.

- law: loss from weights and tokens (scaling.py, fitted)
- bridge: acceptance from loss (scaling.py, fitted)
- device: cost of a level and of a pass (prediction)
- length: the chain that gains most (prediction/speedup.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from outpace.analysis.prediction.model import Planned
from outpace.analysis.prediction.speedup import Drafter, Gain, Steps, chains
from outpace.analysis.roofline import Device
from outpace.analysis.scaling import Bridge, Fitted, Law


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A size that could be trained."""

    weights: float
    """As the points of the law count them."""
    shape: Planned


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A size and a number of tokens, and what they promise."""

    weights: float
    tokens: float
    loss: float
    loss_interval: tuple[float, float]
    acceptance: tuple[float, ...]
    cost: float
    """Of a level, in steps of plain decoding."""
    guesses: int
    """Of the chain that gains most; 0: none gains."""
    emitted: float
    speedup: float
    speedup_interval: tuple[float, float]


def plan(
    fitted: Fitted,
    bridge: Bridge,
    candidates: Sequence[Candidate],
    tokens: Sequence[float],
    target: Planned,
    device: Device,
    *,
    context: int,
    batch: int = 1,
    host: float = 0.0,
) -> list[Choice]:
    """All sizes with all numbers of tokens; the one that promises most comes first.

    Args:
        host: seconds of a step outside of its pass.

    Intervals come from the bootstrap of the law alone: the bridge and the device are taken as they are.
    """
    rows = cache(target.by_rows(device, context, batch))
    steps = Steps(rows, host)
    found = []
    for one in candidates:
        cost, second = steps.level(one.shape.by_rows(device, context, batch))
        for count in tokens:
            draft = partial(_best, bridge, steps, (cost, second), one.weights, count)
            loss, gain = fitted.law.loss(one.weights, count), draft(fitted.law)
            found.append(
                Choice(
                    weights=one.weights,
                    tokens=count,
                    loss=loss,
                    loss_interval=fitted.loss_interval(one.weights, count),
                    acceptance=bridge.acceptance(loss),
                    cost=cost,
                    guesses=len(gain.parents),
                    emitted=gain.emitted,
                    speedup=gain.speedup,
                    speedup_interval=fitted.interval(partial(_speedup, draft)),
                )
            )
    return sorted(found, key=lambda one: -one.speedup)


def _best(
    bridge: Bridge, steps: Steps, level: tuple[float, float], weights: float, tokens: float, law: Law
) -> Gain:
    """The chain that gains most, if a law is right."""
    cost, second = level
    drafter = Drafter(acceptance=bridge.acceptance(law.loss(weights, tokens)), cost=cost, second=second)
    return max(chains(drafter, steps.ratio), key=lambda one: one.speedup)


def _speedup(draft: Callable[[Law], Gain], law: Law) -> float:
    return draft(law).speedup


def shapes(points: Sequence[Any]) -> dict[float, Mapping[str, Any]]:
    """Weights -> shape, of the points that have one."""
    return {point.weights: point.shape for point in points if point.shape is not None}
