"""A clock for passes, so that a report can tell a model's work from the host's."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType


class PassClock:
    """Adds up the wall-clock seconds spent inside passes. Use it as a context manager.

    On a device that works asynchronously these are the seconds until the host is free again.
    The rest of a pass shows wherever the host first waits for its results.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count = 0
        """Passes so far."""
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._began
        self.count += 1


class Clocks(PassClock):
    """Several clocks as one to read; each is counted once."""

    def __init__(self, clocks: Iterable[PassClock]) -> None:
        self._clocks = list({id(clock): clock for clock in clocks}.values())

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return sum([clock.seconds for clock in self._clocks])

    @property
    def count(self) -> int:  # type: ignore[override]
        return sum([clock.count for clock in self._clocks])


class StepClock:
    """Wall-clock seconds per verb of a step, and how many of them were spent inside passes.

    Args:
        drafters: of the drafters' passes; one that several share counts once.
    """

    def __init__(self, target: PassClock, drafters: Iterable[PassClock]) -> None:
        self.seconds: dict[str, float] = {}
        self.passes: dict[str, float] = {}
        self.draft_levels, self.preview = 0, 0.0
        # A target that drafts for itself has one clock: the verb tells for whom it ran.
        self._target, self._drafters = target, Clocks(drafters)
        self._then = self._now()

    def previewed(self) -> None:
        """Note how long previews took, now that they are made."""
        self.preview = time.perf_counter() - self._then[0]

    def lap(self, verb: str) -> None:
        now, then = self._now(), self._then
        own = 2 if verb == "score" else 1
        self.seconds[verb] = now[0] - then[0]
        self.passes[verb] = now[own] - then[own]
        if verb == "draft":
            self.draft_levels = int(now[3] - then[3])
        self._then = now

    def _now(self) -> tuple[float, float, float, int]:
        """Time, seconds in drafters' passes, seconds in the target's, drafters' passes."""
        return time.perf_counter(), self._drafters.seconds, self._target.seconds, self._drafters.count
