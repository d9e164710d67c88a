"""Train every drafter on the same answers for the same time, measure all of them, and make one table.

    outpace train eagle3 --only-data --prompts questions.jsonl --tokens 360000 --work WORK
    python tools/trained_table.py --work WORK --out DRAFTERS --minutes 30 --page docs/results/trained.md

A row is a method with settings, as in ``--rows eagle3 "eagle3 steps=5"``. Features of all rows are computed
once, before; their time does not count. A short trial then says what a step of a row takes of the processor,
and this says how many steps fit into the minutes. So a training goes by steps: what was stopped goes on with
the same bits, and a busy machine changes nothing. What is finished is not done again.
Figures lie beside the page, so further rows can be made elsewhere. Where their tokens are others, the page
tells both sets apart; train a row on both, to see how far they differ.

Each stage is a process of its own with one thread; see `trained_use.py` for what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trained_page
import trained_use
from pages import tool

from outpace import Engine
from outpace.drafters.trained import WEIGHTS
from outpace.errors import OutpaceError
from outpace.files import write_whole
from outpace.train import checkpoint
from outpace.train.features import FeatureStore
from outpace.train.loop import LoopConfig, train
from outpace.train.options import Options, read_options
from outpace.train.pipeline import Pipeline
from outpace.train.tokens import TokenSequence, TokenStore

ROWS = (
    *("eagle3", "hydra", "medusa", "glide", "fspad", "falcon", "mtp", "redrafter", "lstm", "mlp_speculator"),
    *("coral", "streaming", "s2d", "dflash", "s3d", "kangaroo", "ppd", "draft_model"),
    *("early_exit", "dspark", "jetspec", "sec"),
)
SHARED = ("pipeline.tokens_per_batch=1024", "loop.lr=0.001")
"""Settings of all rows; a row's own come later and win."""
TRIAL = 8.0
"""Seconds of the processor in which steps are timed, the first one apart."""
FEWEST = 3
"""Steps that are timed, at least."""
DATA = ("answer_tokens", "tokens", "sequences", "digest")
"""What a row says of the tokens."""
STAGES = ("plan", "trained", "use")


