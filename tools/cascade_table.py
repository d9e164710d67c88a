"""Compare cascades with their members, as the paper's table does: standardized and real walltime.

    python tools/cascade_table.py [--texts NAME=FILE...] [--limit 4] [--out docs/results/cascades.md]

Every arrangement answers every prompt at every temperature, in turns with plain decoding
(`outpace.methods.cascade.planner`). Standardized: a pass of the target costs 1, however many rows it has,
a pass of a drafter what the column says, a lookup nothing. Real: seconds of this machine, so let nothing
else run. ``--keep`` adds figures to a file, so that ``--part 1/4`` and the next three make one table,
and ``--part 0/1`` prints it. Without ``--texts`` the prompts are the built-in questions about passages and
those of mathematics; files are those of ``outpace bench``. Prompts are taken evenly from each.

Paper: Chen et al. 2023, Cascade Speculative Drafting, arXiv:2312.11462, tables 1 to 4.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pages import publish, tool

from outpace import Engine
from outpace.bench.cases import fitting
from outpace.bench.formats import BUILTIN, read_workload
from outpace.errors import RequestError
from outpace.files import write_whole
from outpace.methods.cascade.planner import Measured, speedup
from outpace.models.prompts import evenly

COSTS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5)
"""Of a pass of the trained drafter, in passes of the target."""
KNOWN = (0.01, 0.1, 0.5)
"""Costs that a cascade is told, where the text decides."""
BUILTIN_TEXTS = {"questions": "passages", "maths": "math"}
STRONG = "layer_skip[skip=4+7+10+13+16+19+22+25]"
"""A model of the target's own layers, above the trained drafter."""
MARGIN = 1.05
"""What a cascade should have over its best member."""


def groups(draft: str, strong: str, lookup: str) -> dict[str, list[str]]:
    """Rows of the table, and the arrangements of which each shows the best.

    Args:
        draft: a drafter that is a language model.
        strong: another one above it, for cascades of three models.
    """
    two, three = f"{draft}+{lookup}", f"{strong}+{draft}+{lookup}"

    def made(levels: str, *rest: str) -> list[str]:
        return [f"cascade[levels={levels}{one and ' ' + one}]" for one in rest]

    return {
        "drafter alone": made(draft, "k=1", "k=2", "k=4"),
        "drafter alone, tree": made(draft, "k=4 tree=3x1x1x1"),
        "lookup alone": [lookup],
        "lookup alone, tree": [f"{lookup}[tree=3x2x1x1x1x1]"],
        "cascade": made(two, "k=1,8", "k=2,8/4", "k=4,8/8"),
        "cascade, tree": made(two, "k=2,8/4 tree=3x1x1x1x1x1"),
        "cascade, levels by the text": made(two, "", *(f"cost={cost:g}" for cost in KNOWN)),
        "cascade, levels by the text, tree": made(
            two, *(f"cost={cost:g} tree=3x2x1x1x1x1" for cost in KNOWN)
        ),
        "cascade of three models": made(three, "k=1,0,8", "k=2,2,8/2,4/4"),
    }


CASCADES = ("cascade", "cascade, tree", "cascade, levels by the text", "cascade, levels by the text, tree")
SINGLES = ("drafter alone", "drafter alone, tree", "lookup alone", "lookup alone, tree")

Results = dict[tuple[str, float], dict[str, Measured]]
"""(texts, temperature) -> arrangement -> figures."""


def prompts(
    engine: Engine, texts: Sequence[str], limit: int, most: int, part: Sequence[int] = (1, 1)
) -> dict[str, list[tuple[int, ...]]]:
    """Token ids by the name of their texts.

    Raises:
        RequestError: texts that are not NAME=FILE, or a file that cannot be read.
    """
    found = {}
    for name, file in (_named(text) for text in texts):
        found[name] = read_workload(file)
    if not found:
        known = read_workload(BUILTIN)
        found = {name: [p for p in known if p.category == kind] for name, kind in BUILTIN_TEXTS.items()}
    return {
        name: [ids for _, ids in evenly(fitting(engine, one, most), limit)][part[0] - 1 :: part[1]]
        for name, one in found.items()
    }


