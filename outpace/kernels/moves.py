"""Rows of keys and values that are copied to places before them, in one call of compiled code.

Indexing of torch takes twice as long for a few rows of 30 layers, and what it runs is not near the
processor after a pass.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outpace.kernels.compiled import library


def move(slot: Sequence[int], rows: Sequence[int], start: int) -> bool:
    """Copy rows of a slot, ascending, to ``start`` and behind; none is before its new place.

    Args:
        slot: what ``Move`` of move.h has of it.

    Returns:
        False where torch has to do it.
    """
    code = library()
    if code is not None:
        told = array("q", (*slot, start, len(rows), *rows))
        code.outpace_move(told.buffer_info()[0])
    return code is not None
