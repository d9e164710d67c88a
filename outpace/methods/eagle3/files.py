"""EAGLE heads on disk: the project's own folders, the speculators format, the authors' checkpoints.

    own           config.json with "method": "eagle3"; tensors as in speculators
    speculators   config.json with "speculators_model_type": "eagle3"
    authors       config.json of a Llama; EAGLE-3 has "draft_vocab_size" and ``midlayer.*``,
                  EAGLE-1 and EAGLE-2 have ``fc`` over an embedding and a feature, and no head

Tensors are renamed to those of speculators. ``d2t`` holds offsets: target id = draft id + offset.

Numbers of layers whose features are fused are counted alike here and in speculators: L is the
stream behind L layers. ``eagle_config`` of plain EAGLE-3 folders counts from the layer whose
output it is, one less.

Shape letters: V vocabulary, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.speculators import (
    KIND,
    check_fit,
    check_tensors,
    check_verifier,
    default_layers,
    own_embedding,
    read_layers,
    read_taps,
)
from outpace.drafters.trained import (
    CONFIG,
    WEIGHTS,
    decoder_from_json,
    find,
    read_config,
    read_temper,
    read_tensors,
    vocab_map,
)
from outpace.errors import ModelError
from outpace.methods.eagle3.net import EagleShape
from outpace.models.base import Target
from outpace.models.fields import Fields, brief, read_json

METHOD = "eagle3"
_PICKLED = "pytorch_model.bin"
_FLAGS = {
    "norm_before_residual": "residual_normed",
    "norm_output": "output_normed",
    "norm_before_fc": "joint_norm",
    "fc_norm": "each_norm",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Head:
    """An EAGLE head as it was read."""

    shape: EagleShape
    tensors: Mapping[str, Tensor]
    """All that the shape names, by the names of speculators."""
    id_D: Tensor | None
    """Target ids of the columns of its logits; None: they are the ids."""
    embed_VH: Tensor | None = None
    """An embedding of its own, where it differs from the target's."""
    temper_D: tuple[float, ...] = ()
    """By level, what to divide its logits by at temperature 0."""


def find_head(target: Target, path: str | None) -> Path:
    """The folder of a head: the one named, or the one that was trained for the target.

    Raises:
        ModelError: there is none.
    """
    return find(METHOD, target, path)


def read_head(folder: Path, target: Target) -> Head:
    """Read a head of any known format.

    Raises:
        ModelError: files that are missing or corrupt, or a tensor that is missing or has another
            shape than the config says. Also a head for another target, as far as that shows.
    """
    said = read_json(folder / CONFIG)
    tensors = _renamed(_read_tensors(folder))
    if "target_digest" in said:
        shape = _own(read_config(folder, target, METHOD), folder)
    elif KIND in said:
        shape = _speculators(said, folder, target)
    else:
        shape = _authors(said, folder, target, tensors)
    check_tensors(shape.tensor_shapes(), tensors, folder)
    vocab = vocab_map(tensors, target.vocab_size) if shape.fused else None
    columns = target.vocab_size if vocab is None else len(vocab.to_target_D)
    if shape.fused and columns != shape.draft_vocab:
        raise ModelError(
            f"{folder} has {shape.draft_vocab} draft tokens, but "
            + (f"no 'd2t' to {target.vocab_size}" if vocab is None else f"'d2t' of {columns}")
        )
    return Head(
        shape=shape,
        tensors={name: tensors[name] for name in shape.tensor_shapes()},
        id_D=None if vocab is None else vocab.to_target_D,
        embed_VH=own_embedding(tensors, target, folder),
        temper_D=read_temper(said, folder / CONFIG),
    )


def default_taps(target: Target) -> tuple[str, ...]:
    """The features that EAGLE-3 fuses unless told otherwise."""
    return tuple(f"hidden.{layer}" for layer in default_layers(target))


def _own(said: Mapping[str, Any], folder: Path) -> EagleShape:
    if not said.get("taps") or said.get("draft_vocab_size") is None:
        raise ModelError(f"{folder / CONFIG} lacks 'taps' or 'draft_vocab_size'")
    decoder = decoder_from_json(said.get("decoder", {}), folder / CONFIG)
    return EagleShape(
        decoder=decoder,
        taps=tuple(said["taps"]),
        draft_vocab=int(said["draft_vocab_size"]),
        each_norm=bool(said.get("each_norm")),
        confident=bool(said.get("confident")),
    )


def _speculators(said: Mapping[str, Any], folder: Path, target: Target) -> EagleShape:
    name = check_verifier(said, METHOD, folder, target)
    read = Fields(str(folder / CONFIG), {}, said)
    decoder = read_layers(read.mapping("transformer_layer_config"), folder, "qwen3")
    layers = said.get("eagle_aux_hidden_state_layer_ids")
    flags = {ours: bool(said.get(theirs)) for theirs, ours in _FLAGS.items()}
    shape = EagleShape(
        decoder=decoder,
        taps=_taps(layers, 0, folder, target),
        draft_vocab=read.whole("draft_vocab_size") or decoder.vocab_size,
        **flags,
    )
    width = read.whole("target_hidden_size") or decoder.hidden_size
    check_fit(width, decoder, folder, target, name)
    return shape


def _authors(
    said: Mapping[str, Any], folder: Path, target: Target, tensors: Mapping[str, Tensor]
) -> EagleShape:
    decoder = read_layers(said, folder, "llama")
    check_fit(decoder.hidden_size, decoder, folder, target, "another model")
    if "lm_head.weight" in tensors and "norm.weight" in tensors:
        read = Fields(str(folder / CONFIG), {}, said)
        layers = read.mapping("eagle_config").get("eagle_aux_hidden_state_layer_ids")
        return EagleShape(
            decoder=decoder,
            taps=_taps(layers, 1, folder, target),
            draft_vocab=read.whole("draft_vocab_size") or decoder.vocab_size,
        )
    return EagleShape(
        decoder=decoder,
        taps=("hidden.-1",),
        draft_vocab=target.vocab_size,
        fused=False,
        fc_bias="fc.bias" in tensors,
    )


def _taps(layers: Any, one_less: int, folder: Path, target: Target) -> tuple[str, ...]:
    return read_taps(layers, one_less, folder, target) if layers else default_taps(target)


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    out = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        out[name] = tensor
    return out


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    pickled = folder / _PICKLED
    if (folder / WEIGHTS).is_file() or not pickled.is_file():
        return read_tensors(folder)
    try:
        tensors = torch.load(pickled, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged one ends in any error of torch's interpreter
        raise ModelError(f"{pickled} is truncated or corrupt: {brief(error)}") from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ModelError(f"{pickled} does not hold tensors by name")
    return tensors