def _named(text: str) -> tuple[str, str]:
    name, _, file = text.partition("=")
    if not file:
        raise RequestError(f"--texts is NAME=FILE, got {text!r:.80}")
    return name, file


def _without_folder(argument: str) -> str:
    name, sign, file = argument.partition("=")
    return f"{name}={Path(file).name}" if sign else argument


def measured(engine: Engine, args: argparse.Namespace, rows: dict[str, list[str]]) -> Results:
    """Run everything."""
    specs = list(dict.fromkeys(spec for some in rows.values() for spec in some))
    out = kept(args.keep)
    part = [int(number) for number in args.part.split("/")]
    asked = prompts(engine, args.texts, args.limit, args.max_new_tokens, part) if part[0] else {}
    for name, ids in asked.items():
        for temperature in args.temperatures:
            print(f"{name}, temperature {temperature:g}: {len(ids)} prompts", file=sys.stderr, flush=True)
            found = speedup(engine, specs, ids, max_new_tokens=args.max_new_tokens, temperature=temperature)
            by = out.setdefault((name, temperature), {})
            for spec, one in zip(specs, found, strict=True):
                by[spec] = by[spec] + one if spec in by else one
            if args.keep:
                rest = [[*key, {spec: asdict(one) for spec, one in by.items()}] for key, by in out.items()]
                write_whole(args.keep, json.dumps(rest) + "\n")
    return out


def kept(file: Path | None) -> Results:
    """What other runs measured."""
    if file is None or not file.is_file():
        return {}
    return {
        (name, temperature): {
            spec: Measured(
                tokens=one["tokens"], spent=one["spent"], plain=tuple(one["plain"]), made=tuple(one["made"])
            )
            for spec, one in by.items()
        }
        for name, temperature, by in json.loads(file.read_text(encoding="utf-8"))
    }


def standard(one: Measured, cost: float) -> float:
    """Standardized speed-up; of two models the stronger one costs twice the other."""
    return one.standard([2 * cost, cost] if len(one.passes) == 2 else [cost])


def mean(found: Results, spec: str, cost: float, temperature: float) -> float:
    return statistics.fmean(standard(by[spec], cost) for (_, t), by in found.items() if t == temperature)


def page(args: argparse.Namespace, rows: dict[str, list[str]], found: Results, target: str) -> Iterator[str]:
    """The lines of the report."""
    command = " ".join(["python tools/cascade_table.py", *(_without_folder(one) for one in args.given)])
    yield "# Cascades and their members\n"
    yield f"{target}, {args.limit} prompts of each kind, {args.max_new_tokens} tokens. The command:\n"
    yield f"```text\n{command}\n```\n"
    yield "A *standardized* speed-up counts passes: one of the target costs 1, one of the drafter what"
    yield "the column says, a lookup nothing. Each row shows its best arrangement at that cost. *Real* is"
    yield "by the clock of the run."
    if args.loaded:
        yield "Other programs ran beside it, so the real figures are rough."
    for temperature in args.temperatures:
        yield f"\n## Temperature {temperature:g}\n"
        yield "| drafting | " + " | ".join(f"cost {cost:g}" for cost in COSTS) + " | real |"
        yield "|---|" + "---|" * (len(COSTS) + 1)
        for name, specs in rows.items():
            best = [max(mean(found, spec, cost, temperature) for spec in specs) for cost in COSTS]
            real = max(
                statistics.fmean(by[spec].speedup for (_, t), by in found.items() if t == temperature)
                for spec in specs
            )
            yield f"| {name} | " + " | ".join(f"{x:.2f}" for x in (*best, real)) + " |"
        yield from _verdict(rows, found, temperature)
        yield from _details(rows, found, temperature)


