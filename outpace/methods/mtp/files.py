"""Modules of `mtp` on disk: the project's own folders, and checkpoints of models that came with some.

    own          config.json with "method": "mtp"; ``modules.0.layer.*`` and so on
    DeepSeek     ``model.layers.L.eh_proj``, L counted on behind the model's layers; GLM has the same
    MiMo         ``model.mtp_layers.0.input_proj``, which reads the state before the embedding

Modules of a checkpoint are layers of the model's own kind; their embeddings and heads are copies of the
model's, and left out. Such files do not say which state of the model a module reads, before or behind
the model's last norm: `outpace.methods.mtp.self_test` tries both. They were trained for one step each: where
nobody asks for another tree, a draft is as deep as there are modules. What more depth brings tells FastMTP,
arXiv:2509.18362.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from outpace.drafters.one_layer import LAYER
from outpace.drafters.trained import CONFIG, candidates, find, is_drafter, read_config
from outpace.drafters.trained_file import TrainedFile, read_file, read_layer
from outpace.errors import ModelError, SpecError, shown
from outpace.files import expanded
from outpace.methods.mtp.net import CHAINED, NORMED, PARALLEL, RAW, MtpShape
from outpace.methods.mtp.self_test import choose_base
from outpace.models.base import Target
from outpace.models.decoder import Decoder
from outpace.models.fields import Fields
from outpace.models.weights import SafetensorsCheckpoint
from outpace.types import ROOT, Shape

METHOD = "mtp"
_MOST = 64
_LAYOUTS: tuple[tuple[str, dict[str, str], bool], ...] = (
    (
        "model.layers.{}.",
        {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"},
        False,
    ),
    (
        "model.mtp_layers.{}.",
        {
            "enorm": "token_layernorm",
            "hnorm": "hidden_layernorm",
            "eh_proj": "input_proj",
            "norm": "final_layernorm",
        },
        True,
    ),
)
"""Where a module stands, what its own tensors are called, and whether the state comes first."""
AHEAD = 3
"""Depths that modules of a checkpoint draft at most, where a tree that deep is asked for."""


MtpFile = TrainedFile[MtpShape]


def read_mtp(path: str | None, base: str | None, target: Target) -> MtpFile:
    """Read modules of any known layout.

    Args:
        path: a folder: of a drafter, or of a model's checkpoint.
        base: ``normed`` or ``raw``, for modules of a checkpoint.

    Raises:
        ModelError: no modules, files that are corrupt or of another target, or tensors that are not
            those of the config.
        SpecError: another base, or one for a folder that says its own.
    """
    if base not in (None, NORMED, RAW):
        raise SpecError(f"mtp: base must be {NORMED} or {RAW}, got {shown(base)}")
    folder = None if path is None else expanded(path)
    if folder is not None and _is_model(folder):
        return _from_checkpoint(SafetensorsCheckpoint(folder), base, target, str(folder))
    if folder is None and not candidates(METHOD, target) and isinstance(target, Decoder):
        checkpoint = target.checkpoint
        if _layout(checkpoint.names(), target.num_layers) is not None:
            return _from_checkpoint(checkpoint, base, target, target.name)
    if base is not None:
        raise SpecError("mtp: base is for modules of a model's checkpoint; a drafter folder says its own")
    return _own(find(METHOD, target, path), target)


def _is_model(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and not is_drafter(folder)


def _own(folder: Path, target: Target) -> MtpFile:
    said = read_config(folder, target, METHOD)
    read = Fields(str(folder / CONFIG), {}, said)
    kind, recycle = read.text("kind"), read.text("recycle")
    if kind not in (CHAINED, PARALLEL) or recycle not in (RAW, NORMED):
        raise ModelError(f"{read.source}: kind {shown(kind)} or recycle {shown(recycle)} is unknown")
    taps = read.texts("taps")
    if len(taps) != 1:
        raise ModelError(f"{read.source}: 'taps' must name one feature, got {shown(taps)}")
    shape = MtpShape(
        kind=kind,
        decoder=read_layer(read, target),
        modules=read.count("modules", most=_MOST),
        steps=read.count("steps", most=_MOST),
        base=taps[0],
        recycle=recycle,
    )
    return read_file(folder, said, shape, target)


def _layout(names: Any, layers: int) -> tuple[int, int] | None:
    """Which layout the modules of a checkpoint have, and how many there are; None: it has none."""
    there = set(names)
    for number, (place, parts, _) in enumerate(_LAYOUTS):
        first, count = layers if "mtp" not in place else 0, 0
        while f"{place.format(first + count)}{parts['eh_proj']}.weight" in there:
            count += 1
        if count:
            return number, count
    return None


def _from_checkpoint(checkpoint: Any, base: str | None, target: Target, source: str) -> MtpFile:
    """Modules that stand in a model's checkpoint."""
    config = checkpoint.config
    found = _layout(checkpoint.names(), config.num_layers)
    if found is None:
        raise ModelError(f"{source} holds no modules of multi-token prediction")
    for what in ("hidden_size", "vocab_size"):
        if getattr(config, what) != getattr(target, what):
            raise ModelError(
                f"{source} has {what} {getattr(config, what)}, but {target.name} has {getattr(target, what)}"
            )
    number, count = found
    place, parts, hidden_first = _LAYOUTS[number]
    one = replace(
        config,
        num_layers=1,
        windows=(None,),
        ropes=(config.ropes[config.rope_of_layer[-1]],),
        rope_of_layer=(0,),
        tied_head=False,
        mixture=None,
    )
    shape = MtpShape(
        kind=CHAINED,
        decoder=one,
        modules=count,
        steps=max(count, AHEAD),
        base="hidden.-1",
        hidden_first=hidden_first,
    )
    tensors: dict[str, Tensor] = {}
    first = 0 if "mtp" in place else config.num_layers
    for name, size in shape.tensor_shapes().items():
        _, module, part = name.split(".", 2)
        at = place.format(first + int(module))
        own = part.removeprefix("layer.") if part.startswith("layer.") else _stored(part, parts)
        if f"{at}{own}" not in checkpoint:
            raise ModelError(f"{source} lacks {at}{own}, which a module of {LAYER}'s kind needs")
        tensor = checkpoint.tensor(f"{at}{own}")
        if tuple(tensor.shape) != size:
            raise ModelError(f"{source}: {at}{own} has shape {list(tensor.shape)}, {list(size)} is wanted")
        tensors[name] = tensor
    chosen = choose_base(shape, tensors, target, base)
    tree = Shape(tuple(range(ROOT, count - 1)))  # each as deep as it was trained for
    return MtpFile(shape=replace(shape, base=chosen), tensors=tensors, tree=tree)


def _stored(part: str, parts: Mapping[str, str]) -> str:
    name, kind = part.rsplit(".", 1)
    return f"{parts[name]}.{kind}"
