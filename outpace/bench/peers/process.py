"""A peer that runs in a process of its own, in an environment of its own."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.bench.records import Case, Kind, Run, Settings
from outpace.errors import ModelError, RequestError

_CHILD = Path(__file__).with_name("child.py")
_PARTING = 5.0  # seconds that a child has to end by itself


class PeerAbsentError(ModelError):
    """The environment does not hold the peer."""


class ChildPeer:
    """A contender that asks a child process, which `outpace.bench.peers.child` describes.

    Args:
        python: the Python of the peer's environment.
        about: what reports say about it, besides what the child says.
        eos_ids: tokens that end an answer unless they are to be ignored.
        one_row: whether it answers one prompt at a time.
        answer_seconds: how long an answer may take, apart from
        token_seconds: for every one of its tokens.

    Raises:
        PeerAbsentError: it is not installed there.
        ModelError: it cannot load the model, does not start, or takes too long.
    """

    kind: Kind = "peer"

    def __init__(
        self,
        name: str,
        python: Path,
        given: Mapping[str, Any],
        *,
        about: Mapping[str, Any],
        eos_ids: frozenset[int],
        one_row: bool,
        start_seconds: float = 600.0,
        answer_seconds: float = 60.0,
        token_seconds: float = 5.0,
    ) -> None:
        self.name = name
        self._eos_ids, self._one_row = eos_ids, one_row
        self._patience = (answer_seconds, token_seconds)
        self._asked = 0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        try:
            self._process = subprocess.Popen(
                [str(python), "-u", str(_CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for the parent, which ends it
            )
        except OSError as error:
            self._errors.close()
            raise PeerAbsentError(f"cannot run {python}: {error.strerror}") from error
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()
        try:
            told = self._talk(given, start_seconds)
            if "absent" in told:
                raise PeerAbsentError(f"{python} does not have it: {told['absent']}")
            if "ready" not in told:
                raise ModelError(f"it cannot load {given['model']}: {told.get('error')}")
        except BaseException:
            self.close()
            raise
        self.about: Mapping[str, Any] = {**about, **told["ready"]}

    def run(self, unit: tuple[Case, ...], settings: Settings) -> Run:
        """Answer a unit; the child takes the time.

        Raises:
            RequestError: it cannot serve the settings, or says so.
            ModelError: the child ended, or takes too long.
        """
        refuse(self.name, unit, settings, one_row=self._one_row)
        self._asked += 1
        once, each = self._patience
        told = self._talk(
            {
                "id": self._asked,
                "rows": [list(case.ids) for case in unit],
                "max_new_tokens": settings.max_new_tokens,
                "temperature": settings.temperature,
                "seed": unit[0].seed,
                "eos": [] if settings.ignore_eos else sorted(self._eos_ids),
            },
            once + each * settings.max_new_tokens * len(unit),
        )
        if "error" in told:
            raise RequestError(f"{self.name} cannot answer: {told['error']}")
        return Run(
            tokens=tuple(tuple(row) for row in told["tokens"]),
            seconds=told["seconds"],
            prefill_seconds=told["prefill_seconds"],
            peak_memory_bytes=told.get("peak"),
        )

    def close(self) -> None:
        process = self._process
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        for insist in (process.terminate, process.kill, process.wait):
            try:
                process.wait(_PARTING)
                break
            except subprocess.TimeoutExpired:
                insist()
        self._reader.join(_PARTING)
        if process.stdout is not None:
            process.stdout.close()
        self._errors.close()

    def _talk(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a line and wait for its answer; what answers an older line is dropped."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._ended() from None
        while True:
            try:
                line = self._lines.get(timeout=seconds)
            except queue.Empty:
                self.close()
                raise ModelError(f"{self.name} did not answer within {seconds:g} s and was ended") from None
            if line is None:
                raise self._ended()
            told: dict[str, Any] = json.loads(line)
            if told.get("id") == message.get("id"):
                return told

    def _ended(self) -> ModelError:
        """The child is gone; say what it said last."""
        said = ""
        if not self._errors.closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PARTING)
            self._errors.seek(0)
            lines = self._errors.read().decode("utf-8", "replace").split("\n")
            said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        why = f": {said[:300]}" if said else ""
        return ModelError(f"{self.name} ended with status {self._process.poll()}{why}")

    def _listen(self) -> None:
        """Pass lines on, so that waiting for one can end; None when there are no more."""
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)


def refuse(name: str, unit: tuple[Case, ...], settings: Settings, *, one_row: bool) -> None:
    """Raise RequestError if a peer cannot serve a unit under these settings."""
    if one_row and len(unit) > 1:
        raise RequestError(f"{name} answers one prompt at a time, got {len(unit)}; use --batch 1")
    if settings.reproducible and settings.temperature > 0:
        raise RequestError(
            f"{name} draws with coins of its own, so reproducible=True cannot be served at "
            f"temperature {settings.temperature}; use reproducible=False or temperature 0"
        )
