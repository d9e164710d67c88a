"""Compares predicted with measured times, out of sample, and writes docs/results/predictions.md.

python tools/predict_figures.py --threads 2 --more other.gguf --out figures.json
python tools/predict_figures.py --from figures.json          write the page from figures that are there

Seven passes of a model calibrate; other rows, contexts, batches and prompts are predicted, and measured in
the same rounds, in turns. Then drafters answer prompts beside plain decoding, in turns: their acceptance is
counted, the cost of a draft is predicted from its shape, and the speed-up is compared. With ``--more``
passes of a second model are predicted from its own calibration, and from that of the first.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

from outpace import Engine
from outpace.analysis.prediction.calibration import POINTS, Point, fit, misfit, ops_of, time_passes
from outpace.analysis.prediction.model import planned
from outpace.analysis.prediction.speedup import Drafter, Steps, gain
from outpace.analysis.roofline import Device, seconds
from outpace.bench import report as reports
from outpace.bench.cases import fitting
from outpace.bench.ours import Ours
from outpace.bench.provenance import here
from outpace.bench.records import Case, Settings
from outpace.bench.runner import Runner
from outpace.bench.workloads import builtin
from outpace.files import write_whole
from outpace.models.decoder import Decoder
from outpace.models.prompts import evenly

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "predictions.md"
BEGIN = "<!-- figures: written by tools/predict_figures.py -->"
END = "<!-- end of figures -->"
FIRST = "smollm2-135m"
ROWS, CONTEXTS = (1, 2, 3, 6, 12, 24, 48), (128, 512, 1536)
BATCHES, BATCH_ROWS, BATCH_CONTEXTS = (2, 4, 16), (1, 3), (128, 640)
PROMPTS = (96, 384, 900)
DRAFTERS, LENGTHS = ("draft_model", "quantized_self"), (1, 2, 4)
"""A small decoder that was trained, and the target itself in int8; guesses of their chains."""
NEW = 48

Say = Callable[[str], object]


def _processor(device: torch.device) -> float:
    return time.process_time()


def points() -> list[Point]:
    """Passes to predict; none of them calibrates."""
    found = [Point(rows, context) for context, rows in product(CONTEXTS, ROWS)]
    found += [Point(*one) for one in product(BATCH_ROWS, BATCH_CONTEXTS, BATCHES)]
    found += [Point(rows, 0) for rows in PROMPTS]
    assert not set(found) & set(POINTS)
    return found


def kind(point: Point) -> str:
    if point.context == 0:
        return "prompts"
    return "batches" if point.batch > 1 else "verification"


Fitted = dict[str, tuple[Device, float]]
"""Model and form of its weights -> the fitted device, and the host work of a step."""


def passes(target: Decoder, asked: Any, devices: Fitted, say: Say) -> list[dict[str, Any]]:
    """Time the passes of one model, and predict those that calibrate nothing.

    Args:
        devices: receives the fitted device; those of the same form of weights predict as well.
    """
    shape, wanted = planned(target), [*POINTS, *points()]
    say(f"{target.name}, {shape.form}: {len(wanted)} passes, {asked.repeat} rounds")
    timed = time_passes(target, wanted, asked.repeat, _processor if asked.cpu_time else None)
    spent = dict(timed.passes)

    known = [(ops_of(shape, point), spent[point]) for point in POINTS]
    own = fit(known, "here")
    say(f"  fitted, off by {misfit(known, own):.1%}: {own}")
    others = {name: one for name, one in devices.items() if name.rpartition(", ")[2] == shape.form}
    devices[f"{target.name}, {shape.form}"] = own, timed.host
    return [
        {
            "model": target.name,
            "form": shape.form,
            "calibrated_with": name,
            "kind": kind(point),
            "rows": point.rows,
            "context": point.context,
            "batch": point.batch,
            "measured": spent[point],
            "predicted": seconds(ops_of(shape, point), device),
        }
        for name, (device, _) in {target.name: (own, 0.0), **others}.items()
        for point in points()
    ]


def drafters(engine: Engine, device: Device, host: float, limit: int, say: Say) -> list[dict[str, Any]]:
    """Speed-ups of chains that decoders draft: predicted from their shapes and acceptance, and measured."""
    asked = list(product(DRAFTERS, LENGTHS))
    specs = [f"{name}[tree=chain tree_size={length}]" for name, length in asked]
    target = engine.target
    assert isinstance(target, Decoder)
    shape = planned(target)
    prompts = evenly(fitting(engine, builtin(), NEW), limit)
    cases = [Case(id=prompt.id, group="all", ids=ids) for prompt, ids in prompts]
    context = round(statistics.mean(len(case.ids) for case in cases) + NEW / 2)
    runner = Runner([Ours(engine, engine.method(spec)) for spec in ("none", *specs)], {})
    session = runner.run(cases, [Settings(max_new_tokens=NEW)])
    rows = {row["method"]: row for row in reports.build(session, here(""))["rows"]}

    def over(count: int) -> float:
        return shape.seconds(device, rows=count, context=context)

    steps, out = Steps(over, host), []
    for spec, (name, length) in zip(specs, asked, strict=True):
        method = engine.method(spec)
        row, model = rows[method.spec], method.preferred.drafter.model  # type: ignore[attr-defined]
        reached = [1.0, *(one or 0.0 for one in row["acceptance_by_depth"])]
        shares = [min(1.0, now / before) if before else 0.0 for before, now in pairwise(reached)] or [0.0]
        small = planned(model)
        cost, second = steps.level(lambda rows, one=small: one.seconds(device, rows=rows, context=context))
        drafter = Drafter(acceptance=tuple(shares), cost=cost, second=second)
        found = gain(drafter, steps.ratio, range(-1, length - 1))
        out.append(
            {
                "drafter": name,
                "guesses": length,
                "acceptance": shares,
                "cost": cost,
                "emitted_predicted": found.emitted,
                "emitted_measured": row["mean_emitted"],
                "predicted": found.speedup,
                "measured": row["speedup"],
                "interval": row["speedup_interval"],
            }
        )
        say(f"  {spec}: {found.speedup:.2f} predicted, {row['speedup']:.2f} measured")
    return out


def off(row: dict[str, Any]) -> float:
    return abs(row["predicted"] / row["measured"] - 1)


def render(found: dict[str, Any]) -> str:
    """The block of the page: errors by model and kind, the drafters, some of the passes, the command."""
    rows, drafts = found["passes"], found["drafters"]
    every = [*rows, *drafts]
    same = [row for row in rows if row["calibrated_with"] == row["model"]]
    lines = [
        BEGIN,
        "",
        f"{found['cpu']}, {found['threads']} threads, {found['date'][:10]}; medians of {found['repeat']} "
        f"rounds in turns{', seconds of the processor' if found['cpu_time'] else ''}.",
        "The error of a prediction is its distance from what was measured, as a share of that.",
        "",
        f"**Median error {statistics.median(map(off, every)):.1%}** over {len(every)} figures, none of which "
        "calibrated anything.",
        "",
        "| model | weights | calibrated with | passes | figures | median error | largest | within 10 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups = dict.fromkeys((r["model"], r["form"], r["calibrated_with"], r["kind"]) for r in rows)
    for group in groups:
        some = [off(r) for r in rows if (r["model"], r["form"], r["calibrated_with"], r["kind"]) == group]
        lines.append("| " + " | ".join(group) + " | " + _errors(some) + " |")
    if drafts:
        lines.append(
            f"| {FIRST} | {drafts[0]['form']} | {FIRST} | speed-ups | {_errors(list(map(off, drafts)))} |"
        )
        lines += [
            "",
            "Speed-ups of chains, with the acceptance of the same run, greedy, "
            f"{drafts[0]['prompts']} built-in prompts, {NEW} tokens:",
            "",
            "| drafter | guesses | acceptance by depth | cost of a level, in plain steps "
            "| emitted, predicted | emitted | speed-up, predicted | measured |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [_draft(row) for row in drafts]
    lines += [
        "",
        f"Passes of `{FIRST}` over its weights as stored, milliseconds, predicted and measured:",
        "",
        "| context, batch | " + " | ".join(f"{n} row{'s' * (n > 1)}" for n in ROWS) + " |",
        "|---|" + "---|" * len(ROWS),
    ]
    stored = [row for row in same if row["model"] == FIRST and row["form"] == same[0]["form"]]
    for context in CONTEXTS:
        cells = [r for r in stored if r["context"] == context and r["batch"] == 1 and r["rows"] in ROWS]
        pairs = [f"{1e3 * r['predicted']:.1f}, {1e3 * r['measured']:.1f}" for r in cells]
        lines.append(f"| {context}, 1 | " + " | ".join(pairs) + " |")
    return "\n".join([*lines, "", "```text", found["command"], "```", "", END])


def _errors(some: Sequence[float]) -> str:
    near = sum(one <= 0.1 for one in some) / len(some)
    return f"{len(some)} | {statistics.median(some):.1%} | {max(some):.0%} | {near:.0%}"


def _draft(row: dict[str, Any]) -> str:
    low, high = row["interval"] or (row["measured"],) * 2
    cells = (
        row["drafter"],
        str(row["guesses"]),
        " ".join(f"{one:.2f}" for one in row["acceptance"]),
        f"{row['cost']:.2f}",
        f"{row['emitted_predicted']:.2f}",
        f"{row['emitted_measured']:.2f}",
        f"{row['predicted']:.2f}",
        f"{row['measured']:.2f} ({low:.2f} to {high:.2f})",
    )
    return "| " + " | ".join(cells) + " |"


def replaced(page: str, block: str) -> str:
    """The page with the block in its place."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must hold {BEGIN!r} and {END!r} once each")
    before, rest = page.split(BEGIN)
    return before + block + rest.split(END)[1]


