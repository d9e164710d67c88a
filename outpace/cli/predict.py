"""``outpace predict``: what a model will cost on a device, and what a drafter would gain there."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli import show
from outpace.cli.options import AS_JSON, numbers, option, use_threads, writes_folder
from outpace.errors import RequestError

if TYPE_CHECKING:
    from outpace.analysis.prediction.calibration import Calibration
    from outpace.analysis.prediction.model import Planned
    from outpace.analysis.roofline import Device

_model = partial(option, panel="Model")
_pass = partial(option, panel="Passes")
_draft = partial(option, panel="Drafter")
ROWS: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
_SHOWN = 8
"""Chains with a line of their own."""
_OPERATOR = {
    "operator": "{0[operator]}",
    "times": "{0[count]}",
    "GFLOP": "{1:,.3f}",
    "MB": "{2:,.2f}",
    "bound by": "{0[bound]}",
    "ms": "{3:,.3f}",
    "share": "{4:.0%}",
}
_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}

EXAMPLES = """
Examples:

  outpace predict --config ./big --device h100 --batch 16 --context 4096

  outpace predict --acceptance 0.75,0.65,0.6 --drafter-cost 0.12 --out report

  outpace predict --config owner/name --device a100 --draft-config ./small --acceptance 0.7

  outpace predict --config model-q4.gguf --device m3-max --dtype stored
