"""ASGI middleware: keys, host names and sizes; figures of responses; an answer to every defect."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

from outpace.server.dialects.messages_answers import in_form, refusal
from outpace.server.dialects.responses_answers import PATH as RESPONSES
from outpace.server.dialects.responses_answers import fault
from outpace.server.encoding import to_json
from outpace.server.errors import ApiError, from_defect, stopping
from outpace.server.limits import Limits
from outpace.server.metrics import Meters
from outpace.server.sse import event

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = frozenset({"/", "/health", "/static/chat.js", "/static/chat.css"})
"""Paths that need no key: the page itself holds nothing secret."""
_LAST_WORDS = 2.0  # seconds for an error to reach its reader
SAFE = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class Guard:
    """ASGI middleware that lets through what may come in.

    Args:
        keys: any of these opens the API; none: it is open.
        hosts: names under which the server answers; None: any. A page of another site cannot
            talk a browser into calling a server by a name of its own then (DNS rebinding).
    """

    def __init__(
        self, app: App, *, keys: Iterable[str], hosts: frozenset[str] | None, limits: Limits
    ) -> None:
        self._app, self._hosts, self._limits = app, hosts, limits
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        number = secrets.token_hex(16).encode()
        scope["number"] = number.decode()

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name, number) for name in (b"x-request-id", b"request-id")]
                message["headers"] = [*message.get("headers", []), *SAFE, *own]
            await send(message)

        try:
            self._check(scope)
        except ApiError as error:
            await refusal(scope, error)(scope, receive, send_safely)
            return
        # Whoever neither sends nor reads is let go in the end, whatever the application waits for.
        longest = self._limits.request_seconds + 2 * self._limits.read_seconds
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._app(scope, self._patient(receive), send_safely), longest)

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._hosts is not None:
            name = _host(headers.get(b"host", b"").decode("latin-1"))
            if name not in self._hosts:
                raise ApiError(
                    403,
                    f"this server does not answer as {name!r}; call it by {' or '.join(sorted(self._hosts))}",
                )
        given = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")
        caller = self._caller(given)
        if caller is None and scope["path"] not in OPEN:
            raise ApiError(
                401,
                "this server does not know this key; send another one"
                if given.partition(b" ")[2].strip()
                else "this server needs a key; send Authorization: Bearer KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )
        scope["caller"] = caller or ""
        length = headers.get(b"content-length", b"0")
        # A body without a length is counted as it comes.
        if length.isdigit() and (len(length) > 15 or int(length) > self._limits.body_bytes):
            raise self._too_long()

    def _caller(self, authorization: bytes) -> str | None:
        """Who calls: the digest of the key; empty without keys, None if the key is wrong."""
        if not self._keys:
            return ""
        scheme, _, given = authorization.partition(b" ")
        digest = _digest(given.strip())
        # All keys are compared, each in constant time: the answer's delay tells nothing.
        right = [hmac.compare_digest(digest, key) for key in self._keys]
        return digest.hex() if any(right) and scheme.lower() == b"bearer" else None

    def _too_long(self) -> ApiError:
        return ApiError(
            413,
            f"the body is longer than {self._limits.body_bytes} bytes; send less",
            headers={"Connection": "close"},
        )

    def _patient(self, receive: Receive) -> Receive:
        """Read a body that is neither too long nor too slow; afterwards wait for ever."""
        taken, whole = 0, False
        loop = asyncio.get_running_loop()
        end = loop.time() + 2 * self._limits.read_seconds

        async def bounded() -> Message:
            nonlocal taken, whole
            if whole:
                return await receive()
            try:
                left = min(self._limits.read_seconds, end - loop.time())
                message = await asyncio.wait_for(receive(), max(0.0, left))
            except asyncio.TimeoutError as error:
                raise ApiError(408, "the body came too slowly", headers={"Connection": "close"}) from error
            taken += len(message.get("body", b""))
            whole = message["type"] != "http.request" or not message.get("more_body", False)
            if taken > self._limits.body_bytes:
                raise self._too_long()
            return message

        return bounded


class Counting:
    """ASGI middleware that counts responses by path and status. Outermost.

    Args:
        routes: of the application; the paths that are told apart.
    """

    def __init__(self, app: App, *, meters: Meters, routes: Sequence[Any]) -> None:
        self._app, self._meters, self._routes = app, meters, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._meters.responded(self._path(scope), message["status"])
            await send(message)

        await self._app(scope, receive, counting if scope["type"] == "http" else send)

    def _path(self, scope: Scope) -> str:
        """The path of the route; what was asked for may be anything, and makes no label."""
        path: str | None = getattr(scope.get("route"), "path", None)
        if path is not None:
            return path
        known = any(getattr(route, "path", None) == scope["path"] for route in self._routes)
        return str(scope["path"]) if known else "other"  # refused before it had a route


class Stopping:
    """ASGI middleware that says 503 where the server gives a request up, as its grace has ended.

    It stands outside of everything that cancels by itself: what reaches it came from the server.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: Message | None = None

        async def watching(message: Message) -> None:
            nonlocal begun
            begun = message if message["type"] == "http.response.start" else begun
            await send(message)

        try:
            await self._app(scope, receive, watching)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            with contextlib.suppress(asyncio.TimeoutError):  # whoever does not read is left
                await asyncio.wait_for(self._say(begun, scope, receive, send), _LAST_WORDS)

    async def _say(self, begun: Message | None, scope: Scope, receive: Receive, send: Send) -> None:
        error = stopping({"Connection": "close"})
        if begun is None:
            await refusal(scope, error)(scope, receive, send)
            return
        await send(last_words(begun, scope, error))


def last_words(begun: Message, scope: Scope, error: ApiError) -> Message:
    """The end of a response that cannot go on: an event with the error, where it is a stream.

    Args:
        begun: the message that began the response.
    """
    body = b""
    if any(b"event-stream" in value for _, value in begun["headers"]):
        told = fault(error) if scope["path"] == RESPONSES else in_form(scope, error)
        named = "type" in told
        body = event(to_json(told), "error") if named else event(to_json(told)) + event(b"[DONE]")
    return {"type": "http.response.body", "body": body, "more_body": False}


class Defects:
    """ASGI middleware that answers 500 where the application fails, and tells the log why."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watching(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watching)
        except Exception as error:
            if scope["type"] != "http" or begun:
                raise  # too late for an answer: the connection ends
            found = from_defect(f"{scope['method']} {scope['path']} {scope.get('number', '')}", error)
            await refusal(scope, found)(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _host(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0].lower()
