"""Chunked prefill: which sequences run in the next pass.

    prefill   a chunk of prompt tokens, at least half of it of the prompt that came first
    decode    a step of all sequences whose prompt is in the cache

The two alternate, so a long prompt delays the others by one chunk per step. The chunk grows with the
tokens that a step brings, up to 4 times. Otherwise drafts would starve the queue, and a large batch would
not stay full. Prefill has passes of its own, because results of small passes do not depend on their
neighbours to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch

from outpace.engine.sequence import ActiveSequence
from outpace.machine import Machine
from outpace.step import prefill, step

_MOST_CHUNKS = 4
"""Chunks of one prefill pass: so many while nobody decodes, and at most so many otherwise."""
_FED = 16
"""Sequences that one chunk per step keeps busy. 64 clients get 1.15 times as much with more beside more, and
their first tokens come in half the time."""


class Scheduler:
    """A batch that sequences enter and leave.

    Args:
        machine: its cache holds a slot for every sequence that joins, with a prefix of its
            tokens, and its drafters are those that the sequences name. Beside sequences that
            decode ``machine.chunk`` tokens are read for each that their last step brought them on
            average. Beside many it is more, and four times as many at most.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.active: list[ActiveSequence] = []
        """Sequences that are not finished, in the order in which they joined."""
        self._turn_to_read = True
        self._emitted = 1.0
        """Tokens per sequence that the last step brought."""

    def join(self, row: ActiveSequence) -> None:
        """Let a sequence, not finished, take part from the next pass on."""
        self.active.append(row)
        self._wake(row)

    def leave(self, row: ActiveSequence) -> None:
        """Let a sequence take no part any more; its slot and its states stay as they are."""
        self.active.remove(row)

    def advance(self) -> list[ActiveSequence]:
        """Run one pass.

        Returns:
            The sequences that took part in it; the finished ones among them have left. Between
            passes every sequence is consistent, so it is safe to stop for good.
        """
        reading, decoding = self._parts()
        if reading and (self._turn_to_read or not decoding):
            self._turn_to_read = False
            return self._read(reading, self._most(decoding))
        self._turn_to_read = True
        return self._run(decoding)

    def advance_one(self, row: ActiveSequence) -> None:
        """Run one pass for one sequence alone."""
        self._wake(row)  # the pass that read the last of its text may have failed behind its commit
        if row.reading:
            self._read([row], self.machine.chunk)
        else:
            self._run([row])

    @property
    def busy_reading(self) -> bool:
        """Whether the next pass over prompts is full without another one."""
        reading, decoding = self._parts()
        return sum(map(self._left_to_read, reading[1:])) >= self._most(decoding)

    def _parts(self) -> tuple[list[ActiveSequence], list[ActiveSequence]]:
        """Those that read and those that decode."""
        reading = [row for row in self.active if row.reading]
        return reading, [row for row in self.active if not row.reading]

    def _most(self, decoding: list[ActiveSequence]) -> int:
        chunks = max(1.0, self._emitted) * max(1.0, len(decoding) / _FED)
        return round(self.machine.chunk * min(chunks if decoding else _MOST_CHUNKS, _MOST_CHUNKS))

    def _left_to_read(self, row: ActiveSequence) -> int:
        return row.goal - self.machine.cache.length(row.slot)

    def _read(self, rows: list[ActiveSequence], most: int) -> list[ActiveSequence]:
        """Read the next chunks: at least half of them of the prompt that came first, the rest of the
        shortest. A short prompt does not wait long behind a long one.
        """
        left = {row: self._left_to_read(row) for row in rows}
        first, *others = rows
        for_others = min(most // 2, sum(left[row] for row in others))
        count = {first: min(left[first], most - for_others)}
        most -= count[first]
        for row in sorted(others, key=left.__getitem__):
            count[row] = min(left[row], most)
            most -= count[row]
        part = [row for row in rows if count[row]]
        ends = [self.machine.cache.length(row.slot) + count[row] for row in part]
        with torch.inference_mode():
            prefill(self.machine, part, ends)
        for row in part:
            self._wake(row)
        return self._without_finished(part)

    def _run(self, rows: list[ActiveSequence]) -> list[ActiveSequence]:
        before = sum(row.new_tokens for row in rows)
        with torch.inference_mode():
            step(self.machine, rows)
        self._emitted = (sum(row.new_tokens for row in rows) - before) / len(rows)
        return self._without_finished(rows)

    def _wake(self, row: ActiveSequence) -> None:
        if row.behind and self.machine.cache.length(row.slot) == row.goal:
            row.behind, row.members = False, row.all_members

    def _without_finished(self, part: list[ActiveSequence]) -> list[ActiveSequence]:
        if any(row.finished for row in part):
            self.active = [row for row in self.active if not row.finished]
        return part


def run(
    machine: Machine, sequences: Iterable[ActiveSequence], batch: int | None = None
) -> Iterator[list[ActiveSequence]]:
    """Run sequences to their ends.

    Args:
        sequences: taken one by one, as soon as there is room for another.
        batch: most sequences at a time; None takes all at once.

    Yields:
        After every pass, the sequences that took part in it.

    Raises:
        Exception: whatever broke the text of a sequence.
    """
    waiting = iter(sequences)
    scheduler = Scheduler(machine)
    while True:
        for row in islice(waiting, None if batch is None else batch - len(scheduler.active)):
            scheduler.join(row)
        if not scheduler.active:
            return
        part = scheduler.advance()
        for row in part:
            if row.error is not None:
                raise row.error
        yield part