"""


def predict(
    *,
    config: str = _model(
        "smollm2-135m",
        "A folder with config.json, a GGUF file, a hub id, or a short name; weights are not read.",
        "--config",
        "-m",
        metavar="M",
    ),
    device: str = option(
        "cpu-here",
        "cpu-here (seven passes are timed, once), a100, h100, m3-max, or a JSON file with such a record.",
        metavar="D",
    ),
    dtype: str = _model(
        "auto",
        "float32, bfloat16, stored: weights as a GGUF file has them, or auto: what outpace takes there.",
        metavar="D",
    ),
    quantize: str | None = _model(
        None, "Weights rounded to int8 or int4 (CPU).", metavar="K", shown="as they are"
    ),
    kv_dtype: str = _model(
        "auto",
        "Of keys and values: float32, bfloat16, float16, int8, or auto: what outpace keeps there.",
        metavar="D",
    ),
    prompt: int = _pass(512, "Tokens of the prompt that is read.", least=1),
    context: int | None = _pass(
        None, "Tokens in the cache of every sequence while decoding.", shown="as the prompt", least=0
    ),
    batch: int = _pass(1, "Sequences.", least=1),
    rows: str | None = _pass(
        None, "Rows of a sequence that a pass verifies.", metavar="N,N,...", shown="1 to 64, doubling"
    ),
    acceptance: str | None = _draft(
        None,
        "Chance that a guess is kept where all before it are: by depth, the last one goes on.",
        metavar="A,A,...",
        shown="no drafter",
    ),
    drafter_cost: float | None = _draft(
        None,
        "Cost of a level of the draft, in passes over one row.",
        metavar="C",
        shown="0, or by --draft-config",
    ),
    draft_config: str | None = _draft(
        None, "Predict that cost from a draft model's config, as --config.", metavar="M", shown="none"
    ),
    sibling: float = _draft(
        0.15, "In trees: share of what its elder siblings left that a further guess takes.", metavar="S"
    ),
    tree: str | None = _draft(
        None, "A tree to predict beside the best one, such as 4x2x1.", metavar="T", shown="none"
    ),
    threads: int | None = option(None, "CPU threads of cpu-here.", shown="all cores", least=1),
    calibrate_with: str = option("smollm2-135m", "Model whose passes are timed for cpu-here.", metavar="M"),
    calibrate_again: bool = option(False, "Time passes even if they were timed before."),
    as_json: bool = AS_JSON,
    out: Path | None = writes_folder(
        None, "Write predict.json, device.json and plots into this folder.", "-o"
    ),
) -> None:
    """Predict time and memory of a model from its config, and what a drafter would gain.

    An operator takes the time of its arithmetic or of its memory traffic, whichever is longer. Public figures
    of a device are peaks, which no program reaches, so a prediction from them is a bound.
    """
    from outpace.analysis.prediction import devices
    from outpace.analysis.prediction.model import CPU, read
    from outpace.analysis.prediction.report import predicted

    counts = ROWS
    if rows:
        counts = numbers("--rows", rows, "whole numbers above 0", "1,8", int, lambda one: one > 0)
    drafting = _drafting(acceptance, drafter_cost, draft_config, sibling, tree)
    here = device == devices.HERE
    record = None if here else devices.find(device)
    kind = CPU if record is None else record.kind
    held = partial(read, kind=kind, dtype=dtype, quantize=quantize, cache=kv_dtype)
    shape = held(config)
    length = prompt if context is None else context
    _check_room(shape, prompt, length, max(counts))
    calibration: Calibration | None = None
    if record is None:
        calibration = _here(shape, threads, calibrate_with, calibrate_again)
        machine = calibration.device
    else:
        machine = record.device(shape.dtype)
    sizes = sorted({1, *counts})
    report = predicted(
        shape, machine, record, calibration, prompt=prompt, context=length, batch=batch, rows=sizes
    )
    if drafting is not None:
        host = 0.0 if calibration is None else calibration.timed.host
        other = held(draft_config) if draft_config else None
        report["drafter"] = _gains(shape, machine, other, drafting, length, batch, host)
    pictures = {}
    if out is not None:
        from outpace.cli import predict_plots

        pictures = {
            "roofline": partial(predict_plots.roofline, report=report),
            "rows": partial(predict_plots.by_rows, report=report),
            "speedup": partial(predict_plots.speedup, report=report),
        }
    text = json.dumps(report["device"]["record"], indent=1) + "\n"
    with show.then_write(out, lambda folder: show.save(folder / "device.json", text)):
        show.finish(report, as_json, lambda: show_report(report), out, "predict", pictures)


def _check_room(shape: Planned, prompt: int, context: int, rows: int) -> None:
    """Raise RequestError unless a prompt fits, and a context with rows behind it."""
    room = shape.config.max_positions
    if prompt > room:
        raise RequestError(f"--prompt must be at most {room}, the positions of {shape.name}, got {prompt}")
    if context + rows > room:
        do = f"give --context {room - rows} or less" if rows <= room else "give fewer --rows"
        raise RequestError(
            f"--context {context} and {rows} rows behind it are more than the {room} positions of "
            f"{shape.name}; {do}"
        )


def machine_of(model: str, device: str, threads: int | None) -> tuple[Planned, Device, str, float]:
    """A model in the form that ``auto`` takes on a device, the device, its kind, and host work of a step."""
    from outpace.analysis.prediction import devices
    from outpace.analysis.prediction.model import CPU, read

    if device == devices.HERE:
        shape = read(model)
        here = _here(shape, threads, "smollm2-135m", False)
        return shape, here.device, CPU, here.timed.host
    record = devices.find(device)
    shape = read(model, kind=record.kind)
    return shape, record.device(shape.dtype), record.kind, 0.0


def _drafting(
    acceptance: str | None, cost: float | None, config: str | None, sibling: float, tree: str | None
) -> dict[str, Any] | None:
    """What was said of a drafter, checked before anything is read; None: nothing was."""
    if acceptance is None:
        if cost is not None or config is not None or tree is not None:
            raise RequestError("a drafter's gain needs --acceptance, such as 0.7 or 0.8,0.7,0.6")
        return None
    if cost is not None and config is not None:
        raise RequestError("--drafter-cost and --draft-config both say what a level costs; give one")
    parents = None
    if tree is not None:
        from outpace.tree.shapes import parse_shape

        parents = parse_shape(tree).parent_N
        if parents is None:
            raise RequestError(
                f"--tree {tree!r:.80}: give children per level, such as 4x2x1; chains are shown"
            )
    return {
        "acceptance": numbers(
            "--acceptance", acceptance, "shares from 0 to 1", "0.8,0.7", float, lambda one: 0 <= one <= 1
        ),
        "cost": 0.0 if cost is None else _least("--drafter-cost", cost, 1e6),
        "sibling": _least("--sibling", sibling, 1.0),
        "parents": parents,
    }


def _least(name: str, value: float, most: float) -> float:
    if not 0 <= value <= most:
        raise RequestError(f"{name} must be from 0 to {most:g}, got {value:g}")
    return value


def _here(shape: Planned, threads: int | None, model: str, again: bool) -> Calibration:
    """This machine, from passes of a model that is held as the one asked for."""
    from outpace.analysis.prediction.calibration import calibrated
    from outpace.analysis.prediction.model import read
    from outpace.models.decoder import Decoder
    from outpace.models.load import load_target

    use_threads(threads)
    rounded = shape.form if shape.form in ("int8", "int4") else None
    dtype = "auto" if shape.form == "stored" else shape.dtype

    def load() -> Decoder:
        with show.busy(f"timing seven passes of {model}"):
            target = load_target(model, dtype=dtype, quantize=rounded)
        if not isinstance(target, Decoder):
            raise RequestError(
                f"--calibrate-with {model}: it is not run by the own decoder; name another model"
            )
        return target

    timed = read(model, dtype=dtype, quantize=rounded)
    if timed.form != shape.form:
        raise RequestError(
            f"--calibrate-with {model}: its weights would be {timed.form}, not {shape.form} as those of "
            f"{shape.name}; name a model in that form, or give --dtype"
        )
    return calibrated(timed, load, model=model, fresh=again, note=show.note)


def _gains(
    shape: Planned,
    machine: Device,
    other: Planned | None,
    drafting: dict[str, Any],
    context: int,
    batch: int,
    host: float,
) -> dict[str, Any]:
    from outpace.analysis.prediction.report import gains
    from outpace.analysis.prediction.speedup import Drafter, Steps

    steps = Steps(shape.by_rows(machine, context, batch), host)
    cost, second = steps.given(drafting["cost"]), 0.0
    if other is not None:
        cost, second = steps.level(other.by_rows(machine, context, batch))
    drafter = Drafter(
        acceptance=drafting["acceptance"], cost=cost, sibling=drafting["sibling"], second=second
    )
    return gains(drafter, steps.ratio, drafting["parents"])


def show_report(report: dict[str, Any]) -> None:
    """Print for people."""
    memory, device = report["memory"], report["device"]
    kinds, record = ", ".join(report["weight_types"]), device["record"]
    (peak,) = record["peak"].values()
    show.write(
        f"{report['model']}, weights {report['form']} ({kinds}), keys and values {report['kv_dtype']}\n"
        f"on {device['name']}: {speeds(peak, record['bandwidth'])}\n"
        f"from {device['source']}{_fitted(device['calibration'])}. A prediction, not a measurement.\n\n"
        f"memory    {_bytes(memory['resident_bytes'])} of weights, {_bytes(memory['kv_bytes'])} of keys and "
        f"values ({_bytes(memory['kv_token_bytes'])} a token)"
    )
    if memory["device_bytes"] is not None:
        show.write(
            f"; of {_bytes(memory['device_bytes'])}, room for "
            f"{show.count(memory['room_for'], 'sequence')} of this length"
        )
    show.write("\n")
    for name, what in (("prefill", "prompt"), ("decode", "context")):
        phase = report[name]
        show.write(
            f"\n{name}, {what} {phase[what]}, batch {phase['batch']}: {_time(phase['seconds'])} a pass, "
            f"{phase['tokens_per_second']:,.1f} tokens per second\n"
        )
        show.listed(
            [_operator(one, phase["seconds"]) for one in phase["operators"]], _OPERATOR, ("operator",)
        )
    verify = report["verify"]
    show.write(f"verification at context {verify['context']}, batch {verify['batch']}\n")
    rows = zip(verify["rows"], (1e3 * one for one in verify["pass_seconds"]), verify["ratios"], strict=True)
    show.listed(rows, {"rows": "{0}", "ms": "{1:.3f}", "x one row": "{2:.2f}"})
    if report["drafter"] is not None:
        _show_drafter(report["drafter"])


def _show_drafter(drafter: dict[str, Any]) -> None:
    accepted = ", ".join(f"{one:.2f}" for one in drafter["acceptance"])
    show.write(f"drafter: acceptance {accepted}; a level costs {drafter['cost']:.3f} plain steps\n")
    named = [("chain", one) for one in drafter["chains"][1 : _SHOWN + 1]]
    named += [("best chain", drafter["best_chain"]), ("best tree", drafter["best_tree"])]
    if drafter["tree"] is not None:
        named.append(("tree asked for", drafter["tree"]))
    columns = {
        "draft": "{0}",
        "guesses": "{1[guesses]}",
        "levels": "{1[levels]}",
        "emitted": "{1[emitted]:.2f}",
        "cost of a step": "{1[step_cost]:.2f}",
        "speed-up": "{1[speedup]:.2f}",
    }
    show.listed(named, columns, texts=("draft",))
    limit = drafter["break_even_cost"]
    show.write(
        f"One guess gains up to a cost of {limit:.3f} plain steps.\n"
        if limit
        else "One guess never gains here.\n"
    )


def _operator(one: dict[str, Any], whole: float) -> tuple[Any, ...]:
    return one, one["flops"] / 1e9, one["bytes"] / 1e6, 1e3 * one["seconds"], one["seconds"] / whole


def speeds(peak: float, bandwidth: float) -> str:
    """Two speeds in words. Of a fitted device, one of them may have limited no pass."""
    from outpace.analysis.prediction.calibration import FREE

    return ", ".join(
        (
            f"{peak / 1e9:,.0f} GFLOP/s" if peak < FREE else "arithmetic limited no pass",
            f"{bandwidth / 1e9:,.1f} GB/s" if bandwidth < FREE else "reading weights limited no pass",
        )
    )


def _fitted(calibration: dict[str, Any] | None) -> str:
    if calibration is None:
        return ""
    when = "now" if calibration["timed_now"] else "before"
    return f" ({calibration['model']}, timed {when}, off by {calibration['misfit']:.1%})"


def _bytes(count: float) -> str:
    unit = next((unit for unit in ("GB", "MB", "kB") if count >= _UNITS[unit]), "kB")
    return f"{count / _UNITS[unit]:,.1f} {unit}"


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.3f} ms"
