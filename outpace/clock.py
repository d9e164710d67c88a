"""A clock for passes, so that a report can tell a model's work from the host's."""

from __future__ import annotations

import time
from types import TracebackType


class PassClock:
    """Adds up the wall-clock seconds spent inside passes. Use it as a context manager.

    On a device that works asynchronously these are the seconds until the host is free again;
    the rest of a pass shows wherever the host first waits for its results.
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
