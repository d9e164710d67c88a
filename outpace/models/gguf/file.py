"""GGUF files: header, and tensors dequantized one at a time.

The header is read here and not by ``gguf.GGUFReader``. That one makes an array of every token and
merge (2.1 s for a vocabulary of 49k, against 0.1 s). It also maps the weights for good.
Format: version 3 of the GGUF specification, ggml project.
"""

import math
import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from outpace.errors import ModelError, shown
from outpace.models.fields import brief
from outpace.models.gguf.blocks import GRAIN, expand
from outpace.models.places import Place, RowFile, read_plain, read_portions

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that are read as they stand."""
QUANTIZED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4"),
)
"""Types that are expanded to float32."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST, _MOST, _DEEPEST, _DIMS = 1 << 24, 1 << 24, 4, 4
"""Bytes of a string, entries of an array, arrays within arrays, and dimensions of a tensor at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFFile:
    path: Path
    """The file."""
    metadata: dict[str, Any]
    """Key to value; arrays are lists."""
    places: dict[str, Place]
    """The file's own tensor names to their places; shapes are rows first."""


def read_header(path: Path) -> GGUFFile:
    """Read everything but the weights, and check that the weights are all there.

    Raises:
        ModelError: no GGUF file, a version or tensor type that is not supported (named), or a
            truncated or corrupt file.
    """
    try:
        with path.open("rb") as file:
            total = path.stat().st_size
            if total < 24 or file.read(4) != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file ({total} bytes); give one, or a folder")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _parse(path, content, total)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (struct.error, _Short) as error:
        raise ModelError(f"{path} is truncated or corrupt: its header does not end") from error
    except KeyError as error:
        raise ModelError(
            f"{path} has a corrupt header: unknown value type {error}; download the file again"
        ) from error
    except (UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path} has a corrupt header: {brief(error)}") from error


def read_tensor(place: Place, dtype: torch.dtype | None = None) -> Tensor:
    """Read one tensor into memory of its own.

    Args:
        dtype: what to convert to, in small portions, so that no second copy ever exists. None
            keeps a plain type and expands a quantized one to float32.

    Cost: one thread; common types at some 0.2 G elements per second, others a fifth of that.
    """
    if place.kind in PLAIN:
        return read_plain(place, PLAIN[place.kind], dtype)
    tensor = torch.empty(math.prod(place.shape), dtype=dtype or torch.float32)
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[place.kind]]
    done = 0
    for packed in read_portions(place, GRAIN // block * block_bytes):
        numbers = expand(packed, place.kind)
        tensor[done : done + len(numbers)] = numbers
        done += len(numbers)
    return tensor.view(place.shape)


def read_rows(place: Place, dtype: torch.dtype) -> Callable[[Sequence[int]], Tensor]:
    """Give a reader of some rows of a matrix, expanded as by ``read_tensor``."""
    file = RowFile(place)

    def read(ids: Sequence[int]) -> Tensor:
        packed = file.read(ids)
        plain = PLAIN.get(place.kind)
        numbers = expand(packed, place.kind) if plain is None else packed.view(plain)
        return numbers.view(len(ids), -1).to(dtype)

    return read


class _Short(Exception):
    """The header wants more bytes than the file has."""


class _Cursor:
    """Reads values off a buffer, in order."""

    def __init__(self, content: mmap.mmap, total: int) -> None:
        self.content, self.total, self.at = content, total, 4

    def take(self, count: int, size: int = 1) -> int:
        """Step over ``count`` items of ``size`` bytes and give where they begin."""
        start = self.at
        if count < 0 or count * size > self.total - start:
            raise _Short
        self.at += count * size
        return start

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        start = self.take(count, struct.calcsize("<" + code))
        return struct.unpack_from(f"<{count}{code}", self.content, start)

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        length = self.scalar("Q")
        if length > _LONGEST:
            raise _Short
        start = self.take(length)
        return self.content[start : start + length].decode()

    def strings(self, count: int) -> list[str]:
        """Read many strings; as ``string``, without its calls, since vocabularies are long."""
        self.room(count, 8)
        content, at, length_of = self.content, self.at, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            end = at + 8 + length_of(content, at)[0]
            if end > self.total:
                raise _Short
            found.append(content[at + 8 : end].decode())
            at = end
        self.at = at
        return found

    def room(self, count: int, size: int) -> None:
        """Refuse more entries than the file can hold, or than an array may have."""
        if count > _MOST or count * size > self.total - self.at:
            raise _Short

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner == _STRING:
            return self.strings(count)
        if inner == _ARRAY:
            self.room(count, 12)
            if depth == _DEEPEST:
                raise _Short
            return [self.value(inner, depth + 1) for _ in range(count)]
        self.room(count, 1)
        return list(self.scalars(_SCALARS[inner], count))


def _parse(path: Path, content: mmap.mmap, total: int) -> GGUFFile:
    cursor = _Cursor(content, total)
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ModelError(f"{path} is GGUF version {version}; supported: 2 and 3, little-endian")
    num_tensors, num_keys = cursor.scalars("Q", 2)
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    entries = []
    for _ in range(num_tensors):
        name, dims = cursor.string(), cursor.scalar("I")
        if dims > _DIMS:
            raise ModelError(f"{path} has a corrupt header: {shown(name)} has {dims} dimensions")
        shape = cursor.scalars("Q", dims)[::-1]
        entries.append((name, shape, *cursor.scalars("I", 1), *cursor.scalars("Q", 1)))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ModelError(f"{path} has a corrupt header: alignment {shown(alignment)}")
    data = -(-cursor.at // alignment) * alignment
    places = {}
    for name, shape, kind, offset in entries:
        place = _place(path, name, shape, kind, data + offset)
        if place.start + place.size > total:
            raise ModelError(
                f"{path} is truncated: {shown(name)} ends at byte {place.start + place.size}, "
                f"the file at {total}"
            )
        places[name] = place
    return GGUFFile(path=path, metadata=metadata, places=places)


def _place(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> Place:
    known = {int(member): member for member in gguf.GGMLQuantizationType}
    label = known[kind].name if kind in known else f"number {kind}"
    if label not in PLAIN and label not in QUANTIZED:
        raise ModelError(
            f"{path}: {shown(name)} is stored as {label}, which is not supported; "
            f"supported: {', '.join((*PLAIN, *QUANTIZED))}"
        )
    block, block_bytes = gguf.GGML_QUANT_SIZES[known[kind]]
    if not shape or 0 in shape or shape[-1] % block:
        raise ModelError(f"{path}: {shown(name)} of type {label} cannot have shape {list(shape)}")
    size = math.prod(shape) // block * block_bytes
    return Place(path=path, start=start, size=size, shape=shape, kind=label)
