"""Measure what learning while serving brings on a topic that the drafter was not trained on.

    python tools/learning_figures.py --model smollm2-135m --out learning \
        --drafter 'draft_model[model=FOLDER]' [--requests 2000] [--max-new-tokens 12]

Two servers get one stream of requests, one with ``--learn`` and one without. The requests come in
an open loop at half of the rate that the second server was measured to answer. Blocks of requests
take turns: while one server answers its block, the other is held, so that neither takes time from
the other, and learning has the idle time of its own blocks alone. Both answer some other prompts
first, so that neither has to allocate while it is measured. The topic is code: beginnings of
functions of Python's standard library, each asked once; ``--workload`` gives other prompts.

Every block is printed and kept in OUT. The same command goes on where it was stopped: weights that
were learned are there, texts that were being learned from are not.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import random
import shlex
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from outpace.bench import provenance
from outpace.bench.formats import read_workload
from outpace.bench.load import Question, Reply, Server, Settings, closed_loop, connected, open_loop, poisson
from outpace.bench.workloads import Prompt
from outpace.cli.options import ModelOptions
from outpace.cli.started import Running, launched
from outpace.config import MethodSpec
from outpace.files import write_whole

Json = dict[str, Any]
SIDES = {"on": True, "off": False}
_LEFT_OUT = {"site-packages", "dist-packages", "test", "idlelib", "lib2to3"}
CLIENTS = 16
"""Of the closed loop that measures what a server can do."""


def functions(count: int, characters: int, seed: int) -> list[str]:
    """Beginnings of functions of the standard library, in an order that the seed names."""
    found: list[str] = []
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [*stdlib.glob("*.py")]
    for folder in stdlib.iterdir():
        if folder.is_dir() and folder.name not in _LEFT_OUT:
            files += folder.rglob("*.py")
    files.sort()
    random.Random(seed).shuffle(files)
    for file in files:
        found += _beginnings(file, characters)
        if len(found) >= 2 * count:
            break
    found = list(dict.fromkeys(found))
    random.Random(seed).shuffle(found)
    return found[:count]


def _beginnings(file: Path, characters: int) -> Iterator[str]:
    """Of every function that goes on: whole lines, about so many characters."""
    try:
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        text = "".join(lines[node.lineno - 1 : node.end_lineno])
        if len(text) >= 2 * characters:
            whole = text[:characters].rpartition("\n")[0]
            yield f"{whole}\n" if whole else text[:characters]


def questions(args: argparse.Namespace) -> list[Question]:
    """The stream."""
    if args.workload is not None:
        return chats(read_workload(args.workload)[: args.requests])
    texts = functions(args.requests, args.characters, args.seed)
    return [
        Question(id=str(i), path="/v1/completions", body={"prompt": text}) for i, text in enumerate(texts)
    ]


def chats(prompts: Sequence[Prompt]) -> list[Question]:
    """A question for every prompt."""
    return [
        Question(id=str(i), path="/v1/chat/completions", body={"messages": list(one.messages)})
        for i, one in enumerate(prompts)
    ]


class Measurement:
    """What was measured, on the disk as well."""

    def __init__(self, args: argparse.Namespace, asked: Sequence[Question]) -> None:
        self.args, self.asked = args, asked
        self.folder = Path(args.out)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self.folder / "blocks.jsonl"
        about = {
            "model": args.model,
            "dtype": args.dtype,
            "drafter": args.drafter,
            "seed": args.seed,
            "max_new_tokens": args.max_new_tokens,
            "block": args.block,
            "threads": args.threads,
            "requests": len(asked),
            "guesses": args.guesses,
            "prompts_digest": provenance.digest([[one.path, one.body] for one in asked]),
        }
        rows = [json.loads(line) for line in _lines(self._file)]
        if rows and rows[0]["about"] != about:
            sys.exit(f"{self._file} is of another measurement; name another --out")
        if not rows:
            rows = [{"about": about, **provenance.here(shlex.join(["python", *sys.argv]))}]
            self._write(rows[0])
        self.head, self.rows = rows[0], rows[1:]
        self.rate: float | None = next((r["rate"] for r in self.rows if "rate" in r), args.rate)

    def add(self, row: Json) -> None:
        """Keep a row."""
        self.rows.append(row)
        self._write(row)

    def _write(self, row: Json) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def of(self, side: str) -> dict[int, Json]:
        """Blocks of a side that are measured, by their numbers."""
        return {row["block"]: row for row in self.rows if row.get("side") == side}

    def report(self) -> Json:
        """Figures of the blocks that both sides have."""
        on, off = self.of("on"), self.of("off")
        both = sorted(on.keys() & off.keys())
        part = max(1, len(both) // 10)
        sides: Json = {}
        for name, blocks in (("on", on), ("off", off)):
            rows = [blocks[i] for i in both]
            each = [per for row in rows for per in row["seconds_per_token"]]
            sides[name] = {
                **{
                    f"{what}_{when}": _share(some, what)
                    for what in ("accepted", "checked")
                    for when, some in (("all", rows), ("before", rows[:part]), ("after", rows[-part:]))
                },
                "errors": sum(row["errors"] for row in rows),
                "seconds_per_token_p50": _percentile(each, 50),
                "seconds_per_token_p95": _percentile(each, 95),
            }
        slower = {
            f"{name}_ratio": _ratio(sides["on"][name], sides["off"][name])
            for name in ("seconds_per_token_p50", "seconds_per_token_p95")
        }
        return {
            **self.head,
            "requests_per_second": self.rate,
            "blocks": len(both),
            "edge": part,
            "requests": sum(on[i]["requests"] for i in both),
            **sides,
            **slower,
            "learned": self.learned(),
        }

    def learned(self) -> Json:
        """What the server that learns said of it at last."""
        return next((r["learned"] for r in reversed(self.rows) if r.get("learned")), {})


def _lines(file: Path) -> list[str]:
    """Whole lines; one that was being written when the process ended counts for nothing."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    kept = text[: text.rfind("\n") + 1]
    if kept != text:
        write_whole(file, kept)
    return kept.splitlines()


