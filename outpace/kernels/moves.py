"""Rows of keys and values that are copied to places before them, in one call of compiled code.

Indexing of torch takes twice as long for a few rows of 30 layers: after a pass its code is in no cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outpace.kernels.compiled import library


def move(
    layout: tuple[int, int, int, int, int, int, int, int, bool],
    shape: tuple[int, int, int],
    slot: int,
    rows: Sequence[int],
    start: int,
) -> bool:
    """Copy rows of a slot, ascending, to ``start`` and behind; none is before its new place.

    Args:
        layout: of a cache, as its ``Layout`` has it; keys and values have the same strides.
        shape: layers, heads and their width.

    Returns:
        False where torch has to do it.
    """
    code = library()
    if code is not None:
        keys, values, layer, _, capacity, tile, stride, _, half = layout
        size = 2 if half else 4
        at = slot * stride * size
        where = keys + at, values + at, *shape, capacity, tile, size, layer, start
        told = array("q", (*where, len(rows), *rows))
        code.outpace_move(told.buffer_info()[0])
    return code is not None
