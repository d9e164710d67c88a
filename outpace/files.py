"""Files that are written whole: a reader sees the old one or the new one, never a part.

And files of text that users name: read as UTF-8, with one message where that cannot be done.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from outpace.errors import RequestError

FULL = (errno.ENOSPC, errno.EDQUOT)  # more room would have prevented them


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; afterwards it takes the place of ``path``.

    After an error the old file stays. Missing folders are made.

    Raises:
        OSError: a folder cannot be made, or the file not written; it names the path.
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
    except OSError as error:
        if error.filename not in (None, str(fresh)):
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    except Exception as error:
        # How libraries written in Rust tell of a full disk.
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
    finally:
        fresh.unlink(missing_ok=True)


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[Path]:
    """Give a new folder to write to; afterwards its files take their places in ``folder``.

    After an error nothing of them is left, and no folder that was not there before.

    Raises:
        OSError: a folder cannot be made.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        fresh.mkdir()
        yield fresh
        if folder.exists():
            for file in fresh.iterdir():
                os.replace(file, folder / file.name)
        else:
            fresh.rename(folder)
    except OSError as error:
        named = str(error.filename).replace(str(fresh), str(folder))
        raise OSError(error.errno, error.strerror, named) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        for one in made:
            with contextlib.suppress(OSError):  # it holds something, so it stays
                one.rmdir()


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written, or made; nothing is left there.

    Raises:
        OSError: it names the folder.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    there = next((one for one in (folder, *folder.parents) if one.exists()), Path("."))
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".", suffix=".part") as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error


def expanded(name: str | Path) -> Path:
    """A path that a user wrote, with a home for ``~name``; as it is where nobody knows that home."""
    return Path(os.path.expanduser(name))


def write_whole(path: Path, data: bytes | str) -> None:
    """Write bytes, or text as UTF-8, through ``replaced``."""
    with replaced(path) as fresh:
        fresh.write_bytes(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def reading(path: Path, what: str = "", newline: str | None = None) -> Iterator[TextIO]:
    """Open a file of UTF-8 text, less a byte order mark.

    Args:
        what: what to call it where it cannot be read; its path, unless given.
        newline: as for ``open``: None makes every end of a line a line feed, ``""`` leaves them.

    Raises:
        RequestError: it cannot be read, or is not UTF-8; at any read within the block.
    """
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            yield file
    except OSError as error:
        raise RequestError(f"cannot read {what or path}: {error.strerror}") from error
    except UnicodeDecodeError:
        # A reader in pieces counts from its last one; the file is read again to say where it is.
        decoded(path.read_bytes(), what or str(path))
        raise


_DEEPEST, _BITS = 64, 128  # transformers writes 10^30 for "no limit"


def parse_json(text: str | bytes) -> Any:
    """Parse the JSON of a file, within bounds.

    Raises:
        ValueError: no JSON, values nested deeper than `_DEEPEST`, a whole number of more than `_BITS`
            bits, or half a surrogate pair.
    """
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(f"values are nested deeper than {_DEEPEST}") from None
    level = [content]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            elif isinstance(one, str):
                one.isascii() or one.encode()
            elif isinstance(one, int) and one.bit_length() > _BITS:
                raise ValueError(f"a whole number has more than {_BITS} bits")
        if not inner:
            return content
        level = inner
    raise ValueError(f"values are nested deeper than {_DEEPEST}")


def read_text(path: Path, what: str = "") -> str:
    """The whole of a file, as ``reading`` gives it."""
    with reading(path, what) as file:
        return file.read()


def decoded(data: bytes, what: str) -> str:
    """Bytes of UTF-8 as text, less a byte order mark; RequestError, with the wrong byte's place."""
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise RequestError(f"{what} is not UTF-8 text (byte {error.start}); convert it first") from error