def measure(asked: Any, say: Say) -> dict[str, Any]:
    devices: Fitted = {}
    rows: list[dict[str, Any]] = []
    names = {FIRST: ("auto", "bfloat16"), **{name: ("auto",) for name in asked.more}}
    for name, dtypes in names.items():
        for dtype in dtypes:
            target = Engine.load(name, drafter="none", dtype=dtype).target
            assert isinstance(target, Decoder)
            rows += passes(target, asked, devices, say)
    drafts: list[dict[str, Any]] = []
    if asked.prompts:
        engine = Engine.load(FIRST, drafter="none")
        assert isinstance(engine.target, Decoder)
        form = planned(engine.target).form
        found = drafters(engine, *devices[f"{FIRST}, {form}"], asked.prompts, say)
        drafts = [row | {"form": form, "prompts": asked.prompts} for row in found]
    command = ["python", "tools/predict_figures.py", "--threads", str(torch.get_num_threads())]
    command += ["--repeat", str(asked.repeat), "--prompts", str(asked.prompts)]
    command += ["--cpu-time"] * asked.cpu_time
    for name in asked.more:
        command += ["--more", Path(name).name]
    return {
        **here(shlex.join(command)),
        "threads": torch.get_num_threads(),
        "repeat": asked.repeat,
        "cpu_time": asked.cpu_time,
        "passes": rows,
        "drafters": drafts,
    }


def main(arguments: list[str]) -> int:
    """Measure and write the page, or write it from figures that are there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, help="CPU threads; all cores unless given")
    parser.add_argument("--repeat", type=int, default=7, help="rounds of passes (7)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts for drafters (8); 0: no drafters")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of passes; with one thread, where others run"
    )
    parser.add_argument("--more", action="append", default=[], metavar="M", help="another model")
    parser.add_argument("--out", type=Path, default=Path("figures.json"), help="where figures are kept")
    parser.add_argument("--from", type=Path, dest="there", help="figures that are there")
    parser.add_argument("--print", action="store_true", dest="show", help="print the block, change no page")
    asked = parser.parse_args(arguments)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    try:
        if asked.there is None:
            found = measure(asked, lambda line: print(line, file=sys.stderr, flush=True))
            write_whole(asked.out, json.dumps(found, indent=1) + "\n")
        else:
            found = json.loads(asked.there.read_text(encoding="utf-8"))
        block = render(found)
        page = "" if asked.show else replaced(PAGE.read_text(encoding="utf-8"), block)
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(block)
    if not asked.show:
        write_whole(PAGE, page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
