"""By what rule trees grow where no Python runs between their levels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

from outpace.models.branching import Branching, Rule, Trees
from outpace.tree.dynamic import MOST, Dynamic
from outpace.tree.growth import Growing
from outpace.types import Draft, Price


def ruled(trees: Sequence[Growing]) -> Branching | None:
    """Say by what rules trees grow.

    Returns:
        None where some tree needs more than a softmax, or has more to begin with.
    """
    plain = [tree for tree in trees if isinstance(tree, Dynamic) and _is_plain(tree)]
    return Branching([_rule(tree) for tree in plain]) if len(plain) == len(trees) else None


def _is_plain(tree: Dynamic) -> bool:
    budget = tree.row.budget
    return tree.chosen and tree.row.warp.raw and budget.stop is None and not budget.estimate


def _rule(tree: Dynamic) -> Rule:
    budget = tree.row.budget
    nodes, levels, begins = budget.max_nodes, budget.max_depth, tree.begins
    row_N, level_L = _prices(tree.price, nodes, levels)
    return Rule(
        nodes=nodes,
        levels=levels,
        beam=min(budget.shape.beam or MOST, nodes + (0 if begins is None else len(begins.token_P))),
        fan=min(MOST, nodes),
        pays=tree.pays,
        least=tree.least,
        row_N=row_N,
        level_L=level_L,
        temper_L=array("d", [tree.temper(depth) for depth in range(levels)]),
        begins=begins,
    )


@lru_cache
def _prices(price: Price, nodes: int, levels: int) -> tuple[array[float], array[float]]:
    return array("d", map(price.row, range(nodes))), array("d", map(price.level, range(levels)))


def drafts_of(found: Trees) -> list[Draft]:
    """The drafts that were found."""
    return [
        Draft.chosen(tokens, parents) for tokens, parents in zip(found.token_BN, found.parent_BN, strict=True)
    ]
