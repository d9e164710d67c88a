"""One block of memory for all keys, another for all values; slots are equally long.

Every key is stored, also those outside a sliding window, so that any path of the tail can be
kept. Keys lie as their product with queries reads them, one coordinate of all rows after the
other: for large batches that takes three quarters of the time. Both are float32 whatever the
model's dtype: attention sums in float32, and converting thousands of keys per pass would cost
more than reading them.

Shape letters: L layers, S slots, K key-value heads, C rows of a slot, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.cache.base import KVCache

_ROW_STEP = 64
"""Rows of a slot come in this multiple, so that attention may read past the last key."""

_MEMO = 256
"""Views remembered: making 30 of them takes as long as three products."""


class DenseCache(KVCache):
    """Keys and values of a decoder, all slots equally long.

    Args:
        layers: layers of the decoder.
        heads: key-value heads.
        width: width of a head.
        device: where to keep them.
        capacity: rows per slot to reserve as soon as anything is stored.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        width: int,
        *,
        device: torch.device | str = "cpu",
        capacity: int = 0,
    ) -> None:
        super().__init__()
        self._capacity = capacity
        self.key_store = torch.zeros(layers, 0, heads, width, 0, device=device)
        """float32 [L, S, K, D, C]. Rows never written are zero, hence finite."""
        self.value_store = torch.zeros(layers, 0, heads, 0, width, device=device)
        """float32 [L, S, K, C, D]."""
        self._views: dict[tuple[bool, int, int, int, int], list[Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are allocated."""
        return self.key_store.nbytes + self.value_store.nbytes

    @property
    def layers(self) -> int:
        """L."""
        return len(self.key_store)

    @property
    def rows(self) -> int:
        """C: rows of a slot that are allocated."""
        return self.key_store.shape[4]

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
            slots: consecutive slots.
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
        _, had_slots, _, had_rows, _ = self.value_store.shape
        if rows == 0 or (slots <= had_slots and rows <= had_rows):
            return
        if rows > had_rows:
            rows = max(rows, self._capacity, had_rows + had_rows // 2)
            rows = -(-rows // _ROW_STEP) * _ROW_STEP
        slots, rows = max(slots, had_slots), max(rows, had_rows)
        self._views = {}
        with torch.inference_mode(False):
            self.key_store = _grown(self.key_store, slots, rows, 4)
            self.value_store = _grown(self.value_store, slots, rows, 3)

    def _move(self, slot: int, rows: Sequence[int], start: int) -> None:
        for store in self.by_row:
            own = store[:, slot]
            own[:, start : start + len(rows)] = own[:, torch.tensor(rows, device=own.device)]


def _grown(store: Tensor, slots: int, rows: int, axis: int) -> Tensor:
    """A copy with room for more slots, and for more rows along ``axis``."""
    shape = list(store.shape)
    shape[1], shape[axis] = slots, rows
    larger = store.new_zeros(shape)
    larger[:, : store.shape[1]].narrow(axis, 0, store.shape[axis]).copy_(store)
    return larger