def _share(rows: Sequence[Json], what: str) -> float | None:
    """Accepted tokens over drafted ones, or over those that were checked: a chain is checked up to
    the first refusal.
    """
    over = sum(row["drafted" if what == "accepted" else "checked"] for row in rows)
    return sum(row["accepted"] for row in rows) / over if over else None


def _checked(counts: Json) -> int:
    """Guesses of one answer that were checked. A chain that was cut short by the end of the answer
    counts as if it had been refused, so the share is a little too low.
    """
    histogram: list[int] = counts.get("acceptance_histogram") or [0]
    whole = histogram[-1] if len(histogram) > 1 else 0
    found = sum(histogram) - whole + sum(i * n for i, n in enumerate(histogram))
    drafted: int | None = counts.get("num_draft_tokens")
    return found if drafted is None else min(found, drafted)


def _percentile(values: Sequence[float], part: int) -> float | None:
    return float(np.percentile(values, part)) if values else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


async def ask(
    server: Server, question: Question, settings: Settings, drafter: str, guesses: int | None
) -> Reply:
    """Send a request."""
    body = settings.body(question, drafter, 0)
    if guesses is not None:
        body["speculation"]["num_speculative_tokens"] = guesses
    return await server.ask(question.path, body, question.id)


async def capacity(
    address: str,
    asked: Sequence[Question],
    settings: Settings,
    drafter: str,
    guesses: int | None,
    count: int = 6 * CLIENTS,
) -> float:
    """Requests per second that a server answers to as many clients as it likes."""
    async with connected(address, key=None, seconds=600) as server:

        async def send(number: int) -> Reply:
            return await ask(server, asked[number % len(asked)], settings, drafter, guesses)

        began = time.perf_counter()
        replies = await closed_loop(send, count, CLIENTS)
        seconds = time.perf_counter() - began
    if wrong := next((reply.error for reply in replies if reply.error), None):
        sys.exit(f"the server does not answer: {wrong}")
    return count / seconds


async def block(
    measured: Measurement, number: int, side: str, address: str, settings: Settings, drafter: str
) -> Json:
    """Send one block of the stream to a server."""
    first = number * measured.args.block
    mine = measured.asked[first : first + measured.args.block]
    assert measured.rate is not None
    at = poisson(measured.rate, len(mine), measured.args.seed + number)
    async with connected(address, key=None, seconds=600) as server:

        async def send(i: int) -> Reply:
            return await ask(server, mine[i], settings, drafter, measured.args.guesses)

        replies = await open_loop(send, at)
        figures = (await server._client.get("/metrics")).text if side == "on" else ""
    good = [reply for reply in replies if reply.error is None]
    counts = [reply.metrics.get("speculative_decoding") or {} for reply in good]
    row = {
        "block": number,
        "side": side,
        "requests": len(replies),
        "errors": len(replies) - len(good),
        "drafted": sum(one.get("num_draft_tokens") or 0 for one in counts),
        "accepted": sum(one.get("num_accepted_draft_tokens") or 0 for one in counts),
        "checked": sum(_checked(one) for one in counts),
        "first_token_seconds": [reply.first_seconds for reply in good],
        "seconds_per_token": [per for reply in good if (per := reply.per_token) is not None],
    }
    learned = {
        line.partition("{")[0].removeprefix("outpace:learning_"): float(line.rpartition(" ")[2])
        for line in figures.splitlines()
        if line.startswith("outpace:learning_")
    }
    return {**row, "learned": learned} if learned else row


