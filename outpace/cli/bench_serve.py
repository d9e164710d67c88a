"""``outpace bench serve``: what a server gives under load, with a drafter and without."""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import show
from outpace.cli.options import ModelOptions, at_least_one, option, spread
from outpace.cli.started import started
from outpace.config import MethodSpec, split_specs
from outpace.errors import OutpaceError, RequestError

if TYPE_CHECKING:
    from outpace.bench.load import Arrival, Question, Reply, Server, Settings
    from outpace.bench.load_report import Report, Round, Session
    from outpace.bench.workloads import Prompt

_PLAIN = "none"
_LEAST = 16
"""Requests of a round, at least, unless said otherwise."""
_WHO = "Server"
_WHAT = "Load"
_OUTPUT = "Output"

_EXAMPLES = """
Examples:

  outpace bench serve --drafters prompt_lookup,none --concurrency 1,4,16 --out load

  outpace bench serve --rate 2 --requests 100 --drafters auto

  outpace bench serve --url http://127.0.0.1:8000 --check-texts --concurrency 8
"""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("serve", epilog=_EXAMPLES.strip())(spread(serve))


def serve(
    *,
    model: ModelOptions,
    url: Annotated[
        str | None,
        option("--url", panel=_WHO, metavar="URL", show_default="one that is started",
               help="A server that runs already, with a model of its own."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        option("--api-key-file", panel=_WHO, metavar="FILE", help="Its key, in the first line."),
    ] = None,
    drafters: Annotated[
        str,
        option("--drafters", "-d", panel=_WHO, metavar="SPECS",
               help="Method specs with commas between them, which take turns; none takes part in "
               "any case."),
    ] = f"auto,{_PLAIN}",
    workload: Annotated[
        str,
        option("--workload", "-w", panel=_WHAT, metavar="NAME|FILE",
               help="builtin, or a file as for outpace bench; first turns alone."),
    ] = "builtin",
    concurrency: Annotated[
        str,
        option("--concurrency", "-c", panel=_WHAT, metavar="N,N,...",
               help="Clients of a closed loop: each asks again as soon as it is answered."),
    ] = "1,2,4,8,16,32,64",
    rate: Annotated[
        float | None,
        option("--rate", panel=_WHAT, metavar="R", show_default="closed loop",
               help="Requests per second of an open loop, at random times, in place of clients."),
    ] = None,
    requests: Annotated[
        int | None,
        option("--requests", "-n", panel=_WHAT, metavar="N",
               show_default=f"twice the clients, {_LEAST} at least",
               help="Requests per drafter, load and round."),
    ] = None,
    rounds: Annotated[
        int, option("--rounds", panel=_WHAT, metavar="R", help="Turns of every drafter.")
    ] = 2,
    max_new_tokens: Annotated[
        int,
        option("--max-new-tokens", panel=_WHAT, metavar="N",
               help="Tokens of every answer; an end of sequence does not end it."),
    ] = 128,
    temperature: Annotated[
        float, option("--temperature", "-t", panel=_WHAT, metavar="T", help="Of all requests.")
    ] = 0.0,
    seed: Annotated[
        int,
        option("--seed", panel=_WHAT, metavar="S",
               help="Of arrivals, and of the first sampled answer; the next ones count on."),
    ] = 0,
    check_texts: Annotated[
        bool,
        option("--check-texts", panel=_WHAT,
               help="Compare every text with that of its prompt alone under none; needs "
               "temperature 0."),
    ] = False,
    timeout: Annotated[
        int,
        option("--timeout", panel=_WHAT, metavar="S",
               help="Longest wait for the next piece of an answer, seconds."),
    ] = 600,
    out: Annotated[
        Path | None,
        option("--out", "-o", panel=_OUTPUT, metavar="DIR",
               help="Write report.json, report.md and a plot here."),
    ] = None,
    as_json: Annotated[
        bool, option("--json", panel=_OUTPUT, help="Print one JSON object.")
    ] = False,
) -> None:
    """Put load on a server, drafter by drafter in turns, and report rates, delays and texts.

    Ctrl-C ends it early and keeps what is measured. docs/serve.md says what the columns mean.
    """
    for name, value in (("--requests", requests), ("--rounds", rounds), ("--timeout", timeout),
                        ("--max-new-tokens", max_new_tokens)):
        at_least_one(name, value)
    if rate is not None and not 0 < rate < float("inf"):
        raise RequestError(f"--rate must be above 0, got {rate:g}")
    if check_texts and temperature > 0:
        raise RequestError(f"--check-texts needs temperature 0, got {temperature:g}")
    if url is not None and model != ModelOptions():
        raise RequestError(f"--url {url} has a model already; leave --model and its options out")
    named = [str(MethodSpec.parse(spec)) for spec in split_specs(drafters)]
    specs = list(dict.fromkeys([*named, _PLAIN]))

    from outpace.bench.formats import read_workload
    from outpace.bench.load import Arrival, Settings
    from outpace.bench.load_report import Session, build, write
    from outpace.params import SamplingParams

    SamplingParams(temperature=temperature, seed=seed)  # refuses what is out of range
    arrivals = [Arrival(rate=rate)] if rate is not None else [
        Arrival(concurrency=count) for count in read_counts(concurrency)
    ]
    prompts = read_workload(workload)
    key = None if api_key_file is None else read_key(api_key_file)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # what cannot be written is said before the work
    most = max((one.concurrency or 0 for one in arrivals), default=0)
    session = Session(specs)
    about: dict[str, Any] = {}
    plan = _Plan(
        session, arrivals, prompts, Settings(max_new_tokens=max_new_tokens,
                                             temperature=temperature, seed=seed),
        requests, rounds, check_texts, about,
    )  # fmt: skip
    with started(url, model, specs, clients=most, seconds=timeout) as address:
        try:
            asyncio.run(_run(plan, address, key, float(timeout)))
        except KeyboardInterrupt:
            session.interrupted = True
    if not session.rounds:
        raise typer.Exit(130)
    report = build(session, provenance_of(about, {
        "url": url, "workload": workload, "concurrency": None if rate is not None else concurrency,
        "rate": rate, "requests": requests, "rounds": rounds, "max_new_tokens": max_new_tokens,
        "temperature": temperature, "seed": seed, "drafters": drafters, "ignore_eos": True,
        "check_texts": check_texts,
    }))
    if out is not None:
        from outpace.bench.plots import load, paint

        picture = partial(load, report=report)
        for path in [*write(report, out), *paint({"load": picture}, out, note=show.note)]:
            show.note(f"wrote {path}")
    if as_json:
        show.write_json(report)
    else:
        show_report(report)
    if report["partial"]:
        raise typer.Exit(130)


def read_counts(text: str) -> list[int]:
    """Numbers with commas between them.

    Raises:
        RequestError: something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise RequestError(
            f"--concurrency {text!r} is no list of numbers from 1; give some, such as 1,4,16"
        )
    return list(dict.fromkeys(map(int, parts)))


def read_key(file: Path) -> str:
    """The first key of a file; raises RequestError if there is none."""
    try:
        keys = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read --api-key-file {file}: {error}") from error
    if not keys or not keys[0].isascii():
        raise RequestError(f"--api-key-file {file} holds no key; write one per line")
    return keys[0]


@dataclasses.dataclass(slots=True)
class _Plan:
    """What is to be measured, and where it goes."""

    session: Session
    arrivals: list[Arrival]
    prompts: Sequence[Prompt]
    settings: Settings
    requests: int | None
    rounds: int
    check_texts: bool
    about: dict[str, Any]
    """Filled in: the model as the server describes it, prompts."""

    def count(self, arrival: Arrival) -> int:
        """Requests of a round."""
        return self.requests or max(_LEAST, 2 * (arrival.concurrency or 0))


async def _run(plan: _Plan, address: str, key: str | None, seconds: float) -> None:
    from outpace.bench.load import connected

    session = plan.session
    async with connected(address, key=key, seconds=seconds) as server:
        listed = await server.get("/v1/models")
        plan.about.update(listed["data"][0])
        strangers = set(session.drafters) - {_PLAIN, *plan.about.get("drafters", ())}
        if strangers:
            raise RequestError(
                f"drafter {sorted(strangers)[0]!r} was not started at {server.url}; "
                f"choose from {', '.join(plan.about.get('drafters', ()))}"
            )
        questions = await _questions(plan, server)
        most = max(plan.count(arrival) for arrival in plan.arrivals)
        used = questions[:most]
        plan.about["questions"] = used
        work = len(session.drafters) * plan.rounds * sum(map(plan.count, plan.arrivals))
        extra = len(session.drafters) + (len(used) if plan.check_texts else 0)
        with show.progress(work + extra, "requests") as tick:
            await _warm(plan, server, used, tick)
            for arrival in plan.arrivals:
                for turn in range(plan.rounds):
                    for drafter in session.drafters:
                        name = f"{drafter}, load {arrival.label}"
                        session.rounds.append(await _round(
                            plan, server, used, arrival, turn, drafter, partial(tick, name)
                        ))


async def _questions(plan: _Plan, server: Server) -> list[Question]:
    """The prompts that leave room for an answer, spread over the categories; as chats where the
    model has a template for them.
    """
    from outpace.bench.cases import evenly
    from outpace.bench.load import Question

    room = plan.about["max_model_len"] - plan.settings.max_new_tokens
    found, chats = [], True
    for prompt in plan.prompts:
        body: dict[str, Any] = {"messages": list(prompt.messages)}
        if chats:
            try:
                count = (await server.post("/tokenize", body))["count"]
            except OutpaceError:
                chats = False  # no template: its bare text then
        if not chats:
            body = {"prompt": "\n".join(message["content"] for message in prompt.messages)}
            count = (await server.post("/tokenize", body))["count"]
        path = "/v1/chat/completions" if chats else "/v1/completions"
        if count <= room:
            found.append(Question(id=prompt.id, path=path, body=body))
    if len(found) < len(plan.prompts):
        plan.session.notes.append(
            f"{len(plan.prompts) - len(found)} of {len(plan.prompts)} prompts left out: too long "
            f"for the context of {plan.about['max_model_len']}"
        )
    if not found:
        raise RequestError(
            f"no prompt leaves room for {plan.settings.max_new_tokens} new tokens in the context "
            f"of {plan.about['max_model_len']}; give a smaller --max-new-tokens or other prompts"
        )
    most = max(plan.count(arrival) for arrival in plan.arrivals)
    return evenly(found, most)


async def _warm(
    plan: _Plan, server: Server, questions: Sequence[Question], tick: Callable[[str, int], None]
) -> None:
    """An answer by every drafter, and what the texts are to be compared with."""
    for drafter in plan.session.drafters:
        tick("warming up", 0)
        reply = await _ask(plan, server, questions, drafter, 0)
        if reply.error is not None:
            raise OutpaceError(f"{drafter} does not answer at {server.url}: {reply.error}")
        plan.about["fingerprint"] = reply.fingerprint
        tick("warming up", 1)
    if not plan.check_texts:
        return
    for number, question in enumerate(questions):
        tick("texts alone", 0)
        reply = await _ask(plan, server, questions, _PLAIN, number)
        if reply.error is not None:
            raise OutpaceError(f"no text of {question.id} alone: {reply.error}")
        plan.session.alone[question.id] = tuple(reply.tokens)
        tick("texts alone", 1)


async def _ask(
    plan: _Plan, server: Server, questions: Sequence[Question], drafter: str, number: int
) -> Reply:
    question = questions[number % len(questions)]
    body = plan.settings.body(question, drafter, number)
    return await server.ask(question.path, body, question.id)


async def _round(
    plan: _Plan, server: Server, questions: Sequence[Question], arrival: Arrival, turn: int,
    drafter: str, tick: Callable[[int], None],
) -> Round:
    """Send all requests of a round, of which every drafter gets the same at the same times."""
    from outpace.bench.load import closed_loop, open_loop, poisson
    from outpace.bench.load_report import Round

    async def send(number: int) -> Reply:
        reply = await _ask(plan, server, questions, drafter, number)
        tick(1)
        return reply

    tick(0)
    count, began = plan.count(arrival), time.perf_counter()
    if arrival.rate is not None:
        at = poisson(arrival.rate, count, plan.settings.seed + turn)
        replies = await open_loop(send, at)
    else:
        replies = await closed_loop(send, count, arrival.concurrency or 1)
    return Round(drafter, arrival, turn, time.perf_counter() - began, replies)


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


def show_report(report: Report) -> None:
    """Print a report for people."""
    from outpace.bench.load_report import heading, table

    show.write(f"{heading(report)}\n")
    for line in report["notes"]:
        show.write(f"note: {line}\n")
    made = table(report)
    show.write(f"\n{made.title}\n")
    show.table(made.columns, made.rows, numbers=made.columns[1:])
