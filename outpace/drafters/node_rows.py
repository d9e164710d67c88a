"""State per node: which row of a growing tensor belongs to which node of which draft.

A drafter with a recurrent state computes it where a node is expanded, from the state of the node's
parent. ``NodeRows`` numbers the nodes in the order in which they are expanded, so that the drafter
appends what it computed, and looks parents up. It holds for one growth: a new one begins with every
first level, and whatever was drafted before is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from outpace.tree.growth import Branch
from outpace.types import ROOT

S = TypeVar("S")


class NodeRows(Generic[S]):
    """Rows of the nodes that were expanded so far."""

    def __init__(self) -> None:
        self._row: dict[tuple[int, int], int] = {}

    def add(self, branches: Sequence[Branch[S]]) -> list[int]:
        """Give every node to be expanded the next row.

        Returns:
            The rows of their parents, in the order of ``expand``'s rows; ROOT has none, -1.
        """
        parents = []
        for branch in branches:
            key: Any = id(branch.state)
            for node in branch.nodes:
                parents.append(-1 if node == ROOT else self._row[key, branch.parent_N[node]])
                self._row[key, node] = len(self._row)
        return parents

    def of(self, branch: Branch[S], node: int) -> int:
        """The row of a node that was expanded."""
        return self._row[id(branch.state), node]
