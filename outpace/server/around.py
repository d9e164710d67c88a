"""What stands around everything else: figures of all responses, and an answer to every defect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace.server.encoding import JsonResponse
from outpace.server.errors import from_defect
from outpace.server.guard import App, Message, Receive, Scope, Send
from outpace.server.metrics import Meters


class Counting:
    """ASGI middleware that counts responses by path and status. Outermost.

    Args:
        app: what is counted.
        meters: keeps the figures.
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
            found = from_defect(f"{scope['method']} {scope['path']}", error)
            await JsonResponse(found.body(), found.status_code)(scope, receive, send)
