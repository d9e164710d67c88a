"""A server as a process of its own, for commands that talk to one."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from outpace.cli import show
from outpace.cli.options import ModelOptions
from outpace.errors import OutpaceError

_RUNNING = re.compile(r"running on (http://\S+)")
_LAST = 20
"""Lines of its log that are kept, to say why it did not start."""
_PATIENCE = 20.0
"""Seconds that it gets to end by itself."""


@dataclass(frozen=True, slots=True)
class Running:
    address: str
    process: subprocess.Popen[str]

    def hold(self) -> None:
        """Let it do nothing until ``go``; connections that stand may end meanwhile."""
        self.process.send_signal(signal.SIGSTOP)

    def go(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def started(
    url: str | None, model: ModelOptions, drafters: Sequence[str], *, clients: int, seconds: int
) -> Iterator[str]:
    """Give the address of a server, which is started here and ended unless ``url`` names one.

    It stores no prompts, so that whoever asks for one again does not find it read. Ctrl-C reaches
    this process alone, which then ends the server.

    Args:
        url: of a server that runs; None starts one on loopback.
        clients: most that will ask at once; 0: not known.

    Raises:
        OutpaceError: it cannot be started; the line that it said itself.
    """
    if url is not None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    wide = ["--max-batch", clients, "--max-queue", 2 * clients] if clients > 32 else []
    more = ["--timeout", seconds, "--grace", 1, *wide]
    with launched(model, drafters, [str(one) for one in more]) as running:
        yield running.address


@contextlib.contextmanager
def launched(model: ModelOptions, drafters: Sequence[str], more: Sequence[str] = ()) -> Iterator[Running]:
    """Start a server on a free port of loopback, and end it.

    Raises:
        OutpaceError: as ``started``.
    """
    command = [
        sys.executable,
        "-m",
        "outpace",
        "serve",
        "--port",
        "0",
        "--stored-pages",
        "0",
        *_options(model),
        *(part for spec in drafters for part in ("--drafter", spec)),
        *more,
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        with show.busy("starting the server"):
            address = _address(process)
        yield Running(address, process)
    finally:
        process.terminate()
        if hasattr(signal, "SIGCONT"):  # one that is held does not hear anything else
            process.send_signal(signal.SIGCONT)
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _options(model: ModelOptions) -> Iterator[str]:
    for field in fields(model):
        value = getattr(model, field.name)
        if value is not None:
            name = f"--{field.name.replace('_', '-')}"
            yield from (name,) * value if isinstance(value, bool) else (name, str(value))


def _address(process: subprocess.Popen[str]) -> str:
    """Wait until it listens. Its log is read on, or it would stop for want of room."""
    last: deque[str] = deque(maxlen=_LAST)
    found: list[str] = []
    known = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                last.append(line.strip())
                match = _RUNNING.search(line)
                if match and not found:
                    found.append(match[1])
                    known.set()
        known.set()

    threading.Thread(target=read, name="outpace-server-log", daemon=True).start()
    known.wait()
    if not found:
        said = next((x for x in reversed(last) if x.startswith("outpace: error: ")), None)
        why = said.removeprefix("outpace: error: ") if said else " ".join([*last][-1:])
        raise OutpaceError(f"the server did not start: {why or 'it said nothing'}")
    return found[0]
