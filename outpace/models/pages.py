"""Memory for weights, in large pages where Linux gives them.

A pass reads all weights once. In pages of 4 KiB it waits for the processor to look up each of
them. In pages of 2 MiB one row of SmolLM2-135M takes 5 to 10 % less time.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
import weakref
from functools import cache

import torch
from torch import Tensor

_CHUNK = 1 << 26
"""Bytes that are asked of the system at a time. Pages that nobody writes to take no memory."""
_LINE = 64
"""Bytes of a line of the processor's cache."""


class Pages:
    """Cuts tensors out of large pieces of memory; a piece is freed with the last of them."""

    def __init__(self) -> None:
        self._piece: weakref.ref[mmap.mmap] | None = None
        self._used = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """Memory that starts at a line of the cache: uint8 [nbytes]; its content is undefined."""
        if not nbytes or not sys.platform.startswith("linux"):
            return torch.empty(nbytes, dtype=torch.uint8)
        with self._lock:
            piece = self._piece() if self._piece is not None else None
            if piece is None or self._used + nbytes > len(piece):
                piece = _ask(max(_CHUNK, nbytes))
                self._piece, self._used = weakref.ref(piece), 0
            first, self._used = self._used, self._used + -(-nbytes // _LINE) * _LINE
            return torch.frombuffer(piece, dtype=torch.uint8, count=nbytes, offset=first)


def _ask(nbytes: int) -> mmap.mmap:
    piece = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # pages of the usual size are only slower
        piece.madvise(mmap.MADV_HUGEPAGE)
    return piece


@cache
def pages() -> Pages:
    """Those of this process."""
    return Pages()
