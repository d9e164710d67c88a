"""The measured cost of a pass, and of drafts: what policies and predictions read.

Shape letters: R numbers of rows, C context lengths, B batch sizes, P points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FREE_ROWS = 4
"""Where nothing was measured: rows that a pass over one sequence checks for the price of one."""
ROW_PRICE = 0.055
"""What each further row adds then, in passes over one row (bfloat16 on a CPU). GPUs charge less."""


def assumed(rows: int) -> float:
    """Cost of a pass over so many rows where nothing was measured; over one row it costs 1."""
    return 1.0 + ROW_PRICE * max(0, rows - FREE_ROWS)


RATE = 1.6
"""Where nothing was measured: tokens that the time of a pass over one row is worth. A step that drafts emits
about two in 1.25 such passes."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a draft costs, in tokens: so many it must bring to be worth its time.

    Shape letters: D levels, R guesses, from 0.
    """

    level_D: tuple[float, ...]
    """Of the drafter's levels; the last one stands for all further ones."""
    row_R: tuple[float, ...] = ()
    """Of a pass with so many guesses more, ascending; behind the last one its step goes on.
    Empty: as assumed."""

    @classmethod
    def assumed(cls, level_D: Sequence[float]) -> Price:
        """Where nothing was measured.

        Args:
            level_D: in passes of the target over one row.
        """
        return cls(tuple(RATE * level for level in level_D))

    def level(self, depth: int) -> float:
        return self.level_D[min(depth, len(self.level_D) - 1)]

    def row(self, guesses: int) -> float:
        """Of one guess more than so many."""
        if not self.row_R:
            return RATE * (assumed(guesses + 2) - assumed(guesses + 1))
        last = min(guesses + 1, len(self.row_R) - 1)
        return self.row_R[last] - self.row_R[last - 1] if last else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CostCurve:
    """Seconds of a pass of one model on one machine, by rows, context and batch. Pure numbers.

    Linear between its points, over rows first, then over contexts; beyond them the outermost
    segment goes on, but never downhill. A batch costs what all its rows would cost in one
    sequence, and a surcharge for being several. That is linear in the batch as well.

    Shape letters: R row counts and B batch sizes, both from 1; C contexts; all ascending.
    """

    model: str
    dtype: str
    threads: int
    device: str
    rows_R: tuple[int, ...]
    context_C: tuple[int, ...]
    """Committed tokens of every sequence."""
    seconds_CR: tuple[tuple[float, ...], ...]
    """One sequence."""
    batch_B: tuple[int, ...] = (1,)
    seconds_CB: tuple[tuple[float, ...], ...] = ()
    """Several sequences, one row each; empty where none were measured."""
    source: str = "measured"
    """``measured``, or ``roofline`` where it is computed."""

    def __post_init__(self) -> None:
        for points, first in ((self.rows_R, 1), (self.batch_B, 1), (self.context_C, None)):
            if not points or list(points) != sorted(set(points)) or first not in (None, points[0]):
                raise ValueError(f"rows and batches ascend from 1, contexts ascend, got {points}")
        self._check(self.seconds_CR, len(self.rows_R))
        if self.seconds_CB:
            self._check(self.seconds_CB, len(self.batch_B))
            if [line[0] for line in self.seconds_CB] != [line[0] for line in self.seconds_CR]:
                raise ValueError("a batch of one must cost what one sequence of one row costs")

    def _check(self, table: Sequence[Sequence[float]], width: int) -> None:
        if [len(line) for line in table] != [width] * len(self.context_C):
            raise ValueError(f"need {len(self.context_C)} lines of {width} costs, got {table}")
        if not all(0 < cost < float("inf") for line in table for cost in line):
            raise ValueError(f"seconds must be above 0, got {table}")

    def seconds(self, rows: float, context: float, batch: float = 1) -> float:
        """Cost of a pass.

        Args:
            rows: of each sequence, the pending token included; at least 1. Means are welcome.
            batch: sequences, at least 1.
        """
        if rows < 1 or context < 0 or batch < 1:
            raise ValueError(f"no pass over {batch} x {rows} rows at context {context}")
        cost_C = [_linear(self.rows_R, cost_R, rows * batch) for cost_R in self.seconds_CR]
        for c, (one_R, cost_B) in enumerate(zip(self.seconds_CR, self.seconds_CB, strict=False)):
            extra_B = [
                cost - _linear(self.rows_R, one_R, b) for b, cost in zip(self.batch_B, cost_B, strict=True)
            ]
            cost_C[c] += _linear(self.batch_B, extra_B, batch)
        return _linear(self.context_C, cost_C, context)

    def ratio(self, rows: float, context: float, batch: float = 1) -> float:
        """Cost in passes over one row of each sequence."""
        return self.seconds(rows, context, batch) / self.seconds(1, context, batch)

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``from_json`` reads it."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostCurve:
        """Read plain data; ValueError, TypeError or KeyError if it is no curve."""

        def tuples(value: Any) -> Any:
            return tuple(map(tuples, value)) if isinstance(value, list | tuple) else value

        return cls(**{name: tuples(data[name]) for name in cls.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownDrafter:
    """What was measured of a drafter beforehand on this machine: where policies start."""

    call: float
    """Seconds of a draft for each sequence, apart from its levels."""
    level: float
    """Seconds of a level, for all sequences together."""
    kept_D: tuple[float, ...] = ()
    """Drafts that kept a token at depth 1, 2, ..."""
    tried_D: tuple[float, ...] = ()
    """Drafts of which the target saw a token at that depth below kept ones, or that fell silent
    there."""

    def __post_init__(self) -> None:
        pairs = list(zip(self.kept_D, self.tried_D, strict=True))
        if not all(0.0 <= kept <= tried < float("inf") for kept, tried in pairs):
            raise ValueError(f"kept must be within tried, got {pairs}")
        if not (0.0 <= self.call < float("inf") and 0.0 <= self.level < float("inf")):
            raise ValueError(f"seconds must be at least 0, got {self.call} and {self.level}")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KnownDrafter:
        """Read plain data; ValueError, TypeError or KeyError if it is something else."""
        plain: Any = {name: tuple(one) if isinstance(one, list) else one for name, one in data.items()}
        return cls(**plain)


def _linear(x_P: Sequence[float], y_P: Sequence[float], x: float) -> float:
    """Value at x of the line through points in ascending x."""
    if len(x_P) == 1:
        return y_P[0]
    end = next((i for i in range(1, len(x_P)) if x <= x_P[i]), len(x_P) - 1)
    slope = (y_P[end] - y_P[end - 1]) / (x_P[end] - x_P[end - 1])
    if x < x_P[0]:
        return y_P[0] + max(slope, 0.0) * (x - x_P[0])
    if x > x_P[-1]:
        return y_P[-1] + max(slope, 0.0) * (x - x_P[-1])
    return y_P[end - 1] + slope * (x - x_P[end - 1])
