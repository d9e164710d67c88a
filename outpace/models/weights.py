"""Checkpoints: a model on disk, and its tensors one at a time."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from outpace.errors import ModelError, shown
from outpace.files import parse_json
from outpace.models.families import DecoderConfig, GenerationDefaults
from outpace.models.fields import Fields, brief, read_json
from outpace.models.likeness import Likeness
from outpace.models.mixtures import places_apart, usual_name
from outpace.models.places import Place, RowFile, read_bytes, read_plain
from outpace.models.text import Tokenizer

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Element types of safetensors files that can be read."""
EXITS = "early_exit_layers"
"""Key of a config.json, written by ``outpace train target``: layers after which a model may be left."""


class Checkpoint(ABC):
    """A model on disk: its configuration, its tokenizer, and its tensors by Hugging Face name."""

    config: DecoderConfig
    """Shape and arithmetic of the decoder."""
    defaults: GenerationDefaults
    """How its authors sample from it."""
    name: str
    """What to call it in reports."""
    files: tuple[Path, ...]
    """The files that hold the weights."""
    places: Mapping[str, Place]
    """Every tensor's place."""
    exits: tuple[int, ...] = ()
    """Layers after which it was trained to be left, ascending."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer; a new one at every call."""

    @abstractmethod
    def _read(self, name: str, place: Place, dtype: torch.dtype | None) -> Tensor:
        """Read one tensor that exists."""

    def note(self, dtype: torch.dtype, stored: bool = False) -> str | None:
        """Say in one line what loading makes of quantized tensors; None if there are none.

        Args:
            stored: whether matrices stay as they are stored, as far as ``blocks`` has them.
        """
        return None

    def blocks(self, name: str) -> tuple[Place, Tensor | None] | None:
        """Where the blocks of a quantized matrix lie, and which of its rows each row is.

        Returns:
            None where it is not quantized, or so that compiled code cannot multiply it. No order
            means that rows are stored in order.
        """
        return None

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read one tensor; nothing is kept here. Do not write to it: it may be lent.

        Args:
            name: its Hugging Face name, as in ``DecoderConfig.tensor_shapes``.
            dtype: what to convert to. Asking for it here costs less memory than converting
                later: quantized tensors are expanded and converted in small portions.

        Returns:
            A contiguous CPU tensor. Without ``dtype`` it is of the stored dtype, or float32 if
            it is quantized.

        Raises:
            ModelError: no such tensor, or the file changed since it was opened.
        """
        try:
            place = self.places[name]
        except KeyError as error:
            raise ModelError(f"{self.name} has no tensor {name!r}") from error
        return self._read(name, place, dtype)

    @abstractmethod
    def rows(self, name: str, dtype: torch.dtype) -> Callable[[Sequence[int]], Tensor]:
        """Give a reader of a matrix's rows: ids to [ids, columns] in ``dtype``.

        The matrix stays where it is; the rows are those of ``tensor(name, dtype)``, bit for bit.
        """

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.places

    def names(self) -> Iterable[str]:
        return self.places.keys()

    @cached_property
    def digest(self) -> str:
        """A stable id of the weights: 16 hex digits, the same on every machine.

        Hashes the configuration, every tensor's name, type and shape, and 64 bytes from the
        middle of each. Cost: one small read per tensor.
        """
        lines = hashlib.sha256(self.config.text.encode())
        for name, place in sorted(self.places.items()):
            lines.update(f"{name} {place.kind} {place.shape}\n".encode())
            middle = place.start + max(0, place.size // 2 - 32)
            lines.update(read_bytes(place.path, middle, min(64, place.size)))
        return lines.hexdigest()[:16]

    @cached_property
    def likeness(self) -> Likeness:
        """Shape and a sample of the weights, to find drafters of the same model rounded otherwise."""
        return Likeness.of(self)

    def _check_shapes(self) -> None:
        """Refuse a checkpoint that lacks a tensor of its config, or has it in another shape."""
        for name, shape in self.config.tensor_shapes().items():
            place = self.places.get(name)
            if place is None:
                raise ModelError(f"{self.name} has no tensor {name!r}, which its config needs")
            if place.shape != shape:
                raise ModelError(
                    f"{place.path}: {name!r} has shape {list(place.shape)}, its config needs {list(shape)}"
                )


class SafetensorsCheckpoint(Checkpoint):
    """A folder in the layout of Hugging Face: config.json and one or more safetensors files."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        """Read the headers of the folder's files; no weights are read.

        Raises:
            ModelError: a missing, truncated or corrupt file, an unsupported architecture, or a
                tensor that does not fit the config; the message names the file.
        """
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} holds no config.json, so it is not a model folder")
        self.folder, self.name = folder, name or folder.resolve().name
        config = read_json(folder / "config.json")
        self.config = DecoderConfig.from_hf(config)
        said = Fields(str(folder / "config.json"), {}, config).counts(EXITS)
        self.exits = tuple(sorted({one for one in said if one < self.config.num_layers}))
        self.files, places = find_tensors(folder)
        self.places = places_apart(places)
        self._check_shapes()
        for tensor in self.config.tensor_shapes():
            if (place := self.places[tensor]).kind not in DTYPES:
                raise ModelError(
                    f"{place.path}: {tensor!r} is stored as {place.kind}, which is not supported; "
                    f"supported: {', '.join(DTYPES)}"
                )
        self.defaults = GenerationDefaults.from_hf(
            read_json(folder / "generation_config.json"), config, config.get("text_config") or {}
        )

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer from the files of the folder."""
        return Tokenizer.from_folder(self.folder)

    def _read(self, name: str, place: Place, dtype: torch.dtype | None) -> Tensor:
        return read_plain(place, DTYPES[place.kind], dtype)

    def rows(self, name: str, dtype: torch.dtype) -> Callable[[Sequence[int]], Tensor]:
        """Read rows from the file; see the base class."""
        file, stored = RowFile(self.places[name]), DTYPES[self.places[name].kind]
        return lambda ids: file.read(ids).view(stored).view(len(ids), -1).to(dtype)


