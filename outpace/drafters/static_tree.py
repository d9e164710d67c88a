"""The static tree that measured acceptance by depth and rank asks for.

Shape letters: K depths, B ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from outpace.types import ROOT

RANKS = 10
"""Candidates per head whose accuracies are stored."""
LARGEST = 63
"""Nodes of the tree that is stored; a smaller budget takes the first of them."""


def likeliest(acceptance_KB: Sequence[Sequence[float]], nodes: int) -> tuple[int, ...]:
    """The parents of the tree that emits most per pass, likeliest nodes first.

    A node is reached with the product of the accuracies along its path, which never grows from
    parent to child. So the best tree of n nodes are the n likeliest places, and the first of them
    are the best smaller tree. Where the accuracies are alike at every depth this is
    `outpace.analysis.best_tree`.

    Args:
        acceptance_KB: by depth and rank. Ranks are taken in order, also where a measured rate
            rises by chance from a rank to the next.
        nodes: most guesses; fewer where more would add nothing.
    """
    parents: list[int] = []
    # (-value, turn, parent, depth, rank, value of the parent): the turn decides between equals.
    ready: list[tuple[float, int, int, int, int, float]] = []
    turn = 0

    def offer(parent: int, depth: int, rank: int, reach: float) -> None:
        nonlocal turn
        if depth < len(acceptance_KB) and rank < len(acceptance_KB[depth]):
            value = reach * acceptance_KB[depth][rank]
            if value > 0:
                heapq.heappush(ready, (-value, turn, parent, depth, rank, reach))
                turn += 1

    offer(ROOT, 0, 0, 1.0)
    while ready and len(parents) < nodes:
        negative, _, parent, depth, rank, reach = heapq.heappop(ready)
        parents.append(parent)
        offer(parent, depth, rank + 1, reach)
        offer(len(parents) - 1, depth + 1, 0, -negative)
    return tuple(parents)
