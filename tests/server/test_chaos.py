"""Clients that vanish, bodies that make no sense, queues that overflow, drafters that crash.

Whatever happens, honest requests get the text that they get alone, nobody is told of a defect, and
when all is quiet no slot, no page and no state of a drafter is left behind.
"""

import asyncio
import json
import random
import socket
import threading

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from outpace import Engine
from outpace.methods.lookup.prompt_lookup import PromptLookup
from outpace.server.app import create_app
from outpace.server.limits import Limits
from outpace.serving.service import Service
from tests.server.conftest import Client
from tests.server.fuzz import BEYOND
from tests.server.test_wire import listening, until

COMPLETION = "/v1/completions"
LIMITS = Limits(body_bytes=50_000, new_tokens=16, answers=8, request_seconds=20)
LONG = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
PROMPTS = [letter * 3 + " " + letter for letter in "abcdefgh"]
TAME = {
    COMPLETION: {"prompt": "ab ab", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4},
    "/tokenize": {"prompt": "ab", "messages": None},
    "/detokenize": {},
}
"""Put into bodies that are allowed, so that not all of them are refused for what they mean."""
LONELY = {
    "model",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "allowed_token_ids",
    "min_tokens",
    "speculation",
    "response_format",
    "structured_outputs",
    "prediction",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "max_completion_tokens",
    "logit_bias",
    "stream_options",
}
"""Fields whose values rarely mean anything; left out of tame bodies."""
MARK = "~"
"""A prompt that begins so makes the drafter crash."""
QUIET = settings(
    max_examples=12,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def service(engine, brake):
    own = Engine(engine.target, "none")
    own.listeners.append(brake)
    with Service(
        own, drafters=("prompt_lookup", "reference"), max_batch=4, max_queue=12, pages=10, stored_pages=2
    ) as made:
        yield made


@pytest.fixture(scope="module")
def app(service):
    return create_app(service, name="tiny", limits=LIMITS)


@pytest.fixture(scope="module")
def address(app):
    with listening(app, LIMITS) as url:
        yield url


@pytest.fixture(scope="module")
def alone(app):
    return {prompt: Client(app).complete(prompt, **LONG)["choices"][0]["text"] for prompt in PROMPTS}


@pytest.fixture(autouse=True)
def nothing_is_left_behind(service, app, alone, monkeypatch):
    """After each storm: all is quiet, everything given back, and the service as good as before."""
    states = {"begin": 0, "end": 0}
    for name in states:
        honest = getattr(PromptLookup, name)

        def counted(self, *arguments, honest=honest, name=name):
            states[name] += 1
            return honest(self, *arguments)

        monkeypatch.setattr(PromptLookup, name, counted)
    yield
    until(lambda: not service.stats().running and not service.stats().waiting)
    for prompt, text in [*alone.items()][:2]:
        assert Client(app).complete(prompt, **LONG)["choices"][0]["text"] == text
    until(lambda: not service.stats().running)
    assert left(service) == []
    assert service.broken is None and states["begin"] == states["end"]


def left(service):
    """What an idle service still holds, a word each."""
    stats, memory = service.stats(), service._memory
    found = [name for name in ("running", "waiting", "pages_used") if getattr(stats, name)]
    found += ["slots"] * memory.cache.slots
    if stats.pages_used + stats.pages_stored + stats.pages_free > stats.pages:
        found.append("pages")
    try:
        memory.check_integrity([])
    except AssertionError as error:
        found.append(str(error))
    return found


def operations():
    paths = (COMPLETION, "/v1/chat/completions", "/tokenize", "/detokenize")
    return [(path, mode) for path in paths for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)]


@pytest.mark.parametrize(("path", "mode"), operations(), ids=str)
def test_bodies_made_from_the_description(app, path, mode):
    """Those that it allows and those that it forbids: answered, or refused in one line."""
    operation = schemathesis.openapi.from_dict(app.openapi())[path]["POST"]
    client, seen = Client(app), set()

    @QUIET
    @given(case=operation.as_strategy(generation_mode=mode))
    def storm(case):
        send(case.body)
        if mode is GenerationMode.POSITIVE:
            kept = {key: value for key, value in case.body.items() if key not in LONELY}
            send({**kept, **TAME[path]})

    def send(body):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = client.request("POST", path, content=content, headers={"Content-Type": "application/json"})
        seen.add(answer.status_code)
        if answer.status_code == 200:
            stream = answer.headers["content-type"].startswith("text/event-stream")
            assert answer.text.endswith("data: [DONE]\n\n") if stream else answer.json()
            return
        assert answer.status_code in (400, 404, 413), (answer.status_code, content)
        error = answer.json()["error"]
        if mode is GenerationMode.POSITIVE and answer.status_code == 400:
            assert any(part in error["message"] for part in BEYOND), (error["message"], content)
        assert error["code"] in (answer.status_code, "context_length_exceeded")
        assert "\n" not in error["message"]
        assert 0 < len(error["message"]) <= 400

    storm()
    assert seen <= {400, 404, 413} or mode is GenerationMode.POSITIVE
    assert seen & {400, 404, 413} or mode is GenerationMode.POSITIVE
    assert 200 in seen or mode is GenerationMode.NEGATIVE, seen


