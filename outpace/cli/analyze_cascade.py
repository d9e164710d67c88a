"""``outpace analyze cascade``: which K, and what it should gain."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from outpace import registry
from outpace.cli import show
from outpace.cli.options import AS_JSON, ModelOptions, WorkloadOptions, epilog, option, output, spread

_EXAMPLES = """
Examples:

  outpace analyze cascade --levels "draft_model[model=M]+max_gram" --measure

  outpace analyze cascade -m ./big -l "draft_model[model=./mid]+draft_model[model=./small]+suffix"

  outpace analyze cascade -l draft_model+max_gram --k 5,10/10 --k 3/4 --measure --out report
"""
_PLACES = 5


def register(group: typer.Typer) -> None:
    """Add a command to ``outpace analyze`` for every planner, such as that of cascades."""
    for entry in registry.entries("planner"):
        group.command(entry.name, epilog=epilog(_EXAMPLES))(spread(plan))


def plan(
    context: typer.Context,
    *,
    model: ModelOptions,
    texts: WorkloadOptions,
    levels: str = option(
        ..., "Drafters, strongest first, joined by +: draft_model[model=M]+max_gram.", "-l", metavar="SPECS"
    ),
    k: list[str] | None = option(
        None,
        "Another K to predict, such as 5,10/10; may be given several times.",
        metavar="K",
        shown="the best ones",
    ),
    measure: bool = option(False, "Run every configuration, and plain decoding beside it."),
    max_new_tokens: int = option(64, "Tokens per answer.", least=8),
    temperature: float = option(0.0, "Of all distributions.", "-t", metavar="T"),
    as_json: bool = AS_JSON,
    out: Path | None = output(None, "Write METHOD.json into this folder.", "-o", metavar="DIR"),
) -> None:
    """Measure how far every level's guesses are kept, and name the K that should gain most.

    Times passes of all models here, so let nothing else run.
    """
    method = str(context.info_name)
    wanted = [f"{method}[levels={levels} k={text}]" for text in k or ()]
    prompts = texts.read()

    planner = registry.load("planner", method)
    for spec in (f"{method}[levels={levels}]", *wanted):
        planner.check_levels(spec)
    engine = model.load(drafter="none")
    for spec in wanted:
        engine.method(spec)
    ids = texts.pick(engine, prompts, max_new_tokens)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    with show.progress(len(ids), "prompts") as tick:
        found = planner.measure(engine, levels, ids, **settings, tick=tick)
    rows = [
        {"kind": kind, "k": planner.text_of(best), **_numbers(promise)}
        for kind, (best, promise) in found.predicted().items()
    ]
    rows += [
        {"kind": "given", "k": text, **_numbers(found.predict(planner.read_k(text)))} for text in k or ()
    ]
    if measure:
        specs = [planner.spec_of(levels, planner.read_k(row["k"])) for row in rows]
        with show.progress(len(ids), "prompts") as tick:
            gains = planner.speedup(engine, list(dict.fromkeys(specs)), ids, **settings, tick=tick)
        by_spec = dict(zip(dict.fromkeys(specs), gains, strict=True))
        for row, spec in zip(rows, specs, strict=True):
            row["measured"], row["measured_emitted"] = by_spec[spec]
    best = max(rows, key=lambda row: row["predicted"])
    report = {
        **planner.as_json(found),
        "workload": texts.workload,
        "prompts": len(ids),
        **settings,
        "configurations": rows,
        "best": planner.spec_of(levels, planner.read_k(best["k"])),
    }
    if as_json:
        show.write_json(report)
    else:
        show_report(method, found, report, measure)
    if out is not None:
        show.save(out / f"{method}.json", json.dumps(report, indent=1) + "\n")


def _numbers(promise: Any) -> dict[str, Any]:
    return {"predicted": promise.speedup, "emitted": promise.emitted, "steps": list(promise.steps)}


def show_report(method: str, found: Any, report: dict[str, Any], measured: bool) -> None:
    show.write(
        f"{found.names[0]}, levels {found.levels}, temperature {report['temperature']:g}, "
        f"{show.count(report['prompts'], 'text')}\n\n"
    )
    show.write("Share of guesses kept, by place in the level's part of a draft\n")
    places = tuple(str(place) for place in range(1, _PLACES + 1))
    table = []
    for one in report["acceptance"]:
        kept = [1.0, *one["kept"]]
        shares = [f"{now / before:.2f}" if before else "" for before, now in pairwise(kept)][:_PLACES]
        table.append(
            (one["level"], one["reviewer"], str(one["drafts"]), *shares, *[""] * (_PLACES - len(shares)))
        )
    show.table(("level", "for", "drafts", *places), table, numbers=("drafts", *places))
    show.write("\nMilliseconds of a step, by rows\n")
    counts = ("1", "4", "8", "16")
    show.table(
        ("model", *counts),
        [(one["model"], *(f"{one[n]:.2f}" for n in counts)) for one in report["milliseconds"]],
        numbers=counts,
    )
    show.write("\nSpeed-up over plain decoding\n")
    names = {"emitted": "emitted", "predicted": "predicted"}
    if measured:
        names |= {"really emitted": "measured_emitted", "measured": "measured"}
    show.table(
        (method, "k", *names),
        [
            (row["kind"], row["k"], *(f"{row[name]:.2f}" for name in names.values()))
            for row in report["configurations"]
        ],
        numbers=tuple(names),
    )
    show.write(f"\nbest: {report['best']}\n")
