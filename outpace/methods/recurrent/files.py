"""Recurrent drafters on disk: the project's own folders, and those of three other programs.

    own             config.json with "method"; embedding and unembedding are the target's
    Apple           "model_type": "recurrent_drafting_drafter"; embedding is the target's
    IBM             "model_type": "mlp_speculator": ``speculator.emb.0.weight`` and so on
    Arctic          the same with "method": "sum_lstm" or "sum_rnn", widths as texts

Files of others have heads over the whole vocabulary. What one of these says of its target is its
hidden size and vocabulary alone, so another model of the same sizes is not noticed.

Shape letters: V vocabulary, M inner width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.drafters.trained import CONFIG, find, read_config, read_tensors
from outpace.drafters.trained_file import TrainedFile, fit_tensors, read_file
from outpace.errors import ModelError, shown
from outpace.methods.recurrent.cells import LSTM, MLP, REDRAFTER, CellShape
from outpace.models.base import Target
from outpace.models.fields import Fields, read_json

_APPLE, _IBM = "recurrent_drafting_drafter", "mlp_speculator"
_MOST_STEPS, _MOST_LAYERS = 64, 64
"""Depths and blocks that a file may state; a cell that is the same at all depths has the most."""


CellFile = TrainedFile[CellShape]


def read_cell(method: str, path: str | None, target: Target) -> CellFile:
    """Read a drafter of any known format.

    Raises:
        ModelError: no folder, files that are corrupt or of another target or method, or tensors
            that are not those of the config.
    """
    folder = find(method, target, path)
    said = read_json(folder / CONFIG)
    if "target_digest" in said:
        return _own(method, folder, target)
    shape = _published(said, folder, target)
    if shape.kind != method:
        raise ModelError(f"{folder} holds a {shape.kind}, not a {method}")
    tensors = {name.removeprefix("speculator."): one for name, one in read_tensors(folder).items()}
    wanted = shape.tensor_shapes()
    # Tied stages are stored once or once each.
    kept = {name: tensors[name] for name in wanted if name in tensors}
    return CellFile(shape=shape, tensors=fit_tensors(kept, wanted, folder))


def _own(method: str, folder: Path, target: Target) -> CellFile:
    said = read_config(folder, target, method)
    read = Fields(str(folder / CONFIG), {}, said)
    shape = CellShape(
        kind=method,
        hidden_size=target.hidden_size,
        inner=read.count("inner"),
        steps=read.count("steps", most=_MOST_STEPS),
        layers=read.count("layers", most=_MOST_LAYERS) if method == REDRAFTER else 0,
        tied=bool(said.get("tied", True)),
    )
    return read_file(folder, said, shape, target)


def _published(said: Mapping[str, Any], folder: Path, target: Target) -> CellShape:
    read = Fields(str(folder / CONFIG), {}, said)
    kind = said.get("model_type")
    if kind == _APPLE:
        hidden, inner = read.count("hidden_size"), read.count("exit_dim")
        shape = CellShape(
            kind=REDRAFTER,
            hidden_size=hidden,
            inner=inner,
            steps=_MOST_STEPS,
            layers=read.count("num_draft_layers", most=_MOST_LAYERS),
            recurrent=bool(said.get("rnn")),
            own_rows=read.count("vocab_size"),
        )
    elif kind == _IBM:
        shape = _speculator(said, read)
    else:
        raise ModelError(
            f"{folder / CONFIG}: model_type is {shown(kind)}; recurrent drafters of {_APPLE} and {_IBM} "
            "can be read"
        )
    for what, wanted, got in (
        ("hidden size", target.hidden_size, shape.hidden_size),
        ("vocabulary size", target.vocab_size, shape.own_rows),
    ):
        if wanted != got:
            raise ModelError(
                f"{folder} was made for a model with {what} {got}, but {target.name} has {wanted}"
            )
    return shape


def _speculator(said: Mapping[str, Any], read: Fields) -> CellShape:
    """IBM's config, and Arctic's, which gives some widths as texts such as ``4096``."""
    method, tied = said.get("method", "sum_rnn"), bool(said.get("tie_weights"))
    if method not in ("sum_rnn", "sum_lstm"):
        raise ModelError(f"{read.source}: method is {shown(method)}; sum_rnn and sum_lstm can be read")
    if method == "sum_lstm" and not (tied and said.get("tie_lstm_embs", True)):
        raise ModelError(f"{read.source}: an LSTM must have tie_weights and tie_lstm_embs")
    arctic = "input_hidden_dim" in said
    hidden = read.count("input_hidden_dim" if arctic else "emb_dim")
    inner = _width(said, read, "inner_dim") if said.get("inner_dim") else hidden
    for other in ("emb_dim", "proj_dim") if arctic else ():
        if _width(said, read, other) != inner:
            raise ModelError(f"{read.source}: {other} must be inner_dim, {inner}")
    return CellShape(
        kind=LSTM if method == "sum_lstm" else MLP,
        hidden_size=hidden,
        inner=inner,
        steps=read.count("n_predict", most=_MOST_STEPS),
        tied=tied,
        scaled=bool(said.get("scale_input")),
        own_rows=read.count("vocab_size"),
    )


def _width(said: Mapping[str, Any], read: Fields, key: str) -> int:
    value = said.get(key)
    if isinstance(value, str):
        return Fields(read.source, {}, {key: int(value) if value.isdecimal() else value}).count(key)
    return read.count(key)