def request_of(body, cut=None):
    """The bytes of a request, whole or cut."""
    content = json.dumps(body).encode()
    head = (
        f"POST {COMPLETION} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    ).encode()
    return (head + content)[:cut]


def together(works):
    """Run each on a thread of its own; raise what one of them raises."""
    wrong = []

    def run(work):
        try:
            work()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong, wrong


def test_clients_that_vanish_touch_nobody_else(service, address, alone):
    """Before, in and after their body, before the answer, in the middle of it, and unheard."""
    place = ("127.0.0.1", int(address.rpartition(":")[2]))
    coins = random.Random(0)

    def vanish(cut, read, stream):
        def work():
            with socket.create_connection(place) as connection:
                connection.settimeout(20)
                body = {"prompt": coins.choice(PROMPTS), "stream": stream, **LONG}
                connection.sendall(request_of(body, cut))
                taken = 0
                while taken < read:
                    got = connection.recv(64)
                    taken += len(got)
                    if not got:
                        break

        return work

    def honest(prompt):
        def work():
            answer = httpx.post(address + COMPLETION, json={"prompt": prompt, **LONG}, timeout=20)
            if answer.status_code != 429:
                assert answer.json()["choices"][0]["text"] == alone[prompt]

        return work

    works = [
        vanish(cut, read, stream)
        for stream in (True, False)
        for cut, read in ((0, 0), (20, 0), (-5, 0), (None, 0), (None, 1), (None, 700))
    ]
    works += [honest(prompt) for prompt in PROMPTS[:4]]
    for _ in range(2):
        coins.shuffle(works)
        together(works)


def test_a_full_queue_turns_away_and_answers_the_others(service, app, brake, alone):
    """Of 40 that come at once while nothing moves, those that find room get the right text."""

    async def burst():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            calls = [
                asyncio.ensure_future(client.post(COMPLETION, json={"prompt": prompt, **LONG}))
                for prompt in PROMPTS * 5
            ]
            with brake.on():
                while sum(call.done() for call in calls) < len(calls) - 12 - 4:
                    await asyncio.sleep(0.002)
            return await asyncio.gather(*calls)

    answers = asyncio.run(asyncio.wait_for(burst(), 20))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert 40 - 12 - 4 <= len(refused) < 40
    for answer in refused:
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
        assert "max_queue=12" in answer.json()["error"]["message"]
    for prompt, answer in zip(PROMPTS * 5, answers, strict=True):
        if answer not in refused:
            assert answer.json()["choices"][0]["text"] == alone[prompt]


@pytest.mark.parametrize("where", ["begin", "propose", "observe"])
def test_a_crash_ends_its_own_request_alone(app, alone, monkeypatch, caplog, where):
    honest = getattr(PromptLookup, where)
    mark = Client(app).post("/tokenize", {"prompt": MARK}).json()["tokens"][-1]

    def marked(first):
        if where == "begin":
            return mark in first.prompt
        return any(mark in one.tokens for one in first)

    def broken(self, first, *rest):
        if marked(first):
            raise ZeroDivisionError("a secret")
        return honest(self, first, *rest)

    monkeypatch.setattr(PromptLookup, where, broken)

    async def go():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            prompts = [*PROMPTS[:3], MARK + PROMPTS[0], *PROMPTS[3:6], MARK + PROMPTS[1]]
            return prompts, await asyncio.gather(
                *(client.post(COMPLETION, json={"prompt": prompt, **LONG}) for prompt in prompts)
            )

    prompts, answers = asyncio.run(asyncio.wait_for(go(), 20))
    for prompt, answer in zip(prompts, answers, strict=True):
        if prompt.startswith(MARK):
            assert answer.status_code == 500 and "secret" not in answer.text
        else:
            assert answer.json()["choices"][0]["text"] == alone[prompt]
    monkeypatch.setattr(PromptLookup, where, honest)


def test_a_planted_leak_is_caught(engine, monkeypatch):
    """A request that keeps its slot, and a store that holds more than there is."""
    own = Engine(engine.target, "none")
    release = own.release
    with Service(own, drafters=("none",)) as service:
        monkeypatch.setattr(
            own, "release", lambda row, method, keep_slot=False: release(row, method, keep_slot=True)
        )
        client = Client(create_app(service, name="tiny", limits=LIMITS))
        assert left(service) == []
        client.complete("ab", max_tokens=2)
        until(lambda: not service.stats().running)
        assert left(service) == ["slots"]
        client.complete("ab", max_tokens=2)
        assert left(service) == ["slots", "slots"]
        own.cache.close(0)
        own.cache.close(1)
        monkeypatch.setattr(service._memory.store, "most", -1)
        assert left(service) == ["(0, -1)"]
        monkeypatch.undo()
