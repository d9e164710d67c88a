"""``outpace bench``: what is faster here, by how much, and why, in one paired run."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import bench_passes, bench_serve, show
from outpace.cli.contenders import check_peers, taking_part
from outpace.cli.drafting import PlanOptions, read_specs
from outpace.cli.interrupts import exit_code
from outpace.cli.options import AS_JSON, AutoOptions, add, epilog, option, spread, writes_file, writes_folder
from outpace.config import DEFAULT_DRAFTER
from outpace.errors import RequestError

if TYPE_CHECKING:
    from outpace.bench.cases import Asked
    from outpace.bench.records import Case, Settings
    from outpace.bench.report import Report
    from outpace.bench.runner import Runner, Session
    from outpace.bench.synthetic import Texts
    from outpace.engine.engine import Engine

SEEDS = 4
"""Answers per prompt where answers are sampled."""
_who = partial(option, panel="Methods")
_what = partial(option, panel="Prompts")
_how = partial(option, panel="Measuring")

_EXAMPLES = """
Examples:

  outpace bench --limit 2

  outpace bench --drafters "prompt_lookup,draft_model[model=smollm2-135m layers=12]" --out report

  outpace bench --peers hf,hf-prompt-lookup --workload question.jsonl --answers answers.jsonl

  outpace bench --temperature 0.8 --batch 4 --json

  outpace bench compare before after
"""


def register(app: typer.Typer) -> None:
    group = typer.Typer(invoke_without_command=True, epilog=epilog(_EXAMPLES))
    group.callback()(spread(bench))
    group.command(epilog="Try: outpace bench compare before/report.json after")(spread(compare))
    add(group, bench_passes.passes, bench_passes.EXAMPLES)
    add(group, bench_serve.serve, bench_serve.EXAMPLES)
    app.add_typer(group, name="bench")


def bench(
    context: typer.Context,
    *,
    model: AutoOptions,
    drafters: str = _who(
        f"none,{DEFAULT_DRAFTER}",
        "Method specs with commas between them, or all: every drafter that needs no "
        "setting. none takes part in any case.",
        "-d",
        metavar="SPECS",
    ),
    plan: PlanOptions,
    peers: str = _who(
        "",
        "Other programs: hf, hf-prompt-lookup, hf-assisted, openvino, "
        "openvino-prompt-lookup, llamacpp. hf-assisted takes the model of the first "
        "draft_model among the drafters.",
        metavar="NAMES",
        shown="nobody",
    ),
    peer_python: Path | None = _who(
        None, "Python of the environment that the peers outside this process are in.", metavar="PATH"
    ),
    synthetic_acceptance: str | None = _who(
        None,
        "Add a drafter whose guess at depth i is right at rate Ai, at no cost: "
        "what a drafter of that quality would give.",
        metavar="A1,A2,...",
    ),
    workload: str = _what(
        "builtin",
        "builtin, or a file: Spec-Bench, MT-bench, HumanEval, GSM8K, MBPP, or JSONL with prompt or messages.",
        "-w",
        metavar="NAME|FILE",
    ),
    limit: int | None = _what(None, "Prompts per category, at most.", shown="all", least=1),
    max_new_tokens: int = _how(128, "Tokens of every answer; an end of sequence does not end it."),
    temperature: float = _how(
        0.0,
        f"Above 0: {SEEDS} seeds per prompt, sampled independently and, in rows of their own, reproducibly.",
        "-t",
        metavar="T",
    ),
    batch: int = _how(1, "Prompts of one category that are answered together.", "-b", metavar="B", least=1),
    repeat: int = _how(1, "Rounds over all prompts.", metavar="R", least=1),
    max_repeat: int | None = _how(
        None,
        "Most rounds over a category where a speed-up is not settled to 0.02.",
        metavar="R",
        shown="--repeat",
        least=1,
    ),
    fresh: bool = _how(False, "Measure first answers: what methods learn is forgotten before the next one."),
    disturb: bool = _how(False, "Measure every unit once more while another process spins on a core."),
    seed: int = _how(0, "First seed of sampled answers.", metavar="S"),
    out: Path | None = writes_folder(None, "Write report.json, report.md and plots here.", "-o"),
    answers: Path | None = writes_file(None, "Write the answers as Spec-Bench does."),
    as_json: bool = AS_JSON,
) -> None:
    """Measure methods against plain decoding, in turns, prompt by prompt.

    Ctrl-C or SIGTERM ends it early and keeps what is measured. Read docs/bench.md before you believe it.
    """
    if context.invoked_subcommand is not None:
        return
    if max_new_tokens < 2:
        raise RequestError(
            f"--max-new-tokens must be at least 2, got {max_new_tokens}; the first token belongs to prefill"
        )
    if max_repeat is not None and max_repeat < repeat:
        raise RequestError(f"--max-repeat must be at least --repeat, which is {repeat}, got {max_repeat}")
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
    engine = model.load(drafter="none", allow_lossy=plan.allow_lossy)
    if answers is not None and engine.target.tokenizer is None:
        raise RequestError(f"--answers needs a tokenizer, and {engine.target.name} has none")

    from outpace.bench.cases import make_cases
    from outpace.bench.runner import Runner
    from outpace.train.stopping import ended

    seeds = range(seed, seed + SEEDS) if temperature > 0 else [seed]
    with show.busy("preparing prompts"):
        asked = make_cases(engine, prompts, limit=limit, max_new_tokens=max_new_tokens, seeds=seeds)
    modes = modes_of(max_new_tokens, temperature)
    texts: Texts = {}
    with (
        ended() as stopped,
        taking_part(
            engine,
            specs,
            plan,
            asked.notes,
            rates=rates,
            texts=texts,
            peers=named,
            python=peer_python,
            fresh=fresh,
        ) as contenders,
    ):
        runner = Runner(
            contenders,
            texts,
            batch=batch,
            repeat=repeat,
            max_repeat=max_repeat or repeat,
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
            "fresh": fresh,
            "disturb": disturb,
            "seed": seed,
            "drafters": drafters,
            "peers": named,
            "synthetic_acceptance": rates,
        },
    )
    answered = partial(save_answers, engine, runner.session, asked)
    with show.then_write(answers, answered), show.then_write(out, partial(save, report)):
        show.finish(report, as_json, lambda: show_report(report))
    if report["partial"]:
        raise typer.Exit(exit_code(stopped))


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
    """The report, with where its figures come from."""
    from outpace.bench.provenance import provenance
    from outpace.bench.report import build

    about = provenance(
        command=shlex.join(["outpace", *sys.argv[1:]]), target=engine.target, cases=asked.cases, config=config
    )
    return build(session, about, engine.eos_ids)


def save(report: Report, folder: Path) -> None:
    """Write the report, its page and its plots."""
    from outpace.bench.plots import draw
    from outpace.bench.tables import markdown, write

    for path in [*write(report, markdown(report), folder), *draw(report, folder)]:
        show.note(f"wrote {path}")


def save_answers(engine: Engine, session: Session, asked: Asked, file: Path) -> None:
    """Write an answer file per method, ``FILE`` with the method's name before its suffix.

    The answers are those of the first seed in the first round. Prompts of which a turn was not
    measured, because Ctrl-C came first, are left out.
    """
    from outpace.bench.answers import write_answers
    from outpace.bench.cases import turn_id

    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
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
        write_answers(path, contender.name, prompts, answers, decode=tokenizer.decode)
        written.append(path)
    for path in written:
        show.note(f"wrote {path}")


def show_report(report: Report) -> None:
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
    *,
    as_json: bool = AS_JSON,
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
