"""A large bounded history of token ids in which any recent phrase is found in microseconds.

    tokens   ... | 7 4 4 9 2 6 | 5 4 4 9 1 ...         requests, parted by -1
    head     bucket of "4 4 9" -> its newest place      one table per phrase length
    prev     place -> an older place of that bucket

For phrases of 2, 4, 8 and 16 tokens a hash table leads to their newest place. From there a chain
leads to older ones, as in the compressors of the LZ family. A look-up walks the chain of the
longest phrase that is found. It compares what stands before each place with the text at hand. It
gives the newest places, and how far they agree.

Why not a suffix automaton or a suffix array? The automaton answers in one step per token. But in
Python it takes 600 bytes per token and two microseconds to add one, and nothing can be removed
from it. A sorted array has to be merged again and again as text arrives, and a search in it reads
the text twenty times per segment. Chains take the text as it comes, a request at a time, in a few
vectorised operations. They forget the oldest by cutting them off. They cost 36 bytes per token of
room, which doubles as it fills. What they give up: the longest match is exact among the newest
`SAMPLES` places only.

Figures: ``python tools/lookup_figures.py``.
Source: hash chains as in LZ77 compressors (RFC 1951, section 4); the use, SuffixDecoding,
arXiv:2411.04975, whose global tree this stands for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outpace.methods.lookup.files import read, write

LOG = logging.getLogger("outpace.history")
LEVELS = (16, 8, 4, 2)
"""Phrase lengths that are indexed, longest first."""
SAMPLES = 16
"""Places that a look-up gives at most."""
STEPS = 32
"""Links of a chain that a look-up follows at most; some lead to phrases of equal hash."""
LONGEST = 32
"""Tokens that are compared at a place."""
SMALLEST = 4096
"""Tokens for which room is made at first; it doubles as needed."""
SECONDS = 60.0
"""From one writing of a file to the next, at least."""
_CHUNK = 1 << 15
_BASE = 0x9E3779B97F4A7C15
_SPREAD = 0xD6E8FEB86659FD93
_WORD = (1 << 64) - 1
_KIND = "history"
_REMEDY = "delete it, or name another file as store"


class History:
    """Texts of past requests. Single-threaded.

    Args:
        capacity: tokens kept at most, separators included; the oldest quarter goes when it is
            full.
    """

    def __init__(self, capacity: int = 1 << 20) -> None:
        self.capacity = max(SMALLEST, capacity)
        self.size = 0
        """Tokens held, with one separator per text."""
        self._make(SMALLEST, np.zeros(0, np.int32))

    @property
    def nbytes(self) -> int:
        return int(self._tokens.nbytes + self._head.nbytes + self._prev.nbytes)

    def add(self, text: Sequence[int]) -> None:
        """Take in one text; what is longer than half the capacity loses its beginning.

        Cost: about a microsecond per token at some hundred tokens per call. Now and then the
        tables are made anew, which takes about a second per million tokens.
        """
        text = text[-(self.capacity // 2) :]
        if len(text) < 2:
            return
        start, stop = self.size, self.size + len(text) + 1
        if stop > len(self._tokens):
            self._make_room(len(text) + 1)
            start, stop = self.size, self.size + len(text) + 1
        self._tokens[start : stop - 1] = text
        self._tokens[stop - 1] = -1
        self.size = stop
        self._index(start, stop)

    def find(self, text: Sequence[int]) -> list[tuple[int, int]]:
        """Places after which the text may go on as it did there.

        Args:
            text: its last `LONGEST` tokens are read.

        Returns:
            (place, match): the newest places of the longest indexed phrase that is found, newest
            first; ``tokens[place + 1]`` followed there, and ``match`` tokens agree. Valid until
            the next ``add``.
        """
        for level, bucket in self._buckets(text):
            tokens, prev = self.tokens, self._chains[level]
            place = self._heads[level][bucket]
            found: list[tuple[int, int]] = []
            limit = min(LONGEST, len(text))
            for _ in range(STEPS):
                if place < 0 or len(found) == SAMPLES:
                    break
                match, most = 0, min(limit, place + 1)
                while match < most and tokens[place - match] == text[-1 - match]:
                    match += 1
                if match >= LEVELS[level]:
                    found.append((place, match))
                place = prev[place]
            if found:
                return found
        return []

    def packed(self) -> bytes:
        """The tokens as a file holds them. Cost: a copy."""
        return self._tokens[: self.size].astype("<i4").tobytes()

    def save(self, path: Path, vocabulary: str) -> None:
        """Write the tokens; the tables are made again when they are read.

        Raises:
            OSError: they cannot be written; a file that was there stays.
        """
        _to_file(path, vocabulary, self.packed())

    @classmethod
    def load(cls, path: Path, vocabulary: str, capacity: int) -> History:
        """Read what ``save`` wrote; more than ``capacity`` loses its beginning.

        Raises:
            ModelError: damaged, or made for another vocabulary.
        """
        history = cls(capacity)
        _, data = read(path, _KIND, vocabulary, _REMEDY)
        tokens = np.frombuffer(data, "<i4").astype(np.int32)
        if len(tokens) > history.capacity:
            tokens = _from_separator(tokens, len(tokens) - history.capacity)
        room = SMALLEST
        while room < len(tokens):
            room *= 2
        history._make(min(room, history.capacity), tokens)
        return history

    def _make_room(self, wanted: int) -> None:
        """Double the tables, or forget the oldest texts once they are as large as allowed."""
        kept, room = self._tokens[: self.size], len(self._tokens)
        while room < min(self.size + wanted, self.capacity):
            room *= 2
        room = min(room, self.capacity)
        if self.size + wanted > room:
            kept = _from_separator(kept, max(self.size // 4, self.size + wanted - room))
        self._make(room, kept.copy())

    def _make(self, room: int, tokens: npt.NDArray[np.int32]) -> None:
        """New tables for ``room`` tokens, holding these."""
        self._shift = 64 - max(8, (room - 1).bit_length())
        self._tokens = np.full(room, -1, np.int32)
        self._head = np.full((len(LEVELS), 1 << (64 - self._shift)), -1, np.int32)
        self._prev = np.full((len(LEVELS), room), -1, np.int32)
        # Plain numbers are read several times faster through these.
        self.tokens: Sequence[int] = self._tokens.data
        """Ids; -1 ends a text. Read only."""
        self._heads = [row.data for row in self._head]
        self._chains = [row.data for row in self._prev]
        self._tokens[: len(tokens)] = tokens
        self.size = len(tokens)
        self._index(0, self.size)

    def _buckets(self, text: Sequence[int]) -> list[tuple[int, int]]:
        """(level, bucket) of the phrases that end the text, longest first; as ``_index``."""
        out, total, power = [], 0, 1
        for count in range(1, min(LEVELS[0], len(text)) + 1):
            total = (total + (text[-count] + 1) * power) & _WORD
            power = power * _BASE & _WORD
            if count in LEVELS:
                out.append((LEVELS.index(count), (total * _SPREAD & _WORD) >> self._shift))
        return out[::-1]

    def _index(self, start: int, stop: int) -> None:
        """Enter the phrases that end at these places and are followed by something."""
        for first in range(start, stop, _CHUNK):
            last = min(first + _CHUNK, stop)
            before = max(0, first - LEVELS[0])
            tokens = self._tokens[before:last]
            count = last - first
            place = np.arange(len(tokens))
            parted = np.maximum.accumulate(np.where(tokens < 0, place, -1))
            since = (place - parted)[-count:]  # tokens of this text up to here
            goes_on = np.zeros(count, bool)
            then = self._tokens[first + 1 : min(last + 1, self.size)]
            goes_on[: len(then)] = then >= 0
            value = (tokens + 1).astype(np.uint64)
            total, power = np.zeros(count, np.uint64), 1
            for back in range(LEVELS[0]):
                skip = len(tokens) - count - back
                part = value[max(0, skip) : max(0, len(tokens) - back)]
                total[count - len(part) :] += part * np.uint64(power)
                power = power * _BASE & _WORD
                if back + 1 in LEVELS:
                    whole = np.flatnonzero(goes_on & (since > back))
                    bucket = (total[whole] * np.uint64(_SPREAD)) >> np.uint64(self._shift)
                    level = LEVELS.index(back + 1)
                    self._chain(level, bucket.astype(np.int64), whole + first)

    def _chain(self, level: int, bucket: Any, place: Any) -> None:
        """Put places at the heads of their chains, in order."""
        if not len(place):
            return
        order = np.argsort(bucket, kind="stable")
        bucket, place = bucket[order], place[order]
        newest = np.append(bucket[1:] != bucket[:-1], True)
        older = self._head[level][bucket]
        older[1:] = np.where(newest[:-1], older[1:], place[:-1])
        self._prev[level][place] = older
        self._head[level][bucket[newest]] = place[newest]


class Keeper:
    """Writes a history to its file now and then, on a thread of its own, and at the end.

    So nobody waits for a disk; who breaks down loses the texts of some `SECONDS`. Where the file
    cannot be written, the log is told once, and the history goes on in memory.

    Args:
        now: a clock, in seconds.
    """

    def __init__(
        self, history: History, path: Path, vocabulary: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._history, self._path, self._vocabulary = history, path, vocabulary
        self._now, self._due = now, now()
        self._writer: threading.Thread | None = None
        self._unsaved = self._told = False

    def grown(self) -> None:
        """The history has taken in a text: write it if it is time to. Cost: then a copy of it."""
        self._unsaved = True
        busy = self._writer is not None and self._writer.is_alive()
        if busy or self._now() < self._due:
            return
        self._due = self._now() + SECONDS
        writer = threading.Thread(target=self._write, args=(self._history.packed(),), name="outpace-history")
        self._unsaved = False  # before the writer runs: what it cannot write is unsaved again
        try:
            writer.start()
        except RuntimeError:  # there can be no more threads; later, then
            self._unsaved = True
            return
        self._writer = writer

    def close(self) -> None:
        """Write what is not written yet, on the caller's thread."""
        if self._writer is not None:
            self._writer.join()
        if self._unsaved:
            self._unsaved = False
            self._write(self._history.packed())

    def _write(self, data: bytes) -> None:
        try:
            _to_file(self._path, self._vocabulary, data)
        except OSError as error:
            self._unsaved = True
            if not self._told:
                LOG.warning(
                    "the store %s cannot be written (%s); what it would hold is remembered "
                    "until the process ends",
                    self._path,
                    error.strerror or error,
                )
            self._told = True


def _to_file(path: Path, vocabulary: str, data: bytes) -> None:
    write(path, _KIND, vocabulary, {"tokens": len(data) // 4}, data)


def _from_separator(tokens: npt.NDArray[np.int32], at_least: int) -> npt.NDArray[np.int32]:
    """The tokens less whole texts at the beginning, ``at_least`` so many."""
    ends = np.flatnonzero(tokens[at_least - 1 :] < 0)
    return tokens[at_least + int(ends[0]) :] if len(ends) else tokens[:0]
