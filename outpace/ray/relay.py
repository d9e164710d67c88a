"""A request of HTTP on its way to a replica and back: asked elsewhere if the replica is lost in time.

A replica holds back what it sends until its first token is there (`played`). So a request that was waiting
or whose prompt was being read is asked again, and its client sees nothing of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from starlette.responses import Response

from outpace.server.errors import LOG, ApiError
from outpace.server.middleware import SAFE, App, Message, Receive, Scope, Send, last_words

TRIES = 3
"""Replicas that one request is sent to, at most."""
REPLICA = "x-outpace-replica"
"""Header with the name of the replica that answers."""
LOST = "x-outpace-retries"
"""Header of an answer that another replica had begun: how many were lost."""
_LAST = 2.0  # seconds that the application gets to notice that nobody listens


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A whole request, as it goes to a replica."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    blocks: tuple[bytes, ...]
    """Names of what its prompt begins with, for the router."""

    def scope(self) -> Scope:
        """The request as ASGI has it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": None,
            "server": None,
        }


class Unavailable(Exception):
    """A call that no replica will take now; ``error`` says why."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


Ask = Callable[[Call], AsyncGenerator[Message, None]]
"""Has a replica answer; gives the messages of the response."""


class Relay:
    """ASGI application whose requests are answered by replicas.

    A request whose replica is lost before the client was sent anything is asked again. One that is lost
    later ends: a stream with an error as its API has it.

    Args:
        ask: closed early where the client leaves.
        blocks: names of what a request begins with, from its body and its key.
        lost: what ``ask`` raises where the replica has died or cannot be reached.
    """

    def __init__(
        self,
        ask: Ask,
        blocks: Callable[[bytes, bytes], tuple[bytes, ...]],
        lost: tuple[type[BaseException], ...],
    ) -> None:
        self._ask, self._blocks, self._lost = ask, blocks, lost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            ApiError: nothing was sent, and no replica answers.
        """
        call = await self._read(scope, receive)
        for lost in range(TRIES):
            begun: Message | None = None
            try:
                async with contextlib.aclosing(self._ask(call)) as messages:
                    async for message in messages:
                        if message["type"] == "http.response.start":
                            own = [pair for pair in message["headers"] if pair not in SAFE]
                            again = [(LOST.encode(), str(lost).encode())] if lost else []
                            message = begun = {**message, "headers": own + again}
                        await send(message)
                return
            except self._lost as error:
                LOG.warning("a replica was lost: %s", str(error).partition("\n")[0])
                if begun is not None:
                    gone = ApiError(503, "the replica that wrote this was lost; ask again")
                    await send(last_words(begun, scope, gone))
                    return
            except Unavailable as full:
                raise full.error from None
        raise ApiError(
            503,
            f"{TRIES} replicas were lost one after another; try again later",
            headers={"Retry-After": "5"},
        )

    async def _read(self, scope: Scope, receive: Receive) -> Call:
        body, more = bytearray(), True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message["type"] == "http.request" and message.get("more_body", False)
        told = dict(scope["headers"])
        key = told.get(b"authorization", b"") or told.get(b"x-api-key", b"")
        return Call(
            method=scope["method"],
            path=scope["path"],
            query=scope["query_string"],
            headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            body=bytes(body),
            blocks=self._blocks(bytes(body), key),
        )


class Handed(Response):
    """A response that an application gives."""

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on."""
        await self._app(scope, receive, send)


async def played(app: App, call: Call) -> AsyncGenerator[Message, None]:
    """Have an application answer a call; gives what it sends, the start with the first piece of the body.

    Close it early where nobody wants the rest: the application hears that the client has left.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    read, left = False, asyncio.Event()

    async def receive() -> Message:
        nonlocal read
        if not read:
            read = True
            return {"type": "http.request", "body": call.body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(call.scope(), receive, sent.put)
        finally:
            sent.put_nowait(None)

    running = asyncio.create_task(run())
    start: Message | None = None
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                start = message
                continue
            if start is not None:
                yield start
                start = None
            yield message
        await running
    finally:
        left.set()
        await asyncio.wait({running}, timeout=_LAST)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await running
