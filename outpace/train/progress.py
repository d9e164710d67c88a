"""How far long work has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
        """At this rate; infinite before there is one."""
        return (self.total - self.done) / self.rate if self.rate > 0 else float("inf")

    def __str__(self) -> str:
        share = 100 * self.done / self.total if self.total else 100.0
        return (
            f"{self.what}: {self.done}/{self.total} {self.unit} ({share:.1f} %), "
            f"{self.rate:.0f} {self.unit}/s, {clock_text(self.seconds_left)} left"
        )


Say = Callable[[Tick | str], Any]
"""Takes reports, whose text is a line to print."""


def clock_text(seconds: float) -> str:
    """``1:02:03``, or ``?`` if nobody knows."""
    if seconds == float("inf"):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"
