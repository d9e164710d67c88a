"""One block of memory for all keys and values: [layers, 2, slots, heads, rows, width].

Every key is stored, also those outside a sliding window, so that any path of the tail can be
kept. Keys and values are float32 whatever the model's dtype: attention sums them in float32,
and converting thousands of keys per pass would cost more than reading them.

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
        self.store = torch.zeros(layers, 2, 0, heads, 0, width, dtype=torch.float32, device=device)
        """float32 [L, 2, S, K, C, D]. Rows never written are zero, hence finite."""
        self._views: dict[tuple[int, int, int, int, int], list[Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are allocated."""
        return self.store.nbytes

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
        return self._memo(0, slots, rows)

    def values(self, slots: range, rows: range) -> list[Tensor]:
        """Per layer a view [slots * K, rows, D]; otherwise as ``keys``."""
        return self._memo(1, slots, rows)

    def _memo(self, what: int, slots: range, rows: range) -> list[Tensor]:
        name = (what, slots.start, slots.stop, rows.start, rows.stop)
        views = self._views.get(name)
        if views is None:
            if len(self._views) >= _MEMO:
                self._views.clear()
            part = self.store[:, what, slots.start : slots.stop, :, rows.start : rows.stop]
            part = part.flatten(1, 2)
            views = list((part if what else part.transpose(2, 3)).unbind(0))
            self._views[name] = views
        return views

    def _reserve(self, slots: int, rows: int) -> None:
        # An empty slot needs no memory: a batch is opened slot by slot, and allocated once.
        layers, two, had_slots, heads, had_rows, width = self.store.shape
        if rows == 0 or (slots <= had_slots and rows <= had_rows):
            return
        if rows > had_rows:
            rows = max(rows, self._capacity, had_rows + had_rows // 2)
            rows = -(-rows // _ROW_STEP) * _ROW_STEP
        slots, rows = max(slots, had_slots), max(rows, had_rows)
        old, self._views = self.store, {}
        with torch.inference_mode(False):
            self.store = old.new_zeros(layers, two, slots, heads, rows, width)
            self.store[:, :, :had_slots, :, :had_rows] = old

    def _move(self, slot: int, rows: Sequence[int], start: int) -> None:
        own = self.store[:, :, slot]
        index = torch.tensor(rows, device=own.device)
        own[:, :, :, start : start + len(rows)] = own.index_select(3, index)
