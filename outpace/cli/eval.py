"""``outpace eval``: tasks of lm-evaluation-harness, plainly and with drafters, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import typer

from outpace.cli import show
from outpace.cli.drafting import read_specs
from outpace.cli.options import AS_JSON, AutoOptions, option, writes_folder
from outpace.config import DEFAULT_DRAFTER

EXAMPLES = """
Examples:

  outpace eval --tasks sample

  outpace eval --tasks questions.jsonl --drafters none,auto,suffix --limit 50 --out report

  outpace eval -m ./my-model --tasks mine.yaml --chat
"""


def evaluate(
    *,
    model: AutoOptions,
    tasks: str = option(
        "sample",
        "Tasks with commas between them: names that lm-evaluation-harness knows, YAML files of its form, "
        "JSON lines with question and answer (and choices) or text, or sample: three short ones.",
        metavar="NAMES|FILES",
    ),
    drafters: str = option(
        f"none,{DEFAULT_DRAFTER}", "Method specs with commas between them.", "-d", metavar="SPECS"
    ),
    limit: int | None = option(None, "Samples per task, at most.", shown="all", least=1),
    shots: int | None = option(None, "Examples before every question.", shown="as the task says", least=0),
    chat: bool = option(False, "Wrap what is asked in the model's chat template."),
    batch: int = option(8, "Sequences at a time.", "-b", metavar="B", least=1),
    allow_lossy: bool = option(False, "Permit drafters that change the distribution of the output."),
    as_json: bool = AS_JSON,
    out: Path | None = writes_folder(None, "Write eval.json and a plot here.", "-o"),
) -> None:
    """Score tasks with lm-evaluation-harness, plainly and with drafters: the scores must be equal.

    Exit code 1 if an answer differs that is promised to be equal.
    """
    specs = read_specs("--drafters", drafters)

    from outpace.bench.harness.scores import broken, evaluate, harness
    from outpace.bench.harness.tasks import read_tasks

    read, folders = read_tasks([name for name in tasks.split(",") if name])
    harness()  # whether it is there is said before the model is loaded
    engine = model.load(drafter="none", allow_lossy=allow_lossy)
    methods = {
        spec: engine.method(spec) for spec in specs
    }  # one that cannot be loaded is said before the work

    with show.progress(len({"none", *specs}), "drafters") as tick:
        report = evaluate(
            engine, specs, read, folders, limit=limit, shots=shots, chat=chat, batch=batch, tick=tick
        )
    lossless = [spec for spec, one in methods.items() if one.lossless(one.verifier)]
    report |= {"limit": limit, "chat": chat, "broken": broken(report, lossless)}
    pictures = {"eval": partial(_picture, report=report)}
    show.finish(report, as_json, lambda: show_report(report), out, "eval", pictures)
    if report["broken"]:
        raise typer.Exit(1)


def show_report(report: Mapping[str, Any]) -> None:
    """Print scores side by side, then what answers cost."""
    specs = [run["drafter"] for run in report["runs"]]
    show.write(f"{report['model']}, {report['dtype']}\n\n")
    rows = []
    for task in report["tasks"]:
        for one in task["metrics"]:
            scores = {cell["drafter"]: cell["score"] for cell in one["scores"]}
            cells = (f"{scores[spec]:.4f}" if spec in scores else "" for spec in specs)
            rows.append((task["task"], one["metric"], str(task["samples"]), *cells))
    show.table(("task", "metric", "samples", *specs), rows, numbers=("samples", *specs))
    rows = []
    for place, run in enumerate(report["runs"]):
        same = [task["same"][place] for task in report["tasks"]]
        every = sum(task["samples"] for task in report["tasks"])
        emitted = "" if run["mean_emitted"] is None else f"{run['mean_emitted']:.2f}"
        rows.append(
            (
                run["drafter"],
                f"{sum(one['equal'] for one in same)} of {every}",
                f"{max(one['largest_gap'] for one in same):.1e}",
                str(run["drafted"]),
                str(run["accepted"]),
                emitted,
                f"{run['seconds']:.1f}",
            )
        )
    numbers = ("equal to plain", "largest gap", "drafted", "accepted", "mean emitted", "seconds")
    show.table(("drafter", *numbers), rows, numbers=numbers)
    for line in report["broken"]:
        show.write(f"BROKEN  {line}\n")
    if not report["promised"]:
        show.write("Equal answers are not promised here: rows depend on the pass that they are in.\n")


def _picture(figure: Any, report: Mapping[str, Any]) -> bool:
    """Draw every metric over that of plain decoding, a row per metric."""
    from outpace.bench.plots import COLOURS, MARKERS

    rows = [(task["task"], one) for task in report["tasks"] for one in task["metrics"]]
    specs = [run["drafter"] for run in report["runs"] if run["drafter"] != "none"]
    if not rows or not specs:
        return False
    figure.set_size_inches(8, 1.9 + 0.35 * len(rows))
    axes = figure.subplots()
    for index, spec in enumerate(specs):
        points = []
        for place, (_, one) in enumerate(rows):
            scores = {cell["drafter"]: cell["score"] for cell in one["scores"]}
            if spec in scores and scores.get("none"):
                points.append((scores[spec] / scores["none"], place))
        if points:
            look = {"color": COLOURS[index % len(COLOURS)], "mfc": "none", "ms": 6 + 3 * index}
            axes.plot(*zip(*points, strict=True), MARKERS[index % len(MARKERS)], label=spec, **look)
    axes.axvline(1.0, color="black", ls="--", lw=1.2, label="plain = 1.0")
    names = [
        f"{task}: {one['metric']} ({next(c['score'] for c in one['scores'] if c['drafter'] == 'none'):.3f})"
        for task, one in rows
    ]
    axes.set_yticks(range(len(rows)), names, fontsize="small")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(min(0.9, axes.get_xlim()[0]), max(1.1, axes.get_xlim()[1]))
    axes.set_xlabel("score over that of plain decoding (in brackets)")
    figure.legend(loc="outside lower center", ncols=min(4, len(specs) + 1))
    return True