def _verdict(rows: dict[str, list[str]], found: Results, temperature: float) -> Iterator[str]:
    """From which cost of the drafter on a cascade is worth it."""
    kinds = [by for (_, t), by in found.items() if t == temperature]
    gains, worst = [], []
    for cost in COSTS:

        def best(names: Sequence[str], cost: float = cost) -> str:
            specs = [spec for name in names for spec in rows[name]]
            return max(specs, key=lambda spec: mean(found, spec, cost, temperature))

        mine, other = best(CASCADES), best(SINGLES)
        gains.append(mean(found, mine, cost, temperature) / mean(found, other, cost, temperature))
        worst.append(min(standard(by[mine], cost) / standard(by[other], cost) for by in kinds))
    yield "| *best cascade over best single* | " + " | ".join(f"{gain:.2f}" for gain in gains) + " | |"
    yield "| *the same on the worst kind of text* | " + " | ".join(f"{one:.2f}" for one in worst) + " | |"
    pays = [f"{cost:g}" for cost, gain in zip(COSTS, gains, strict=True) if gain >= MARGIN]
    if pays:
        yield f"\nA cascade gains 5 % or more over its best member at costs of {', '.join(pays)}."
    else:
        yield f"\nNo cascade gains 5 % over its best member; the most is {max(gains) - 1:+.1%}."


def picture(figure: Any, rows: dict[str, list[str]], found: Results, temperatures: Sequence[float]) -> bool:
    """Standardized speed-up of the best cascade and the best single, by what the drafter costs."""
    figure.set_size_inches(9, 4.2)
    costs = [0.01 * 1.08**i for i in range(52)]
    for axes, temperature in zip(
        figure.subplots(1, len(temperatures), squeeze=False)[0], temperatures, strict=True
    ):
        for names, label in ((CASCADES, "best cascade"), (SINGLES, "best single"), (SINGLES[:1], "drafter")):
            specs = [spec for name in names for spec in rows[name]]
            best = [max(mean(found, spec, cost, temperature) for spec in specs) for cost in costs]
            axes.plot(costs, best, label=label, lw=1.6)
        axes.set_xscale("log")
        axes.set_title(f"temperature {temperature:g}", loc="left", fontsize="medium")
        axes.set_xlabel("cost of a pass of the drafter")
    figure.axes[0].set_ylabel("standardized speed-up")
    figure.axes[0].legend()
    return True


def _details(rows: dict[str, list[str]], found: Results, temperature: float) -> Iterator[str]:
    names = [name for name, t in found if t == temperature]
    yield "\n| arrangement | " + " | ".join(f"{n}: emitted | drafter's passes | real" for n in names) + " |"
    yield "|---|" + "---|" * (3 * len(names))
    for spec in dict.fromkeys(spec for specs in rows.values() for spec in specs):
        cells = []
        for name in names:
            one = found[name, temperature][spec]
            passes = " + ".join(f"{count:.2f}" for count in one.passes) or "0"
            cells.append(f"{one.emitted:.2f} | {passes} | {one.speedup:.2f}")
        yield f"| `{spec}` | " + " | ".join(cells) + " |"


@tool
def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", default="draft_model", help="a drafter that is a language model")
    parser.add_argument("--strong", default=STRONG, help="one above it, for three models")
    parser.add_argument("--lookup", default="max_gram")
    parser.add_argument("--texts", nargs="+", default=[], metavar="NAME=FILE")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--limit", type=int, default=4, help="prompts of each kind")
    parser.add_argument("--part", default="1/1", help="1/4: every fourth of these prompts; 0/1: none")
    parser.add_argument("--keep", type=Path, help="file that keeps figures, added to what it holds")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--plot", type=Path, help="folder for a picture of what --keep holds")
    parser.add_argument("--loaded", action="store_true", help="say that other programs ran")
    parser.add_argument("--out", type=Path, help="write the page, besides printing it")
    args = parser.parse_args()
    args.given = [one for one in sys.argv[1:] if one != "--loaded"]
    rows = groups(args.draft, args.strong, args.lookup)
    engine = Engine.load(args.model, drafter="none")
    lines = page(args, rows, measured(engine, args, rows), engine.target.name)

    def draw(figure: Any) -> bool:
        return picture(figure, rows=rows, found=kept(args.keep), temperatures=args.temperatures)

    publish(lines, args.out, {"cascades": draw}, args.plot)


if __name__ == "__main__":
    sys.exit(main())
