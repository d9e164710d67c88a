"""The model of a target as a file that peers in other processes can read.

OpenVINO GenAI and llama.cpp read GGUF files. They get the weights as wide as our own decoder
multiplies them, expanded from a quantized file. That is 16 bits for bfloat16 (as float16, which both
take), and 32 for float32. So a peer reads as many bytes per pass as the own decoder. OpenVINO, whose
reader refuses float32 matrices, gets 16 bits there too and reads half.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from outpace.config import cache_folder
from outpace.errors import ModelError
from outpace.files import replaced
from outpace.models.base import Target
from outpace.models.decoder import Decoder
from outpace.models.gguf.file import PLAIN, read_header, read_tensor
from outpace.models.gguf.model import GGUFCheckpoint
from outpace.models.weights import SafetensorsCheckpoint

_WIDTHS: Mapping[torch.dtype, tuple[str, torch.dtype, gguf.LlamaFileType]] = {
    torch.bfloat16: ("float16", torch.float16, gguf.LlamaFileType.MOSTLY_F16),
    torch.float32: ("float32", torch.float32, gguf.LlamaFileType.ALL_F32),
}
_OWN = "openvino_model.xml"
"""What OpenVINO's exporter calls a model."""


def peer_model(engine: str, target: Target, dtype: torch.dtype) -> tuple[Path, dict[str, Any]]:
    """Find or make the file that a peer loads.

    For OpenVINO, an export of its own comes first, in the model's folder or in the cache. Else it is
    a GGUF file of the model, expanded into the cache once.

    Returns:
        The path, and what reports say about the weights.

    Raises:
        ModelError: there is no such file and none can be made; it says how to make one.

    Effects: may write a file of the size of the expanded model below the cache folder.
    """
    if dtype not in _WIDTHS:
        raise ModelError(f"it computes in bfloat16 or float32, not in {dtype}")
    checkpoint = target.checkpoint if isinstance(target, Decoder) else None
    stored = torch.bfloat16 if engine == "openvino" else dtype
    width = _WIDTHS[stored][0]
    source = target if checkpoint is None else checkpoint  # it has no quantized variants
    place = cache_folder() / "peers" / f"{_plain(source.name)}-{source.digest}"
    about: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    if engine == "openvino":
        folders = [place.with_name(f"{place.name}-openvino")]
        if isinstance(checkpoint, SafetensorsCheckpoint):
            folders.insert(0, checkpoint.folder)
        for folder in folders:
            if (folder / _OWN).is_file():
                return folder, about | {"weights": f"as exported in {folder}"}
        how = f"optimum-cli export openvino --weight-format fp16 --model MODEL {folders[-1]}"
    else:
        how = "a GGUF file as --model"
    if not isinstance(checkpoint, GGUFCheckpoint):
        raise ModelError(f"it cannot read {target.name}; make one that it can read with: {how}")
    path = place.with_name(f"{place.name}-{width}.gguf")
    kinds = sorted({p.kind for p in checkpoint.places.values()} - set(PLAIN))
    if not _is_whole(path):
        expand_gguf(checkpoint.path, path, stored)
    origin = f", expanded from {' and '.join(kinds)}" if kinds else ""
    return path, about | {"weights": f"{width}{origin}"}


def expand_gguf(source: Path, path: Path, dtype: torch.dtype) -> None:
    """Write a GGUF file again, with matrices in one plain type and the same metadata.

    Matrices become float16 if ``dtype`` is bfloat16, else float32; vectors become float32.

    Raises:
        ModelError: a value of the metadata that cannot be written.

    Effects: the file appears whole or not at all. Memory: one tensor at a time.
    """
    _, matrix, file_type = _WIDTHS[dtype]
    header = read_header(source)
    with replaced(path) as part:
        writer = gguf.GGUFWriter(part, str(header.metadata["general.architecture"]))
        for key, value in header.metadata.items():
            if key == "general.file_type":
                value = int(file_type)
            if key not in ("general.architecture", "general.quantization_version"):
                _add(writer, key, value)
        kinds = {
            name: torch.float32 if len(place.shape) < 2 else matrix for name, place in header.places.items()
        }
        for name, place in header.places.items():
            empty = np.dtype(str(kinds[name]).removeprefix("torch."))
            size = int(np.prod(place.shape)) * empty.itemsize
            writer.add_tensor_info(name, place.shape, empty, size)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, place in header.places.items():
            writer.write_tensor_data(read_tensor(place, kinds[name]).numpy())
        writer.close()


def _is_whole(path: Path) -> bool:
    """Whether a file is there and holds all of its tensors; who maps a shorter one is killed."""
    try:
        read_header(path)
    except (ModelError, OSError):
        return False
    return True


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write one value of the metadata, as wide as converters write it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        raise ModelError(f"{key} of a GGUF file is a {type(value).__name__}; it cannot be written")


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)
