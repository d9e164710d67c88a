"""Typed reads from the small files of a model, so that a bad value is one clear line."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.errors import ModelError, shorten, shown
from outpace.files import parse_json

MOST = 2**31 - 1
"""Largest count that a file may state."""
MOST_LAYERS = 4096
"""Most layers of a model."""


class BadValue(ModelError):
    """A value that is missing or impossible, so that nobody else need try to read it."""


class FileContent(dict[str, Any]):
    """What a JSON file says, with its place, so that errors can name it."""

    def __init__(self, path: Path, said: Mapping[str, Any]) -> None:
        super().__init__(said)
        self.path = path


class Fields:
    """Typed reads from one mapping, with defaults; None counts as absent.

    Every method raises a ModelError that names the source, the key and the value.
    """

    def __init__(self, source: str, defaults: Mapping[str, Any], said: Mapping[str, Any]) -> None:
        """Wrap ``said``, read from ``source``; ``defaults`` fills in what it leaves out.

        What ``read_json`` gave knows its file, which is then the source.
        """
        self.source = str(said.path) if isinstance(said, FileContent) else source
        self.defaults, self.said = defaults, said

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Give what is said, else the table's default, else ``otherwise``."""
        value = self.said.get(key)
        if value is None:
            value = self.defaults.get(key)
        return otherwise if value is None else value

    def count(self, key: str, otherwise: int | None = None, *, most: int = MOST) -> int:
        """Give a whole number from 1 to ``most``; a list of equal numbers counts as one."""
        value = self.get(key, otherwise)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._bad(key, "a positive whole number", value)
        if value > most:
            raise self._bad(key, f"at most {most}", value)
        return value

    def counts(self, key: str) -> list[int]:
        """Give a list of whole numbers of at least 1; an empty one where there is none."""
        value = self.get(key) or []
        if not isinstance(value, list) or not all(type(one) is int and one > 0 for one in value):
            raise self._bad(key, "a list of positive whole numbers", value)
        return value

    def number(self, key: str, otherwise: float | None = None, *, zero: bool = False) -> float:
        """Give a number above 0, or also 0 itself."""
        value = self.get(key, otherwise)
        wrong = isinstance(value, bool) or not isinstance(value, (int, float))
        if wrong or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise self._bad(key, "a number of at least 0" if zero else "a positive number", value)
        return float(value)

    def maybe(self, key: str, *, zero: bool = False) -> float | None:
        """Give a number, or None where there is none."""
        return None if self.get(key) is None else self.number(key, zero=zero)

    def whole(self, key: str, *, most: int = MOST) -> int | None:
        """Give a whole number of at least 1; None where there is none or a 0."""
        return None if self.get(key) in (None, 0) else self.count(key, most=most)

    def text(self, key: str, otherwise: str | None = None) -> str:
        value = self.get(key, otherwise)
        if not isinstance(value, str):
            raise self._bad(key, "a string", value)
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Give an object; an empty one where there is none, or anything that counts as false."""
        value = self.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._bad(key, "an object", value)
        return value

    def texts(self, key: str) -> list[str]:
        """Give a list of strings; an empty one where there is none."""
        value = self.get(key) or []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._bad(key, "a list of strings", value)
        return value

    def _bad(self, key: str, wanted: str, value: Any) -> ModelError:
        if value is None:
            return BadValue(f"{self.source} lacks {key!r}")
        return BadValue(f"{self.source}: {key!r} must be {wanted}, got {shown(value)}")


def check_counts(source: str, config: Mapping[str, Any]) -> None:
    """Refuse counts that no model has, whatever its architecture calls them.

    Raises:
        BadValue: naming the first one.
    """
    read = Fields(source, {}, config)
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_counts(f"{read.source}: {key}", value)
        elif type(value) is int and value > MOST_LAYERS and key.endswith(("layers", "layer", "experts")):
            read.count(key, most=MOST_LAYERS)
        elif type(value) is int and value > MOST and key.endswith(("size", "heads", "head", "dim")):
            read.count(key)


def token_ids(file: Mapping[str, Any], key: str) -> list[int]:
    """Read one id or a list of ids; an absent or negative one counts as none."""
    value = file.get(key)
    values = value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, (int, type(None))) for i in values):
        raise ModelError(f"{key!r} must be a token id or a list of them, got {shown(value)}")
    return [i for i in values if i is not None and i >= 0]


def brief(error: BaseException) -> str:
    """Give what another library's error says, on one line of at most 200 characters."""
    return shorten(" ".join(str(error).split()), 200) or type(error).__name__


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a file that is absent reads as an empty one.

    Raises:
        ModelError: the file cannot be read or holds anything but an object.
    """
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        return FileContent(path, {})
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {brief(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return FileContent(path, content)
