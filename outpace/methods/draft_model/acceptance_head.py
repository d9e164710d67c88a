"""A small network beside a draft model that estimates whether its guesses are accepted.

    token -> draft model -> last hidden state g -> head -> chance that this token is accepted

    x = g;  x = x + silu(W x + b), a few times;  chance = sigmoid(w x + c)

With ``tied`` all blocks are one and the same, as in the published code. Two outputs and a softmax,
as the paper has them, are the same function as one output and a sigmoid.

A head belongs to the draft model whose states it reads and to the target that judges: its folder
has the digests of both. ``outpace train acceptance`` makes it.

Paper: Huang et al. 2024 (SpecDec++), arXiv:2405.19715 (blocks are D, the weight of rejections w).

Shape letters: F rows, W width of the draft model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.drafters.trained import CONFIG, candidates, find, read_config, read_tensors
from outpace.drafters.trained_file import fit_tensors
from outpace.errors import ModelError
from outpace.models.base import TAPS, Target
from outpace.models.fields import read_json
from outpace.models.packed import Linear

METHOD = "acceptance"
"""What the pipeline calls it."""
LAST = "hidden.-1"
"""The feature of the draft model that a head reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShape:
    width: int
    """Hidden size of the draft model, W."""
    blocks: int
    """Residual blocks that a state goes through."""
    tied: bool
    """Whether they share their weights."""

    @property
    def stored(self) -> int:
        return min(self.blocks, 1) if self.tied else self.blocks

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"out.weight": (1, self.width), "out.bias": (1,)}
        for block in range(self.stored):
            shapes[f"blocks.{block}.weight"] = (self.width, self.width)
            shapes[f"blocks.{block}.bias"] = (self.width,)
        return shapes


class AcceptanceHead:
    """A head, ready to run.

    Args:
        folder: where ``outpace train acceptance`` wrote it.
        model: the draft model; gives dtype and device.

    Raises:
        ModelError: files that are missing or corrupt, or made for another target or draft model.
    """

    def __init__(self, folder: Path, model: Target, target: Target) -> None:
        said = read_config(folder, target, METHOD)
        if said.get("draft_digest") != model.digest:
            raise ModelError(
                f"{folder} judges the draft model {said.get('draft')} "
                f"({said.get('draft_digest')}), not {model.name} ({model.digest})"
            )
        model.require(frozenset({TAPS}), "an acceptance head")
        blocks, tied = said.get("blocks"), said.get("tied")
        if not isinstance(blocks, int) or blocks < 0 or not isinstance(tied, bool):
            raise ModelError(
                f"{folder / CONFIG}: need blocks of at least 0 and tied true or false, got "
                f"{blocks!r} and {tied!r}"
            )
        self.shape = HeadShape(width=model.hidden_size, blocks=blocks, tied=tied)
        tensors = fit_tensors(read_tensors(folder), self.shape.tensor_shapes(), folder)
        self.folder, self._dtype = folder, model.dtype
        where, kind = model.device, model.dtype
        self._blocks = [
            Linear(tensors[f"blocks.{i}.weight"].to(where, kind), tensors[f"blocks.{i}.bias"].to(where, kind))
            for i in range(self.shape.stored)
        ]
        self._out_1W = tensors["out.weight"].to(where, torch.float32)
        self._bias_1 = tensors["out.bias"].to(where, torch.float32)

    @torch.no_grad()
    def __call__(self, hidden_FW: Tensor) -> Tensor:
        """Chance that the token of each row is accepted, float32 [F]; cost: its weights once."""
        x_FW = hidden_FW.float()
        for i in range(self.shape.blocks):
            block = self._blocks[0 if self.shape.tied else i]
            x_FW = x_FW + F.silu(block(x_FW.to(self._dtype)).float())
        return F.linear(x_FW, self._out_1W, self._bias_1).squeeze(-1).sigmoid()


def find_head(path: str | None, model: Target, target: Target) -> AcceptanceHead | None:
    """The head of a draft model.

    Args:
        path: its folder; None looks where training puts it, for one that fits the draft model.

    Returns:
        None if no folder was named and there is none that fits.

    Raises:
        ModelError: what was found, or named, cannot be used.
    """
    if path is not None:
        return AcceptanceHead(find(METHOD, target, path), model, target)
    for folder in candidates(METHOD, target):
        if read_json(folder / CONFIG).get("draft_digest") == model.digest:
            return AcceptanceHead(folder, model, target)
    return None
