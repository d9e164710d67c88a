"""A load session: the same requests for every drafter, in turns, by sweeps over the loads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from outpace.bench.load import (
    Arrival,
    Question,
    Refused,
    Reply,
    Server,
    Settings,
    closed_loop,
    connected,
    open_loop,
    poisson,
)
from outpace.bench.load_report import Round, Session, first_difference
from outpace.bench.load_terms import MIXED, PLAIN, usual_requests
from outpace.bench.workloads import Prompt
from outpace.errors import OutpaceError, RequestError
from outpace.models.prompts import evenly

_GAPS = 12
"""Texts that differ whose first difference is looked into."""

Tick = Callable[[str, int], None]


@dataclass(slots=True)
class Plan:
    """What is to be measured, and where it goes."""

    session: Session
    arrivals: list[Arrival]
    prompts: Sequence[Prompt]
    settings: Settings
    requests: int | None = None
    """Of a round; None: as many as the load asks for."""
    rounds: int = 1
    check_texts: bool = False
    mixed: Sequence[str] = ()
    """Method specs that take turns request by request; then the session's one drafter is
    ``MIXED``, and answers have different lengths."""
    longest: int | None = None
    """Tokens of a prompt that is asked, at most."""
    about: dict[str, Any] = field(default_factory=dict)
    """Filled in: the model as the server describes it, prompts."""

    def count(self, arrival: Arrival) -> int:
        return self.requests or usual_requests(arrival.concurrency or 0)

    def asked(self, drafter: str, number: int) -> tuple[str, Settings]:
        """Who drafts for a request, and how long its answer is."""
        if drafter != MIXED:
            return drafter, self.settings
        # Neither in step with the lengths nor with the prompts, which come again and again.
        who = (number * 40503 >> 8) % len(self.mixed)
        return self.mixed[who], self.settings.shorter(number)


async def measure(
    plan: Plan,
    address: str,
    key: str | None,
    seconds: float,
    progress: Callable[[int, str], AbstractContextManager[Tick]],
) -> None:
    """Put load on a server. What is measured goes into the plan's session, round by round.

    A sweep over all loads comes before the next one. So a session that ends early has all
    loads, and a machine that grows slower does so for all of them alike.

    Args:
        seconds: longest wait for the next piece of an answer.
        progress: shows how far it has come, as ``outpace.cli.show.progress`` does.

    Raises:
        OutpaceError: no server, a drafter that it lacks, or no prompt that fits.
    """
    session = plan.session
    async with connected(address, key=key, seconds=seconds) as server:
        listed = await server.get("/v1/models")
        plan.about.update(listed["data"][0])
        known = {PLAIN, *plan.about.get("drafters", ())}
        strangers = {*session.drafters, *plan.mixed} - known - {MIXED}
        if strangers:
            raise RequestError(
                f"drafter {sorted(strangers)[0]!r} was not started at {server.url}; "
                f"choose from {', '.join(plan.about.get('drafters', ()))}"
            )
        used = await _questions(plan, server)
        plan.about["questions"] = used
        work = len(session.drafters) * plan.rounds * sum(map(plan.count, plan.arrivals))
        extra = len(plan.mixed or session.drafters) + (len(used) if plan.check_texts else 0)
        with progress(work + extra, "requests") as tick:
            await _warm(plan, server, used, tick)
            for turn in range(plan.rounds):
                for arrival in plan.arrivals:
                    for drafter in session.drafters:
                        name = f"{drafter}, load {arrival.label}"
                        session.rounds.append(
                            await one_round(plan, server, used, arrival, turn, drafter, partial(tick, name))
                        )
            if plan.check_texts:
                try:
                    await _look_into(plan, server, used, tick)
                except OutpaceError as error:  # the rounds stand without it
                    session.notes.append(f"not all differences of texts were looked into: {error}")


async def _questions(plan: Plan, server: Server) -> list[Question]:
    """The prompts that leave room for an answer and are short enough, spread over the categories. They are
    chats where the model has a template for them.
    """
    context, new, longest = plan.about["max_model_len"], plan.settings.max_new_tokens, plan.longest
    found, counts, chats = [], list[int](), True
    for prompt in plan.prompts:
        body: dict[str, Any] = {"messages": list(prompt.messages)}
        if chats:
            try:
                counts.append(await _count(server, body, context))
            except Refused:
                if counts:
                    raise
                chats = False  # no template: its bare text then
        if not chats:
            body = {"prompt": "\n".join(message["content"] for message in prompt.messages)}
            counts.append(await _count(server, body, context))
        path = "/v1/chat/completions" if chats else "/v1/completions"
        if counts[-1] <= min(context - new, longest or context):
            found.append(Question(id=prompt.id, path=path, body=body))
    if len(found) < len(counts):
        most = f"the context of {context}" if longest is None else f"{longest} tokens or the context"
        plan.session.notes.append(
            f"{len(counts) - len(found)} of {len(counts)} prompts left out: too long for {most}"
        )
    if longest is not None and min(counts) > longest:
        raise RequestError(
            f"no prompt has at most {longest} tokens; give --max-prompt-tokens {min(counts)} or more"
        )
    if not found:
        raise RequestError(
            f"no prompt leaves room for {new} new tokens in the context "
            f"of {context}; give a smaller --max-new-tokens or other prompts"
        )
    return evenly(found, max(plan.count(arrival) for arrival in plan.arrivals))


async def _count(server: Server, body: dict[str, Any], context: int) -> int:
    """Tokens of a prompt; one more than the context where there are too many to count."""
    try:
        count: int = (await server.post("/tokenize", body))["count"]
    except Refused as error:
        if error.code != "context_length_exceeded":
            raise
        return context + 1
    return count


async def _warm(plan: Plan, server: Server, questions: Sequence[Question], tick: Tick) -> None:
    """An answer by every drafter, and what the texts are to be compared with."""
    for drafter in plan.mixed or plan.session.drafters:
        tick("warming up", 0)
        reply = await ask(server, questions[0], plan.settings, drafter, 0)
        if reply.error is not None:
            raise OutpaceError(f"{drafter} does not answer at {server.url}: {reply.error}")
        plan.about["fingerprint"] = reply.fingerprint
        tick("warming up", 1)
    if not plan.check_texts:
        return
    for number, question in enumerate(questions):
        tick("texts alone", 0)
        reply = await ask(server, question, plan.settings, PLAIN, number)
        if reply.error is not None:
            raise OutpaceError(f"no text of {question.id} alone: {reply.error}")
        plan.session.alone[question.id] = tuple(reply.tokens)
        tick("texts alone", 1)


async def ask(server: Server, question: Question, settings: Settings, drafter: str, number: int) -> Reply:
    return await server.ask(question.path, settings.body(question, drafter, number), question.id)


async def one_round(
    plan: Plan,
    server: Server,
    questions: Sequence[Question],
    arrival: Arrival,
    turn: int,
    drafter: str,
    tick: Callable[[int], None],
) -> Round:
    """Send all requests of a round, of which every drafter gets the same at the same times."""

    async def send(number: int) -> Reply:
        who, settings = plan.asked(drafter, number)
        reply = await ask(server, questions[number % len(questions)], settings, who, number)
        tick(1)
        return reply

    tick(0)
    count = plan.count(arrival)
    if arrival.rate is not None:
        at = poisson(arrival.rate, count, plan.settings.seed + turn)
        replies = await open_loop(send, at)
    else:
        replies = await closed_loop(send, count, arrival.concurrency or 1)
    # In an open loop nothing happens before the first request has come.
    began = min(reply.began for reply in replies)
    return Round(drafter, arrival, turn, time.perf_counter() - began, replies)


async def _look_into(plan: Plan, server: Server, questions: Sequence[Question], tick: Tick) -> None:
    """Of texts that differ: how much likelier the token is that the prompt gets alone.

    It is asked for alone, behind the text that both have in common.
    """
    session, by_id = plan.session, {question.id: question for question in questions}
    for one in session.rounds:
        for reply in one.replies:
            alone = session.alone.get(reply.prompt, ())[: len(reply.tokens)]
            at = first_difference(reply.tokens, alone)
            if reply.error is not None or at is None or at >= min(len(reply.tokens), len(alone)):
                continue
            place = (reply.prompt, at)
            if place not in session.gaps and len(session.gaps) < _GAPS:
                tick("differences", 0)
                session.gaps[place] = await _gap(
                    server, by_id[reply.prompt], list(alone[:at]), alone[at], reply.tokens[at]
                )


async def _gap(server: Server, question: Question, common: list[int], right: int, other: int) -> float:
    """Difference of two tokens' logits behind a text; a server tells log-probabilities."""
    prompt = (await server.post("/tokenize", question.body))["tokens"]
    found = []
    for token in (right, other):
        answer = await server.post(
            "/v1/completions",
            {
                "prompt": [*prompt, *common],
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": 0,
                "allowed_token_ids": [token],
                "ignore_eos": True,
                "speculation": {"drafter": PLAIN},
            },
        )
        found.append(answer["choices"][0]["logprobs"]["token_logprobs"][0])
    return float(found[0] - found[1])
