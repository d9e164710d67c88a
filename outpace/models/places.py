"""Where tensors lie on disk, and plain reads of them.

Files are never mapped: a mapped file stays resident once touched, and a model that is repacked
layer by layer would be in memory twice.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outpace.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    path: Path
    """The file."""
    start: int
    """First byte in the file."""
    size: int
    """Bytes."""
    shape: tuple[int, ...]
    """Shape, rows first."""
    kind: str
    """Element type in the file's own words."""


def read_bytes(path: Path, start: int, size: int) -> bytes:
    """Read a stretch of a file.

    Raises:
        ModelError: the file cannot be read, or ends too early.
    """
    content = bytearray(size)
    for _ in _fill(path, start, memoryview(content), size):
        pass
    return bytes(content)


def read_plain(place: Place, stored: torch.dtype, dtype: torch.dtype | None) -> Tensor:
    """Read a tensor whose elements lie one after the other, and convert it to ``dtype``."""
    tensor = torch.empty(place.shape, dtype=stored)
    view = tensor.view(-1).view(torch.uint8).numpy().data
    for _ in _fill(place.path, place.start, view, place.size):
        pass
    return tensor if dtype is None else tensor.to(dtype)


class RowFile:
    """Rows of a matrix, read from its file when they are wanted.

    The file stays open, so that it may be replaced or deleted meanwhile.

    Raises:
        ModelError: the file cannot be opened.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._row_bytes = place.size // place.shape[0]
        try:
            self._file = os.open(place.path, os.O_RDONLY)
        except OSError as error:
            raise ModelError(f"cannot read {place.path}: {error.strerror or error}") from error
        weakref.finalize(self, os.close, self._file)

    def read(self, rows: Sequence[int]) -> Tensor:
        """Bytes of some rows, one after the other: uint8.

        Raises:
            ModelError: the file ends too early.

        Cost: a system call of a microsecond or two per row, if the file is cached.
        """
        size = self._row_bytes
        parts = [os.pread(self._file, size, self.place.start + row * size) for row in rows]
        if any(len(part) != size for part in parts):
            raise ModelError(f"{self.place.path} is truncated: it lacks some of rows {list(rows)}")
        return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def read_portions(place: Place, portion: int) -> Iterator[Tensor]:
    """Read a tensor as uint8 in portions of so many bytes; each is valid until the next."""
    buffer = torch.empty(min(portion, place.size), dtype=torch.uint8)
    for count in _fill(place.path, place.start, buffer.numpy().data, place.size):
        yield buffer[:count]


def _fill(path: Path, start: int, buffer: memoryview, size: int) -> Iterator[int]:
    """Fill ``buffer`` again and again from ``size`` bytes of a file; yield how full it is."""
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while done < size:
                wanted = min(len(buffer), size - done)
                got = 0
                while got < wanted:
                    count = file.readinto(buffer[got:wanted])
                    if not count:
                        raise ModelError(f"{path} is truncated: it lacks byte {start + done + got}")
                    got += count
                done += wanted
                yield wanted
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
