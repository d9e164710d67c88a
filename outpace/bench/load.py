"""Load on a server of the OpenAI API: requests that arrive, and when their tokens come back.

Two ways to arrive. Closed loop: so many clients, each of which asks again as soon as it has its
answer, which shows what a server can do. Open loop: at random times that do not wait for answers,
which shows what users see at a given rate, queues included.

Every request streams. What is measured is measured here, by the client's clock.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.errors import ModelError, OutpaceError, RequestError

if TYPE_CHECKING:
    import httpx

Json = dict[str, Any]

_CONNECT = 10.0  # seconds until a connection must stand
_DONE = b"[DONE]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """How requests arrive; one of the two is given."""

    concurrency: int | None = None
    """Clients of a closed loop."""
    rate: float | None = None
    """Requests per second of an open loop, on average."""

    @property
    def label(self) -> str:
        return f"{self.concurrency}" if self.rate is None else f"{self.rate:g}/s"


@dataclass(slots=True)
class Reply:
    """What became of one request. Times are seconds by ``time.perf_counter``."""

    prompt: str
    """Id of its prompt."""
    began: float
    ended: float = 0.0
    portions: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    usage: Json = field(default_factory=dict)
    metrics: Json = field(default_factory=dict)
    fingerprint: str = ""
    error: str | None = None
    """Why there is no whole answer, in one line."""

    @property
    def first_seconds(self) -> float:
        """From the request to its first tokens."""
        return self.portions[0][0] - self.began

    @property
    def gaps(self) -> list[float]:
        times = [at for at, _ in self.portions]
        return [b - a for a, b in itertools.pairwise(times)]

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first portion; None if nothing came after it."""
        later = sum(count for _, count in self.portions[1:])
        return (self.portions[-1][0] - self.portions[0][0]) / later if later else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A prompt as the server takes it."""

    id: str
    path: str
    """Of the API."""
    body: Json
    """What is special to it: ``messages`` or ``prompt``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    """Of the first request; the next ones count on."""

    def shorter(self, number: int) -> Settings:
        """The settings of one of several requests whose answers differ in length: a quarter of the
        whole at least.
        """
        length = self.max_new_tokens * (1 + number * 5 % 8) // 8  # 5 steps of 8: all, mixed up
        return replace(self, max_new_tokens=max(1, self.max_new_tokens // 4, length))

    def body(self, question: Question, drafter: str, number: int) -> Json:
        """The body of a request. An end of sequence does not end it: all are equally long."""
        body: Json = {
            **question.body,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "speculation": {"drafter": drafter},
        }
        if self.temperature > 0:
            # As clients mostly ask: independent coins, not those that any drafter would share.
            body["seed"] = self.seed + number
            body["speculation"]["reproducible"] = False
        return body


class Refused(OutpaceError):
    """An answer of a server that says an error, with its ``code``."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.code = code


class Server:
    """A server under load, through one pool of connections. Made by ``connected``."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client, self.url = client, url

    async def get(self, path: str) -> Json:
        """A JSON answer.

        Raises:
            Refused: it is an error.
            OutpaceError: there is none.
        """
        return await self._json(self._client.get(path), path)

    async def post(self, path: str, body: Json) -> Json:
        """A JSON answer; raises as ``get``."""
        return await self._json(self._client.post(path, json=body), path)

    async def _json(self, call: Awaitable[httpx.Response], path: str) -> Json:
        import httpx

        try:
            answer = await call
            found = answer.json()
        except httpx.HTTPError as error:
            raise OutpaceError(
                f"no answer from {self.url}{path}: {_said(error)}; is a server running there?"
            ) from error
        except ValueError:
            found = None
        if answer.status_code != 200 or not isinstance(found, dict):
            message, code = _refusal(found)
            raise Refused(f"{self.url}{path} answers {answer.status_code}: {message}", code)
        return found

    async def ask(self, path: str, body: Json, prompt: str) -> Reply:
        """Send a request that streams, and read its answer; errors are part of the reply."""
        import httpx

        reply = Reply(prompt, time.perf_counter())
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    reply.error = f"{response.status_code}: {_refusal(_parsed(response.text))[0]}"
                else:
                    await _read(response, reply)
        except httpx.HTTPError as error:
            reply.error = _said(error)
        reply.ended = time.perf_counter()
        return reply


@asynccontextmanager
async def connected(url: str, *, key: str | None, seconds: float) -> AsyncIterator[Server]:
    """Open a pool of connections to a server.

    Args:
        url: without ``/v1``.
        seconds: longest wait for the next piece of an answer.

    Raises:
        ModelError: the package httpx is not installed.
        RequestError: an address that none can be.
    """
    try:
        import httpx
    except ImportError as error:
        raise ModelError("load needs the package httpx; install it: pip install 'outpace[load]'") from error
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if not url.startswith(("http://", "https://")):
        raise RequestError(f"--url {url!r} is no address; give one such as http://127.0.0.1:8000")
    try:
        client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            trust_env=False,
            timeout=httpx.Timeout(seconds, connect=_CONNECT, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
    except httpx.InvalidURL as error:
        raise RequestError(f"--url {url!r} is no address: {error}") from error
    async with client:
        yield Server(client, url)


async def _read(response: httpx.Response, reply: Reply) -> None:
    whole = False
    async for line in _lines(response):
        if not line.startswith(b"data: "):
            continue
        now = time.perf_counter()
        data = line.removeprefix(b"data: ")
        if data == _DONE:
            whole = True
            continue
        chunk = _parsed(data)
        if not isinstance(chunk, dict) or "error" in chunk:
            reply.error = reply.error or f"in the stream: {_refusal(chunk)[0]}"
            continue
        reply.fingerprint = chunk.get("system_fingerprint") or reply.fingerprint
        reply.usage = chunk.get("usage") or reply.usage
        reply.metrics = chunk.get("metrics") or reply.metrics
        for choice in chunk.get("choices", ()):
            ids = choice.get("token_ids") or ()
            if ids:
                reply.portions.append((now, len(ids)))
                reply.tokens += ids
            reply.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    if reply.error is None and not (whole and reply.portions):
        reply.error = "the stream ended before the answer did"


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines that end with a line feed; texts may hold characters that others take for one."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


Send = Callable[[int], Awaitable[Reply]]
"""Sends the request of a number, and gives what became of it."""


async def closed_loop(send: Send, count: int, clients: int) -> list[Reply]:
    """Send requests 0 to ``count`` - 1 from so many clients; replies in that order."""
    numbers, replies = iter(range(count)), dict[int, Reply]()

    async def client() -> None:
        for number in numbers:
            replies[number] = await send(number)

    await _all([client() for _ in range(min(clients, count))])
    return [replies[number] for number in range(count)]


async def open_loop(send: Send, at: Sequence[float]) -> list[Reply]:
    """Send request i ``at[i]`` seconds from now, whatever has become of the others."""
    start, replies = time.perf_counter(), dict[int, Reply]()

    async def one(number: int) -> None:
        await asyncio.sleep(max(0.0, start + at[number] - time.perf_counter()))
        replies[number] = await send(number)

    await _all([one(number) for number in range(len(at))])
    return [replies[number] for number in range(len(at))]


async def _all(works: Sequence[Awaitable[None]]) -> None:
    """Wait for all; if one fails, or nobody waits any more, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Arrival times, in seconds, of a Poisson process."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return [float(at) for at in gaps.cumsum()]


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _refusal(found: Any) -> tuple[str, str | None]:
    """What an answer says of an error: its message in one line, and its code."""
    error = found.get("error") if isinstance(found, Mapping) else None
    error = error if isinstance(error, Mapping) else {}
    return " ".join(str(error.get("message") or "no reason given").split()), error.get("code")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip(": ") or "the connection failed"
