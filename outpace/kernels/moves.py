"""Rows of keys and values that are copied to places before them, in one call of compiled code.

Indexing of torch takes twice as long for a few rows of 30 layers, and what it runs is not near the
processor after a pass.

Shape letters: L layers, S slots, K heads, D their width, C rows of a slot.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from torch import Tensor

from outpace.kernels.compiled import library


def move(keys_LSKDC: Tensor, values_LSKCD: Tensor, slot: int, rows: Sequence[int], start: int) -> bool:
    """Copy rows of a slot, ascending, to ``start`` and behind; none is before its new place.

    Returns:
        False where torch has to do it.
    """
    code = library() if keys_LSKDC.is_cpu else None
    if code is None:
        return False
    layers, _, heads, width, capacity = keys_LSKDC.shape
    size, step = keys_LSKDC.element_size(), heads * width * capacity
    keys, values = (store.data_ptr() + slot * step * size for store in (keys_LSKDC, values_LSKCD))
    per_layer = keys_LSKDC.stride(0) * size
    told = array(
        "q", (keys, values, layers, heads, width, capacity, size, per_layer, start, len(rows), *rows)
    )
    code.outpace_move(told.buffer_info()[0])
    return True
