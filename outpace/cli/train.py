"""``outpace train``: from prompts to a measured drafter for a model, in one command."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace import registry
from outpace.cli import interrupts, show
from outpace.cli.options import AS_JSON, ModelOptions, option, output
from outpace.errors import OutpaceError, RequestError
from outpace.files import check_writable, expanded, reading

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.train.corpus import CorpusPrompt, Source
    from outpace.train.estimate import Estimate
    from outpace.train.pipeline import Made, Pipeline

MEASURED_PROMPTS, MEASURED_TOKENS = 12, 96
"""Held-out prompts that a new drafter is measured on, and tokens of each answer."""
_data = partial(option, panel="Data")

EXAMPLES = """
Examples:

  outpace train draft_model --prompts questions.jsonl --texts book.txt --dry-run

  outpace train eagle3 --self-prompts 4000 --texts book.txt --set loop.minutes=120

  outpace train eagle3 --resume --set loop.minutes=120

  outpace train draft_model --set layers=4 --set pipeline.vocab=16384 --set data.greedy=0.3

  outpace train target --texts stories.txt --set loop.minutes=40 --out exits
"""


def train(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="What to train, such as draft_model or eagle3; or target.")
    ],
    *,
    model: ModelOptions,
    prompts: list[str] | None = _data(
        None,
        "Questions to answer: JSON or JSONL rows, or a line each. FILE::LICENCE notes "
        "its licence. Repeatable.",
        metavar="FILE",
    ),
    texts: list[str] | None = _data(
        None,
        "Texts or code; every passage becomes a task, such as to summarise it. Repeatable.",
        metavar="FILE",
    ),
    self_prompts: int | None = _data(
        None, "Let the model think of so many questions itself. Needs its chat template.", least=1
    ),
    tokens: int | None = _data(None, "Tokens of answers to learn from.", shown="1000000", least=1),
    work: Path | None = _data(
        None,
        "Keep answers, features and checkpoints here; all methods share them.",
        metavar="DIR",
        check=check_writable,
        shown="the user's data folder",
    ),
    start: Path | None = option(
        None, "Begin with the weights and the vocabulary of this drafter of the method.", metavar="DIR"
    ),
    mean_with: list[Path] | None = option(
        None, "With --start: begin with the mean of its weights and of these. Repeatable.", metavar="DIR"
    ),
    out: Path | None = output(
        None, "Write the drafter here.", "-o", metavar="DIR", shown="where --drafter METHOD finds it"
    ),
    settings: list[str] | None = option(
        None,
        "An option of the method, of the data (data.KEY), of the loop (loop.KEY) or of "
        "the pipeline (pipeline.KEY); a wrong one lists those there are. Repeatable.",
        "--set",
        "-s",
        metavar="KEY=VALUE",
    ),
    resume: bool = option(False, "Go on with a training that was stopped."),
    only_data: bool = option(False, "Make answers, and leave."),
    dry_run: bool = option(False, "Say what it would take in tokens, disk, memory and time."),
    as_json: bool = AS_JSON,
) -> None:
    """Make a drafter for a model, from nothing but the model and some prompts.

    Prompts come from files, from the model itself, or both. The model answers them, its features
    are kept, the method is trained on them, and the drafter is measured on held-out prompts. With --resume
    a training that was stopped goes on.

    With target as METHOD, a model is trained on texts so that its first layers draft well for it.
    """
    if method == "target":
        _train_target(texts or (), out, settings or (), resume)
        return
    registry.entry("objective", method, "target")
    from outpace.train.options import read_options

    options = read_options(method, settings or (), tokens)
    from outpace.train.distributed import take_device

    take_device(model.device)
    if out is not None:
        from outpace.train.install import check_destination

        check_destination(out)
    for name in (*(prompts or ()), *(texts or ())):
        with reading(expanded(name.partition("::")[0])):
            pass  # a wrong name is said before the model is loaded
    engine = model.load(drafter="none")

    from outpace.train import checkpoint
    from outpace.train.pipeline import Pipeline, made_to_json, work_folder
    from outpace.train.stopping import told

    work = work_folder(engine) if work is None else work
    with contextlib.ExitStack() as stack:
        if not dry_run:
            stack.enter_context(told(_say, partial(checkpoint.kept, work / method, work / method / "best")))
        own: Sequence[str] = ()
        prompt_seconds = 0.0
        if self_prompts is not None:
            options.trial(engine.target)  # refuses what cannot be, before the model thinks of prompts
            # What is only estimated leaves nothing behind.
            there = Path(stack.enter_context(tempfile.TemporaryDirectory())) if dry_run else work
            count = min(self_prompts, 64) if dry_run else self_prompts
            began = time.perf_counter()
            own = _self_prompts(engine, there, count, options.data.batch)
            prompt_seconds = (time.perf_counter() - began) * self_prompts / count
        corpus, sources = _corpus([*(prompts or ()), *own], texts or ())
    pipeline = Pipeline(
        engine,
        options,
        prompts=corpus,
        sources=sources,
        work=work,
        out=out,
        resume=resume,
        start=start,
        mean_with=mean_with or (),
        say=_say,
    )
    if tokens is not None and not corpus and (store := pipeline.stored) and store.answer_tokens < tokens:
        raise RequestError(
            f"--tokens {tokens}, but {pipeline.work / 'tokens'} holds {store.answer_tokens}; give the "
            "files that it was made from with --prompts and --texts"
        )
    if not corpus and (wrong := [pair for pair in settings or () if pair.startswith("data.")]):
        raise RequestError(
            f"--set {wrong[0]} is about answers to be made; give the files to make "
            "them from with --prompts and --texts"
        )
    if dry_run:
        from outpace.train.estimate import estimate

        if self_prompts is None:  # of which only a few were thought of
            pipeline.check_prompts()
        with show.busy("measuring speeds"):
            found = estimate(pipeline, MEASURED_PROMPTS * MEASURED_TOKENS, prompt_seconds)
            _show_estimate(pipeline, found, as_json)
        return
    if only_data:
        pipeline.data()
        _show_data(pipeline, as_json)
        return
    made = pipeline.run(report=_report, measure=lambda folder: _measure(engine, pipeline, folder))
    if pipeline.rank > 0:
        return
    measured = dict(made.measured or {})
    if as_json:
        show.write_json({**made_to_json(made), "measured": measured})
    else:
        _show_made(made, measured)


def _train_target(texts: Sequence[str], out: Path | None, settings: Sequence[str], resume: bool) -> None:
    """Make a model of its own from texts."""
    from outpace.train.target import make, read_settings

    interrupts.done()
    if not texts or out is None:
        raise RequestError("a target is made from texts; give --texts FILE and --out DIR")
    missing = [name for name in texts if not expanded(name).is_file()]
    if missing:
        raise RequestError(f"--texts {missing[0]}: there is no such file")
    if out.exists() and not out.is_dir():
        raise RequestError(f"--out {out} is a file; name a folder")
    check_writable(out)
    recipe, loop = read_settings(settings)
    make(out, recipe, [expanded(name) for name in texts], loop, resume, say=show.note)
    show.write(f"wrote {out}, and a workload to measure it with, {out / 'prompts.jsonl'}\n")


def _self_prompts(engine: Engine, folder: Path, count: int, batch: int) -> list[str]:
    """Files of prompts and conversations that the model thinks of itself, gone on with where they end."""
    from outpace.train.self_prompts import SelfPromptConfig, write_conversations, write_prompts

    prompts, turns = folder / "self-prompts.jsonl", folder / "self-conversations.jsonl"
    config = SelfPromptConfig(count=count, batch=batch)
    write_prompts(engine, prompts, config, say=_say)
    found = [prompts]
    if write_conversations(engine, prompts, turns, config, say=_say):
        found.append(turns)
    return [f"{path}::written by {engine.target.name}" for path in found]


def _corpus(prompts: Sequence[str], texts: Sequence[str]) -> tuple[list[CorpusPrompt], list[Source]]:
    """Prompts of the files, without those that benchmarks measure with."""
    if not prompts and not texts:
        return [], []
    from outpace.bench.workloads import builtin
    from outpace.train.corpus import read_corpus

    measured = [turn["content"] for prompt in builtin() for turn in prompt.messages]
    with show.busy("reading prompts"):
        return read_corpus(prompts, texts, exclude=measured)


def _say(tick: Any) -> None:
    show.note(str(tick))


def _report(progress: Any) -> None:
    show.note(progress.line())


def _measure(engine: Engine, pipeline: Pipeline, folder: Path) -> dict[str, Any]:
    """Speed-up of a drafter over plain decoding, in turns, on prompts kept from training.

    A drafter that cannot be measured here is no reason to lose it: the reason is given instead.

    Args:
        folder: where it is until it was measured.

    Raises:
        KeyboardInterrupt: stopped by Ctrl-C; half a measurement is none.
    """
    from outpace.bench import report as reports
    from outpace.bench.ours import Ours
    from outpace.bench.provenance import provenance
    from outpace.bench.records import Case, Settings
    from outpace.bench.runner import Runner
    from outpace.train.pipeline import command

    prompts = pipeline.held_out_prompts(MEASURED_PROMPTS)
    longest = engine.target.max_positions - MEASURED_TOKENS
    cases = [
        Case(id=f"held-out-{i}", group="held-out", ids=ids)
        for i, ids in enumerate(prompts)
        if len(ids) <= longest
    ]
    try:
        if not cases:
            raise RequestError("no held-out prompt leaves room for an answer")
        with tempfile.TemporaryDirectory() as place:
            # A method spec cannot hold every path that a work folder may have.
            link = Path(place) / "drafter"
            link.symlink_to(folder.resolve(), target_is_directory=True)
            specs = ("none", _spec(pipeline, link))
            runner = Runner([Ours(engine, engine.method(spec)) for spec in specs], {})
            mode = Settings(max_new_tokens=MEASURED_TOKENS)
            with show.progress(runner.steps(cases, [mode]), "units") as tick:
                runner.tick = tick
                session = runner.run(cases, [mode])
    except OutpaceError as error:
        show.note(f"not measured: {error}")
        return {"speedup": None, "reason": str(error)}
    if session.interrupted:
        raise KeyboardInterrupt
    about = provenance(
        command=command(),
        target=engine.target,
        cases=cases,
        config={"max_new_tokens": MEASURED_TOKENS, "temperature": 0.0, "batch": 1},
    )
    row = reports.build(session, about, engine.eos_ids)["rows"][-1]
    keys = ("speedup", "speedup_interval", "mean_emitted", "acceptance_rate", "tokens_per_second")
    where = ("cpu", "gpu", "threads", "dtype", "date")
    return {
        **{key: row.get(key) for key in keys},
        **({} if row.get("speedup") else {"reason": "something else used the machine"}),
        "method": _spec(pipeline, None if pipeline.out_is_home else pipeline.out),
        "prompts": len(cases),
        "max_new_tokens": MEASURED_TOKENS,
        **{key: about.get(key) for key in where},
    }


def _spec(pipeline: Pipeline, folder: Path | None) -> str:
    """The method spec of what was trained, in a folder; None: where its name finds it."""
    options = pipeline.options
    spec = options.objective.spec(options.own, folder)
    return spec or drafter_spec(options.method, folder or pipeline.out, folder is None)


def drafter_spec(method: str, folder: Path, found: bool) -> str:
    """The method spec that loads a drafter folder.

    Args:
        found: whether the name alone finds it.

    Raises:
        OutpaceError: no drafter is called that.
    """
    if found:
        return method
    import dataclasses

    from outpace import registry

    fields = {field.name for field in dataclasses.fields(registry.load("drafter", method).Config)}
    key = next((name for name in ("path", "model") if name in fields), "path")
    return f"{method}[{key}={folder}]"


def _show_estimate(pipeline: Pipeline, found: Estimate, as_json: bool) -> None:
    import shutil

    from outpace.train.features import size_text
    from outpace.train.progress import clock_text

    there = next(p for p in (pipeline.work, *pipeline.work.resolve().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if as_json:
        show.write_json(
            {
                "method": pipeline.options.method,
                "model": pipeline.target.name,
                "work": str(pipeline.work),
                "out": str(pipeline.out),
                "disk_free_bytes": free,
                **found.to_json(),
            }
        )
        return
    prompts = f"prompts {clock_text(found.prompt_seconds)}, " if found.prompt_seconds else ""
    show.write(
        f"{pipeline.options.method} for {pipeline.target.name}, roughly; nothing was started\n"
        f"tokens   {found.answer_tokens} in {show.count(found.answers, 'answer')}, "
        f"{found.tokens} with their prompts\n"
        f"disk     {size_text(found.disk_bytes)} in {pipeline.work} ({size_text(free)} are free)\n"
        f"memory   {size_text(found.memory_bytes)}\n"
        f"time     {clock_text(found.seconds)}: {prompts}answers {clock_text(found.generate_seconds)}, "
        f"features {clock_text(found.feature_seconds)}, {found.steps} steps "
        f"{clock_text(found.train_seconds)}, measurement {clock_text(found.measure_seconds)}\n"
        f"drafter  {pipeline.out}\n"
    )


def _show_data(pipeline: Pipeline, as_json: bool) -> None:
    counts = dict(pipeline.store.manifest["counts"])
    if as_json:
        show.write_json({"work": str(pipeline.work), "data_digest": pipeline.store.digest, **counts})
        return
    show.write(
        f"{counts['answer_tokens']} tokens of answers in {counts['sequences']} sequences; "
        f"{counts.get('loop_tokens_cut', 0)} tokens of loops were cut\n"
        f"all in {pipeline.work}\n"
    )


def _show_made(made: Made, measured: dict[str, Any]) -> None:
    best = made.trained.best
    if best is not None:
        depths = ", ".join(f"{one:.2f}" for one in best.acceptance)
        show.write(
            f"held-out acceptance by depth {depths} (step {made.trained.best_step} of {made.trained.steps})\n"
        )
    if measured["speedup"] is not None:
        show.write(
            f"measured on held-out prompts ({measured['prompts']}): speed-up "
            f"{measured['speedup']:.2f}, mean emitted {measured['mean_emitted']:.2f}\n"
        )
    else:
        show.write(f"speed-up not measured: {measured['reason']}\n")
    show.write(f"wrote {made.folder}\n")
