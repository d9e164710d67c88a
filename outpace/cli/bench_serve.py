"""``outpace bench serve``: what a server gives under load, with a drafter and without."""

from __future__ import annotations

import asyncio
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outpace.bench.load_terms import MIXED, PLAIN, USUAL
from outpace.cli import show
from outpace.cli.interrupts import exit_code
from outpace.cli.keys import read_keys
from outpace.cli.options import AS_JSON, AutoOptions, numbers, option, whole, writes_folder
from outpace.cli.started import started
from outpace.config import MethodSpec, split_specs
from outpace.errors import RequestError

if TYPE_CHECKING:
    from outpace.bench.load_report import Report

_who = partial(option, panel="Server")
_what = partial(option, panel="Load")

EXAMPLES = """
Examples:

  outpace bench serve --drafters prompt_lookup,none --concurrency 1,4,16 --out load

  outpace bench serve --max-prompt-tokens 128 --concurrency 1,8,64

  outpace bench serve --rate 2 --requests 100 --drafters auto

  outpace bench serve --url http://127.0.0.1:8000 --check-texts --concurrency 8

  outpace bench serve --mixed --check-texts --concurrency 64 --requests 500 --rounds 1
"""


def serve(
    *,
    model: AutoOptions,
    url: str | None = _who(
        None,
        "A server that runs already, with a model of its own.",
        metavar="URL",
        shown="one that is started",
    ),
    api_key_file: Path | None = _who(None, "Its key, in the first line.", metavar="FILE"),
    drafters: str = _who(
        f"auto,{PLAIN}",
        "Method specs with commas between them, which take turns; none takes part in any case.",
        "-d",
        metavar="SPECS",
    ),
    workload: str = _what(
        "builtin", "builtin, or a file as for outpace bench; first turns alone.", "-w", metavar="NAME|FILE"
    ),
    max_prompt_tokens: int | None = _what(
        None, "Ask shorter prompts alone: reading long ones may bound every figure.", metavar="N", least=1
    ),
    concurrency: str = _what(
        "1,2,4,8,16,32,64",
        "Clients of a closed loop: each asks again as soon as it is answered.",
        "-c",
        metavar="N,N,...",
    ),
    rate: float | None = _what(
        None,
        "Requests per second of an open loop, at random times, in place of clients.",
        metavar="R",
        shown="closed loop",
    ),
    requests: int | None = _what(None, "Requests per drafter, load and round.", "-n", shown=USUAL, least=1),
    rounds: int = _what(2, "Turns of every drafter.", metavar="R", least=1),
    max_new_tokens: int = _what(128, "Tokens of every answer; an end of sequence does not end it.", least=1),
    temperature: float = _what(0.0, "Of all requests.", "-t", metavar="T"),
    seed: int = _what(
        0, "Of arrivals, and of the first sampled answer; the next ones count on.", metavar="S"
    ),
    check_texts: bool = _what(
        False, "Compare every text with that of its prompt alone under none; needs temperature 0."
    ),
    mixed: bool = _what(
        False,
        "One row for all drafters, which take turns request by request, with answers "
        "of different lengths: a quarter of --max-new-tokens at least.",
    ),
    timeout: int = _what(600, "Longest wait for the next piece of an answer, seconds.", metavar="S", least=1),
    out: Path | None = writes_folder(None, "Write report.json, report.md and a plot here.", "-o"),
    as_json: bool = AS_JSON,
) -> None:
    """Put load on a server, drafter by drafter in turns, and report rates, delays and texts.

    Ctrl-C or SIGTERM ends it early and keeps what is measured. docs/bench.md says what the columns mean.
    """
    if rate is not None and not 0 < rate < float("inf"):
        raise RequestError(f"--rate must be above 0, got {rate:g}")
    if check_texts and temperature > 0:
        raise RequestError(f"--check-texts needs temperature 0, got {temperature:g}")
    if url is not None and model != AutoOptions():
        raise RequestError(f"--url {url} has a model already; leave --model and its options out")
    named = [str(MethodSpec.parse(spec)) for spec in split_specs(drafters)]
    specs = list(dict.fromkeys([*named, PLAIN]))

    from outpace.bench.formats import read_workload
    from outpace.bench.load import Arrival, Settings
    from outpace.bench.load_report import Session, build
    from outpace.bench.load_run import Plan, measure
    from outpace.params import SamplingParams
    from outpace.train.stopping import ended

    SamplingParams(temperature=temperature, seed=seed)  # refuses what is out of range
    arrivals = [Arrival(rate=rate)]
    if rate is None:
        counts = numbers("--concurrency", concurrency, "numbers from 1", "1,4,16", whole, lambda one: one > 0)
        arrivals = [Arrival(concurrency=count) for count in dict.fromkeys(counts)]
    prompts = read_workload(workload)
    key = None if api_key_file is None else read_keys((), api_key_file)[0]
    most = max((one.concurrency or 0 for one in arrivals), default=0)
    session = Session([MIXED] if mixed else specs)
    plan = Plan(
        session,
        arrivals,
        prompts,
        Settings(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed),
        requests,
        rounds,
        check_texts,
        specs if mixed else (),
        longest=max_prompt_tokens,
    )
    with ended() as stopped, started(url, model, specs, clients=most, seconds=timeout) as address:
        try:
            asyncio.run(measure(plan, address, key, float(timeout), show.progress))
        except KeyboardInterrupt:
            session.interrupted = True
    if not session.rounds:
        raise typer.Exit(exit_code(stopped))
    report = build(
        session,
        provenance_of(
            plan.about,
            {
                "url": url,
                "workload": workload,
                "max_prompt_tokens": max_prompt_tokens,
                "concurrency": None if rate is not None else concurrency,
                "rate": rate,
                "requests": requests,
                "rounds": rounds,
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "seed": seed,
                "drafters": drafters,
                "ignore_eos": True,
                "check_texts": check_texts,
                "mixed": mixed,
            },
        ),
    )
    with show.then_write(out, partial(save, report)):
        show.finish(report, as_json, lambda: show_report(report))
    if report["partial"]:
        raise typer.Exit(exit_code(stopped))


def provenance_of(about: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Where the figures come from; of the model what the server tells."""
    from outpace.bench import provenance

    questions = about.get("questions", ())
    return {
        **provenance.here(shlex.join(["outpace", *sys.argv[1:]])),
        "gpu": None,
        "device": about.get("device"),
        "threads": about.get("threads"),
        "dtype": about.get("dtype"),
        "model": about.get("root") or about.get("id"),
        "server": about.get("fingerprint"),
        "config": config,
        "config_digest": provenance.digest(config),
        "prompts": len(questions),
        "prompts_digest": provenance.digest([[one.id, one.body] for one in questions]),
        "seeds": [config["seed"]],
    }


def save(report: Report, folder: Path) -> None:
    """Write the report, its page and its plot."""
    from outpace.bench.load_report import markdown
    from outpace.bench.plots import load, paint
    from outpace.bench.tables import write

    picture = partial(load, report=report)
    for path in [*write(report, markdown(report), folder), *paint({"load": picture}, folder, note=show.note)]:
        show.note(f"wrote {path}")


def show_report(report: Report) -> None:
    from outpace.bench.load_report import heading, table

    show.write(f"{heading(report)}\n")
    for line in report["notes"]:
        show.write(f"note: {line}\n")
    made = table(report)
    show.write(f"\n{made.title}\n")
    show.table(made.columns, made.rows, numbers=made.columns[1:])
