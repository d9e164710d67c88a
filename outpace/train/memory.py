"""How the C library handles memory while training."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from outpace.models.blocks import release

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of malloc.h
_LARGE = 1 << 30
STATM = Path("/proc/self/statm")


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, where the C library can (glibc).

    A step makes and frees the same large tensors again and again. Handing each back to the system
    and getting it anew, page by page, took a quarter of a training step on two CPU cores.

    Returns:
        Whether the library agreed.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        settings = ((_MMAP_THRESHOLD, _LARGE), (_TRIM_THRESHOLD, 2 * _LARGE - 1))
        return all(library.mallopt(name, value) == 1 for name, value in settings)
    return False


class Holes:
    """Hands freed memory back before its holes grow large: batches of many lengths leave them."""

    MOST = 2 << 30
    """Bytes that a process may grow by, about what a step takes. A block drafter came to 8.4 GB without."""

    def __init__(self) -> None:
        self._least = resident()

    def close(self) -> None:
        """Call after every step; reading the size takes some microseconds, handing back up to a second."""
        if resident() - self._least > self.MOST:
            release()
            self._least = resident()


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say (other than Linux)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
