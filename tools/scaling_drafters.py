"""Trains draft models of several sizes on several numbers of tokens: points for outpace analyze scaling.

    outpace train draft_model --only-data --texts book.txt --tokens 64000 --work WORK
    python tools/scaling_drafters.py --work WORK --out runs --points drafters.json
    outpace analyze scaling drafters.json --plan smollm2-135m

Every point is one `outpace train draft_model`: narrow layers that start at random, one process after another,
each on a part of the tokens. What is there is not trained again, so a run that was stopped goes on. Another
size (--check) is no point: its loss is predicted by the law, and compared with that of its training.
Weights are those that a pass reads; tokens are those of answers that were learned from.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from outpace import Engine
from outpace.analysis.planner import Candidate, plan
from outpace.analysis.prediction.model import ROUNDED, shaped
from outpace.analysis.prediction.speedup import Steps
from outpace.analysis.roofline import read_parameters
from outpace.analysis.scaling import Point, bridge, fitted
from outpace.bench import report as reports
from outpace.bench.ours import Ours
from outpace.bench.provenance import here
from outpace.bench.records import Case, Settings
from outpace.bench.runner import Runner
from outpace.cli.predict import machine_of
from outpace.drafters.trained import decoder_from_json, decoder_to_json
from outpace.files import write_whole
from outpace.train.options import read_options
from outpace.train.pipeline import Pipeline

WIDTHS = (64, 128, 256)
PARTS = (0.125, 0.25, 0.5, 1.0)
"""Of the tokens."""
NEW = 48
"""Tokens of an answer whose speed is measured."""


def main(arguments: list[str] | None = None) -> int:
    """Train what is missing, write the points, and predict the size that was kept out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the tokens, as of outpace train")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafters")
    parser.add_argument("--points", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)), help="hidden sizes of the fit")
    parser.add_argument("--parts", default=",".join(map(str, PARTS)), help="shares of the tokens")
    parser.add_argument("--check", type=int, default=192, help="hidden size that is predicted; 0: none")
    parser.add_argument(
        "--speed", type=int, default=0, metavar="N", help="measure speed-ups on N held-out prompts"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=4096, help="draft vocabulary")
    parser.add_argument("--batch", type=int, default=1024, help="tokens of a training step")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    engine = Engine.load(asked.model, drafter="none")
    counts = json.loads((asked.work / "tokens" / "manifest.json").read_text(encoding="utf-8"))["counts"]
    whole, answers = counts["tokens"], counts["answer_tokens"]
    points: list[dict[str, Any]] = []
    told: dict[str, Any] = {"model": asked.model, "points": points}
    parts = [float(part) for part in asked.parts.split(",")]
    for part, width in product(parts, map(int, asked.widths.split(","))):
        points.append(trained(asked, engine, width, math.floor(part * whole / asked.batch), part * answers))
        write_whole(asked.points, json.dumps(told, indent=1) + "\n")
    if asked.check:
        steps = math.floor(parts[-1] * whole / asked.batch)
        told["checked"] = check(points, trained(asked, engine, asked.check, steps, parts[-1] * answers))
        write_whole(asked.points, json.dumps(told, indent=1) + "\n")
    if asked.speed:
        told["speed"] = speeds(asked, engine, points, told.get("checked"))
        write_whole(asked.points, json.dumps(told, indent=1) + "\n")
    return 0


