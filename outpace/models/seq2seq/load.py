"""Encoder-decoders from a folder, or from a model of transformers in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from outpace.errors import ModelError
from outpace.models.blocks import Form
from outpace.models.defaults import GenerationDefaults
from outpace.models.fields import read_json
from outpace.models.places import Place, read_bytes, read_plain
from outpace.models.seq2seq.config import Seq2SeqConfig
from outpace.models.seq2seq.network import Read, check_tensors
from outpace.models.seq2seq.target import Seq2SeqTarget
from outpace.models.text import Tokenizer
from outpace.models.weights import DTYPES, find_tensors

_LOGIT_BIAS = "final_logits_bias"


def load_folder(folder: Path, form: Form, name: str | None = None) -> Seq2SeqTarget:
    """Read a model folder in the layout of Hugging Face.

    Raises:
        ModelError: a file is missing or corrupt, or the model is not supported.
    """
    said, generation = (read_json(folder / f"{one}.json") for one in ("config", "generation_config"))
    config = Seq2SeqConfig.from_hf(said, generation)
    _, places = find_tensors(folder)

    def read(tensor: str) -> Tensor:
        place = places.get(tensor)
        if place is None:
            raise ModelError(f"{folder} has no tensor {tensor!r}, which its config needs")
        if place.kind not in DTYPES:
            raise ModelError(f"{place.path}: {tensor!r} is stored as {place.kind}, which is not supported")
        return read_plain(place, DTYPES[place.kind], None)

    return _made(
        config,
        read,
        {tensor: place.shape for tensor, place in places.items()},
        form,
        name=name or folder.resolve().name,
        digest=_digest(config, places),
        tokenizer=Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None,
        defaults=GenerationDefaults.from_hf(generation, said),
    )


def wrap(model: Any, form: Form, name: str, tokenizer: Tokenizer | None) -> Seq2SeqTarget:
    """Take a model of transformers apart; its weights are copied where they are laid out anew."""
    tensors: Mapping[str, Tensor] = model.state_dict()
    said = model.generation_config
    generation = said.to_diff_dict() if said is not None else {}
    config = Seq2SeqConfig.from_hf(model.config.to_dict(), generation)

    def read(tensor: str) -> Tensor:
        if tensor not in tensors:
            raise ModelError(f"{name} has no tensor {tensor!r}, which its config needs")
        return tensors[tensor].detach()

    lines = hashlib.sha256(repr(config).encode())
    for at, one in sorted(tensors.items()):
        flat = one.detach().reshape(-1)
        lines.update(f"{at} {tuple(one.shape)} {flat[:: max(1, len(flat) // 8)].float().tolist()}\n".encode())
    return _made(
        config,
        read,
        {at: tuple(one.shape) for at, one in tensors.items()},
        form,
        name=name,
        digest=lines.hexdigest()[:16],
        tokenizer=tokenizer,
        defaults=GenerationDefaults.from_hf(generation, model.config.to_dict()),
    )


def _made(
    config: Seq2SeqConfig,
    read: Read,
    shapes: Mapping[str, tuple[int, ...]],
    form: Form,
    *,
    name: str,
    digest: str,
    tokenizer: Tokenizer | None,
    defaults: GenerationDefaults,
) -> Seq2SeqTarget:
    embed = check_tensors(config, frozenset(shapes), shapes.__getitem__)
    bias_V = None
    if config.bias and _LOGIT_BIAS in shapes:
        bias_V = read(_LOGIT_BIAS).float().reshape(-1).to(form.device)
    return Seq2SeqTarget(
        config,
        read,
        embed,
        "lm_head.weight" if "lm_head.weight" in shapes else embed,
        form,
        name=name,
        digest=digest,
        tokenizer=tokenizer,
        defaults=defaults,
        logit_bias_V=bias_V,
    )


def _digest(config: Seq2SeqConfig, places: Mapping[str, Place]) -> str:
    lines = hashlib.sha256(repr(config).encode())
    for name, place in sorted(places.items()):
        lines.update(f"{name} {place.kind} {place.shape}\n".encode())
        middle = place.start + max(0, place.size // 2 - 32)
        lines.update(read_bytes(place.path, middle, min(64, place.size)))
    return lines.hexdigest()[:16]
