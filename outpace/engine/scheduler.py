"""Which sequences run in the next pass.

Sequences join and leave between passes. Those whose prompts are not read yet go first, all of them
in one pass per chunk, so that they can decode with the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from outpace.engine.sequence import Sequence as Running
from outpace.step import Machine, prefill, step


class Scheduler:
    """A batch that sequences enter and leave.

    Args:
        machine: its cache holds a slot for every sequence that joins, with a prefix of its
            prompt, and its drafters are those that the sequences name.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.active: list[Running] = []
        """Sequences that are not finished, in the order in which they joined."""

    def join(self, row: Running) -> None:
        """Let a sequence, not finished, take part from the next pass on."""
        self.active.append(row)

    def advance(self) -> list[Running]:
        """Run one pass.

        Returns:
            The sequences that took part in it; the finished ones among them have left. Between
            passes every sequence is consistent, so it is safe to stop for good.
        """
        reading = [row for row in self.active if row.new_tokens == 0]
        part = reading or list(self.active)
        with torch.inference_mode():
            if reading:
                prefill(self.machine, part)
            else:
                step(self.machine, part)
        self.active = [row for row in self.active if not row.finished]
        return part


def run(
    machine: Machine, sequences: Iterable[Running], batch: int | None = None
) -> Iterator[list[Running]]:
    """Run sequences to their ends.

    Args:
        machine: see ``Scheduler``.
        sequences: taken one by one, as soon as there is room for another.
        batch: most sequences at a time; None takes all at once.

    Yields:
        After every pass, the sequences that took part in it.
    """
    waiting = iter(sequences)
    scheduler = Scheduler(machine)
    more = True
    while True:
        while more and (batch is None or len(scheduler.active) < batch):
            row = next(waiting, None)
            if row is None:
                more = False
            else:
                scheduler.join(row)
        if not scheduler.active:
            return
        yield scheduler.advance()