def speeds(
    asked: Any, engine: Engine, points: list[dict[str, Any]], checked: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """What the planner promises for every size at the most tokens, and what it gives here."""
    shape, machine, kind, host = machine_of(asked.model, "cpu-here", asked.threads)
    known = [Point(**{key: p[key] for key in ("weights", "tokens", "loss")}) for p in points]
    law, tokens = fitted(known), max(p["tokens"] for p in points)
    across = bridge(
        [replace(k, acceptance=tuple(p["acceptance"])) for k, p in zip(known, points, strict=True)]
    )
    most = [p for p in (*points, *([checked] if checked else ())) if p["tokens"] == tokens]
    pipeline = Pipeline(
        engine, read_options("draft_model", [], None), work=asked.work, out=asked.out / "none"
    )
    prompts = pipeline.held_out_prompts(asked.speed)
    cases = [Case(id=str(number), group="all", ids=ids) for number, ids in enumerate(prompts)]
    context = round(sum(len(case.ids) for case in cases) / len(cases) + NEW / 2)
    candidates = [
        Candidate(weights=p["weights"], shape=shaped("drafter", p["shape"], kind=kind, quantize=ROUNDED))
        for p in most
    ]
    choices = {
        one.weights: one
        for one in plan(law, across, candidates, [tokens], shape, machine, context=context, host=host)
    }
    steps = Steps(lambda rows: shape.seconds(machine, rows=rows, context=context), host)
    specs = [
        f"draft_model[model={p['folder']} tree=chain tree_size={max(1, choices[p['weights']].guesses)}]"
        for p in most
    ]
    runner = Runner([Ours(engine, engine.method(spec)) for spec in ("none", *specs)], {})
    rows = reports.build(runner.run(cases, [Settings(max_new_tokens=NEW)]), here(""))["rows"]
    found = []
    for p, spec in zip(most, specs, strict=True):
        (row,) = [row for row in rows if row["method"] == engine.method(spec).spec]
        choice = choices[p["weights"]]
        found.append(
            {
                "weights": p["weights"],
                "guesses": choice.guesses,
                "one_guess": 1 / (steps.ratio(2) + choice.cost) * (1 + choice.acceptance[0]),
                "loss": [choice.loss, p["loss"]],
                "acceptance": [choice.acceptance[0], p["acceptance"][0], row["acceptance_by_depth"][0]],
                "emitted": [choice.emitted, row["mean_emitted"]],
                "speedup": [choice.speedup, row["speedup"]],
                "interval": row["speedup_interval"],
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def trained(asked: Any, engine: Engine, width: int, steps: int, tokens: float) -> dict[str, Any]:
    """One point, trained if need be."""
    out = asked.out / f"width-{width}-steps-{steps}"
    if not (out / "provenance.json").is_file():
        settings = {
            "width": width,
            "layers": asked.layers,
            "loop.steps": steps,
            "loop.evaluate_every": steps,
            "loop.checkpoint_every": max(50, steps),
            "pipeline.vocab": asked.vocab,
            "pipeline.tokens_per_batch": asked.batch,
        }
        stopped = asked.work / "draft_model"
        if stopped.exists():  # of a run that ended early: it begins anew
            shutil.rmtree(stopped)
        options = read_options("draft_model", [f"{key}={value}" for key, value in settings.items()], None)
        pipeline = Pipeline(engine, options, work=asked.work, out=out, say=_say)
        pipeline.run(report=lambda progress: _say(progress.line()))
    said = json.loads((out / "config.json").read_text(encoding="utf-8"))
    held_out = json.loads((out / "provenance.json").read_text(encoding="utf-8"))["held_out"]
    config = decoder_from_json(said["decoder"], out)
    shape = replace(config, vocab_size=said.get("draft_vocab_size", config.vocab_size), tied_head=False)
    point = {
        "weights": read_parameters(shape),
        "tokens": round(tokens),
        "loss": held_out["held_out_loss"],
        "acceptance": held_out["acceptance"],
        "shape": decoder_to_json(shape),
        "folder": str(out),
    }
    print(
        f"width {width}, {steps} steps: loss {point['loss']:.3f}, acceptance {point['acceptance']}",
        flush=True,
    )
    return point


def _say(line: object) -> None:
    print(line, file=sys.stderr, flush=True)


def check(points: list[dict[str, Any]], other: dict[str, Any]) -> dict[str, Any]:
    """The loss of a size that the law has not seen: predicted, and as trained."""
    found = fitted([Point(weights=p["weights"], tokens=p["tokens"], loss=p["loss"]) for p in points])
    weights, tokens = other["weights"], other["tokens"]
    low, high = found.interval(lambda law: law.loss(weights, tokens))
    guess = found.law.loss(weights, tokens)
    print(
        f"{weights:.3g} weights, {tokens:.3g} tokens: loss {guess:.3f} predicted ({low:.3f} to {high:.3f}), "
        f"{other['loss']:.3f} trained, off by {guess / other['loss'] - 1:+.1%}"
    )
    return {**other, "predicted_loss": guess, "interval": [low, high]}


if __name__ == "__main__":
    raise SystemExit(main())
