"""What each part and each constant of `auto` is worth, by replay.

rows = judge(texts, variants())
found = worth(rows)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from statistics import mean
from typing import Any

from outpace.analysis.judge import Judged
from outpace.policies.acceptance import Pool
from outpace.policies.auto import Auto, AutoConfig
from outpace.policies.base import Policy
from outpace.policies.costs import Costs, Passes
from outpace.policies.tuning import TUNING, Tuning
from outpace.types import Budget

WHOLE = "auto"
"""The variant that lacks nothing."""

_OFF: Mapping[str, tuple[str, Any]] = {
    "text": ("what the text at hand teaches", 0.0),
    "pool": ("what all texts teach", 0.0),
    "explore": ("trials of idle drafters", 1e-9),
    "remember": ("forgetting", 1.0),
    "stall": ("stalls told from slow steps", math.inf),
    "first": ("few guesses while rows have no price", 1 << 20),
    "quiet": ("rest of sequences without drafts", 0),
}
"""Constant -> what it serves, and its value without that."""


class _PlainRate(Auto):
    """The throughput to beat is that of plain decoding."""

    _pace = property(lambda self: 0, lambda self, pace: None)


class _Straight(Passes):
    """A line says it all."""

    def over(self, bin_: int) -> float:
        return 1.0


class _Lines(Costs):
    form = _Straight


class _Full(Pool):
    """Trees have all the levels that they were asked for."""

    def levels(self, depth: int, width: int) -> list[float]:
        return [float(level) for level in range(1, depth + 1)]


class _FullTrees(Auto):
    form = _Full


class _Widest(Pool):
    """Trees have the nodes of their spec."""

    def sizes_to_weigh(self, budget: Budget) -> Sequence[tuple[int, int]]:
        found = super().sizes_to_weigh(budget)
        return [one for one in found if one[0] == budget.max_nodes] if budget.shape.beam else found


class _OneWidth(Auto):
    form = _Widest


def variants(constants: bool = False) -> dict[str, Callable[[], Policy]]:
    """Name -> a fresh policy: `auto`, and `auto` without each of its parts.

    Args:
        constants: in their place, with each constant halved and doubled.
    """
    found: dict[str, Callable[[], Policy]] = {WHOLE: partial(_made, Auto, Costs, TUNING)}
    if constants:
        for one in fields(Tuning):
            for factor in (0.5, 2.0):
                value = getattr(TUNING, one.name)
                # What is near 1 is halved and doubled in its distance from 1.
                other = 1.0 - factor * (1.0 - value) if 0.5 < value < 1.0 else type(value)(factor * value)
                told = f"{one.name} {value:g} -> {other:g}"
                found[told] = partial(_made, Auto, Costs, replace(TUNING, **{one.name: other}))
        return found
    for name, (told, value) in _OFF.items():
        found[told] = partial(_made, Auto, Costs, replace(TUNING, **{name: value}))
    found["throughput of the step itself"] = partial(_made, _PlainRate, Costs, TUNING)
    found["passes corrected by number of guesses"] = partial(_made, Auto, _Lines, TUNING)
    found["levels of trees that stop by themselves"] = partial(_made, _FullTrees, Costs, TUNING)
    found["narrower trees"] = partial(_made, _OneWidth, Costs, TUNING)
    return found


def _made(policy: type[Auto], costs: type[Costs], tuning: Tuning) -> Policy:
    made = policy(AutoConfig(), tuning)
    made.costs = costs(tuning=tuning)
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """What is lost without a part, as shares of the best fixed rule's rate."""

    part: str
    mean: float
    """Of all scenarios; below 0 where it is better to be without."""
    most: float
    """Of the scenario that loses most."""
    where: str
    """That scenario."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


def worth(rows: Sequence[Judged]) -> list[Worth]:
    """Compare variants with the whole, worth most first."""
    found = []
    for part in rows[0].rates if rows else ():
        lost = {row.scenario: row.regret(part) - row.regret(WHOLE) for row in rows}
        where = max(lost, key=lost.__getitem__)
        found.append(Worth(part=part, mean=mean(lost.values()), most=lost[where], where=where))
    return sorted((one for one in found if one.part != WHOLE), key=lambda one: -one.most)
