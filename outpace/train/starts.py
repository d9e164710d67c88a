"""Weights to begin a training with: those of a drafter, or the mean of several.

Shape letters: V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from outpace.drafters.trained import read_tensors, vocab_map
from outpace.errors import ModelError
from outpace.train.objective import Objective


@torch.no_grad()
def begin_from(objective: Objective, *folders: Path) -> None:
    """Overwrite what is trained with the weights of a drafter folder, or with the mean of several. Of an
    unembedding for other tokens the rows of those are taken that both have.

    Raises:
        ModelError: it holds other tensors, or of other shapes; the first is named.
    """
    mean: dict[str, Tensor] = {}
    for folder in folders:
        _copy(objective, folder)
        for name, tensor in objective.named().items():
            mean[name] = mean.get(name, 0.0) + tensor.float() / len(folders)
    for name, tensor in objective.named().items():
        tensor.copy_(mean[name])


def _copy(objective: Objective, folder: Path) -> None:
    stored = read_tensors(folder)
    row_V = _rows_of(stored, objective.target.vocab_size)
    for name, tensor in objective.named().items():
        found = stored.get(name)
        if found is None and name in objective.fresh:
            continue
        rows = row_V if name == "lm_head.weight" else None
        first = 0 if rows is None else 1  # rows are matched by token
        if found is None or found.shape[first:] != tensor.shape[first:]:
            shape = "missing" if found is None else list(found.shape)
            raise ModelError(
                f"{folder}: {name} is {shape}, and {list(tensor.shape)} is wanted; "
                "give the settings that it was trained with, or leave --start out"
            )
        if rows is None:
            tensor.copy_(found)
            continue
        row_D = rows if objective.vocab is None else rows[objective.vocab.to_target_D.cpu()]
        both = (row_D >= 0).nonzero()[:, 0]
        tensor[both.to(tensor.device)] = found[row_D[both]].to(tensor)


def _rows_of(stored: Mapping[str, Tensor], size: int) -> Tensor | None:
    """The row of a stored unembedding for each token, -1 where it has none; None: it is for other tokens."""
    if (held := vocab_map(stored, size)) is not None:
        return held.feed_V
    return torch.arange(size) if len(stored.get("lm_head.weight", ())) == size else None
