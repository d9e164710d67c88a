"""Ancestor masks and depths of small trees, from parent lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ancestors(parents: Sequence[int]) -> Tensor:
    """Which rows each row sees: itself and its ancestors.

    Args:
        parents: for each row an earlier row, or -1.

    Returns:
        bool [J, J]; row i sees column j.
    """
    size = len(parents)
    seen_JJ = torch.eye(size, dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen_JJ[row, : parent + 1] |= seen_JJ[parent, : parent + 1]
    return seen_JJ


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every row hangs from the row before it; the first one from -1."""
    return all(parent == i - 1 for i, parent in enumerate(parents))
