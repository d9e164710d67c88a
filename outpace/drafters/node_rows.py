"""State per node: which row of a growing tensor belongs to which node of which draft.

A drafter with a recurrent state computes it where a node is expanded, from the state of a node
above. ``NodeRows`` numbers the nodes in the order in which they are expanded, so that the drafter
appends what it computed, and looks others up. It holds for one growth: a new one begins with every
first level, and whatever was drafted before is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from outpace.tree.growth import Branch

S = TypeVar("S")


class NodeRows(Generic[S]):
    """Rows of the nodes that were expanded so far."""

    def __init__(self) -> None:
        self._row: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._row)

    def add(self, branches: Sequence[Branch[S]]) -> None:
        """Give every node to be expanded the next row."""
        for branch in branches:
            for node in branch.nodes:
                self._row[id(branch.state), node] = len(self._row)

    def of(self, branch: Branch[S], node: int) -> int:
        """The row of a node that was expanded."""
        return self._row[id(branch.state), node]
