"""Measure the index of past requests: time to take in text, time of a look-up, memory.

    python tools/lookup_figures.py [--tokens 1000000] [--request 600] [--lookups 2000]

Text: random requests that repeat phrases of earlier ones, as traffic does. Times are wall clock,
one thread; memory is that of the tables, and the peak of all allocations while they were filled.
For comparison, the same per token of the automaton that a running sequence uses.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterator

from outpace.methods.lookup.automaton import SuffixAutomaton
from outpace.methods.lookup.history import History

VOCABULARY = 49152


def traffic(tokens: int, request: int, seed: int) -> Iterator[list[int]]:
    """Requests of ``request`` tokens each: phrases of which half were said before."""
    coins = random.Random(seed)
    phrases: list[list[int]] = []
    for _ in range(tokens // request):
        text: list[int] = []
        while len(text) < request:
            if phrases and coins.random() < 0.5:
                text += coins.choice(phrases)
            else:
                # Squared, so that some tokens are far more common than others.
                fresh = [int(VOCABULARY * coins.random() ** 2) for _ in range(coins.randint(3, 30))]
                phrases.append(fresh)
                text += fresh
        yield text[:request]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--request", type=int, default=600)
    parser.add_argument("--lookups", type=int, default=2000)
    args = parser.parse_args()
    requests = list(traffic(args.tokens, args.request, seed=0))
    total = sum(map(len, requests))

    history = History(capacity=2 * args.tokens)
    start = time.perf_counter()
    for request in requests:
        history.add(request)
    filled = time.perf_counter() - start
    print(
        f"take in   {total} tokens in {len(requests)} requests: {filled:.2f} s, "
        f"{filled / total * 1e6:.2f} us per token"
    )

    coins = random.Random(1)
    times, matches = [], []
    for _ in range(args.lookups):
        text = coins.choice(requests)
        end = coins.randrange(20, len(text))
        query = text[max(0, end - 32) : end]
        start = time.perf_counter()
        found = history.find(query)
        times.append(time.perf_counter() - start)
        matches.append(max((match for _, match in found), default=0))
    ordered = sorted(times)
    print(
        f"look up   median {statistics.median(times) * 1e6:.1f} us, "
        f"99 of 100 below {ordered[len(ordered) * 99 // 100] * 1e6:.1f} us; "
        f"found {sum(map(bool, matches)) / len(matches):.0%}, "
        f"median match {statistics.median(matches)} tokens"
    )

    tracemalloc.start()
    again = History(capacity=2 * args.tokens)
    for request in requests:
        again.add(request)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"memory    {again.nbytes / total:.0f} bytes per token, peak while filling {peak / total:.0f}")

    text = [token for request in requests[:10] for token in request]
    tracemalloc.start()
    automaton = SuffixAutomaton(text)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    start = time.perf_counter()
    SuffixAutomaton(text)
    took = time.perf_counter() - start
    print(
        f"automaton {took / len(text) * 1e6:.2f} us and {held / len(text):.0f} bytes per token, "
        f"{len(automaton.next) / len(text):.2f} states"
    )


if __name__ == "__main__":
    main()
