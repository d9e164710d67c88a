"""What was measured of a target on this machine, in the user's cache folder.

A file per kind, model, dtype, threads, machine and version. Files are replaced as a whole, so that several
processes may share the folder. One that is missing, damaged (by its own digest) or of another version
counts as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from outpace import __version__
from outpace.config import cache_folder
from outpace.files import parse_json, write_whole
from outpace.kernels.compiled import library
from outpace.models.base import Target
from outpace.models.lock import Lock

T = TypeVar("T")
_FORMAT = 2  # of the files; other ones are measured anew


def machine(device: torch.device) -> str:
    """Name of the processor, and how many cores of it this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        name = next(iter(re.findall(r"^model name\s*: (.+)$", lines, re.MULTILINE)), name)
    allowed = getattr(os, "sched_getaffinity", None)
    cores = len(allowed(0)) if allowed is not None else os.cpu_count() or 1
    return f"{name.strip()}, {cores} core{'s' * (cores != 1)}"


def store(
    kind: str, target: Target, spec: str, value: Any, note: Callable[[str], None] | None = None
) -> Path:
    """Keep a dataclass, for ``kept`` to find under the same kind and spec. Returns its file."""
    key = _key(kind, target, spec)
    file = _file(key, target)
    _write(file, key, value, note)
    return file


def change(kind: str, target: Target, made: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Keep what is made of what is kept of a kind; processes do so one after another."""
    folder = _file(_key(kind, target, ""), target).parent
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a folder that cannot be written
            lock = Lock(folder, "measurements change", wait=str, clean=False)
            stack.callback(lock.release)
        store(kind, target, "", made(kept(kind, target, "", dict) or {}))


def merged(begun: Any, own: Any, found: Any) -> Any:
    """What a process learned, and what others did meanwhile, which it began with too or did not know.

    Args:
        begun: what it began with.
        own: what it knows now: wherever that is something else, it counts.
        found: what is kept by now.
    """
    if not (isinstance(own, dict) and isinstance(found, dict)):
        return own if own != begun or found is None else found
    first = begun if isinstance(begun, dict) else {}
    return {**found, **{name: merged(first.get(name), one, found.get(name)) for name, one in own.items()}}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _key(kind: str, target: Target, spec: str) -> dict[str, Any]:
    """What a measurement depends on."""
    return {
        "format": _FORMAT,
        "kind": kind,
        "model": "" if kind == "device" else f"{type(target).__name__} {target.digest}",
        "spec": spec,
        "dtype": dtype_name(target.dtype),
        "threads": torch.get_num_threads(),
        "machine": machine(target.device),
        "compiled": Path(code._name).stem if target.device.type == "cpu" and (code := library()) else "",
        "outpace": __version__,
    }


def _file(key: Mapping[str, Any], target: Target) -> Path:
    kind, spec = key["kind"], key["spec"]
    about = re.sub(r"[^A-Za-z0-9.]+", "_", spec or ("" if kind == "device" else target.name))[:40]
    return file_of(key, (kind, about, dtype_name(target.dtype)))


def file_of(key: Mapping[str, Any], words: Iterable[str]) -> Path:
    """Where a measurement lies; its name begins with these words."""
    digest = hashlib.sha256(json.dumps({**key, "format": None}).encode()).hexdigest()[:16]
    return cache_folder() / "costs" / f"{'-'.join(word for word in (*words, digest) if word)}.json"


def kept(
    kind: str,
    target: Target,
    spec: str,
    read: Callable[[Any], T],
    make: Callable[[], T] | None = None,
    note: Callable[[str], None] | None = None,
) -> T | None:
    """Read a measurement, or make and keep it; None if it is missing and not to be made."""
    key = _key(kind, target, spec)
    return recalled(key, _file(key, target), read, make, note)


def recalled(
    key: Mapping[str, Any],
    file: Path,
    read: Callable[[Any], T],
    make: Callable[[], T] | None,
    note: Callable[[str], None] | None,
) -> T | None:
    """Read what a file holds under this key, or make and keep it; as ``kept``."""
    try:
        data = parse_json(file.read_bytes())
        if data["key"] != key:
            raise ValueError("it was written by another version")
        if data["sha256"] != _digest(data["value"]):
            raise ValueError("it is damaged")
        return read(data["value"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if note is not None:
            note(f"{file} is ignored: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    if make is None:
        return None
    value = make()
    _write(file, key, value, note)
    return value


def _write(file: Path, key: Mapping[str, Any], value: Any, note: Callable[[str], None] | None) -> None:
    """Put a file in place as a whole; a folder that cannot be written is no error."""
    value = value if isinstance(value, dict) else asdict(value)
    try:
        write_whole(file, json.dumps({"key": key, "sha256": _digest(value), "value": value}))
    except OSError as error:
        if note is not None:
            note(f"{file} cannot be written, so the next run measures again: {error.strerror}")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
