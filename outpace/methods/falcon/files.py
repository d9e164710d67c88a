"""Falcon on disk: the folders that ``outpace train falcon`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from outpace.drafters.last_state import fit_tensors, read_tree, read_vocab
from outpace.drafters.trained import CONFIG, decoder_from_json, read_config, read_tensors
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.methods.falcon.net import FalconShape
from outpace.models.base import Target
from outpace.models.fields import Fields
from outpace.types import Shape

METHOD = "falcon"
_MOST = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FalconFile:
    """A network as it was read."""

    shape: FalconShape
    tensors: Mapping[str, Tensor]
    vocab: VocabMap | None = None
    """The draft vocabulary; None is the target's whole."""
    tree: Shape | None = None
    """The calibrated tree, likeliest nodes first; None: nothing was measured."""


def read_falcon(folder: Path, target: Target) -> FalconFile:
    """Read a drafter folder.

    Raises:
        ModelError: files that are corrupt or of another target or method, or tensors that are not
            those of the config.
    """
    said = read_config(folder, target, METHOD)
    read = Fields(str(folder / CONFIG), {}, said)
    decoder = decoder_from_json(read.mapping("decoder"), folder / CONFIG)
    if decoder.hidden_size != target.hidden_size or decoder.num_layers != 1:
        raise ModelError(f"{read.source}: the decoder must be one layer of hidden size {target.hidden_size}")
    shape = FalconShape(
        decoder=decoder, block=read.count("block", most=_MOST), passes=read.count("passes", most=_MOST)
    )
    tensors = read_tensors(folder)
    return FalconFile(
        shape=shape,
        tensors=fit_tensors(tensors, shape.tensor_shapes(), folder),
        vocab=read_vocab(tensors, said, target.vocab_size, folder),
        tree=read_tree(said, folder),
    )
