"""Times of passes that write past the caches, as parts of those that do not (docs/how/passes.md).

    python tools/apart.py --dtype bfloat16 --seconds 60

Both take turns, and passes between them say whether the cores have a cache in common just then.
"""

import argparse
import ctypes
import statistics
import sys
import time

from outpace import Engine
from outpace.analysis.cost import filled, timed
from outpace.kernels.compiled import library

ROWS, CONTEXT, LISTENING, TURNS = (1, 2, 4, 6, 8), 400, 17, 3
"""Passes of a row count, positions before them, passes of which one is listened to, turns in between."""


def main() -> None:
    """Time passes until the seconds are over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    target = Engine.load("smollm2-135m", dtype=given.dtype, drafter="none").target
    cache, slots = filled(target, CONTEXT, 1, max(ROWS))
    passes = {rows: timed(target, cache, slots, rows) for rows in ROWS}
    code = library()
    if code is None:
        sys.exit("passes are not compiled here")
    apart = ctypes.c_int.in_dll(code, "outpace_apart")

    def heard() -> int:
        apart.value = -1  # no pass writes this
        for _ in range(2 * LISTENING):
            passes[ROWS[-1]]()
        return apart.value

    found: dict[int, list[tuple[int, float, float]]] = {0: [], 1: []}
    end, before = time.monotonic() + given.seconds, heard()
    while time.monotonic() < end:
        took = []
        for turn in range(TURNS):
            for rows in ROWS:
                both = [0.0, 0.0]
                for forced in (0, 1) if turn % 2 else (1, 0):
                    apart.value = forced
                    both[forced] = passes[rows]()
                took.append((rows, both[0], both[1]))
        after = heard()
        if before == after in found:
            found[after] += took
        before = after
    for state, name in enumerate(("a cache in common", "no cache in common")):
        for rows in ROWS:
            some = [(plain, past) for count, plain, past in found[state] if count == rows]
            if some:
                plain = 1e3 * statistics.median(plain for plain, _ in some)
                share = statistics.median(past / plain for plain, past in some)
                print(f"{name}, {rows} rows: {plain:.2f} ms, past the caches {share:.3f} of it ({len(some)})")


if __name__ == "__main__":
    main()
