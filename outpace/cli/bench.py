"""``outpace bench``: what is faster here, by how much, and why, in one paired run."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import bench_passes, bench_serve, show
from outpace.cli.contenders import check_peers, taking_part
from outpace.cli.drafting import PlanOptions, read_specs
from outpace.cli.options import ModelOptions, at_least_one, option, spread
from outpace.config import DEFAULT_DRAFTER
from outpace.errors import RequestError
from outpace.files import check_writable

if TYPE_CHECKING:
    from outpace.bench.cases import Asked
    from outpace.bench.records import Case, Settings
    from outpace.bench.report import Report
    from outpace.bench.runner import Runner, Session
    from outpace.bench.synthetic import Texts
    from outpace.engine.engine import Engine

SEEDS = 4
"""Answers per prompt where answers are sampled."""
_WHO = "Methods"
_WHAT = "Prompts"
_HOW = "Measuring"
_OUTPUT = "Output"

_EXAMPLES = """
Examples:

  outpace bench --limit 2

  outpace bench --drafters "prompt_lookup,draft_model[model=smollm2-135m layers=12]" --out report

  outpace bench --peers hf,hf-prompt-lookup --workload question.jsonl --answers answers.jsonl

  outpace bench --temperature 0.8 --batch 4 --json

  outpace bench compare before after
