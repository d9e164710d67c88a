"""A folder that one process at a time works in."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from outpace.errors import ModelError

LOCK = "lock"
"""Name of the file in that folder."""


class Lock:
    """Keeps a folder for one process; one that dies gives it up.

    Args:
        folder: made if it is not there, for its owner alone.
        busy: what to say where another process has it.
        wait: told so, and then the other one is waited for; without it, ``busy`` is an error.
        clean: remove parts of files there, unless others write there without a lock.

    Raises:
        ModelError: ``busy``.
        OSError: it cannot be written.
    """

    def __init__(
        self, folder: Path, busy: str, wait: Callable[[str], object] | None = None, clean: bool = True
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        self.release = weakref.finalize(self, os.close, file)
        """Gives the folder up. Harmless if it was done."""
        with contextlib.suppress(ImportError):  # a system without such locks
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if wait is None:
                    self.release()
                    raise ModelError(busy) from None
                wait(f"{busy}: waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:  # a disk of a network without such locks
                return
            if clean:
                remove_parts(folder)


@contextlib.contextmanager
def alone(folder: Path, busy: str, wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Have a folder for this process, as a ``Lock`` does; others may read it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder, busy, wait)
    try:
        yield
    finally:
        lock.release()


def remove_parts(folder: Path) -> None:
    """Remove files that a process which died was writing."""
    for part in folder.glob(".*.part"):
        part.unlink(missing_ok=True)
