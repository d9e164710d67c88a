"""The best fixed tree, from how often the first, second, ... sibling of a node is the one accepted.

With acceptance a[b], the probability that the b-th sibling is the first accepted, alike at every
node, a node is reached with probability

    value(node) = a[b1] * a[b2] * ...       b1, b2, ...: the ranks along its path

and a pass emits 1 + the sum of the values of all nodes. The dynamic program finds the tree with
the largest sum for every number of nodes and levels at once. It builds a node with b children from
two trees. The first is smaller: the node, its first b - 1 children, and what hangs below them. The
second has the b-th child as its root.

Sources: Sequoia, arXiv:2402.12374 (F, G and the hardware-aware choice of the size).

Shape letters: M sizes of subtrees, their root included; B siblings.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outpace.tree.shapes import MAX_NODES, children
from outpace.types import ROOT, CostCurve, Shape

Floats = NDArray[np.float64]
_SAME = 1e-12  # sums that differ by less differ by rounding alone


def optimal(acceptance: Sequence[float], nodes: int, depth: int) -> Shape:
    """The template that emits most per pass.

    Args:
        acceptance: a[1], a[2], ...: of each sibling, that it is the first accepted one. No node
            gets more children than there are entries.
        nodes: most guesses.
        depth: most levels.

    Returns:
        A template of at most ``nodes`` nodes; fewer where more would add nothing. Nodes that are
        likelier to be reached come first, so that, while a[1] >= a[2] >= ..., its first n nodes
        are the best template of n nodes.

    Raises:
        ValueError: no distribution in ``acceptance``, or a size out of range.

    Cost: O(nodes^2 * depth * siblings), vectorised over one ``nodes``; 64 nodes, 8 levels and 8
    siblings take some 30 ms.
    """
    table = _Table(acceptance, nodes, depth)
    best_M = table.best[depth]
    size = int(np.argmax(best_M >= best_M.max() - _SAME))
    return table.shape(depth, size)


def expected(shape: Shape, acceptance: Sequence[float]) -> float:
    """Mean emitted per pass of a template; a sibling without an entry is never accepted.

    Raises:
        ValueError: a chain without a length, or a tree that is grown as it goes.
    """
    if shape.parent_N is None:
        raise ValueError("only a template has an expected length, got a chain or a dynamic tree")
    value: list[float] = []
    rank: dict[int, int] = {}
    for parent in shape.parent_N:
        b = rank[parent] = rank.get(parent, -1) + 1
        reach = 1.0 if parent == ROOT else value[parent]
        value.append(reach * (acceptance[b] if b < len(acceptance) else 0.0))
    return 1.0 + sum(value)


def best_size(
    acceptance: Sequence[float],
    cost: CostCurve,
    draft_seconds_per_level: float,
    context: float,
    max_nodes: int,
    max_depth: int,
) -> tuple[Shape, float]:
    """The template that emits most per second on a machine.

    Args:
        cost: of the target's pass; the pending token is a row as well.
        draft_seconds_per_level: every level costs one pass of the drafter, however wide it is.
        max_nodes: most guesses.
        max_depth: most levels.

    Returns:
        The template, empty where no guess pays, and its tokens per second.
    """
    table = _Table(acceptance, max_nodes, max_depth)
    seconds_M = np.array([cost.seconds(rows, context) for rows in range(1, max_nodes + 2)])
    best, where = 1.0 / float(seconds_M[0]), (0, 1)
    for levels in range(1, max_depth + 1):
        rate_M = table.best[levels][1:] / (seconds_M + levels * draft_seconds_per_level)
        at = int(np.argmax(rate_M))
        if rate_M[at] > best:
            best, where = float(rate_M[at]), (levels, at + 1)
    return table.shape(*where), best


class _Table:
    """Best sums for every number of levels and every size, and how they are made."""

    def __init__(self, acceptance: Sequence[float], nodes: int, depth: int) -> None:
        if not acceptance or min(acceptance) < 0 or sum(acceptance) > 1 + 1e-9:
            raise ValueError(
                f"acceptance of siblings must be probabilities that exclude each other, "
                f"got {list(acceptance)}"
            )
        if not 0 <= nodes <= MAX_NODES or depth < 0:
            raise ValueError(f"need 0 to {MAX_NODES} nodes and 0 levels or more, got {nodes} and {depth}")
        self._acceptance = acceptance
        alone_M = np.full(nodes + 2, -np.inf)
        alone_M[1] = 1.0  # a leaf
        self.best: list[Floats] = [alone_M]
        """Levels -> size -> most expected tokens of a tree of exactly that size; -inf: none."""
        self._fan: list[NDArray[np.int64]] = [np.zeros(nodes + 2, np.int64)]
        """Likewise, how many children the root has."""
        self._rest: list[list[NDArray[np.int64]]] = [[]]
        """Likewise by b, the size of what is left without the b-th child and all below it."""
        for _ in range(depth):
            self._add_level(alone_M)

    def _add_level(self, alone_M: Floats) -> None:
        below_M = self.best[-1]
        best_M, fan_M = alone_M.copy(), np.zeros(len(alone_M), np.int64)
        rest: list[NDArray[np.int64]] = []
        with_M = alone_M  # the root has exactly b children
        for b, accepted in enumerate(self._acceptance, start=1):
            term_M = np.where(np.isinf(below_M), -np.inf, accepted * np.maximum(below_M, 0.0))
            next_M = np.full(len(alone_M), -np.inf)
            rest_M = np.zeros(len(alone_M), np.int64)
            for size in range(2, len(alone_M)):
                sums = with_M[1:size] + term_M[size - 1 : 0 : -1]
                at = int(np.argmax(sums))
                next_M[size], rest_M[size] = sums[at], at + 1
            better = next_M > best_M + _SAME
            best_M, fan_M = np.where(better, next_M, best_M), np.where(better, b, fan_M)
            rest.append(rest_M)
            with_M = next_M
        self.best.append(best_M)
        self._fan.append(fan_M)
        self._rest.append(rest)

    def shape(self, levels: int, size: int) -> Shape:
        """The template behind an entry, likeliest nodes first."""
        parents: list[int] = []
        values: list[float] = []
        self._hang(ROOT, 1.0, levels, size, parents, values)
        kids = children(parents)
        place = {ROOT: ROOT}
        ready = [(-values[kids[ROOT][0]], kids[ROOT][0])] if parents else []
        ordered: list[int] = []
        while ready:
            _, node = heapq.heappop(ready)
            place[node] = len(ordered)
            ordered.append(place[parents[node]])
            family = kids[parents[node]]
            after = family[family.index(node) + 1 :][:1]  # a sibling waits for the one before
            for child in (*kids.get(node, ())[:1], *after):
                heapq.heappush(ready, (-values[child], child))
        return Shape(tuple(ordered))

    def _hang(
        self, parent: int, value: float, levels: int, size: int, parents: list[int], values: list[float]
    ) -> None:
        """Append the nodes below ``parent``, siblings in order."""
        sizes = []
        for b in range(int(self._fan[levels][size]), 0, -1):
            rest = int(self._rest[levels][b - 1][size])
            sizes.append(size - rest)
            size = rest
        for b, below in enumerate(reversed(sizes)):
            parents.append(parent)
            values.append(value * self._acceptance[b])
            self._hang(len(parents) - 1, values[-1], levels - 1, below, parents, values)
