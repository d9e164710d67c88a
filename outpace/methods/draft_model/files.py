"""A draft model that was trained for its target, as a Target: loaded, with what it borrows.

It is a decoder whose embedding may be the target's own object. Its head has one row per token of
its vocabulary, so its logits may have fewer columns than the target has tokens.

Shape letters: V vocabulary, D draft vocabulary, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from outpace.drafters.trained import (
    CONFIG,
    WEIGHTS,
    decoder_from_json,
    lender,
    read_config,
    read_tensors,
    rounding,
    vocab_map,
)
from outpace.errors import ModelError
from outpace.models.base import Target
from outpace.models.blocks import Ends, Form, read_block
from outpace.models.decoder import Decoder
from outpace.models.embedding import Embedding
from outpace.models.families import DecoderConfig
from outpace.models.load import shared
from outpace.models.memory import MemoryCheckpoint
from outpace.models.rope import Rotation
from outpace.models.rowwise import Norm

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class PartCheckpoint(MemoryCheckpoint):
    """Tensors of a decoder that may lack the embedding and have a head of its own size."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, Tensor],
        *,
        name: str,
        rows: int,
        id_D: Tensor | None = None,
    ) -> None:
        self._rows, self.id_D = rows, id_D
        super().__init__(config, tensors, name=name)

    def _check_shapes(self) -> None:
        ends = {EMBED, HEAD} - set(self.places)
        for name, shape in self.config.tensor_shapes().items():
            wanted = (self._rows, *shape[1:]) if name == HEAD else shape
            place = self.places.get(name)
            if name not in ends and (place is None or place.shape != wanted):
                got = "is missing" if place is None else f"has shape {list(place.shape)}"
                raise ModelError(f"{self.name}: {name!r} {got}, needs {list(wanted)}")


def load_trained(
    folder: Path, target: Target, dtype: str | None = None, quantize: str | None = None
) -> tuple[Decoder, Tensor | None]:
    """Load a draft model that ``outpace train draft_model`` wrote; drafters of a target share it.

    Args:
        target: what it was trained for; lends what is not stored.
        dtype: must be the target's if given, since tensors are shared.
        quantize: how to round its own matrices, where compiled code multiplies them.

    Returns:
        The model, and the target ids [D] of its logits' columns; None: they are all ids.

    Raises:
        ModelError: files that are missing or corrupt, another target, or a dtype.
    """
    weights = (folder / WEIGHTS).stat() if (folder / WEIGHTS).is_file() else None
    written = None if weights is None else (weights.st_mtime_ns, weights.st_size)
    key = folder.resolve(), written, dtype, rounding(quantize, target)
    model = shared(target, key, lambda: _load(folder, target, dtype, quantize))
    assert isinstance(model.checkpoint, PartCheckpoint)
    return model, model.checkpoint.id_D


def _load(folder: Path, target: Target, dtype: str | None, quantize: str | None) -> Decoder:
    said = read_config(folder, target, "draft_model")
    lent = lender(target, "draft_model")
    if dtype is not None and getattr(torch, dtype, None) is not target.dtype:
        raise ModelError(
            f"{folder} borrows from {target.name} and has its dtype, "
            f"{str(target.dtype).removeprefix('torch.')}; leave dtype={dtype} out"
        )
    tensors = read_tensors(folder)
    vocab = vocab_map(tensors, target.vocab_size)
    config = decoder_from_json(said.get("decoder", {}), folder / CONFIG)
    rows = target.vocab_size if vocab is None else len(vocab.to_target_D)
    for name, what in ((EMBED, "embedding"), (HEAD, "head")):
        if name not in tensors and config.hidden_size != target.hidden_size:
            raise ModelError(
                f"{folder} stores no {what}, and cannot borrow that of {target.name}: it has "
                f"hidden size {config.hidden_size}, the target {target.hidden_size}"
            )
    checkpoint = PartCheckpoint(
        config,
        tensors,
        name=f"{target.name}/draft_model",
        rows=rows,
        id_D=None if vocab is None else vocab.to_target_D.to(target.device),
    )
    kind, where = target.dtype, target.device
    form = Form(kind, where, quantize=rounding(quantize, target))
    blocks = [read_block(checkpoint, i, form) for i in range(config.num_layers)]
    ends = Ends(
        embed=Embedding(checkpoint, kind, where, True) if EMBED in tensors else lent.embedding,
        norm=Norm(checkpoint.tensor("model.norm.weight").to(where), config),
        head=form.linear(checkpoint.tensor(HEAD, kind)) if HEAD in tensors else lent.unembedding(vocab),
    )
    turns = [Rotation(rope, where) for rope in config.ropes]
    return Decoder(checkpoint, config, blocks, ends, turns, form)
