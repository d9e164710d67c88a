"""Drafters that say in one pass what may stand at several depths below a node.

    block of 3    pass 1 reads the root     depths 1, 2, 3: the same below every node of a depth
                  pass 2 reads nodes at 3   depths 4, 5, 6: of every node's own descendants

A guess inside a block does not know the guesses above it in the same block. All nodes below one
block's root have the same distribution at each depth. It is drawn below every node by itself, so
what a verifier is told is what was drawn from, as for any drafter.

Shape letters: F nodes of a frontier, K depths of a block, D draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from outpace.drafters.base import ExpandingDrafter
from outpace.drafters.node_rows import NodeRows
from outpace.tree.growth import Branch
from outpace.types import ROOT

S = TypeVar("S")


class BlockDrafter(ExpandingDrafter[S]):
    """Implements ``blocks`` alone; ``expand`` looks up."""

    block: int
    """K: depths that a pass over a node says; 1 is a drafter like all others."""
    id_D: Tensor | None = None
    """Target ids of the columns; None: they are the ids."""
    rows: NodeRows[S]
    """Of the nodes at which blocks begin, in the draft under way; their parents are not among them
    unless a block has one depth."""
    _logits_NKD: Tensor

    @abstractmethod
    def blocks(self, branches: Sequence[Branch[S]]) -> Tensor:
        """Run one pass over nodes at which blocks begin.

        Args:
            branches: the root in the first call; later, nodes whose depth is a multiple of K.
                Everything up to K levels above them was asked before.

        Returns:
            float32 [F, K, D]: what may stand 1, 2, ..., K levels below each node.
        """

    def expand(self, branches: Sequence[Branch[S]]) -> tuple[Tensor, Tensor | None]:
        """One pass for the nodes at which blocks begin; the others look up their block's."""
        if branches[0].nodes == (ROOT,):
            self.rows = NodeRows()
        begun = []
        for branch in branches:
            nodes = tuple(node for node in branch.nodes if len(branch.path(node)) % self.block == 0)
            if nodes:
                fields = (branch.state, branch.tokens, nodes, branch.token_N, branch.parent_N)
                begun.append(Branch(*fields))
        if begun:
            first = len(self.rows) == 0
            logits_FKD = self.blocks(begun)
            self.rows.add(begun)
            self._logits_NKD = logits_FKD if first else torch.cat([self._logits_NKD, logits_FKD])
        row_F, depth_F = [], []
        for branch in branches:
            for node in branch.nodes:
                path = branch.path(node)
                depth_F.append(len(path) % self.block)
                row_F.append(self.rows.of(branch, root_of(path, self.block)))
        return self._logits_NKD[row_F, depth_F], self.id_D


def root_of(path: Sequence[int], block: int) -> int:
    """The node at which the block of a path's end begins.

    Args:
        path: nodes from the first guess down; empty for the root.
    """
    above = len(path) - len(path) % block
    return path[above - 1] if above else ROOT
