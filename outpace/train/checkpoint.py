"""Checkpoints of training: everything that goes on from here, in one file, written in one step.

A checkpoint is a safetensors file of weights and the optimizer's moments, by parameter name. Its
header has the counters, as JSON, with a digest of both. Going on from it gives the same bits as
never having stopped, unless the schedule counts minutes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outpace.errors import ModelError
from outpace.files import parse_json, replaced
from outpace.models.fields import brief
from outpace.train.optimizers import Optimizer

KEPT = 2
"""How many checkpoints stay: the newest, and the one before in case the newest is damaged."""
_PREFIX, _SUFFIX = "step-", ".safetensors"


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Write a checkpoint, then drop all but the newest ``KEPT``.

    Args:
        state: plain data; numbers come back as they were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for part in folder.glob(f".{_PREFIX}*.part"):  # of a process that was killed while it wrote
        part.unlink(missing_ok=True)
    stored = {name: one.detach().cpu().contiguous() for name, one in tensors.items()}
    said = json.dumps(dict(state))
    header = {"state": said, "digest": _digest(stored, said)}
    path = folder / f"{_PREFIX}{step:08d}{_SUFFIX}"
    with replaced(path) as fresh:
        save_file(stored, fresh, metadata=header)
    for old in paths(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def paths(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}"))


def latest(folder: Path) -> Path | None:
    """The newest checkpoint, or None."""
    return next(reversed(paths(folder)), None)


def kept(folder: Path, best: Path | None) -> str:
    """One line on what a training that was stopped leaves, and how to go on.

    Args:
        best: folder of its best drafter so far, if there is one; None: it makes no drafter.
    """
    last = latest(folder)
    drafter = ""
    if best is not None:
        drafter = f"the best drafter so far is in {best}, " if best.is_dir() else "no drafter was made, "
    if last is None:
        on = "begins the training anew" if best is None else f"goes on with what {folder.parent} holds"
        return f"stopped: {drafter}there is no checkpoint; the same command {on}"
    return f"stopped: {drafter}the last checkpoint is {last.name}; --resume goes on"


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint: its tensors and its state.

    Raises:
        ModelError: truncated or damaged; says which older one is there to go on from.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        # Older ones have a digest of the tensors alone.
        old = "digest" not in header
        if header["sha256" if old else "digest"] != _digest(tensors, "" if old else header["state"]):
            raise ValueError("its digest does not fit its contents")
        return tensors, parse_json(header["state"])
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        older = [one for one in paths(path.parent) if one < path]
        way = f"delete it to go on from {older[-1]}" if older else "delete it to begin anew"
        raise ModelError(f"checkpoint {path} is corrupt: {brief(error)}; {way}") from error


def training_tensors(module: torch.nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights and moments by parameter name; buffers are not trained and not kept."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        tensors[f"weight.{name}"] = parameter
        for key, moment in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{name}"] = moment
    return tensors


@torch.no_grad()
def restore(module: torch.nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Put weights and moments back where ``training_tensors`` took them.

    Raises:
        ModelError: the checkpoint is of another network.
    """
    for name, parameter in module.named_parameters():
        stored = tensors.get(f"weight.{name}")
        if stored is None or stored.shape != parameter.shape:
            got = "nothing" if stored is None else f"shape {list(stored.shape)}"
            raise ModelError(
                f"checkpoint {path} is of another network: {name} has shape "
                f"{list(parameter.shape)}, the checkpoint holds {got}; train into another folder"
            )
        parameter.copy_(stored)
        moments = {
            key: tensors[f"{key}.{name}"]
            for key in ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
            if f"{key}.{name}" in tensors
        }
        if moments:
            # The count of steps stays where the optimizer wants it; moments live with weights.
            optimizer.state[parameter] = {
                key: one.clone() if key == "step" else one.to(parameter.device)
                for key, one in moments.items()
            }


def _digest(tensors: Mapping[str, Tensor], state: str) -> str:
    lines = hashlib.sha256(state.encode())
    for name, one in sorted(tensors.items()):
        lines.update(f"{name} {one.dtype} {tuple(one.shape)}\n".encode())
        lines.update(one.reshape(-1).view(torch.uint8).numpy().tobytes())
    return lines.hexdigest()
