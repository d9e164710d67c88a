"""Where tensors lie on disk, and plain reads of them.

Files are never mapped: a mapped file stays resident once touched, and a model that is repacked
layer by layer would be in memory twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outpace.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one tensor lies."""

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
    whole = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    for _ in _fill(place.path, place.start, whole, max(place.size, 1)):
        pass
    return tensor if dtype is None else tensor.to(dtype)


def read_portions(place: Place, portion: int) -> Iterator[Tensor]:
    """Read a tensor as uint8 in portions of so many bytes; each is valid until the next."""
    buffer = torch.empty(min(portion, place.size), dtype=torch.uint8)
    view = memoryview(buffer.numpy())
    left = place.size
    try:
        with place.path.open("rb", buffering=0) as file:
            file.seek(place.start)
            while left:
                count = min(portion, left)
