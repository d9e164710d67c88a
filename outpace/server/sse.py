"""Server-sent events, and what to do when the one who asked has left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Type": "text/event-stream; charset=utf-8",
    "X-Accel-Buffering": "no",
}
_SLACK = 5.0  # seconds that a last event may take beyond the time of a request


class EventStream(Response):
    """Sends chunks as they are made. Ends when the reader leaves, or does not read.

    Args:
        chunks: one event's data each, in one line; closed in any case.
        seconds: the longest that all of it may take.
        end: called when it is over, also if no chunk was ever asked for.
        named: whether chunks are whole events, and none says that it is over.
    """

    def __init__(
        self, chunks: AsyncIterator[bytes], seconds: float, end: Callable[[], None], named: bool = False
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._chunks, self._seconds, self._end, self._named = chunks, seconds, end, named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(until_left(self._send(send), receive), self._seconds + _SLACK)
        finally:
            self._end()
            close = getattr(self._chunks, "aclose", None)
            if close is not None:
                await close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._chunks:
            told = chunk if self._named else event(chunk)
            await send({"type": "http.response.body", "body": told, "more_body": True})
        last = b"" if self._named else event(b"[DONE]")
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def until_left(work: Awaitable[T], receive: Callable[[], Awaitable[Any]]) -> T | None:
    """Do something for a client, unless it leaves: then the work is cancelled.

    Args:
        receive: of the connection; its body has been read.

    Returns:
        What the work gives; None if the client left first.
    """

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def event(data: bytes, name: str = "") -> bytes:
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"
