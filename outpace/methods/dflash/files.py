"""Block drafters on disk: the network of `dflash`, its vocabulary and its tree.

A folder's config.json has ``taps`` and ``slots`` besides the keys of every drafter folder and, once
measured, ``acceptance`` (by row and rank) and ``tree``. The unembedding is the target's and in no
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from outpace.drafters.trained import CONFIG, decoder_from_json, read_config, read_tensors, vocab_map
from outpace.errors import ModelError, SpecError
from outpace.law import VocabMap
from outpace.methods.dflash.net import BlockShape
from outpace.models.base import Target
from outpace.tree.shapes import table
from outpace.types import Shape

METHOD = "dflash"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockFile:
    """A drafter folder as it was read."""

    shape: BlockShape
    tensors: Mapping[str, Tensor]
    vocab: VocabMap | None
    """The draft vocabulary; None is the target's whole."""
    tree: Shape | None = None
    """The calibrated tree, likeliest nodes first; None: nothing was measured."""


def read_block_drafter(folder: Path, target: Target) -> BlockFile:
    """Read a folder that ``outpace train dflash`` wrote.

    Raises:
        ModelError: files that are corrupt or of another target or method, or tensors that the
            config does not describe.
    """
    said, tensors = read_config(folder, target, METHOD), read_tensors(folder)
    taps, slots = said.get("taps"), said.get("slots")
    if not taps or not isinstance(slots, int) or slots < 1:
        raise ModelError(f"{folder / CONFIG}: need taps, and slots of at least 1, got {taps} and {slots}")
    decoder = decoder_from_json(said.get("decoder", {}), folder / CONFIG)
    shape = BlockShape(decoder=decoder, taps=tuple(taps), slots=slots)
    for name, wanted in shape.tensor_shapes().items():
        got = list(tensors[name].shape) if name in tensors else None
        if got != list(wanted):
            raise ModelError(f"{folder}: {name!r} has shape {got}, its config needs {list(wanted)}")
    vocab = vocab_map(tensors, target.vocab_size)
    columns = target.vocab_size if vocab is None else len(vocab.to_target_D)
    if said.get("draft_vocab_size") != columns:
        raise ModelError(
            f"{folder / CONFIG}: draft_vocab_size is {said.get('draft_vocab_size')}, but the "
            f"weights have {columns} draft tokens"
        )
    kept = {name: tensors[name] for name in shape.tensor_shapes()}
    return BlockFile(shape=shape, tensors=kept, vocab=vocab, tree=_tree(said, folder))


def _tree(said: Mapping[str, Any], folder: Path) -> Shape | None:
    try:
        return table(said["tree"]) if said.get("tree") else None
    except (SpecError, TypeError) as error:
        raise ModelError(f"{folder / CONFIG}: {error}") from error
