"""From the service's thread to the event loop: one HTTP request and the answers made for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from outpace.errors import LogitsError, QueueFull, RequestError, ServiceClosed
from outpace.server.client_request import ClientRequest
from outpace.server.errors import ApiError, from_defect, from_mistake, stopping
from outpace.server.metrics import Meters
from outpace.serving.batch import Ticket
from outpace.serving.events import Done, Event, Failed, Tokens
from outpace.serving.service import Service


class Mailbox:
    """Brings events from any thread to queues of an event loop.

    The loop is woken once for all that a pass gave. Woken for each of 64 answers, it held the service up
    for 1.2 ms more between two passes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._woken = loop, False
        self._posted: deque[tuple[asyncio.Queue[Any], Event]] = deque()

    def post(self, queue: asyncio.Queue[Any], event: Event) -> None:
        """Put an event into a queue of the loop."""
        self._posted.append((queue, event))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first, so that what is posted from now on wakes the loop again
        while self._posted:
            queue, event = self._posted.popleft()
            queue.put_nowait(event)


class RequestHandler:
    """The answers of one request under way. Lives on an event loop.

    Args:
        mail: of the loop; brings what the service tells.
        began: when the request was there, by ``time.perf_counter``.
        seconds: how long it may take from then on.
    """

    def __init__(
        self,
        service: Service,
        wanted: ClientRequest,
        meters: Meters,
        mail: Mailbox,
        began: float,
        seconds: float,
    ) -> None:
        self.wanted, self._mail = wanted, mail
        self._service, self._meters = service, meters
        self._began, self._seconds = began, seconds
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self._left = wanted.answers
        self._last: dict[int, float] = {}

    def start(self, key: str) -> None:
        """Queue the request; all of its prompts, or none.

        Raises:
            ApiError: 429, the queue is full; 503, the service ends or has broken.
        """
        for number, request in enumerate(self.wanted.requests):
            first = number * self.wanted.n

            def listen(event: Event, first: int = first) -> None:
                event = replace(event, index=first + event.index) if first else event
                self._mail.post(self._queue, event)

            try:
                self._tickets.append(self._service.submit(request, listen, key=key))
            except QueueFull as error:
                self.cancel()
                wait = self._meters.wait(self._service.stats())
                raise ApiError(429, str(error), headers={"Retry-After": str(wait)}) from error
            except ServiceClosed as error:
                self.cancel()
                raise ApiError(503, str(error)) from error
            except BaseException:
                self.cancel()
                raise

    def cancel(self) -> None:
        """Drop what is not answered yet."""
        for ticket in self._tickets:
            ticket.cancel()

    async def events(self) -> AsyncGenerator[Tokens | Done, None]:
        """Everything that happens to the answers, until the last of them has ended.

        Raises:
            ApiError: an answer failed, or they take too long. The others are cancelled.
        """
        left = self._began + self._seconds - time.perf_counter()
        # No wait_for: before Python 3.12 it forgets that it was cancelled if an event comes at
        # the same moment, and the answer would go on for a client who has left.
        late = asyncio.get_running_loop().call_later(max(0.0, left), self._queue.put_nowait, None)
        try:
            while self._left:
                event = await self._next()
                if isinstance(event, Failed):
                    raise _fault(event.error)
                self._measure(event)
                if isinstance(event, Done):
                    self._left -= 1
                    if event.result.finish_reason == "cancelled":
                        raise stopping()
                yield event
        finally:
            late.cancel()
            if self._left:
                self.cancel()

    async def _next(self) -> Event:
        event = await self._queue.get()
        if event is None:
            raise ApiError(
                504,
                f"the answer takes longer than {self._seconds:g} seconds; ask for less",
                headers={"x-should-retry": "false"},
            )
        return event

    def _measure(self, event: Tokens | Done) -> None:
        now = time.perf_counter()
        if isinstance(event, Done):
            self._meters.ended(event.result, now - self._began)
            return
        last = self._last.get(event.index)
        if last is None:
            self._meters.first(now - self._began)
        else:
            self._meters.later(now - last)
        self._last[event.index] = now


def _fault(error: Exception) -> ApiError:
    # What was wrong with a method spec was said before it ran.
    if isinstance(error, RequestError):
        return from_mistake(error)
    if isinstance(error, LogitsError):
        return ApiError(500, str(error))
    return from_defect("an answer", error)
