"""Filling the shape of a budget with ranked guesses: a chain, a template, or a dynamic tree.

A lookup can say what may follow a place, best first, and about how likely each guess is. In a
chain and in a template the order alone counts. The r-th best guess below a node goes to the r-th
child that the template gives it. A dynamic tree takes the guesses whose paths are likeliest.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import TypeAlias, TypeVar

from outpace.types import ROOT, Budget, Draft

K = TypeVar("K")
Ranked: TypeAlias = Callable[[K], Iterable[tuple[int, float, K]]]
"""Key of a node -> token, share and key of each guess below it: best first, no token twice."""


def fill(budget: Budget, root: K, ranked: Ranked[K]) -> Draft:
    """Hang guesses below the pending token until the budget is spent.

    Args:
        budget: nothing in it is exceeded. A place of a template that finds no guess stays empty,
            with all below it, and leaves its node to a later place.
        ranked: asked once per node that may have children, read as far as they are wanted.

    Returns:
        A CHOSEN draft, empty where nothing is guessed.
    """
    if budget.shape.beam:
        return _dynamic(budget, root, ranked)
    most = min(budget.max_nodes, budget.max_rows)
    template: Sequence[int] | None = budget.shape.parent_N
    if template is None:
        template = range(ROOT, min(most, budget.max_depth) - 1)
    tokens: list[int] = []
    parents: list[int] = []
    at: dict[int, tuple[int, int, K]] = {ROOT: (ROOT, 0, root)}
    left: dict[int, Iterator[tuple[int, float, K]]] = {}
    for place, parent in enumerate(template):
        if len(tokens) >= most:
            break
        if parent not in at or at[parent][1] >= budget.max_depth:
            continue
        node, depth, key = at[parent]
        if parent not in left:
            left[parent] = iter(ranked(key))
        guess = next(left[parent], None)
        if guess is not None:
            at[place] = (len(tokens), depth + 1, guess[2])
            tokens.append(guess[0])
            parents.append(node)
    return Draft.chosen(tokens, parents)


def halving(guesses: Iterable[tuple[int, K]]) -> Iterator[tuple[int, float, K]]:
    """Shares for guesses that are ranked and nothing else: every one is half as likely."""
    share = 1.0
    for token, key in guesses:
        share /= 2
        yield token, share, key


def _dynamic(budget: Budget, root: K, ranked: Ranked[K]) -> Draft:
    """The likeliest paths first; a path is as likely as the product of its shares."""
    most = min(budget.max_nodes, budget.max_rows)
    tokens: list[int] = []
    parents: list[int] = []
    grown: Counter[int] = Counter()
    ties = count()
    heap: list[tuple[float, int, int, int, float, int, K, Iterator[tuple[int, float, K]]]] = []

    def offer(node: int, depth: int, value: float, guesses: Iterator[tuple[int, float, K]]) -> None:
        """Put the next guess below a node up for choice."""
        for token, share, key in guesses:
            if value * share * most > budget.shape.least:
                entry = (-value * share, next(ties), node, depth + 1, value, token, key, guesses)
                heapq.heappush(heap, entry)
            return

    def open_(node: int, depth: int, value: float, key: K) -> None:
        if depth < budget.max_depth and grown[depth] < budget.shape.beam:
            grown[depth] += 1
            offer(node, depth, value, iter(ranked(key)))

    open_(ROOT, 0, 1.0, root)
    while heap and len(tokens) < most:
        loss, _, parent, depth, above, token, key, guesses = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        offer(parent, depth - 1, above, guesses)
        open_(len(tokens) - 1, depth, -loss, key)
    return Draft.chosen(tokens, parents)
