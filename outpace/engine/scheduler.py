"""Chunked prefill: which sequences run in the next pass.

    prefill   a chunk of prompt tokens, at least half of it of the prompt that came first
    decode    a step of all sequences whose prompt is in the cache

One pass does both, so weights are read once. Where rows depend on their neighbours to the last bit,
the two alternate. Either way a long prompt delays the others by one chunk per step. The chunk grows
with the tokens that a step brings, up to 4 times: otherwise drafts would starve the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch

from outpace.engine.sequence import ActiveSequence
from outpace.machine import Machine
from outpace.step import step

_MOST_CHUNKS = 4
"""Chunks of one pass: so many while nobody decodes, and at most so many otherwise."""
_IN_A_ROW = 7
"""Steps in a row that prompts take part in. The next one tells policies what prompts cost."""


class Scheduler:
    """A batch that sequences enter and leave.

    Args:
        machine: its cache holds a slot for every sequence that joins, with a prefix of its
            tokens, and its drafters are those that the sequences name. Beside sequences that
            decode ``machine.chunk`` tokens are read for each that their last step brought them on
            average, at most four times as many.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.active: list[ActiveSequence] = []
        """Sequences that are not finished, in the order in which they joined."""
        self._in_a_row = 0
        """Passes over prompts since the last one without."""
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
        together = self.machine.target.equal_rows
        if decoding and self._in_a_row >= (_IN_A_ROW if together else 1):
            reading = []
        self._in_a_row = self._in_a_row + 1 if reading else 0
        return self._pass([] if reading and not together else decoding, reading, self._most(decoding))

    def advance_one(self, row: ActiveSequence) -> None:
        """Run one pass for one sequence alone."""
        self._wake(row)  # the pass that read the last of its text may have failed behind its commit
        reading = [row] if row.reading else []
        self._pass([] if reading else [row], reading, self.machine.chunk)

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
        chunks = min(max(1.0, self._emitted), _MOST_CHUNKS) if decoding else _MOST_CHUNKS
        return round(self.machine.chunk * chunks)

    def _left_to_read(self, row: ActiveSequence) -> int:
        return row.goal - self.machine.cache.length(row.slot)

    def _pass(
        self, decoding: list[ActiveSequence], reading: list[ActiveSequence], most: int
    ) -> list[ActiveSequence]:
        count = self._chunks(reading, most) if reading else {}
        before = sum(row.new_tokens for row in decoding)
        ends = [(row, self.machine.cache.length(row.slot) + count[row]) for row in reading if count[row]]
        with torch.inference_mode():
            step(self.machine, decoding, ends)
        if decoding:
            self._emitted = (sum(row.new_tokens for row in decoding) - before) / len(decoding)
        for row, _ in ends:
            self._wake(row)
        if any(row.finished for row in self.active):
            self.active = [row for row in self.active if not row.finished]
        return [*decoding, *[row for row, _ in ends]]

    def _chunks(self, rows: list[ActiveSequence], most: int) -> dict[ActiveSequence, int]:
        """Tokens that each reads next: at least half of them of the prompt that came first, the rest of
        the shortest. A short prompt does not wait long behind a long one.
        """
        left = {row: self._left_to_read(row) for row in rows}
        first, *others = rows
        for_others = min(most // 2, sum(left[row] for row in others))
        count = {first: min(left[first], most - for_others)}
        most -= count[first]
        for row in sorted(others, key=left.__getitem__):
            count[row] = min(left[row], most)
            most -= count[row]
        return count

    def _wake(self, row: ActiveSequence) -> None:
        if row.behind and self.machine.cache.length(row.slot) == row.goal:
            row.behind, row.members = False, row.all_members


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
