"""Devices to predict for: records with public peak figures, a file of your own, or this machine.

A record has what a specification says and its source. Nothing reaches its peaks, so a prediction from
them is about the least that a pass can cost; ``cpu-here`` is fitted to timed passes instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from outpace.analysis.prediction.model import CPU, CUDA, METAL
from outpace.analysis.roofline import GROUPS, Device
from outpace.errors import RequestError, UnknownNameError, shown
from outpace.files import expanded, parse_json

HERE = "cpu-here"
_NEEDED = ("title", "kind", "peak", "bandwidth")
_MORE = ("memory", "source", "overhead", "call", "attend", "traffic", "widen", "tile", "overlaps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What is known of a device."""

    name: str
    title: str
    kind: str
    """``cpu``, ``cuda`` or ``metal``."""
    peak: Mapping[str, float]
    """Dtype of what is computed -> FLOP/s."""
    memory: float | None = None
    """Bytes; None: not said."""
    source: str = ""
    more: Mapping[str, Any]
    """Fields of ``Device`` that are the same for every dtype."""

    def device(self, dtype: str) -> Device:
        """The numbers for a model that computes in ``dtype``.

        Raises:
            RequestError: it has no peak for that.
        """
        if dtype not in self.peak:
            raise RequestError(
                f"device {self.name} has no peak for {dtype}; it has {', '.join(self.peak)}: give --dtype"
            )
        return Device(name=self.title, peak=self.peak[dtype], **self.more)


def known() -> dict[str, Record]:
    """The records that come with the package."""
    text = files("outpace.analysis.prediction").joinpath("devices.json").read_bytes()
    return {name: read_record(name, one) for name, one in parse_json(text).items()}


def find(name: str) -> Record:
    """A record by its name, or from a JSON file.

    Raises:
        UnknownNameError: neither.
        RequestError: a file that holds no such record.
    """
    records = known()
    if name in records:
        return records[name]
    path = expanded(name)
    if not path.is_file():
        raise UnknownNameError(
            "device", name, [HERE, *records], notes=["or give a JSON file with such a record"]
        )
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RequestError(f"device file {name} cannot be read as JSON: {error}") from None
    return read_record(path.stem, found, f"device file {name}")


def read_record(name: str, found: Any, where: str = "devices.json") -> Record:
    """Check a record.

    Raises:
        RequestError: a key that is missing or unknown, or a value that cannot be.
    """
    if not isinstance(found, dict) or set(_NEEDED) - set(found) or set(found) - {*_NEEDED, *_MORE}:
        raise RequestError(
            f"{where}: a device needs {', '.join(_NEEDED)} and may have {', '.join(_MORE)}; "
            f"got {shown(found)}"
        )
    if found["kind"] not in (CPU, CUDA, METAL):
        raise RequestError(f"{where}: kind must be {CPU}, {CUDA} or {METAL}, got {shown(found['kind'])}")
    peak = found["peak"]
    if not isinstance(peak, dict) or not peak:
        raise RequestError(f"{where}: peak must give FLOP/s by dtype, got {shown(peak)}")
    overlaps = found.get("overlaps", GROUPS)
    if not isinstance(overlaps, list | tuple) or not set(map(str, overlaps)) <= set(GROUPS):
        raise RequestError(f"{where}: overlaps must name some of {', '.join(GROUPS)}, got {shown(overlaps)}")
    for key in ("title", "source"):
        if not isinstance(found.get(key, ""), str):
            raise RequestError(f"{where}: {key} must be text, got {shown(found[key])}")
    numbers = {key: found[key] for key in found if key not in ("title", "kind", "peak", "source", "overlaps")}
    for key, value in (*peak.items(), *numbers.items()):
        right = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e30
        right = right and (key != "tile" or isinstance(value, int))
        if not right or (value == 0 and key not in ("overhead", "call")):
            raise RequestError(f"{where}: {key} must be a number above 0, got {shown(value)}")
    said = {key: found[key] for key in ("title", "kind", "peak", "memory", "source") if key in found}
    more = {key: one for key, one in found.items() if key not in said} | {"overlaps": tuple(overlaps)}
    return Record(name=name, more=more, **said)
