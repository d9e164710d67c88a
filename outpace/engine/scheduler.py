"""Which sequences run in the next pass.

Sequences of one call start together and leave when they finish; prompts are read first, in
chunks, all rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from outpace.engine.sequence import Sequence as Running
from outpace.step import Machine, prefill, step


def run(machine: Machine, sequences: Sequence[Running]) -> Iterator[list[Running]]:
    """Run sequences to their ends.

    Args:
        machine: its cache holds a slot for every sequence, with a prefix of its prompt.
        sequences: none of them finished.

    Yields:
        After every pass, the sequences that took part in it. Stopping early is safe: every
        sequence is consistent between passes.
    """
    active = list(sequences)
    while active:
        reading = [row for row in active if row.new_tokens == 0]
        part = reading or active
        with torch.inference_mode():  # not around the yield: it would leak into the reader's code
            if reading:
                prefill(machine, part)
            else:
                step(machine, part)
        yield part
        active = [row for row in active if not row.finished]
