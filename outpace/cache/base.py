"""The contract of a key-value cache: committed text, and a tail of guesses behind it.

    slot 3:  [the cat sat on]  [the  mat  rug  .]     parents in the tail: -1 0 0 1
              committed, ids    tail: pending and drafted rows, in the order fed

The bookkeeping on the host lives here, once; a subclass moves the tensors. Ids are stored
beside the keys, so that a cache can be brought in line with any text (`sync`) and checked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

PAGE = 64
"""Rows of a slot that are counted, stored and shared together."""


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix. Cost: comparing slices, not tokens one by one."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(slots=True)
class Slot:
    """Host side of one sequence. Changed by the cache only."""

    ids: list[int] = field(default_factory=list)
    """Committed tokens, whose keys stand at positions 0, 1, ..."""
    tail_ids: list[int] = field(default_factory=list)
    tail_parents: list[int] = field(default_factory=list)
    """Tail index of each tail row's parent; -1: the last committed token."""
    tail_depths: list[int] = field(default_factory=list)
    """Position of a tail row = ``len(ids) + depth``; the first rows have depth 0."""
    twin: tuple[int, int] = (0, 0)
    """A slot whose first so many rows hold the same, bit for bit: who reads them there finds them at hand."""


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A sequence's slot in the target's cache, lent to a drafter for one ``propose``.

    The drafter may feed rows to the tail through the target, with its first layers or with all: the
    pending token, then guesses below it. Verification goes on from what the draft's ``resume``
    covers; the rest of the tail is dropped. Whoever drops a draft drops its tail. Committed text is
    not the drafter's to change.
    """

    cache: KVCache
    """The same for all rows of one ``propose``."""
    slot: int
    resumes: bool = True
    """Whether the draft may ``resume``; not while another drafter reads features, which a resumed
    pass could not give."""


class KVCache(ABC):
    """Keys and values of several sequences, one slot each."""

    copies: ClassVar[bool] = False
    """Whether ``copy``, ``restore`` and ``move`` work."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}

    def open(self) -> int:
        """Take a free slot, empty. The lowest free number, so that live slots stay dense."""
        number = next(i for i in range(len(self._slots) + 1) if i not in self._slots)
        self._slots[number] = Slot()
        self._reserve(number + 1, 0)
        return number

    def close(self, slot: int) -> None:
        """Give a slot back; its contents are lost."""
        self._part(slot, 0)
        del self._slots[slot]

    def slot(self, slot: int) -> Slot:
        """The host side of a slot, to read."""
        return self._slots[slot]

    def twin(self, slot: int) -> tuple[int, int]:
        """See ``Slot``; no rows where the slot is free."""
        return self._slots[slot].twin if slot in self._slots else (0, 0)

    def length(self, slot: int) -> int:
        """Committed tokens."""
        return len(self._slots[slot].ids)

    def ids(self, slot: int) -> list[int]:
        """Committed tokens; a copy."""
        return list(self._slots[slot].ids)

    def append(self, slot: int, tokens: Sequence[int], parents: Sequence[int]) -> range:
        """Reserve tail rows for a pass; the target then writes their keys.

        Args:
            tokens: one id per row.
            parents: tail index of each row's parent, or -1.

        Returns:
            The storage rows of the slot that the new tail rows occupy.
        """
        state = self._slots[slot]
        first = len(state.ids) + len(state.tail_ids)
        for token, parent in zip(tokens, parents, strict=True):
            if not -1 <= parent < len(state.tail_ids):
                raise ValueError(f"row {len(state.tail_ids)} of the tail has parent {parent}")
            state.tail_ids.append(token)
            state.tail_parents.append(parent)
            state.tail_depths.append(0 if parent < 0 else state.tail_depths[parent] + 1)
        self._reserve(max(self._slots) + 1, first + len(tokens))
        return range(first, first + len(tokens))

    def keep(self, slot: int, rows: Sequence[int]) -> None:
        """Commit tail rows, a path from the committed text down, and drop the rest of the tail.

        Args:
            rows: tail indices; the first has parent -1, each later one the row before it.
        """
        state = self._slots[slot]
        for before, row in zip((-1, *rows), rows, strict=False):
            if state.tail_parents[row] != before:
                raise ValueError(
                    f"rows {list(rows)} are no path: {row} hangs from "
                    f"{state.tail_parents[row]}, not from {before}"
                )
        if list(rows) != list(range(len(rows))):
            self._move(slot, [len(state.ids) + row for row in rows], len(state.ids))
        state.ids += [state.tail_ids[row] for row in rows]
        self.drop(slot)

    def drop(self, slot: int) -> None:
        """Forget the tail. Costs nothing: later rows overwrite it."""
        state = self._slots[slot]
        state.tail_ids.clear()
        state.tail_parents.clear()
        state.tail_depths.clear()

    def prune(self, slot: int, rows: Sequence[int]) -> None:
        """Leave only some rows in the tail, numbered anew.

        Args:
            rows: tail indices, ascending; the parent of each is among them, or -1.
        """
        state = self._slots[slot]
        if len(rows) == len(state.tail_ids):
            return
        place = {-1: -1, **{row: i for i, row in enumerate(rows)}}
        lost = [row for row in rows if state.tail_parents[row] not in place]
        if lost:
            raise ValueError(f"rows {lost} of {list(rows)} hang from rows that would be dropped")
        if list(rows) != list(range(len(rows))):
            self._move(slot, [len(state.ids) + row for row in rows], len(state.ids))
        state.tail_ids[:] = [state.tail_ids[row] for row in rows]
        state.tail_depths[:] = [state.tail_depths[row] for row in rows]
        state.tail_parents[:] = [place[state.tail_parents[row]] for row in rows]

    def truncate(self, slot: int, length: int) -> None:
        """Forget the tail and all committed tokens from ``length`` on."""
        state = self._slots[slot]
        if not 0 <= length <= len(state.ids):
            raise ValueError(f"cannot truncate {len(state.ids)} committed tokens to {length}")
        del state.ids[length:]
        state.twin = state.twin[0], min(state.twin[1], length)
        self._part(slot, length)
        self.drop(slot)

    def sync(self, slot: int, tokens: Sequence[int]) -> int:
        """Truncate to the longest common prefix with ``tokens``; return its length."""
        same = shared_prefix(self._slots[slot].ids, tokens)
        self.truncate(slot, same)
        return same

    def copy(self, slot: int, start: int, stop: int) -> Any:
        """Keys and values of committed rows, for ``restore``; ``start`` is a multiple of `PAGE`."""
        assert 0 <= start <= stop <= self.length(slot), (slot, start, stop)
        return self._copy(slot, start, stop)

    def restore(self, slot: int, ids: Sequence[int], parts: Sequence[Any]) -> None:
        """Fill an empty slot with copies of equally many rows each.

        Args:
            slot: holds nothing.
            ids: their tokens.
            parts: from ``copy``, in the order of the text; copies stay good for other slots.
        """
        state = self._slots[slot]
        assert not state.ids and not state.tail_ids, slot
        self._reserve(max(self._slots) + 1, len(ids))
        size = len(ids) // max(1, len(parts))
        for i, part in enumerate(parts):
            self._paste(slot, i * size, part)
        state.ids.extend(ids)

    def fork(self, slot: int, length: int) -> int:
        """Open a slot with a copy of the first committed rows of another."""
        ids, part = self.ids(slot)[:length], self.copy(slot, 0, length)
        other = self.open()
        self.restore(other, ids, [part])
        self._slots[other].twin = slot, length
        return other

    def _part(self, slot: int, length: int) -> None:
        """Copies share no rows with a slot from ``length`` on."""
        for one in self._slots.values():
            if one.twin[1] and one.twin[0] == slot:
                one.twin = slot, min(one.twin[1], length)

    def relocate(self, slot: int) -> int:
        """Move committed text to the lowest free slot, if that is lower; returns the slot."""
        lowest = next(i for i in range(len(self._slots) + 1) if i not in self._slots)
        if lowest > slot:
            return slot
        self.drop(slot)
        ids, length = self.ids(slot), self.length(slot)
        part, other = self.copy(slot, 0, length), self.open()
        if length:
            self.restore(other, ids, [part])
        self.close(slot)
        return other

    @property
    def slots(self) -> int:
        """Slots below the highest one in use, and it."""
        return max(self._slots, default=-1) + 1

    @property
    def room(self) -> tuple[int, int]:
        """Slots, and rows of each, that memory is allocated for."""
        return 0, 0

    def resize(self, slots: int, rows: int) -> None:
        """Allocate for exactly so many slots and rows; what is in use must fit. Nothing is done
        where memory is not allocated in this way.
        """
        return

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; 0 if that is not known."""
        return 0

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself. For tests and idle time."""
        for number, state in self._slots.items():
            assert len(state.tail_ids) == len(state.tail_parents) == len(state.tail_depths), number
            for row, parent in enumerate(state.tail_parents):
                assert -1 <= parent < row, (number, state.tail_parents)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of keys and values that are allocated."""

    @abstractmethod
    def _reserve(self, slots: int, rows: int) -> None:
        """Make room for ``slots`` slots of ``rows`` rows each, keeping what is stored."""

    def _copy(self, slot: int, start: int, stop: int) -> Any:
        raise NotImplementedError(f"{type(self).__name__} copies no rows")

    def _paste(self, slot: int, start: int, part: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} copies no rows")

    @abstractmethod
    def _move(self, slot: int, rows: Sequence[int], start: int) -> None:
        """Copy storage rows (ascending, each >= its destination) to ``start, start + 1, ...``."""
