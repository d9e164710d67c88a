"""One tiny model, one service, one application; a browser-less client that runs in process."""

import asyncio
import contextlib
import threading

import httpx
import pytest
import torch

from outpace import Engine
from outpace.server.app import create_app
from outpace.server.limits import Limits
from outpace.serving.service import Service

LIMITS = Limits(body_bytes=100_000, answers=8, new_tokens=512, request_seconds=20)
DRAFTERS = ("prompt_lookup", "suffix", "reference")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Models this small gain nothing from a second thread and wait for it when others run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def engine():
    return Engine.load("tiny", dtype="float32", drafter="none")


@pytest.fixture(scope="session")
def service(engine):
    with Service(engine, drafters=DRAFTERS, max_batch=4, max_queue=16) as made:
        yield made


@pytest.fixture(scope="session")
def app(service):
    return create_app(service, name="tiny", limits=LIMITS)


class Brake:
    """A listener of an engine that holds the thread that computes behind a pass, while it is on."""

    def __init__(self):
        self._free, self.held = threading.Event(), threading.Event()
        self._free.set()

    def __call__(self, record):
        if not self._free.is_set():
            self.held.set()
            self._free.wait(20)

    @contextlib.contextmanager
    def on(self):
        """Meanwhile at most one pass begins."""
        self.held.clear()
        self._free.clear()
        try:
            yield self
        finally:
            self._free.set()


@pytest.fixture(scope="module")
def brake():
    return Brake()


class Client:
    """Synchronous calls into an ASGI application."""

    def __init__(self, app, **headers):
        self._app, self._headers = app, headers

    def request(self, method, path, **more):
        async def go():
            transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1", headers=self._headers
            ) as client:
                return await client.request(method, path, **more)

        return asyncio.run(go())

    def get(self, path, **more):
        return self.request("GET", path, **more)

    def post(self, path, body, **more):
        return self.request("POST", path, json=body, **more)

    def complete(self, prompt, **fields):
        """A completion that must succeed."""
        answer = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, text, **fields):
        """A chat that must succeed."""
        body = {"messages": [{"role": "user", "content": text}], **fields}
        answer = self.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path, body, status=400):
        """The error of a request that must fail."""
        answer = self.post(path, body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["code"] == status and error["message"] and "\n" not in error["message"]
        return error


@pytest.fixture(scope="session")
def client(app):
    return Client(app)
