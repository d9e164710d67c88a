"""Folders of trained drafters, read: their tensors, draft vocabulary, calibrated tree and rates.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from outpace.drafters.trained import CONFIG, decoder_from_json, read_tensors, vocab_map
from outpace.errors import ModelError, SpecError, shown
from outpace.law import VocabMap
from outpace.models.base import Target
from outpace.models.families import DecoderConfig
from outpace.models.fields import Fields
from outpace.tree.shapes import table
from outpace.types import Shape


class Network(Protocol):
    """The shape of a network."""

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a drafter folder besides its vocabulary."""


N = TypeVar("N", bound=Network)


def read_tree(said: Mapping[str, Any], folder: Path) -> Shape | None:
    """The calibrated tree of a drafter folder; None if nothing was measured.

    Raises:
        ModelError: no table of parents.
    """
    parents = said.get("tree")
    if not parents:
        return None
    try:
        return table(parents)
    except (SpecError, TypeError) as error:
        raise ModelError(f"{folder / CONFIG}: {error}") from error


def fit_tensors(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], folder: Path
) -> dict[str, Tensor]:
    """The tensors that a config asks for, and no others but those of a draft vocabulary.

    Raises:
        ModelError: one is missing, has another shape, or is not asked for.
    """
    for name in sorted(wanted.keys() | tensors.keys() - {"d2t", "t2d"}):
        got, need = (tuple(tensors[name].shape) if name in tensors else None), wanted.get(name)
        if got != need:
            raise ModelError(f"{folder}: {name!r} has shape {got}, its config needs {need}")
    return {name: tensors[name] for name in wanted}


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedFile(Generic[N]):
    """A drafter folder as it was read."""

    shape: N
    """Of the network."""
    tensors: Mapping[str, Tensor]
    vocab: VocabMap | None = None
    """The draft vocabulary; None is the target's whole."""
    tree: Shape | None = None
    """The calibrated tree, likeliest nodes first; None: nothing was measured."""


def read_file(folder: Path, said: Mapping[str, Any], shape: N, target: Target) -> TrainedFile[N]:
    """Read what the shape of a network names, and what a folder says of vocabulary and tree.

    Raises:
        ModelError: files that are corrupt, or tensors that are not those of the config.
    """
    tensors = read_tensors(folder)
    return TrainedFile(
        shape=shape,
        tensors=fit_tensors(tensors, shape.tensor_shapes(), folder),
        vocab=read_vocab(tensors, said, target.vocab_size, folder),
        tree=read_tree(said, folder),
    )


def read_layer(read: Fields, target: Target) -> DecoderConfig:
    """The one layer of a network that is as wide as the target.

    Raises:
        ModelError: several layers, or others.
    """
    decoder = decoder_from_json(read.mapping("decoder"), Path(read.source))
    if decoder.hidden_size != target.hidden_size or decoder.num_layers != 1:
        raise ModelError(f"{read.source}: the decoder must be one layer of hidden size {target.hidden_size}")
    return decoder


def read_rates(said: Mapping[str, Any], folder: Path) -> tuple[tuple[float, ...], ...]:
    """Held-out acceptance by depth and rank; empty: nothing was measured.

    Raises:
        ModelError: no table of numbers.
    """
    rates = said.get("acceptance") or ()
    try:
        return tuple(tuple(float(one) for one in row) for row in rates)
    except (TypeError, ValueError):
        raise ModelError(f"{folder / CONFIG}: acceptance must be numbers, got {shown(rates)}") from None


def read_vocab(
    tensors: Mapping[str, Tensor], said: Mapping[str, Any], vocab_size: int, folder: Path
) -> VocabMap | None:
    """The draft vocabulary of a drafter folder; None is the target's whole.

    Raises:
        ModelError: the config says another size.
    """
    vocab = vocab_map(tensors, vocab_size)
    columns = vocab_size if vocab is None else len(vocab.to_target_D)
    if said.get("draft_vocab_size") != columns:
        raise ModelError(
            f"{folder / CONFIG}: draft_vocab_size is {said.get('draft_vocab_size')}, but the "
            f"weights have {columns} draft tokens"
        )
    return vocab
