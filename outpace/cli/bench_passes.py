"""``outpace bench passes``: what a pass costs here, beside the least that it could cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli import show
from outpace.cli.drafting import read_specs
from outpace.cli.options import AS_JSON, TrainedOptions, numbers, option, whole, writes_folder
from outpace.cli.predict import speeds

if TYPE_CHECKING:
    from outpace.analysis.cost import CostCurve, DraftCost
    from outpace.analysis.roofline import Device
    from outpace.engine.engine import Engine

EXAMPLES = """
Examples:

  outpace bench passes --dtype float32 --threads 2

  outpace bench passes --drafters "prompt_lookup,draft_model[model=smollm2-135m layers=6]"

  outpace bench passes --rows 1,5,9,17 --contexts 100,2000 --out passes --json
"""


def passes(
    *,
    model: TrainedOptions,
    drafters: str | None = option(
        None,
        "Method specs with commas between them, whose drafts are timed by level.",
        "-d",
        metavar="SPECS",
        shown="nobody",
    ),
    rows: str | None = option(
        None,
        "Rows of one sequence: the pending token and its guesses.",
        metavar="N,N,...",
        shown="1 to 128, doubling",
    ),
    contexts: str | None = option(
        None, "Tokens that the cache holds before a pass.", metavar="N,N,...", shown="64,256,1024"
    ),
    batches: str | None = option(
        None, "Sequences in one pass, of one row each.", metavar="N,N,...", shown="1,2,4"
    ),
    repeat: int = option(11, "Timed rounds; medians are reported.", metavar="R", least=1),
    out: Path | None = writes_folder(None, "Write passes.json, passes.png and passes.svg here.", "-o"),
    as_json: bool = AS_JSON,
) -> None:
    """Measure what a pass costs by rows, context and batch, and the floor below it.

    The floor is the time to read once, at the measured bandwidth, the weights that one row needs.

    What the default rows, contexts and batches cost is kept, for policies that plan by cost.
    """
    points = {
        name: numbers(f"--{name}", text, f"whole numbers from {least}", "1,2,4", whole, least.__le__)
        for name, text, least in (("rows", rows, 1), ("contexts", contexts, 0), ("batches", batches, 1))
        if text is not None
    }
    specs = [] if drafters is None else read_specs("--drafters", drafters)
    engine = model.load(drafter="none")
    methods = [engine.method(spec) for spec in specs]

    from outpace.analysis.cost import keep, measure, measure_drafter
    from outpace.analysis.roofline import measure_device

    target = engine.target
    with show.progress(repeat + 1, "rounds") as tick:
        tick("the machine", 0)
        device = measure_device(target.dtype, target.device)
        curve = measure(target, repeat=repeat, progress=tick, **points)
        # A floor is what the machine can do: of two moments, before and after, the better one.
        device = device.better(measure_device(target.dtype, target.device))
    costs = [measure_drafter(method, target, repeat=repeat) for method in methods]
    if not points:
        keep(target, curve, show.note)
    for cost in costs:
        keep(target, cost, show.note)
    report = {**report_of(engine, device, curve, costs), "repeats": repeat}
    show.finish(report, as_json, lambda: show_report(report), out, "passes")
    if out is not None:
        from outpace.bench.plots import draw

        draw({"passes": report}, out, note=show.note)


def report_of(engine: Engine, device: Device, curve: CostCurve, costs: list[DraftCost]) -> dict[str, Any]:
    """Everything measured, as plain data; docs/json.md says what the keys mean."""
    target = engine.target
    one = curve.seconds_CR[0][0]
    floor = target.weight_bytes / device.bandwidth
    return {
        "model": curve.model,
        "digest": target.digest,
        "dtype": curve.dtype,
        "device": curve.device,
        "threads": curve.threads,
        "weight_bytes": target.weight_bytes,
        "bandwidth": device.bandwidth,
        "floor_seconds": floor,
        "one_row_seconds": one,
        "floor_ratio": one / floor if floor else None,
        "rows": list(curve.rows_R),
        "contexts": list(curve.context_C),
        "pass_seconds": [list(line) for line in curve.seconds_CR],
        "batches": list(curve.batch_B),
        "batch_seconds": [list(line) for line in curve.seconds_CB],
        "drafters": {
            cost.spec: {
                "draft_seconds": list(cost.seconds_L),
                "pass_seconds": list(cost.pass_seconds_L),
                "draft_passes": list(cost.passes_L),
                "depths": list(cost.depth_L),
                "level_seconds": cost.per_level,
                "level_share": cost.per_level / one,
            }
            for cost in costs
        },
        "roofline": _roofline(engine, device, curve),
    }


def _roofline(engine: Engine, device: Device, curve: CostCurve) -> dict[str, Any] | None:
    """What the shape of the model predicts; None where it is not known."""
    from outpace.analysis.prediction.calibration import fit
    from outpace.analysis.prediction.model import planned
    from outpace.analysis.roofline import error, estimated_like
    from outpace.models.decoder import Decoder

    target = engine.target
    if not isinstance(target, Decoder):
        return None
    shape = planned(target)
    passes = [
        (shape.ops(rows=rows, context=context), cost)
        for context, cost_R in zip(curve.context_C, curve.seconds_CR, strict=True)
        for rows, cost in zip(curve.rows_R, cost_R, strict=True)
    ]
    fitted = fit(passes, device.name)
    out = []
    for one in (device, fitted):
        guess = estimated_like(shape.ops, one, curve)
        out.append(
            {
                "peak": one.peak,
                "bandwidth": one.bandwidth,
                "overhead": one.overhead,
                "one_row_seconds": guess.seconds_CR[0][0],
                "error": error(guess, curve),
                "pass_seconds": [list(line) for line in guess.seconds_CR],
            }
        )
    return {"measured": out[0], "fitted": out[1]}


def show_report(report: dict[str, Any]) -> None:
    rows, contexts = report["rows"], report["contexts"]
    one = report["one_row_seconds"]
    show.write(
        f"{report['model']}, {report['dtype']}, {report['device']}, "
        f"{show.count(report['threads'], 'thread')}; medians of {report['repeats']}\n\n"
    )
    if report["floor_ratio"] is not None:
        show.write(
            f"floor     {report['weight_bytes'] / 1e6:.1f} MB of weights at "
            f"{report['bandwidth'] / 1e9:.1f} GB/s: {_ms(report['floor_seconds'])} ms\n"
            f"one row   {_ms(one)} ms at context {contexts[0]}: "
            f"{report['floor_ratio']:.2f} x the floor\n"
        )
    if report["roofline"] is not None:
        plain, fitted = report["roofline"]["measured"], report["roofline"]["fitted"]
        show.write(
            f"roofline  {speeds(plain['peak'], plain['bandwidth'])}: "
            f"one row {_ms(plain['one_row_seconds'])} ms; off by {plain['error']:.0%} on average\n"
            f"fitted    {speeds(fitted['peak'], fitted['bandwidth'])}, "
            f"{fitted['overhead'] * 1e6:.1f} us per operator: off by {fitted['error']:.0%}\n"
        )
    show.write("\npass by rows: ms, and passes over one row\n")
    heads = [(f"ms at {context}", f"x at {context}") for context in contexts]
    columns = ["rows", *(head for pair in heads for head in pair)]
    show.table(
        columns,
        [[str(count), *_pairs(report["pass_seconds"], i)] for i, count in enumerate(rows)],
        numbers=columns,
    )
    if len(report["batches"]) > 1:
        show.write("pass by sequences of one row each: ms, and passes over one of them\n")
        columns[0] = "batch"
        show.table(
            columns,
            [[str(size), *_pairs(report["batch_seconds"], i)] for i, size in enumerate(report["batches"])],
            numbers=columns,
        )
    if report["drafters"]:
        show.write("drafts: cost of a level beside a pass over one row\n")
        numbers = ("levels", "draft ms", "of it in passes", "ms per level", "x one row")
        show.table(
            ("drafter", *numbers),
            [(spec, *_draft(cost)) for spec, cost in report["drafters"].items()],
            numbers=numbers,
        )


def _pairs(table: list[list[float]], index: int) -> list[str]:
    """For one row of a table: milliseconds and ratio, context by context."""
    return [cell for line in table for cell in (_ms(line[index]), f"{line[index] / line[0]:.2f}")]


def _draft(cost: dict[str, Any]) -> tuple[str, ...]:
    if not cost["draft_seconds"]:
        return ("0", "", "", "", "0.000")
    whole, inside = cost["draft_seconds"][-1], cost["pass_seconds"][-1]
    return (
        str(cost["depths"][-1]),
        _ms(whole),
        f"{inside / whole:.0%}",
        _ms(cost["level_seconds"]),
        f"{cost['level_share']:.3f}",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if seconds >= 1e-3 else f"{seconds * 1e3:.3f}"
