"""Rows for the nodes of a draft that a model reads next."""

from __future__ import annotations

from typing import Any

from outpace.tree.growth import Branch
from outpace.types import Feed


def feed_nodes(branch: Branch[Any], slot: int, row: dict[int, int], first: int, view: Any = None) -> Feed:
    """Feed the nodes that are to be expanded.

    Args:
        row: node -> its row in the tail of the slot.
        first: row of the first of these nodes.

    Effects: ``row`` gains the nodes.
    """
    tokens = tuple(branch.token_N[node] for node in branch.nodes)
    parents = tuple(row[branch.parent_N[node]] for node in branch.nodes)
    row.update({node: first + i for i, node in enumerate(branch.nodes)})
    return Feed(slot, tokens, parents, view=view)