def run(measured: Measurement, servers: dict[str, Running], settings: Settings, drafter: str) -> None:
    """All blocks that are not measured yet, side by side."""
    args, total = measured.args, -(-len(measured.asked) // measured.args.block)
    short = sorted(read_workload("builtin"), key=lambda one: len(str(one.messages)))[:CLIENTS]
    for server in servers.values():  # the first requests allocate, and would count as slow
        server.go()
        asyncio.run(
            capacity(server.address, chats(short), settings, drafter, args.guesses, count=2 * CLIENTS)
        )
        server.hold()
    if measured.rate is None:
        servers["off"].go()
        most = asyncio.run(capacity(servers["off"].address, measured.asked, settings, drafter, args.guesses))
        servers["off"].hold()
        measured.rate = args.share * most
        measured.add({"rate": measured.rate, "capacity": most})
        print(f"{most:.2f} requests per second at most; the stream has {measured.rate:.2f}")
    print("figures of each block; those of the server that does not learn in brackets")
    print(
        f"{'requests':>9}  {'accepted':>14}  {'checked':>14}  {'ms per token p50':>16}  {'p95':>14}  learned",
        flush=True,
    )
    for number in range(total):
        for side in (("on", "off"), ("off", "on"))[number % 2]:
            if number in measured.of(side):
                continue
            servers[side].go()
            address = servers[side].address
            measured.add(asyncio.run(block(measured, number, side, address, settings, drafter)))
            servers[side].hold()
        on, off = measured.of("on")[number], measured.of("off")[number]
        p50, p95 = (
            [1e3 * (_percentile(row["seconds_per_token"], part) or 0.0) for row in (on, off)]
            for part in (50, 95)
        )
        told = on.get("learned", {})
        shares = (
            f"{_share([on], what) or 0:6.3f} ({_share([off], what) or 0:.3f})"
            for what in ("accepted", "checked")
        )
        times = (f"{one:7.1f} ({other:.1f})" for one, other in (p50, p95))
        cells = [f"{one:>14}" for one in (*shares, *times)]
        cells[2] = cells[2].rjust(16)
        print(
            f"{min((number + 1) * args.block, len(measured.asked)):9d}  {'  '.join(cells)}  "
            f"{told.get('versions_total', 0):.0f} versions, "
            f"{told.get('updates_total', 0):.0f} updates",
            flush=True,
        )


def summary(report: Json) -> str:
    """The figures in words."""
    on, off = report["on"], report["off"]

    def change(side: Json, what: str) -> str:
        return " -> ".join(
            "-" if side[f"{what}_{when}"] is None else f"{side[f'{what}_{when}']:.3f}"
            for when in ("before", "after")
        )

    def slower(part: str) -> str:
        values = [side[f"seconds_per_token_{part}"] for side in (on, off)]
        ratio = report[f"seconds_per_token_{part}_ratio"]
        if None in values or ratio is None:
            return f"{part} -"
        return f"{part} {1e3 * values[0]:.1f} and {1e3 * values[1]:.1f} ({ratio:.3f} x)"

    lines = [
        f"{report['requests']} requests, {report['requests_per_second']:.2f} per second; "
        f"errors {on['errors']} and {off['errors']}",
        *(
            f"{what}, first and last tenth: learning {change(on, what)}, without {change(off, what)}"
            for what in ("accepted", "checked")
        ),
        f"ms per output token, learning and without: {slower('p50')}, {slower('p95')}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--drafter", default="draft_model", help="spec of a trained draft_model")
    parser.add_argument("--out", default="learning", help="folder of what is measured and learned")
    parser.add_argument("--workload", help="prompts, as for outpace bench")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--characters", type=int, default=120, help="of a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=12)
    parser.add_argument("--guesses", type=int, help="most per pass; else the drafter's own")
    parser.add_argument("--block", type=int, default=50, help="requests of a turn")
    parser.add_argument("--rate", type=float, help="requests per second; else measured")
    parser.add_argument("--share", type=float, default=0.5, help="of what a server can answer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    drafter = str(MethodSpec.parse(args.drafter))
    measured = Measurement(args, questions(args))
    model = ModelOptions(model=args.model, dtype=args.dtype, threads=args.threads)
    settings = Settings(max_new_tokens=args.max_new_tokens)
    learned = ["--learn", "--learn-folder", str(measured.folder / "learned")]
    try:
        with ExitStack() as stack:
            servers = {}
            for side, learns in SIDES.items():
                more = ["--grace", "1", *(learned if learns else ())]
                servers[side] = stack.enter_context(launched(model, [drafter], more))
                servers[side].hold()
            run(measured, servers, settings, drafter)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here")
    report = measured.report()
    write_whole(measured.folder / "report.json", json.dumps(report, indent=1) + "\n")
    if report["blocks"]:
        print(summary(report))


if __name__ == "__main__":
    main()
