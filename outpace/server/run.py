"""Listening: sockets, signals, and an end in good order."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import signal
from collections.abc import Sequence
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from outpace.server.app import create_app
from outpace.server.limits import Limits
from outpace.server.ports import check_port, unusable
from outpace.serving.service import Service

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def is_loopback(host: str) -> bool:
    """Whether only programs of the same machine reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_names(host: str, keys: Sequence[str], allowed: Sequence[str] = ()) -> frozenset[str] | None:
    """Names that a server answers to; None: to any. Where loopback is all that protects it, these are its
    own and those allowed. Where it is protected otherwise, those allowed, if there are any.
    """
    if (keys or not is_loopback(host)) and not allowed:
        return None
    own = f"[{host.strip('[]')}]" if ":" in host else host
    return _LOOPBACK | {own.lower()} | {name.lower() for name in allowed}


def serve(
    service: Service,
    *,
    name: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    keys: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
    limits: Limits | None = None,
    thinking_marks: Sequence[str] = (),
    quiet: bool = False,
) -> None:
    """Serve until the process is told to stop (SIGINT, SIGTERM); then let answers end.

    The service is closed when this returns. Call it on the main thread.

    Args:
        port: 0 takes a free one.
        allowed_hosts: further host names that the server answers to.
        origins: sites whose pages may call the API.

    Raises:
        OutpaceError: the port is taken, or the host is none of this machine.
    """
    limits = limits or Limits()
    try:
        check_port(host, port)
        hosts = host_names(host, keys, allowed_hosts)
        app = create_app(
            service,
            name=name,
            keys=keys,
            hosts=hosts,
            origins=origins,
            limits=limits,
            thinking_marks=thinking_marks,
        )
        server = make_server(app, host=host, port=port, limits=limits, quiet=quiet)
        # A body of many small lists makes Python search for garbage. Without this it searches the
        # model and all libraries too, and every stream waits for that.
        gc.collect()
        gc.freeze()
        # uvicorn hands the signals on to whoever had them before when it is done; a server that
        # was told to stop and did has not failed.
        before = {s: signal.signal(s, _ignore) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            server.run()
        except SystemExit as error:  # how uvicorn says that another program took the port since
            raise unusable(host, port, "another program took it") from error
        finally:
            gc.unfreeze()
            for which, handler in before.items():
                signal.signal(which, handler)
    finally:
        service.close(drain=False)


def make_server(app: FastAPI, *, host: str, port: int, limits: Limits, quiet: bool = False) -> uvicorn.Server:
    """A server that does not run yet."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=host.strip("[]"),
            port=port,
            http=_impatient(limits.read_seconds),
            log_level="error" if quiet else "info",
            access_log=False,
            server_header=False,
            limit_concurrency=limits.connections + 1,  # it counts the one that asks
            timeout_keep_alive=30,
            timeout_graceful_shutdown=max(1, round(limits.grace_seconds)),
            lifespan="off",
            ws="none",
            h11_max_incomplete_event_size=1 << 16,
        )
    )


def _impatient(seconds: float) -> type[asyncio.Protocol]:
    """HTTP that closes a connection on which no whole request head comes for so long."""

    class Impatient(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(seconds, self._look, None)

        def eof_received(self) -> bool:  # type: ignore[override]
            """The client writes no more. One that waits for its answer gets it."""
            waits = self.cycle is not None and not self.cycle.response_complete
            if waits and not self.cycle.more_body:
                self.cycle.keep_alive = False
                self._probe(2)
                return True
            return False

        def _probe(self, times: int) -> None:
            """Find out whether it still reads: what is sent to one that left makes writing fail."""
            nothing = {
                h11.SEND_RESPONSE: h11.InformationalResponse(status_code=102, headers=[]),
                h11.SEND_BODY: h11.Data(data=b":\n\n"),  # only streams of events take long here
            }.get(self.conn.our_state)
            if times and nothing is not None and not self.transport.is_closing():
                self.transport.write(self.conn.send(nothing) or b"")
                self.loop.call_later(0.05, self._probe, times - 1)

        def _look(self, before: Any) -> None:
            """End it if no request has come since the last look, and none is being answered."""
            if self.transport.is_closing():
                return
            if self.conn.their_state is h11.IDLE and self.cycle is before:
                self.transport.close()
            else:
                self.loop.call_later(seconds, self._look, self.cycle)

    return Impatient


def _ignore(signum: int, frame: object) -> None:
    """Nothing is left to do."""
