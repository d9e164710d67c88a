"""How far long work has come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_SAY_EVERY = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class Tick:
    """One report; its text is a line to print."""

    what: str
    done: int
    total: int
    unit: str
    rate: float
    """Units per second."""

    @property
    def seconds_left(self) -> float:
        """At this rate; infinite before there is one, unless all is done."""
        if self.done >= self.total:
            return 0.0
        return (self.total - self.done) / self.rate if self.rate > 0 else float("inf")

    def __str__(self) -> str:
        share = 100 * self.done / self.total if self.total else 100.0
        return (
            f"{self.what}: {self.done}/{self.total} {self.unit} ({share:.1f} %), "
            f"{self.rate:.{int(self.rate < 10)}f} {self.unit}/s, {clock_text(self.seconds_left)} left"
        )


Say = Callable[[Tick | str], Any]
"""Takes reports, whose text is a line to print."""


class Reporter:
    """Tells how far work has come, and how fast it goes.

    Args:
        first: what was done before it began.
    """

    def __init__(self, what: str, unit: str, say: Say, first: int = 0) -> None:
        self._what, self._unit, self._say, self._first = what, unit, say, first
        self._began = self._told = time.perf_counter()

    def late(self, done: int, total: int) -> None:
        """As ``now``, if nothing was told for a while."""
        if time.perf_counter() - self._told > _SAY_EVERY:
            self.now(done, total)

    def now(self, done: int, total: int) -> None:
        self._told = time.perf_counter()
        rate = (done - self._first) / max(self._told - self._began, 1e-9)
        self._say(Tick(self._what, min(done, total), total, self._unit, rate))


def clock_text(seconds: float) -> str:
    """``1:02:03``, or ``?`` if nobody knows."""
    if seconds == float("inf"):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"
