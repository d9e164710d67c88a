"""Files that are written whole: a reader sees the old one or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; afterwards it takes the place of ``path``.

    After an error the old file stays. Missing folders are made.

    Raises:
        OSError: a folder cannot be made, or the file not written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        fresh.touch()
        mode = fresh.stat().st_mode
        yield fresh
        # Whoever wrote it may have put a private file in its place.
        fresh.chmod(mode)
        # On the disk before it has its name: a crash must not leave a name without content.
        with fresh.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes | str) -> None:
    """Write bytes, or text as UTF-8, through ``replaced``."""
    with replaced(path) as fresh:
        fresh.write_bytes(data.encode() if isinstance(data, str) else data)
