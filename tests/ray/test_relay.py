"""Requests whose replica is lost: asked again in time, or ended with an error. Ray is not needed."""

import asyncio
import contextlib
import json

import pytest
from fastapi import FastAPI

from outpace.ray.relay import LOST, TRIES, Call, Relay, Unavailable, played
from outpace.server.app import create_app, tell_errors
from outpace.server.errors import ApiError
from outpace.server.middleware import Guard
from outpace.serving.service import Service
from tests.server.conftest import LIMITS, Client, engine  # noqa: F401
from tests.support import until

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
BODIES = {
    CHAT: {"messages": HI, "max_tokens": 12, "temperature": 0},
    MESSAGES: {"messages": HI, "max_tokens": 12, "temperature": 0, "model": "tiny"},
    RESPONSES: {"input": "hi", "max_output_tokens": 12, "temperature": 0},
}


class Dead(Exception):
    """What stands for the end of a replica."""


class Front:
    """An application in front of replicas that die when they are told to.

    Args:
        deaths: for every call in turn, after how many messages its replica dies; None: never.
    """

    def __init__(self, app, deaths=()):
        self.app, self.deaths, self.calls = app, list(deaths), []
        relay = Relay(self.ask, lambda body, key: (body[:1], key), (Dead,))
        self.http = FastAPI()
        tell_errors(self.http)
        self.http.mount("/", Guard(relay, keys=(), hosts=None, limits=LIMITS))

    async def ask(self, call):
        self.calls.append(call)
        left = self.deaths.pop(0) if self.deaths else None
        if isinstance(left, Exception):
            raise left
        async with contextlib.aclosing(played(self.app, call)) as messages:
            async for message in messages:
                if left == 0:
                    raise Dead("gone")
                left = None if left is None else left - 1
                yield message


@pytest.fixture(scope="module")
def app(engine):  # noqa: F811
    with Service(engine, drafters=("prompt_lookup",), max_batch=4) as service:
        yield create_app(service, name="tiny", limits=LIMITS)


def post(front, path=CHAT, **more):
    return Client(front.http).request("POST", path, json={**BODIES[path], **more})


def events(text):
    """(name, data) of every event."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((lines.get("event", ""), lines["data"]))
    return found


@pytest.mark.parametrize("path", list(BODIES))
def test_answers_are_those_of_the_application(app, path):
    plain = Client(app).request("POST", path, json=BODIES[path])
    front = Front(app)
    got = post(front, path)
    assert got.status_code == 200 and LOST not in got.headers

    def text(answer):
        told = answer.json()
        return (
            told.get("choices", [{}])[0].get("message") or told.get("content") or told["output"][0]["content"]
        )

    assert text(got) == text(plain)
    assert sorted(set(got.headers) - {"date", "server"}) == sorted(set(plain.headers) - {"date", "server"})
    (call,) = front.calls
    assert call.blocks == (b"{", b"") and call.path == path


def test_refusals_come_through(app):
    assert post(Front(app), messages=5).json()["error"]["param"] == "messages"
    assert Client(Front(app).http).request("GET", "/nothing").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_what_nothing_was_sent_of_is_asked_again(app, stream):
    front = Front(app, [0, 0])
    got = post(front, stream=stream)
    assert got.status_code == 200 and got.headers[LOST] == "2" and len(front.calls) == 3
    if stream:
        *chunks, (_, done) = events(got.text)
        told = "".join(json.loads(data)["choices"][0]["delta"].get("content") or "" for _, data in chunks)
        assert done == "[DONE]"
    else:
        told = got.json()["choices"][0]["message"]["content"]
    assert told == post(Front(app)).json()["choices"][0]["message"]["content"]


def test_a_stream_has_sent_nothing_before_its_first_token(app):
    """The start of a response and the opening of a chat come with it."""

    async def first():
        kinds = []
        async with contextlib.aclosing(Front(app).ask(call)) as messages:
            async for message in messages:
                kinds.append(message)
                if len(kinds) == 3:
                    break
        return kinds

    front = Front(app)
    post(front, stream=True)
    (call,) = front.calls
    service = app.state.server.service
    before = service.stats().passes
    start, opening, piece = asyncio.run(first())
    assert start["type"] == "http.response.start" and b'"role":"assistant"' in opening["body"]
    assert service.stats().passes > before and b'"content":' in piece["body"]


@pytest.mark.parametrize("path", list(BODIES))
def test_a_stream_that_is_cut_ends_with_an_error_of_its_api(app, path):
    front = Front(app, [5])
    got = post(front, path, stream=True)
    assert got.status_code == 200 and len(front.calls) == 1
    found = events(got.text)
    assert len(found) >= 4
    if path == CHAT:
        assert found[-1][1] == "[DONE]"
        error = json.loads(found[-2][1])["error"]
        assert error["code"] == 503 and error["type"] == "overloaded_error"
    else:
        name, data = found[-1]
        told = json.loads(data)
        error = told["error"] if path == MESSAGES else told
        assert name == told["type"] == "error"
    assert "the replica that wrote this was lost; ask again" in error["message"]


def test_it_gives_up_in_the_end(app):
    front = Front(app, [0] * TRIES)
    got = post(front)
    assert got.status_code == 503 and len(front.calls) == TRIES
    assert "3 replicas were lost" in got.json()["error"]["message"] and got.headers["Retry-After"] == "5"


def test_full_replicas_are_told_as_such(app):
    full = Unavailable(ApiError(429, "all replicas are busy", headers={"Retry-After": "1"}))
    got = post(Front(app, [full]), MESSAGES)
    assert got.status_code == 429 and got.json()["error"]["type"] == "rate_limit_error"


def test_a_client_that_leaves_ends_the_work(app):
    body = json.dumps({**BODIES[CHAT], "max_tokens": 500, "stream": True}).encode()
    headers = ((b"content-type", b"application/json"),)
    call = Call(method="POST", path=CHAT, query=b"", headers=headers, body=body, blocks=())

    async def leave():
        async with contextlib.aclosing(played(app, call)) as messages:
            async for message in messages:
                if message["type"] == "http.response.body":
                    return

    service = app.state.server.service
    before = service.stats().finished.get("cancelled", 0)
    asyncio.run(leave())
    until(lambda: not service.stats().running)
    assert service.stats().finished["cancelled"] == before + 1
