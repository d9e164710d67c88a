"""One block of memory for all keys, another for all values; slots are equally long.

Every key is stored, also those outside a sliding window, so that any path of the tail can be
kept. Keys lie as their product with queries reads them, one coordinate of all rows after the
other: for large batches that takes three quarters of the time. Attention sums in float32, so
whoever reads bfloat16 has to convert it for less than reading twice as much would take.

Shape letters: L layers, S slots, K key-value heads, C rows of a slot, D width of a head.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.cache.base import PAGE, KVCache
from outpace.kernels.moves import move

_LARGE = 1 << 20
"""Bytes from which on memory is asked for in whole pages of the system."""
_MEMO = 256
"""Views remembered: making 30 of them takes as long as three products."""


class Layout(NamedTuple):
    """Where keys and values are, in bytes, and the steps between them, in numbers."""

    keys: int
    values: int
    key_layer: int
    value_layer: int
    capacity: int
    key_stride: int
    value_stride: int
    half: bool


class DenseCache(KVCache):
    """Keys and values of a decoder, all slots equally long.

    Args:
        capacity: rows per slot to reserve as soon as anything is stored.
        dtype: float32, or bfloat16 if who attends can read it.
    """

    copies = True

    def __init__(
        self,
        layers: int,
        heads: int,
        width: int,
        *,
        device: torch.device | str = "cpu",
        capacity: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._capacity, self.layers, self._had = capacity, layers, (0, 0)
        self.key_store = torch.zeros(layers, 0, heads, width, 0, device=device, dtype=dtype)
        """[L, S, K, D, C]. Rows never written are zero, hence finite."""
        self.value_store = torch.zeros(layers, 0, heads, 0, width, device=device, dtype=dtype)
        """[L, S, K, C, D]."""
        self._shape, self._on_cpu = (layers, heads, width), self.key_store.is_cpu
        self._layout: Layout | None = None
        self._views: dict[tuple[bool, int, int, int, int], list[Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are allocated."""
        return self.key_store.nbytes + self.value_store.nbytes

    @property
    def rows(self) -> int:
        """C: rows of a slot that are allocated."""
        return self.key_store.shape[4]

    @property
    def layout(self) -> Layout:
        """For compiled code; valid until the cache grows."""
        if self._layout is None:
            keys, values = self.key_store, self.value_store
            size, half = keys.element_size(), keys.dtype == torch.bfloat16
            at, steps = (keys.data_ptr(), values.data_ptr()), (keys.stride(0) * size, values.stride(0) * size)
            self._layout = Layout(*at, *steps, keys.shape[4], keys.stride(1), values.stride(1), half)
        return self._layout

    @property
    def by_row(self) -> tuple[Tensor, Tensor]:
        """Keys and values as views [L, S, C, K, D], to be written; valid until the cache grows."""
        return self.key_store.permute(0, 1, 4, 2, 3), self.value_store.transpose(2, 3)

    def scratch(self, slot: int, count: int) -> range:
        """Storage rows behind the tail for rows that are never kept; the next pass reuses them."""
        state = self._slots[slot]
        first = len(state.ids) + len(state.tail_ids)
        self._reserve(max(self._slots) + 1, first + count)
        return range(first, first + count)

    def keys(self, slots: range, rows: range) -> list[Tensor]:
        """Per layer a view [slots * K, D, rows], ready to be multiplied by queries.

        Args:
            rows: consecutive storage rows; they may reach past what is stored.

        Valid until the cache grows, so ask anew in every pass; asking twice costs nothing.
        """
        return self._memo(True, slots, rows)

    def values(self, slots: range, rows: range) -> list[Tensor]:
        """Per layer a view [slots * K, rows, D]; otherwise as ``keys``."""
        return self._memo(False, slots, rows)

    def _memo(self, keys: bool, slots: range, rows: range) -> list[Tensor]:
        name = (keys, slots.start, slots.stop, rows.start, rows.stop)
        views = self._views.get(name)
        if views is None:
            if len(self._views) >= _MEMO:
                self._views.clear()
            store, axis = (self.key_store, 4) if keys else (self.value_store, 3)
            part = store[:, slots.start : slots.stop].narrow(axis, rows.start, len(rows))
            views = self._views[name] = list(part.flatten(1, 2).unbind(0))
        return views

    def _reserve(self, slots: int, rows: int) -> None:
        # An empty slot needs no memory: a batch is opened slot by slot, and allocated once.
        had_slots, had_rows = self._had
        if rows == 0 or (slots <= had_slots and rows <= had_rows):
            return
        longer, more = max(rows, self._capacity, had_rows * 3 // 2), max(slots, had_slots * 3 // 2)
        rows = longer if rows > had_rows else had_rows
        rows += 0 if -(-rows // PAGE) % 16 else PAGE  # coordinates would share few sets of a cache: 1 to 5 %
        self.resize(more if slots > had_slots else had_slots, rows)

    @property
    def room(self) -> tuple[int, int]:
        return self._had

    def resize(self, slots: int, rows: int) -> None:
        """Allocate anew and copy what is in use. Rows are rounded up to whole pages, so that
        attention may read past the last key.
        """
        rows = -(-rows // PAGE) * PAGE
        # Rows that are being appended are not stored yet.
        used = {
            number: min(len(state.ids) + len(state.tail_ids), self.rows)
            for number, state in self._slots.items()
            if number < self.room[0]
        }
        assert slots >= self.slots and rows >= max(used.values(), default=0), (slots, rows)
        self._views, self._layout = {}, None
        with torch.inference_mode(False):
            self.key_store = _resized(self.key_store, slots, rows, used, 4)
            self.value_store = _resized(self.value_store, slots, rows, used, 3)
        self._had = slots, rows

    @property
    def page_bytes(self) -> int:
        layers, _, heads, _, width = self.value_store.shape
        return 2 * layers * heads * width * PAGE * self.value_store.element_size()

    def _copy(self, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):
            keys, values = self.key_store[:, slot, :, :, start:stop], self.value_store[:, slot, :, start:stop]
            return keys.clone(), values.clone()

    def _paste(self, slot: int, start: int, part: tuple[Tensor, Tensor]) -> None:
        keys, values = part
        self.key_store[:, slot, :, :, start : start + keys.shape[-1]] = keys
        self.value_store[:, slot, :, start : start + values.shape[-2]] = values

    def _move(self, slot: int, rows: Sequence[int], start: int) -> None:
        moved = self._on_cpu and move(self.layout, self._shape, slot, rows, start)
        for store in () if moved else self.by_row:
            own = store[:, slot]
            own[:, start : start + len(rows)] = own[:, torch.tensor(rows, device=own.device)]


def _resized(store: Tensor, slots: int, rows: int, used: Mapping[int, int], axis: int) -> Tensor:
    """A copy with another number of slots, and of rows along ``axis``; ``used`` rows per slot."""
    shape = list(store.shape)
    shape[1], shape[axis] = slots, rows
    other = _zeros(shape, store)
    for slot, count in used.items():
        old, new = (one[:, slot].narrow(axis - 1, 0, count) for one in (store, other))
        new.copy_(old)
    return other


def _zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Zeros of the dtype and device of ``like``. Large ones on a CPU take no memory, and no time,
    before they are written: zeros of a few gigabytes take seconds, for which all would wait.
    """
    size = like.element_size() * math.prod(shape)
    if like.device.type != "cpu" or size < _LARGE or not hasattr(mmap, "MAP_PRIVATE"):
        return like.new_zeros(shape)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype).view(*shape)