@tool
def main(arguments: list[str] | None = None) -> None:
    """Do what is missing, row by row, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the tokens, as of outpace train")
    parser.add_argument("--out", type=Path, required=True, help="folder for drafters and figures")
    parser.add_argument("--minutes", type=float, required=True, help="of one thread, per row")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help="methods, each with its settings")
    parser.add_argument("--set", dest="shared", nargs="+", default=list(SHARED), help="settings of all rows")
    parser.add_argument("--page-only", action="store_true", help="write the page of what is finished")
    parser.add_argument("--features-only", action="store_true", help="compute features and leave")
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts to measure on")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an answer that is measured")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--loaded", action="store_true", help="say that other programs ran")
    parser.add_argument("--page", type=Path, help="Markdown file to write; its plot goes to ../images")
    asked = parser.parse_args(arguments)
    asked.given = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the stage, too
    left = [row for row in asked.rows if not asked.page_only and not stage_file(asked, row, "use").is_file()]
    if asked.features_only or left:
        alone(features, asked)
    failed = [row for row in left if not asked.features_only and not finished(asked, row)]
    if asked.page is not None and (rows := found(asked)):
        trained_page.write(asked, rows)
    if failed:
        raise OutpaceError(f"not finished: {', '.join(failed)}; the same command goes on with them")


def finished(asked: Any, row: str) -> bool:
    """Do what is missing of a row; whether that went well. What did not is told, and costs no other row."""
    try:
        for stage, work in zip(STAGES, (plan, trained, use), strict=True):
            if not stage_file(asked, row, stage).is_file():
                print(f"{row}: {stage}", file=sys.stderr, flush=True)
                alone(work, asked, row)
    except OutpaceError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return False
    return True


class _Enough(Exception):
    """Steps were timed."""


def alone(work: Callable[..., None], *given: Any) -> None:
    """Run a stage in a process of its own: memory is its own, and what was set ends with it.

    Raises:
        OutpaceError: it failed.
    """
    process = multiprocessing.get_context("spawn").Process(target=work, args=given, daemon=True)
    process.start()
    process.join()
    if process.exitcode:
        raise OutpaceError(f"{' '.join(map(str, given[1:]))}: {work.__name__} ended with {process.exitcode}")


def found(asked: Any) -> list[dict[str, Any]]:
    """What is known of the rows that are finished, those that the page already shows included.

    Raises:
        OutpaceError: the page shows rows of another time.
    """
    rows = [
        {"row": row, **{name: _read(stage_file(asked, row, name)) for name in STAGES}}
        for row in asked.rows
        if stage_file(asked, row, "use").is_file()
    ]
    shown = asked.page.with_suffix(".json")
    earlier = _read(shown) if shown.is_file() else []
    if len({row["plan"]["minutes"] for row in (*earlier, *rows)}) > 1:
        raise OutpaceError(f"{shown} has rows of other minutes; remove it, or name another --page")
    return [*{(row["row"], row["trained"]["data"]["digest"]): row for row in (*earlier, *rows)}.values()]


def features(asked: Any) -> None:
    """Compute what any row reads of the target, once for all."""
    engine, wanted = _engine(asked), set[str]()
    for row in asked.rows:
        options = _options(asked, row)
        wanted |= set(options.objective.taps(options.own, engine.target))
    store = TokenStore.open(asked.work / "tokens")
    room = round(read_options("eagle3", asked.shared).pipeline.feature_gb * 1e9)
    kept = FeatureStore(engine.target, store.folder, sorted(wanted), room)
    longest = read_options("eagle3", asked.shared).pipeline.max_length
    began = time.process_time()
    kept.fill(
        [one.beginning(longest) for one in store], lambda told: print(told, file=sys.stderr, flush=True)
    )
    kept.flush()
    print(f"features: {time.process_time() - began:.0f} s of the processor", file=sys.stderr, flush=True)


def plan(asked: Any, row: str) -> None:
    """Time steps of a row, and say how many of them fit."""
    pipeline = _pipeline(asked, row, ())
    objective = pipeline.options.objective.build(pipeline.options.own, pipeline.target, pipeline.vocab)
    config = LoopConfig(steps=1 << 30, report_every=1, evaluate_every=1 << 30, checkpoint_every=1 << 30)
    stamps = [time.process_time()]

    def report(progress: Any) -> None:
        stamps.append(time.process_time())
        if len(stamps) > FEWEST + 1 and stamps[-1] - stamps[1] >= TRIAL:
            raise _Enough

    with tempfile.TemporaryDirectory(dir=pipeline.work) as place, contextlib.suppress(_Enough):
        out, work = Path(place) / "out", Path(place) / "work"
        train(objective, pipeline.batches("train"), (), config, out=out, work=work, report=report)
    spent = np.diff(stamps)[1:]  # the first one sets things up
    steps = max(1, round(60 * asked.minutes / float(spent.mean())))
    told = {
        "minutes": asked.minutes,
        "steps": steps,
        "step_seconds": float(spent.mean()),
        "timed": len(spent),
    }
    put(stage_file(asked, row, "plan"), {**told, "settings": [*asked.shared, *row.split()[1:]]})


def trained(asked: Any, row: str) -> None:
    """Train a row, or go on with it."""
    steps = _read(stage_file(asked, row, "plan"))["steps"]
    every = max(1, min(50, steps // 4))
    loop = (f"loop.steps={steps}", f"loop.evaluate_every={steps}", f"loop.checkpoint_every={every}")
    pipeline = _pipeline(asked, row, loop)
    began, losses, elsewhere = time.process_time(), [], timed(pipeline.features)

    def report(progress: Any) -> None:
        losses.append([progress.step, progress.loss])
        print(f"{row}: {progress.line()}", file=sys.stderr, flush=True)

    made = pipeline.run(report=report)
    count = pipeline.batches("train").count(0)
    told = {
        "steps": made.trained.steps,
        "epochs": made.trained.steps / count,
        "processor_seconds": time.process_time() - began - sum(elsewhere),
        "feature_seconds": sum(elsewhere),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "weights_bytes": (made.folder / WEIGHTS).stat().st_size,
        "losses": losses,
        "held_out": made.provenance and _read(made.folder / "provenance.json").get("held_out"),
        "data": {key: made.provenance["data"].get(key) for key in DATA},
    }
    put(stage_file(asked, row, "trained"), told)


def timed(features: FeatureStore | None) -> list[float]:
    """Note how long the target's passes take, of features that were not kept; processor seconds of each."""
    spent = list[float]()
    if features is not None:
        usual = features.ensure

        def ensure(part: Sequence[TokenSequence]) -> Any:
            began = time.process_time()
            try:
                return usual(part)
            finally:
                spent.append(time.process_time() - began)

        features.ensure = ensure  # type: ignore[method-assign]
    return spent


def use(asked: Any, row: str) -> None:
    """Measure a row that was trained."""
    pipeline = _pipeline(asked, row, ())
    put(stage_file(asked, row, "use"), trained_use.measured(pipeline, asked.prompts, asked.max_new_tokens))


def _engine(asked: Any) -> Engine:
    torch.set_num_threads(1)
    return Engine.load(asked.model, drafter="none")


def _options(asked: Any, row: str, more: Sequence[str] = ()) -> Options:
    name, *own = row.split()
    return read_options(name, [*asked.shared, *own, *more])


def _pipeline(asked: Any, row: str, more: Sequence[str]) -> Pipeline:
    """A row's training; every row has a work folder of its own, with the tokens of all."""
    folder = stage_file(asked, row, "plan").parent
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "tokens").is_symlink():
        os.symlink((asked.work / "tokens").resolve(), work / "tokens", target_is_directory=True)
    options = _options(asked, row, more)
    there = checkpoint.latest(work / options.method) is not None
    return Pipeline(_engine(asked), options, work=work, out=folder / "drafter", resume=there)


def stage_file(asked: Any, row: str, stage: str) -> Path:
    """Where a stage of a row leaves its figures."""
    out: Path = asked.out
    return out / re.sub(r"[^\w.=-]+", "-", row) / f"{stage}.json"


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def put(path: Path, content: dict[str, Any]) -> None:
    """Write figures, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
