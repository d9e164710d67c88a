"""How the C library handles memory while training."""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of malloc.h
_LARGE = 1 << 30


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
