"""A cache for models of transformers from which any rows can be picked.

``GatherCache`` owns every key and value of every layer, windowed ones included. A pass sees it
through a cache object of transformers whose layers write where they are told. So a tree can be
stored and its accepted path moved to the front.

Shape letters: B feeds of a pass, J rows of the longest feed, T rows of all feeds. L storage rows of
the longest slot, K key-value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.cache.base import PAGE, KVCache
from outpace.models.hf.config import CHUNKED
from outpace.tree.mask import ancestors

_ROWS = 64
"""Rows that a cache of unknown length starts with."""


@dataclass(frozen=True, slots=True, eq=False)
class Spot:
    """Where the rows of one pass are stored."""

    slots: tuple[int, ...]
    feed_T: Tensor
    column_T: Tensor
    """Index of each row in its own feed."""
    slot_T: Tensor
    row_T: Tensor
    """Storage row."""
    length: int
    """L: storage rows that the pass can see."""
    read: int
    """Rows of the longest slot that were stored before the pass."""


class _Layer:
    """Stands where a pass of transformers expects the cache of one layer."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    is_initialized = True

    def __init__(self, cache: GatherCache, spot: Spot, index: int) -> None:
        self.cache, self.spot, self.index = cache, spot, index

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the new rows and give all rows that the pass may see, both [B, K, ., D]."""
        return self.cache.write(self.index, key, value, self.spot)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.spot.length, 0


class GatherCache(KVCache):
    """Keys and values of every layer in storage of our own, [slots, K, rows, D] each."""

    copies = True

    def __init__(self, layers: int, device: torch.device, capacity: int = 0) -> None:
        super().__init__()
        self._device = device
        self._capacity = capacity
        self._room = (0, 0)
        self._stores: list[tuple[Tensor, Tensor] | None] = [None] * layers

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are allocated."""
        return sum(t.nbytes for store in self._stores if store is not None for t in store)

    def spot(self, slots: Sequence[int], rows: Sequence[range]) -> Spot:
        """Say where a pass stores its rows.

        Args:
            rows: what ``append`` gave for each feed.
        """
        places = [
            (feed, column, slot, row)
            for feed, (slot, span) in enumerate(zip(slots, rows, strict=True))
            for column, row in enumerate(span)
        ]
        feed_T, column_T, slot_T, row_T = torch.tensor(places, device=self._device).T
        length, width = max(span.stop for span in rows), max(len(span) for span in rows)
        return Spot(tuple(slots), feed_T, column_T, slot_T, row_T, length, length - width)

    def adapter(self, spot: Spot) -> Any:
        """Give the cache object to hand to the model for the pass at ``spot``."""
        from transformers.cache_utils import Cache

        whole: Any = Cache(layers=[_Layer(self, spot, i) for i in range(len(self._stores))])
        whole.get_seq_length = lambda layer_idx=0: spot.read
        return whole

    def write(self, layer: int, key: Tensor, value: Tensor, spot: Spot) -> tuple[Tensor, Tensor]:
        """Store [B, K, J, D] and give views [B, K, L, D] of all rows of the pass's slots."""
        self._fit(layer, key, value)
        stores = self._stores[layer]
        assert stores is not None
        first = spot.slots[0]
        dense = spot.slots == tuple(range(first, first + len(spot.slots)))
        out = []
        for store, new in zip(stores, (key, value), strict=True):
            if len(spot.slots) == 1:
                store[first, :, spot.length - new.shape[2] : spot.length] = new[0]
            else:
                store[spot.slot_T, :, spot.row_T] = new[spot.feed_T, :, spot.column_T]
            seen = store[:, :, : spot.length]
            out.append(seen[first : first + len(spot.slots)] if dense else seen[list(spot.slots)])
        return out[0], out[1]

    def _reserve(self, slots: int, rows: int) -> None:
        had_slots, had_rows = self._room
        if rows > had_rows:
            rows = max(rows, self._capacity, 2 * had_rows, _ROWS)
        self._room = (max(slots, had_slots), max(rows, had_rows))

    def _fit(self, layer: int, *new: Tensor) -> None:
        """Make a layer's storage as large as the room that was reserved."""
        slots, rows = self._room
        stores = self._stores[layer]
        if stores is not None and stores[0].shape[::2] == (slots, rows):
            return
        grown = []
        for which, one in enumerate(new):
            # Zeros, never garbage: a masked key weighs 0, and 0 * nan would be nan. Pages are pasted
            # between passes, which tensors of inference mode refuse.
            with torch.inference_mode(False):
                store = one.new_zeros(slots, one.shape[1], rows, one.shape[3])
            if stores is not None:
                old = stores[which][:slots, :, :rows]
                store[: old.shape[0], :, : old.shape[2]] = old
            grown.append(store)
        self._stores[layer] = (grown[0], grown[1])

    @property
    def room(self) -> tuple[int, int]:
        """Slots and rows that layers get as soon as they are written."""
        return self._room

    def resize(self, slots: int, rows: int) -> None:
        """Copy every layer to storage of this size; rows are rounded up to whole pages."""
        self._room = slots, -(-rows // PAGE) * PAGE
        for layer, stores in enumerate(self._stores):
            if stores is not None:
                self._fit(layer, *(store[:1] for store in stores))

    def _copy(self, slot: int, start: int, stop: int) -> list[tuple[Tensor, ...] | None]:
        return [
            None if pair is None else tuple(store[slot, :, start:stop].clone() for store in pair)
            for pair in self._stores
        ]

    def _paste(self, slot: int, start: int, part: list[tuple[Tensor, ...] | None]) -> None:
        for layer, parts in enumerate(part):
            if parts is not None:
                self._fit(layer, *(one[None] for one in parts))
                for store, one in zip(self._stores[layer] or (), parts, strict=True):
                    store[slot, :, start : start + one.shape[1]] = one

    def _move(self, slot: int, rows: Sequence[int], start: int) -> None:
        for stores in self._stores:
            for store in stores or ():
                store[slot, :, start : start + len(rows)] = store[slot, :, list(rows)]

    def mask(
        self, spot: Spot, fresh: Sequence[int], kinds: Mapping[str, int | None], dtype: torch.dtype
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Build what a pass over the last ``fresh`` tail rows of each slot needs.

        Args:
            kinds: layer types, with the window or chunk in tokens (None: sees everything).

        Returns:
            Positions int64 [B, J], and for each kind an additive mask [B, 1, J, L]. Padding
            rows see one key, so that their softmax is a number.
        """
        width = max(fresh)
        sees_BJL = torch.zeros(len(fresh), width, spot.length, dtype=torch.bool)
        query_BJ = torch.zeros(len(fresh), width, dtype=torch.int64)
        key_BL = torch.zeros(len(fresh), spot.length, dtype=torch.int64)
        for feed, (number, count) in enumerate(zip(spot.slots, fresh, strict=True)):
            state = self.slot(number)
            done, tail = len(state.ids), len(state.tail_ids)
            sees_BJL[feed, :count, :done] = True
            sees_BJL[feed, :count, done : done + tail] = _ancestors(state.tail_parents)[-count:]
            sees_BJL[feed, count:, 0] = True
            position_T = done + torch.tensor(state.tail_depths, dtype=torch.int64)
            key_BL[feed, :done] = torch.arange(done)
            key_BL[feed, done : done + tail] = position_T
            query_BJ[feed, :count] = position_T[-count:]
        masks = {}
        for kind, reach in kinds.items():
            near_BJL = sees_BJL
            if reach is not None and kind == CHUNKED:
                near_BJL = sees_BJL & (query_BJ[..., None] // reach == key_BL[:, None] // reach)
            elif reach is not None:
                near_BJL = sees_BJL & (query_BJ[..., None] - key_BL[:, None] < reach)
            add_BJL = torch.zeros(near_BJL.shape, dtype=dtype)
            add_BJL.masked_fill_(~near_BJL, torch.finfo(dtype).min)
            masks[kind] = add_BJL[:, None].to(self._device)
        return query_BJ.to(self._device), masks


def _ancestors(parents: Sequence[int]) -> Tensor:
    """Ancestor matrix of a tail; a long chain, as a prompt is, costs one call."""
    chain = next((i for i, parent in enumerate(parents) if parent != i - 1), len(parents))
    if chain == len(parents):
        return torch.ones(chain, chain, dtype=torch.bool).tril_()
    return ancestors(parents)