"""


def register(app: typer.Typer) -> None:
    """Add the command and its sub-commands."""
    group = typer.Typer(invoke_without_command=True, epilog=_EXAMPLES.strip().replace("[", r"\["))
    group.callback()(spread(bench))
    group.command(epilog="Try: outpace bench compare before/report.json after")(compare)
    bench_passes.register(group)
    bench_serve.register(group)
    app.add_typer(group, name="bench")


def bench(
    context: typer.Context,
    *,
    model: ModelOptions,
    drafters: Annotated[
        str,
        option(
            "--drafters",
            "-d",
            panel=_WHO,
            metavar="SPECS",
            help="Method specs with commas between them, or all: every drafter that needs no "
            "setting. none takes part in any case.",
        ),
    ] = f"none,{DEFAULT_DRAFTER}",
    plan: PlanOptions,
    peers: Annotated[
        str,
        option(
            "--peers",
            panel=_WHO,
            metavar="NAMES",
            show_default="nobody",
            help="Other programs: hf, hf-prompt-lookup, hf-assisted, openvino, "
            "openvino-prompt-lookup, llamacpp. hf-assisted takes the model of the first "
            "draft_model among the drafters.",
        ),
    ] = "",
    peer_python: Annotated[
        Path | None,
        option(
            "--peer-python",
            panel=_WHO,
            metavar="PATH",
            help="Python of the environment that the peers outside this process are in.",
        ),
    ] = None,
    synthetic_acceptance: Annotated[
        str | None,
        option(
            "--synthetic-acceptance",
            panel=_WHO,
            metavar="A1,A2,...",
            help="Add a drafter whose guess at depth i is right at rate Ai, at no cost: "
            "what a drafter of that quality would give.",
        ),
    ] = None,
    workload: Annotated[
        str,
        option(
            "--workload",
            "-w",
            panel=_WHAT,
            metavar="NAME|FILE",
            help="builtin, or a file: Spec-Bench, MT-bench, HumanEval, GSM8K, MBPP, or JSONL "
            "with prompt or messages.",
        ),
    ] = "builtin",
    limit: Annotated[
        int | None,
        option(
            "--limit", panel=_WHAT, metavar="N", show_default="all", help="Prompts per category, at most."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        option(
            "--max-new-tokens",
            panel=_HOW,
            metavar="N",
            help="Tokens of every answer; an end of sequence does not end it.",
        ),
    ] = 128,
    temperature: Annotated[
        float,
        option(
            "--temperature",
            "-t",
            panel=_HOW,
            metavar="T",
            help=f"Above 0: {SEEDS} seeds per prompt, sampled independently and, in rows of "
            "their own, reproducibly.",
        ),
    ] = 0.0,
    batch: Annotated[
        int,
        option(
            "--batch",
            "-b",
            panel=_HOW,
            metavar="B",
            help="Prompts of one category that are answered together.",
        ),
    ] = 1,
    repeat: Annotated[int, option("--repeat", panel=_HOW, metavar="R", help="Rounds over all prompts.")] = 1,
    max_repeat: Annotated[
        int | None,
        option(
            "--max-repeat",
            panel=_HOW,
            metavar="R",
            show_default="--repeat",
            help="Most rounds over a category where a speed-up is not settled to 0.02.",
        ),
    ] = None,
    disturb: Annotated[
        bool,
        option(
            "--disturb",
            panel=_HOW,
            help="Measure every unit once more while another process spins on a core.",
        ),
    ] = False,
    seed: Annotated[
        int, option("--seed", panel=_HOW, metavar="S", help="First seed of sampled answers.")
    ] = 0,
    out: Annotated[
        Path | None,
        option(
            "--out", "-o", panel=_OUTPUT, metavar="DIR", help="Write report.json, report.md and plots here."
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        option("--answers", panel=_OUTPUT, metavar="FILE", help="Write the answers as Spec-Bench does."),
    ] = None,
    as_json: Annotated[bool, option("--json", panel=_OUTPUT, help="Print one JSON object.")] = False,
) -> None:
    """Measure methods against plain decoding, in turns, prompt by prompt.

    Ctrl-C ends it early and keeps what is measured. Read docs/bench.md before you believe it.
    """
    if context.invoked_subcommand is not None:
        return
    for name, value in (
        ("--limit", limit),
        ("--batch", batch),
        ("--repeat", repeat),
        ("--max-repeat", max_repeat),
    ):
        at_least_one(name, value)
    if max_new_tokens < 2:
        raise RequestError(
            f"--max-new-tokens must be at least 2, got {max_new_tokens}; the first token belongs to prefill"
        )
    if answers is not None and batch > 1:
        raise RequestError(f"--answers needs the time of every answer, got --batch {batch}; use 1")
    specs = read_drafters(drafters, plan)

    from outpace.bench.formats import read_workload
    from outpace.bench.synthetic import read_rates
    from outpace.params import SamplingParams

    SamplingParams(temperature=temperature, seed=seed)  # refuses what is out of range
    named = check_peers(peers)
    rates = None if synthetic_acceptance is None else read_rates(synthetic_acceptance)
    prompts = read_workload(workload)
    if out is not None:
        check_writable(out)  # what cannot be written is said before the work
    engine = model.load(drafter="none", allow_lossy=plan.allow_lossy)
    tokenizer = engine.target.tokenizer
    if answers is not None and tokenizer is None:
        raise RequestError(f"--answers needs a tokenizer, and {engine.target.name} has none")

    from outpace.bench.cases import make_cases
    from outpace.bench.runner import Runner

    seeds = range(seed, seed + SEEDS) if temperature > 0 else [seed]
    with show.busy("preparing prompts"):
        asked = make_cases(engine, prompts, limit=limit, max_new_tokens=max_new_tokens, seeds=seeds)
    modes = modes_of(max_new_tokens, temperature)
    texts: Texts = {}
    with taking_part(
        engine, specs, plan, asked.notes, rates=rates, texts=texts, peers=named, python=peer_python
    ) as contenders:
        runner = Runner(
            contenders,
            texts,
            batch=batch,
            repeat=repeat,
            max_repeat=max(repeat, max_repeat or 1),
            need_texts=rates is not None,
            disturb=disturb,
        )
        runner.session.notes += asked.notes
        measure(runner, asked.cases, modes)
    report = report_of(
        engine,
        asked,
        runner.session,
        {
            "workload": workload,
            "limit": limit,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "batch": batch,
            "ignore_eos": modes[0].ignore_eos,
            "repeat": repeat,
            "max_repeat": runner.max_repeat,
            "disturb": disturb,
            "seed": seed,
            "drafters": drafters,
            "peers": named,
            "synthetic_acceptance": rates,
        },
    )
    if as_json:
        show.write_json(report)
    else:
        show_report(report)
    # After the table: a disk that is full by now costs files and no figures.
    if out is not None:
        save(report, out)
    if answers is not None and tokenizer is not None:
        for path in save_answers(answers, runner.session, asked, tokenizer.decode):
            show.note(f"wrote {path}")
    if report["partial"]:
        raise typer.Exit(130)


def read_drafters(text: str, plan: PlanOptions) -> list[str] | None:
    """Method specs with the plan put in; None stands for all drafters. Raises as ``known``."""
    plan.check_names()  # also where nobody drafts
    if text == "all":
        return None
    return [plan.on(spec) for spec in read_specs("--drafters", text)]


def modes_of(max_new_tokens: int, temperature: float) -> list[Settings]:
    """How answers are given; sampled ones also so that any drafter gives the same."""
    from outpace.bench.records import Settings

    free = Settings(max_new_tokens=max_new_tokens, temperature=temperature)
    return [free, replace(free, reproducible=True)] if temperature > 0 else [free]


def measure(runner: Runner, cases: list[Case], modes: list[Settings]) -> None:
    """Run it, showing how far it has come."""
    with show.progress(runner.steps(cases, modes), "units") as tick:
        runner.tick = tick
        runner.run(cases, modes)


def report_of(engine: Engine, asked: Asked, session: Session, config: dict[str, Any]) -> Report:
    """The report, with where its figures come from.

    Args:
        engine: what was measured.
        asked: with what.
        session: what came of it.
        config: the options of the command.
    """
    from outpace.bench.provenance import provenance
    from outpace.bench.report import build

    about = provenance(
        command=shlex.join(["outpace", *sys.argv[1:]]), target=engine.target, cases=asked.cases, config=config
    )
    return build(session, about, engine.eos_ids)


def save(report: Report, folder: Path) -> None:
    """Write the report, its page and its plots."""
    from outpace.bench.plots import draw
    from outpace.bench.report import write

    for path in [*write(report, folder), *draw(report, folder)]:
        show.note(f"wrote {path}")


def save_answers(
    file: Path, session: Session, asked: Asked, decode: Callable[[Sequence[int]], str]
) -> list[Path]:
    """Write an answer file per method, ``FILE`` with the method's name before its suffix.

    The answers are those of the first seed in the first round. Prompts of which a turn was not
    measured, because Ctrl-C came first, are left out.
    """
    from outpace.bench.answers import write_answers
    from outpace.bench.cases import turn_id

    part = session.parts[0]
    seed = asked.cases[0].seed
    unit_of = {unit[0].id: n for n, unit in enumerate(part.units) if unit[0].seed == seed}
    written = []
    for contender in part.contenders:
        runs = part.runs[contender.name]
        prompts, answers = [], []
        for prompt in asked.prompts:
            names = [turn_id(prompt, turn) for turn in range(1 + len(prompt.turns))]
            keys = [(unit_of[name], 0) for name in names if name in unit_of]
            if all(key in runs for key in keys):
                prompts.append(prompt)
                answers.append([runs[key] for key in keys])
        name = re.sub(r"[^\w.=-]+", "_", contender.name).strip("_")
        path = file.with_name(f"{file.stem}-{name}{file.suffix}")
        write_answers(path, contender.name, prompts, answers, decode=decode)
        written.append(path)
    return written


def show_report(report: Report) -> None:
    """Print a report for people."""
    from outpace.bench.tables import heading, noise_line, tables

    show.write(f"{heading(report)}\n")
    show.write(f"{noise_line(report)}\n")
    for line in report["notes"]:
        show.write(f"note: {line}\n")
    for table in tables(report):
        show.write(f"\n{table.title}\n")
        show.table(table.columns, table.rows, numbers=table.columns[1:])


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="report.json, or the folder that holds it.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: Annotated[bool, option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show two reports side by side, if they measured the same prompts in the same way."""
    from outpace.bench.report import check_comparable, read
    from outpace.bench.tables import heading, pairs, side_by_side

    a, b = read(first), read(second)
    remarks = check_comparable(a, b)
    if as_json:
        rows = [{"method": name, "a": one, "b": other} for name, (one, other) in pairs(a, b)]
        show.write_json({"differs": remarks, "rows": rows})
        return
    show.write(f"A  {heading(a)}\nB  {heading(b)}\n")
    for line in remarks:
        show.write(f"differs in {line}\n")
    for table in side_by_side(a, b):
        show.write(f"\n{table.title}\n")
        show.table(table.columns, table.rows, numbers=table.columns[1:])
