"""One block of memory for all keys, another for all values; slots are equally long.

Every key is stored, also those outside a sliding window, so that any path of the tail can be kept.
Keys lie coordinate by coordinate, as their product with queries reads them. torch multiplies all rows
at once. Compiled code reads tiles of `PAGE` rows, in three quarters of the time.

Shape letters: L layers, S slots, K key-value heads, C rows of a slot, D width of a head, P = `PAGE`.
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


class Layout(NamedTuple):
    """Where keys and values are, in bytes, and the steps between them, in numbers."""

    keys: int
    values: int
    key_layer: int
    value_layer: int
    capacity: int
    tile: int
    key_stride: int
    value_stride: int
    half: bool


class DenseCache(KVCache):
    """Keys and values of a decoder, all slots equally long.

    Args:
        capacity: rows per slot to reserve as soon as anything is stored.
        dtype: float32, or bfloat16 if who attends can read it.
        tiled: whether keys lie in tiles, for compiled code alone; else a tile has all rows of a slot.
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
        tiled: bool = False,
    ) -> None:
        super().__init__()
        self._capacity, self.layers, self._had = capacity, layers, (0, 0)
        keys = (0, width, PAGE) if tiled else (width, 0)
        self.key_store = torch.zeros(layers, 0, heads, *keys, device=device, dtype=dtype)
        """[L, S, K, D, C], or in tiles [L, S, K, C / P, D, P]. Rows never written are zero, hence finite."""
        self.value_store = torch.zeros(layers, 0, heads, 0, width, device=device, dtype=dtype)
        """[L, S, K, C, D]."""
        self._shape, self._on_cpu, self._tiled = (layers, heads, width), self.key_store.is_cpu, tiled
        self._layout: Layout | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are allocated."""
        return self.key_store.nbytes + self.value_store.nbytes

    @property
    def rows(self) -> int:
        """C: rows of a slot that are allocated."""
        return self.value_store.shape[3]

    @property
    def layout(self) -> Layout:
        """For compiled code; valid until the cache grows."""
        if self._layout is None:
            keys, values = self.key_store, self.value_store
            size, half = keys.element_size(), keys.dtype == torch.bfloat16
            steps, lengths = (keys.stride(0) * size, values.stride(0) * size), (self.rows, keys.shape[-1])
            both = *steps, *lengths, keys.stride(1), values.stride(1), half
            self._layout = Layout(keys.data_ptr(), values.data_ptr(), *both)
        return self._layout

    @property
    def by_row(self) -> tuple[Tensor, Tensor]:
        """Keys and values as views [L, S, C, K, D], to be written; otherwise as ``keys``."""
        assert not self._tiled
        return self.key_store.permute(0, 1, 4, 2, 3), self.value_store.transpose(2, 3)

    def scratch(self, slot: int, count: int) -> range:
        """Storage rows behind the tail for rows that are never kept; the next pass reuses them."""
        state = self._slots[slot]
        first = len(state.ids) + len(state.tail_ids)
        self._reserve(max(self._slots) + 1, first + count)
        return range(first, first + count)

    def keys(self, slots: range, rows: range) -> list[Tensor]:
        """Per layer a view [slots * K, D, rows], ready to be multiplied by queries; not of tiles.

        Args:
            rows: consecutive storage rows; they may reach past what is stored.

        Valid until the cache grows.
        """
        assert not self._tiled
        part = self.key_store[:, slots.start : slots.stop, :, :, rows.start : rows.stop]
        return list(part.flatten(1, 2).unbind(0))

    def values(self, slots: range, rows: range) -> list[Tensor]:
        """Per layer a view [slots * K, rows, D]; otherwise as ``keys``."""
        part = self.value_store[:, slots.start : slots.stop, :, rows.start : rows.stop]
        return list(part.flatten(1, 2).unbind(0))

    def first_keys(self, layers: int | slice, slots: int | slice, stop: int) -> Tensor:
        """Those of the first rows, [layers, slots, K, D, rows]; a copy where keys lie in tiles."""
        own = self.key_store[layers, slots]
        if self._tiled:
            own = own[..., : -(-stop // PAGE), :, :].transpose(-3, -2).flatten(-2)
        return own[..., :stop]

    def _reserve(self, slots: int, rows: int) -> None:
        # An empty slot needs no memory: a batch is opened slot by slot, and allocated once.
        had_slots, had_rows = self._had
        if rows == 0 or (slots <= had_slots and rows <= had_rows):
            return
        longer, more = max(rows, self._capacity, had_rows * 3 // 2), max(slots, had_slots * 3 // 2)
        rows = longer if rows > had_rows else had_rows
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
        self._layout = None
        with torch.inference_mode(False):
            self.value_store = _resized(self.value_store, slots, rows, used, 3)
            tiles = {slot: -(-count // PAGE) for slot, count in used.items()}
            keys = (rows // PAGE, tiles, 3) if self._tiled else (rows, used, 4)
            self.key_store = _resized(self.key_store, slots, *keys)
        self._had = slots, rows

    @property
    def page_bytes(self) -> int:
        return 2 * math.prod(self._shape) * PAGE * self.value_store.element_size()

    def _copy(self, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):
            return self._keys(slot, start, stop).clone(), self.value_store[:, slot, :, start:stop].clone()

    def _paste(self, slot: int, start: int, part: tuple[Tensor, Tensor]) -> None:
        keys, values = part
        self._keys(slot, start, start + values.shape[-2])[:] = keys
        self.value_store[:, slot, :, start : start + values.shape[-2]] = values

    def _keys(self, slot: int, start: int, stop: int) -> Tensor:
        """A view of them; tiles are whole, and what follows is not in use yet."""
        if not self._tiled:
            return self.key_store[:, slot, :, :, start:stop]
        assert start % PAGE == 0
        return self.key_store[:, slot, :, start // PAGE : -(-stop // PAGE)]

    def _move(self, slot: int, rows: Sequence[int], start: int) -> None:
        moved = self._on_cpu and move(self.layout, self._shape, slot, rows, start)
        for store in () if moved else self.by_row:
            own = store[:, slot]
            own[:, start : start + len(rows)] = own[:, torch.tensor(rows, device=own.device)]


def _resized(store: Tensor, slots: int, rows: int, used: Mapping[int, int], axis: int) -> Tensor:
    """A copy of the ``used`` rows, or tiles, per slot, with other numbers of slots and along ``axis``."""
    shape = list(store.shape)
    shape[1], shape[axis] = slots, rows
    other = _zeros(shape, store)
    for slot, count in used.items():
        old, new = (one[:, slot].narrow(axis - 1, 0, count) for one in (store, other))
        new.copy_(old)
    return other


def _zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Zeros as ``like``. Large ones on a CPU take memory, and time, only once they are written."""
    size = like.element_size() * math.prod(shape)
    if like.device.type != "cpu" or size < _LARGE or not hasattr(mmap, "MAP_PRIVATE"):
        return like.new_zeros(shape)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype).view(*shape)
