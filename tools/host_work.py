"""Measure what a step of one sequence takes outside of compiled code: Python, sampling, records.

    python tools/host_work.py none prompt_lookup auto
    python tools/host_work.py none eagle3 --temperature 0.8

Prints per method the median step and the median and the fastest tenth of what is left of steps
without the calls of compiled code, those of the target and those of drafters. A median counts on a
quiet machine only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from outpace import Engine, SamplingParams
from outpace.kernels.compiled import library
from outpace.types import StepRecord

PROMPT = "Question: Tell me about the history of the city of Paris in some detail.\nAnswer:"
TOKENS, ROUNDS = 96, 4


def timed(run: Callable[..., int], inside: list[float], *given: object) -> int:
    """Call compiled code, and add the seconds that it took."""
    began = time.perf_counter()
    result = run(*given)
    inside[0] += time.perf_counter() - began
    return result


def main() -> None:
    """Measure methods, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["none"], help="method specs")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the answers")
    asked = parser.parse_args()
    code, inside = library(), [0.0]
    if code is None:
        sys.exit("passes are not compiled here")
    for name in "run levels trees product norm gate".split():
        setattr(code, f"outpace_{name}", partial(timed, getattr(code, f"outpace_{name}"), inside))
    for method in asked.methods:
        engine = Engine.load("smollm2-135m", drafter=method)
        marks: list[tuple[float, float]] = []
        guesses: list[int] = []

        def watch(record: StepRecord, marks: list = marks, guesses: list = guesses) -> None:
            marks.append((time.perf_counter(), inside[0]))
            guesses.append(sum(row.drafted for row in record.rows))

        engine.listeners.append(watch)
        steps: list[tuple[float, float]] = []
        for turn in range(ROUNDS):
            marks.clear()
            params = SamplingParams(temperature=asked.temperature, max_new_tokens=TOKENS, ignore_eos=True)
            engine.generate(PROMPT, params)
            if turn:
                steps += [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks)]
        if method != "none" and not any(guesses):
            print(f"{method}: no guess was made, so this is no measurement of it")
            continue
        host = sorted(1e3 * (whole - within) for whole, within in steps)
        middle, few = statistics.median(host), host[len(host) // 10]
        step = 1e3 * statistics.median(whole for whole, _ in steps)
        print(
            f"{method}: {len(steps)} steps of {step:.2f} ms, outside {middle:.3f} ms, fastest tenth {few:.3f}"
        )


if __name__ == "__main__":
    main()
