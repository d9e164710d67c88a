"""Measure what a store shared over requests brings to `suffix`: tokens per pass, with it and without.

    python tools/shared_store.py [--model smollm2-135m] [--max-new-tokens 64] [--json]

Two kinds of traffic, made here, greedy, one request after the other on a fresh store:

    same kind   records of like shape are asked for, from texts that differ
    agents      several agents with the same tools; each turn brings a result and asks for a call

Passes are counted, not timed, so the figures do not depend on the machine. The first requests have
nothing to look up; the last column is the last third of them.

Paper: Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975, whose agents these loops imitate.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from pages import tool

from outpace import Engine
from outpace.bench.cases import fitting
from outpace.bench.workloads import Prompt
from outpace.engine.results import Counters

SPECS = {"none": "none", "own text": "suffix", "shared store": "suffix[shared=true]"}
PEOPLE = (
    ("Anna Keller", "nurse", "Bern", 34),
    ("Omar Haddad", "baker", "Tunis", 51),
    ("Lucia Rossi", "teacher", "Parma", 42),
    ("Kenji Mori", "welder", "Osaka", 29),
    ("Sofia Lund", "pilot", "Bergen", 38),
    ("Daniel Okoye", "lawyer", "Lagos", 46),
    ("Mina Farah", "farmer", "Berbera", 57),
    ("Peter Novak", "carpenter", "Brno", 33),
    ("Ines Silva", "chemist", "Porto", 40),
    ("Tom Baker", "driver", "Leeds", 25),
    ("Ruth Adler", "painter", "Graz", 62),
    ("Ivan Petrov", "miner", "Pernik", 48),
)
TASKS = ("apples", "batteries", "candles", "drills", "envelopes", "forks")
TURNS = ("Result: {n} {item} are in store 1.", "Result: {n} {item} are in store 2.", "Result: ordered.")
TOOLS = (
    "You manage supplies. Answer with one JSON object and nothing else. "
    'Example: {{"thought": "I look into store 1 first.", "tool": "count", '
    '"arguments": {{"item": "{item}", "store": 1}}}}. The tools are count, order and finish.'
)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one kind of traffic and one drafter."""

    traffic: str
    drafter: str
    requests: int
    tokens: int
    passes: int
    emitted: float
    """Tokens per pass."""
    emitted_late: float
    """The same over the last third of the requests."""


def same_kind(engine: Engine, spec: str, most: int) -> Iterator[Counters]:
    """One request per person, all for the same record."""
    for name, work, city, age in PEOPLE:
        text = (
            f"{name} has worked as a {work} in {city} for years and turned {age} last week. Write a JSON "
            'record with the keys "name", "profession", "city", "age" and "summary".'
        )
        yield _answer(engine, spec, [{"role": "user", "content": text}], most)[0]


def agents(engine: Engine, spec: str, most: int) -> Iterator[Counters]:
    """One conversation per task; what the model wrote stays in it."""
    for number, item in enumerate(TASKS):
        talk = [
            {"role": "system", "content": TOOLS.format(item=item)},
            {"role": "user", "content": f"See that {10 + number} {item} are there. Your first call?"},
        ]
        for turn in ("", *TURNS):
            if turn:
                said = turn.format(n=number + 3, item=item)
                talk.append({"role": "user", "content": f"{said} Your next call?"})
            counters, text = _answer(engine, spec, talk, most)
            talk.append({"role": "assistant", "content": text})
            yield counters


def _answer(engine: Engine, spec: str, talk: list[dict[str, str]], most: int) -> tuple[Counters, str]:
    ((_, ids),) = fitting(engine, [Prompt(id="one", category="talk", messages=tuple(map(dict, talk)))], most)
    answer = engine.generate(list(ids), drafter=spec, max_new_tokens=most, temperature=0.0)
    return answer.counters, answer.text


def measured(engine: Engine, most: int) -> Iterator[Figures]:
    """Run every kind of traffic with every drafter; a kind has a store of its own."""
    for name, traffic in (("same kind", same_kind), ("agents", agents)):
        for title, spec in SPECS.items():
            # The capacity tells the stores apart, as an engine keeps one drafter per spec.
            own = spec.replace("true", f"true capacity={(1 << 20) + (traffic is agents)}")
            counts = list(traffic(engine, own, most))
            late = counts[-(len(counts) // 3) :]
            tokens, passes = _totals(counts)
            yield Figures(
                name, title, len(counts), tokens, passes, tokens / passes, _totals(late)[0] / _totals(late)[1]
            )


def _totals(counts: list[Counters]) -> tuple[int, int]:
    """Tokens and passes; the first token of an answer comes with its prompt."""
    return sum(one.new_tokens - 1 for one in counts), sum(one.passes for one in counts)


@tool
def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    engine = Engine.load(args.model, drafter="none")
    rows = []
    for row in measured(engine, args.max_new_tokens):
        rows.append(asdict(row))
        if not args.json:
            print(
                f"{row.traffic:10} {row.drafter:13} {row.requests:3} requests {row.tokens:5} tokens "
                f"{row.passes:5} passes {row.emitted:.2f} a pass, {row.emitted_late:.2f} late",
                flush=True,
            )
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    sys.exit(main())
