"""``outpace bench serve``: what a server gives under load, with a drafter and without."""

from __future__ import annotations

import asyncio
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.bench.load_terms import MIXED, PLAIN, USUAL
from outpace.cli import show
from outpace.cli.keys import read_keys
from outpace.cli.options import ModelOptions, at_least_one, option, spread
from outpace.cli.started import started
from outpace.config import MethodSpec, split_specs
from outpace.errors import RequestError
from outpace.files import check_writable

if TYPE_CHECKING:
    from outpace.bench.load_report import Report

_WHO = "Server"
_WHAT = "Load"
_OUTPUT = "Output"

_EXAMPLES = """
Examples:

  outpace bench serve --drafters prompt_lookup,none --concurrency 1,4,16 --out load

  outpace bench serve --rate 2 --requests 100 --drafters auto

  outpace bench serve --url http://127.0.0.1:8000 --check-texts --concurrency 8

  outpace bench serve --mixed --check-texts --concurrency 64 --requests 500 --rounds 1
"""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("serve", epilog=_EXAMPLES.strip())(spread(serve))


def serve(
    *,
    model: ModelOptions,
    url: Annotated[
        str | None,
        option(
            "--url",
            panel=_WHO,
            metavar="URL",
            show_default="one that is started",
            help="A server that runs already, with a model of its own.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, option("--api-key-file", panel=_WHO, metavar="FILE", help="Its key, in the first line.")
    ] = None,
    drafters: Annotated[
        str,
        option(
            "--drafters",
            "-d",
            panel=_WHO,
            metavar="SPECS",
            help="Method specs with commas between them, which take turns; none takes part in any case.",
        ),
    ] = f"auto,{PLAIN}",
    workload: Annotated[
        str,
        option(
            "--workload",
            "-w",
            panel=_WHAT,
            metavar="NAME|FILE",
            help="builtin, or a file as for outpace bench; first turns alone.",
        ),
    ] = "builtin",
    concurrency: Annotated[
        str,
        option(
            "--concurrency",
            "-c",
            panel=_WHAT,
            metavar="N,N,...",
            help="Clients of a closed loop: each asks again as soon as it is answered.",
        ),
    ] = "1,2,4,8,16,32,64",
    rate: Annotated[
        float | None,
        option(
            "--rate",
            panel=_WHAT,
            metavar="R",
            show_default="closed loop",
            help="Requests per second of an open loop, at random times, in place of clients.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        option(
            "--requests",
            "-n",
            panel=_WHAT,
            metavar="N",
            show_default=USUAL,
            help="Requests per drafter, load and round.",
        ),
    ] = None,
    rounds: Annotated[int, option("--rounds", panel=_WHAT, metavar="R", help="Turns of every drafter.")] = 2,
    max_new_tokens: Annotated[
        int,
        option(
            "--max-new-tokens",
            panel=_WHAT,
            metavar="N",
            help="Tokens of every answer; an end of sequence does not end it.",
        ),
    ] = 128,
    temperature: Annotated[
        float, option("--temperature", "-t", panel=_WHAT, metavar="T", help="Of all requests.")
    ] = 0.0,
    seed: Annotated[
        int,
        option(
            "--seed",
            panel=_WHAT,
            metavar="S",
            help="Of arrivals, and of the first sampled answer; the next ones count on.",
        ),
    ] = 0,
    check_texts: Annotated[
        bool,
        option(
            "--check-texts",
            panel=_WHAT,
            help="Compare every text with that of its prompt alone under none; needs temperature 0.",
        ),
    ] = False,
    mixed: Annotated[
        bool,
        option(
            "--mixed",
            panel=_WHAT,
            help="One row for all drafters, which take turns request by request, with answers "
            "of different lengths: a quarter of --max-new-tokens at least.",
        ),
    ] = False,
    timeout: Annotated[
        int,
        option(
            "--timeout",
            panel=_WHAT,
            metavar="S",
            help="Longest wait for the next piece of an answer, seconds.",
        ),
    ] = 600,
    out: Annotated[
        Path | None,
        option(
            "--out", "-o", panel=_OUTPUT, metavar="DIR", help="Write report.json, report.md and a plot here."
        ),
    ] = None,
    as_json: Annotated[bool, option("--json", panel=_OUTPUT, help="Print one JSON object.")] = False,
) -> None:
    """Put load on a server, drafter by drafter in turns, and report rates, delays and texts.

    Ctrl-C ends it early and keeps what is measured. docs/bench.md says what the columns mean.
    """
    for name, value in (
        ("--requests", requests),
        ("--rounds", rounds),
        ("--timeout", timeout),
        ("--max-new-tokens", max_new_tokens),
    ):
        at_least_one(name, value)
    if rate is not None and not 0 < rate < float("inf"):
        raise RequestError(f"--rate must be above 0, got {rate:g}")
    if check_texts and temperature > 0:
        raise RequestError(f"--check-texts needs temperature 0, got {temperature:g}")
    if url is not None and model != ModelOptions():
        raise RequestError(f"--url {url} has a model already; leave --model and its options out")
    named = [str(MethodSpec.parse(spec)) for spec in split_specs(drafters)]
    specs = list(dict.fromkeys([*named, PLAIN]))

    from outpace.bench.formats import read_workload
    from outpace.bench.load import Arrival, Settings
    from outpace.bench.load_report import Session, build
    from outpace.bench.load_run import Plan, measure
    from outpace.params import SamplingParams

    SamplingParams(temperature=temperature, seed=seed)  # refuses what is out of range
    arrivals = (
        [Arrival(rate=rate)]
        if rate is not None
        else [Arrival(concurrency=count) for count in read_counts(concurrency)]
    )
    prompts = read_workload(workload)
    key = None if api_key_file is None else read_keys((), api_key_file)[0]
    if out is not None:
        check_writable(out)  # what cannot be written is said before the work
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
    )
    with started(url, model, specs, clients=most, seconds=timeout) as address:
        try:
            asyncio.run(measure(plan, address, key, float(timeout), show.progress))
        except KeyboardInterrupt:
            session.interrupted = True
    if not session.rounds:
        raise typer.Exit(130)
    report = build(
        session,
        provenance_of(
            plan.about,
            {
                "url": url,
                "workload": workload,
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
    if as_json:
        show.write_json(report)
    else:
        show_report(report)
    # After the table: a disk that is full by now costs files and no figures.
    if out is not None:
        save(report, out)
    if report["partial"]:
        raise typer.Exit(130)


def read_counts(text: str) -> list[int]:
    """Numbers with commas between them.

    Raises:
        RequestError: something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise RequestError(f"--concurrency {text!r} is no list of numbers from 1; give some, such as 1,4,16")
    return list(dict.fromkeys(map(int, parts)))


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
    from outpace.bench.load_report import write
    from outpace.bench.plots import load, paint

    picture = partial(load, report=report)
    for path in [*write(report, folder), *paint({"load": picture}, folder, note=show.note)]:
        show.note(f"wrote {path}")


def show_report(report: Report) -> None:
    """Print a report for people."""
    from outpace.bench.load_report import heading, table

    show.write(f"{heading(report)}\n")
    for line in report["notes"]:
        show.write(f"note: {line}\n")
    made = table(report)
    show.write(f"\n{made.title}\n")
    show.table(made.columns, made.rows, numbers=made.columns[1:])