def find_tensors(folder: Path) -> tuple[tuple[Path, ...], dict[str, Place]]:
    """Read the headers of all weight files of a folder."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index_path} has no weight_map")
        files = sorted({folder / str(file) for file in weight_map.values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {', '.join(missing)}, named in {index_path.name}")
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = [p.name for p in sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))]
        hint = f" ({', '.join(others[:3])} cannot be read: convert to safetensors)" * bool(others)
        raise ModelError(f"{folder} holds no safetensors files{hint}")
    places: dict[str, Place] = {}
    for file in files:
        places |= _read_header(file)
    return tuple(files), places


def _read_header(path: Path) -> dict[str, Place]:
    """Read the header of one safetensors file: 8 bytes of length, then JSON."""
    total = path.stat().st_size
    length = int.from_bytes(read_bytes(path, 0, 8), "little") if total >= 8 else 0
    if not 2 <= length <= total - 8:
        raise ModelError(f"{path} is truncated or no safetensors file ({total} bytes)")
    try:
        header = parse_json(read_bytes(path, 8, length))
        header.pop("__metadata__", None)
        places = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            places[_hf_name(name)] = Place(
                path=path,
                start=8 + length + int(start),
                size=int(end) - int(start),
                shape=tuple(int(n) for n in entry["shape"]),
                kind=str(entry["dtype"]),
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} has a corrupt header: {brief(error)}") from error
    for name, place in places.items():
        if place.start < 8 + length or place.size < 0:
            raise ModelError(f"{path} has a corrupt header: {shown(name)} lies inside it")
        if place.kind in DTYPES:
            needed = math.prod(place.shape) * DTYPES[place.kind].itemsize
            if place.size != needed:
                raise ModelError(f"{path} has a corrupt header: {shown(name)} needs {needed} bytes")
        if place.start + place.size > total:
            raise ModelError(
                f"{path} is truncated: {shown(name)} ends at byte {place.start + place.size}, "
                f"the file at {total}"
            )
    return places


def _hf_name(name: str) -> str:
    """Give a tensor of a multimodal checkpoint the name it has in a language model alone."""
    for before, after in (
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ):
        if name.startswith(before):
            return after + name[len(before) :]
    return usual_name(name)
