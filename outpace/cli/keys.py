"""API keys from a command line and from a file. No message shows one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outpace.errors import RequestError
from outpace.files import expanded, read_text

_FORM = "must be printable ASCII characters, one at least"


def read_keys(given: Sequence[str], file: Path | None) -> list[str]:
    """Keys of ``--api-key``, then those of ``--api-key-file``, which is cut at white space.

    Raises:
        RequestError: a key of other characters, or a file that cannot be read, is not UTF-8 or
            holds none.
    """
    if not all(map(_proper, given)):
        raise RequestError(f"--api-key {_FORM}")
    if file is None:
        return list(given)
    what = f"--api-key-file {file}"
    found = read_text(expanded(file), what).split()
    if not found:
        raise RequestError(f"{what} holds no key; write one per line")
    for number, key in enumerate(found, start=1):
        if not _proper(key):
            raise RequestError(f"{what}: key {number} {_FORM}")
    return [*given, *found]


def _proper(key: str) -> bool:
    return bool(key.strip()) and key.isascii() and key.isprintable()
