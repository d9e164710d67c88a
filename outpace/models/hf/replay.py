"""A cache for models of transformers whose state cannot be cut: it goes back and reads again.

Recurrent states and compressed caches only ever grow. ``ReplayCache`` keeps the model's own
cache object, and a copy of it from before the guesses. When some of them are dropped, the next
pass starts from the copy and reads the accepted ones once more.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outpace.cache.base import KVCache


@dataclass(slots=True)
class Track:
    """What the model's own cache object of one slot has read."""

    state: Any = None
    ids: tuple[int, ...] = ()


class ReplayCache(KVCache):
    """The model's own cache objects: one that is ahead, and a copy from before the guesses."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, Track] = {}
        self._saved: dict[int, Track] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the states that are held, copies included."""
        tracks = (*self._live.values(), *self._saved.values())
        return sum(t.nbytes for t in _tensors([track.state for track in tracks]))

    def resume(self, slot: int, fresh: int) -> Track:
        """Give a track that has read a prefix of the slot's text, ``fresh`` tail rows excepted.

        The live one if nothing it read was dropped since, else the copy, else an empty one.
        """
        text = self._text(slot)
        for tracks in (self._live, self._saved):
            track = tracks.pop(slot, Track())
            read = len(track.ids)
            if 0 < read <= len(text) - fresh and track.ids == text[:read]:
                return track
        return Track()

    def save(self, slot: int, track: Track) -> None:
        """Copy a track, to come back to when rows after it are dropped."""
        self._saved[slot] = Track(_copied(track.state), track.ids)

    def advance(self, slot: int, track: Track) -> None:
        """Make a track the live one of its slot."""
        self._live[slot] = track

    def unread(self, slot: int, track: Track) -> tuple[int, ...]:
        """Give the tokens of the slot's text, tail included, that a track has not read."""
        return self._text(slot)[len(track.ids) :]

    def close(self, slot: int) -> None:
        """Give a slot back; its contents are lost."""
        super().close(slot)
        self._live.pop(slot, None)
        self._saved.pop(slot, None)

    def _text(self, slot: int) -> tuple[int, ...]:
        state = self.slot(slot)
        return (*state.ids, *state.tail_ids)

    def _reserve(self, slots: int, rows: int) -> None:
        """The model's own cache grows by itself."""

    def _move(self, slot: int, rows: Sequence[int], start: int) -> None:
        raise AssertionError("a chain is kept from its first row on")


def _copied(state: Any) -> Any:
    """Copy a cache object of transformers, sharing what a pass replaces and never writes to."""
    from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

    if not isinstance(state, Cache):
        return copy.deepcopy(state)
    twin = copy.copy(state)
    grown = (DynamicLayer, DynamicSlidingWindowLayer)
    twin.layers = [
        copy.copy(layer) if type(layer) in grown else copy.deepcopy(layer) for layer in state.layers
    ]
    return twin


def _tensors(holder: Any) -> list[Tensor]:
    """Find the tensors in a cache object of any kind."""
    if isinstance(holder, Tensor):
        return [holder]
    if isinstance(holder, Mapping):
        parts: Sequence[Any] = list(holder.values())
    elif isinstance(holder, (list, tuple)):
        parts = holder
    else:
        parts = list(getattr(holder, "__dict__", {}).values())
    return [tensor for part in parts for tensor in _tensors(part)]
