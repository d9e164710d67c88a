"""Over a socket: the official client, readers that leave, and an end in good order."""

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from http.client import HTTPConnection

import httpx
import openai
import pytest

from outpace import Engine
from outpace.server.app import create_app
from outpace.server.limits import Limits
from outpace.server.run import make_server
from outpace.serving.service import Service
from tests.support import until

HI = [{"role": "user", "content": "ab ab"}]
LONG = {"max_tokens": 900, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def listening(app, limits):
    """The address of a server on a thread."""
    server = make_server(app, host="127.0.0.1", port=0, limits=limits, quiet=True)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def service(engine, brake):
    own = Engine(engine.target, "none")
    own.listeners.append(brake)
    with Service(own, drafters=("prompt_lookup",), max_batch=4) as made:
        yield made


@pytest.fixture
def tickets(service, monkeypatch):
    """Of the requests that the server has handed on."""
    made, submit = [], service.submit

    def noting(*request, **settings):
        made.append(submit(*request, **settings))
        return made[-1]

    monkeypatch.setattr(service, "submit", noting)
    return made


@pytest.fixture(scope="module")
def address(service):
    limits = Limits(grace_seconds=5)
    app = create_app(service, name="tiny", keys=["key"], limits=limits)
    with listening(app, limits) as url:
        yield url


@pytest.fixture(scope="module")
def official(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0) as client:
        yield client


def test_the_official_client_chats(official):
    plain = official.chat.completions.create(
        model="tiny",
        messages=HI,
        max_tokens=12,
        temperature=0.9,
        seed=3,
        logprobs=True,
        top_logprobs=2,
        n=2,
        extra_body={"top_k": 20, "speculation": {"drafter": "none"}},
    )
    assert [choice.index for choice in plain.choices] == [0, 1]
    assert plain.choices[0].message.role == "assistant"
    assert len(plain.choices[0].logprobs.content[0].top_logprobs) == 2
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
    stream = official.chat.completions.create(
        model="tiny",
        messages=HI,
        max_tokens=12,
        temperature=0.9,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 20},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage.completion_tokens >= 1
    assert chunks[-1].metrics["speculative_decoding"]["num_spec_steps"] > 0


def test_the_official_client_completes_lists_and_fails(official, address):
    whole = official.completions.create(model="tiny", prompt="ab ab", max_tokens=8, temperature=0)
    parts = official.completions.create(
        model="tiny", prompt="ab ab", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(p.choices[0].text for p in parts) == whole.choices[0].text
    assert [model.id for model in official.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError, match="unknown field 'frobnicate'") as caught:
        official.completions.create(model="tiny", prompt="a", extra_body={"frobnicate": 1})
    assert caught.value.param == "frobnicate"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        official.completions.create(model="other", prompt="a")
    wrong = openai.OpenAI(base_url=f"{address}/v1", api_key="other", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_a_reader_who_leaves_a_stream_ends_the_answer(service, address, brake, tickets):
    before = service.stats()
    body = {"prompt": "ab", "stream": True, **LONG}
    with brake.on():  # so that the answer cannot end before anybody has looked
        with httpx.stream(
            "POST", f"{address}/v1/completions", json=body, headers={"Authorization": "Bearer key"}
        ) as response:
            assert response.status_code == 200 and brake.held.wait(20)
        until(lambda: tickets[-1].cancelled)
    until(lambda: service.stats().finished.get("cancelled", 0) == before.finished.get("cancelled", 0) + 1)
    assert service.stats().new_tokens - before.new_tokens < 20


def test_a_client_who_leaves_before_the_answer_ends_it(service, address, brake, tickets):
    before = service.stats()
    port = int(address.rpartition(":")[2])
    body = json.dumps({"prompt": "ab", **LONG}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    with brake.on():
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head + body)
            assert brake.held.wait(20)
        until(lambda: tickets[-1].cancelled)
    until(lambda: service.stats().finished.get("cancelled", 0) == before.finished.get("cancelled", 0) + 1)
    assert service.stats().new_tokens - before.new_tokens < 20


def test_many_at_once_get_the_text_they_get_alone(address):
    def ask(prompt):
        answer = httpx.post(
            f"{address}/v1/completions",
            headers={"Authorization": "Bearer key"},
            json={"prompt": prompt, "max_tokens": 16, "temperature": 0},
            timeout=30,
        )
        return answer.json()["choices"][0]["text"]

    prompts = [f"{letter} {letter}" for letter in "abcdefgh"]
    alone = [ask(prompt) for prompt in prompts]
    together = [""] * len(prompts)

    def work(number):
        together[number] = ask(prompts[number])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert together == alone and len(set(alone)) > 4


def test_the_command_serves_and_ends_in_good_order():
    command = [
        sys.executable,
        "-m",
        "outpace.cli.main",
        "serve",
        "--model",
        "tiny",
        "--port",
        "0",
        "--drafter",
        "prompt_lookup",
        "--threads",
        "1",
        "--grace",
        "5",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})
    try:
        port = None
        for line in process.stderr:
            if found := re.search(r"running on http://127\.0\.0\.1:(\d+)", line):
                port = int(found[1])
                break
        assert port
        url = f"http://127.0.0.1:{port}"
        body = {"prompt": "ab", "stream": True, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"  # the answer under way is given
        assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


class Patience:
    """Holds back what an event loop is to do after so many seconds, until it is told to."""

    def __init__(self, monkeypatch, seconds):
        self.due, real = [], asyncio.BaseEventLoop.call_later

        def call_later(loop, delay, call, *arguments, **more):
            if delay != seconds:
                return real(loop, delay, call, *arguments, **more)
            return self.due.append((loop, call, arguments))

        monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", call_later)

    def ends(self):
        """The seconds pass for all that wait."""
        due, self.due[:] = self.due[:], []
        for loop, call, arguments in due:
            loop.call_soon_threadsafe(call, *arguments)


def test_a_connection_that_asks_nothing_is_closed(service, monkeypatch):
    limits = Limits(read_seconds=1234.0, connections=2)
    patience = Patience(monkeypatch, limits.read_seconds)
    app = create_app(service, name="tiny", limits=limits)
    with listening(app, limits) as url:
        place = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(place) as silent, socket.create_connection(place) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost:")
            until(lambda: len(patience.due) == 2)
            assert httpx.get(f"{url}/health").status_code == 503  # both connections are taken
            patience.ends()
            for one in (silent, slow):
                one.settimeout(10)
                assert one.recv(1) == b""
        until(lambda: httpx.get(f"{url}/health").status_code == 200)
        with contextlib.closing(HTTPConnection(*place, timeout=10)) as kept:
            kept.connect()
            kept.auto_open = False  # one that asks now and then is kept
            for _ in range(4):
                kept.request("GET", "/health")
                answer = kept.getresponse()
                assert answer.status == 200 and answer.read()
                until(lambda: patience.due)
                patience.ends()
            until(lambda: patience.ends() or select.select([kept.sock], [], [], 0)[0])
            assert kept.sock.recv(1) == b""  # and closed, once it does not


def server_of(app, limits):
    """A server on a thread, its address, and the thread."""
    server = make_server(app, host="127.0.0.1", port=0, limits=limits)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    return server, ("127.0.0.1", server.servers[0].sockets[0].getsockname()[1]), thread


def test_when_the_grace_ends_waiting_clients_are_told(service, brake, caplog):
    limits = Limits(grace_seconds=1)
    app = create_app(service, name="tiny", limits=limits)
    server, (host, port), thread = server_of(app, limits)
    url, found = f"http://{host}:{port}/v1/completions", {}

    def ask(stream):
        found[stream] = httpx.post(url, json={"prompt": "ab", "stream": stream, **LONG}, timeout=30)

    asking = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    with brake.on():
        for one in asking:
            one.start()
        assert brake.held.wait(20)
        until(lambda: len(server.server_state.tasks) == 2)
        server.should_exit = True
        for one in [*asking, thread]:
            one.join(20)
    assert (found[False].status_code, found[True].status_code) == (503, 200)
    error = found[False].json()["error"]
    assert error["code"] == 503 and "stopping" in error["message"]
    *_, last, done, nothing = found[True].text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503
    assert (done, nothing) == ("data: [DONE]", "")
    assert "Traceback" not in caplog.text and "Exception in ASGI" not in caplog.text


def test_a_client_that_half_closes_gets_its_answer(address):
    port = int(address.rpartition(":")[2])
    body = json.dumps({"prompt": "ab", "max_tokens": 40, "ignore_eos": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(20)
        connection.sendall(head + body)
        connection.shutdown(socket.SHUT_WR)
        text = b""
        while more := connection.recv(1 << 16):
            text += more
    assert b"HTTP/1.1 200 OK" in text and b'"finish_reason":"length"' in text


def test_head_requests(address):
    for path in ("/", "/health"):
        answer = httpx.head(f"{address}{path}")
        assert answer.status_code == 200 and not answer.content
