"""By what rule trees grow where no Python runs between their levels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from outpace.coins import KeyedCoins
from outpace.models.branching import Branching, Draws, Rule, Trees
from outpace.tree.dynamic import MOST, Dynamic
from outpace.tree.growth import Growing
from outpace.tree.shapes import LEAST
from outpace.types import Draft, Drawn, Law, Price


def ruled(trees: Sequence[Growing]) -> Branching | None:
    """Say by what rules trees grow.

    Returns:
        None where some tree needs more than a softmax, or other draws and coins.
    """
    plain = [tree for tree in trees if isinstance(tree, Dynamic) and _is_plain(tree)]
    return Branching([_rule(tree) for tree in plain]) if len(plain) == len(trees) else None


def _is_plain(tree: Dynamic) -> bool:
    row, budget = tree.row, tree.row.budget
    if not row.warp.raw or budget.stop is not None or budget.estimate:
        return False
    # Other draws count siblings by other rules; other coins are not hashes.
    known = row.drawn in (Drawn.DISTINCT, Drawn.COUPLED) and isinstance(row.coins, KeyedCoins)
    return tree.chosen or (known and not row.warp.greedy)


def _rule(tree: Dynamic) -> Rule:
    budget = tree.row.budget
    nodes, levels, begins = budget.max_nodes, budget.max_depth, tree.begins
    beam = min(budget.shape.beam or MOST, nodes + (0 if begins is None else len(begins.token_P)))
    row_N, level_L = _prices(tree.price, nodes + beam, levels)
    return Rule(
        nodes=nodes,
        levels=levels,
        beam=beam,
        fan=min(MOST, nodes),
        pays=tree.pays,
        least=tree.least,
        row_N=row_N,
        level_L=level_L,
        temper_L=_tempers(tree.temper_D, levels),
        begins=begins,
        draws=None if tree.chosen else _draws(tree),
    )


def _draws(tree: Dynamic) -> Draws:
    row, races = tree.row, tree.row.drawn is Drawn.COUPLED
    coins, warp = row.coins, row.warp
    assert isinstance(coins, KeyedCoins)
    return Draws(
        races=races,
        temperature=warp.temperature,
        truncation=warp.truncation,
        truncates=warp.truncates,
        key=coins.race_base if races else coins.base,
        position=coins.position,
        sibling=max(tree.least, LEAST / max(1, row.budget.max_nodes)),
    )


@lru_cache
def _prices(price: Price, nodes: int, levels: int) -> tuple[array[float], array[float]]:
    return array("d", map(price.row, range(nodes))), array("d", map(price.level, range(levels)))


@lru_cache
def _tempers(temper_D: Sequence[float], levels: int) -> array[float]:
    told = array("d", temper_D or (1.0,))
    return told[:levels] + told[-1:] * (levels - len(told))


def drafts_of(found: Trees, trees: Sequence[Growing], id_D: Tensor | None) -> list[Draft] | None:
    """The drafts that were found; None where nothing was, for want of a distribution."""
    if not found.levels:
        return None
    drafts = []
    for i, tree in enumerate(trees):
        tokens, parents = found.token_BN[i], found.parent_BN[i]
        if tree.row.drawn is Drawn.CHOSEN:
            drafts.append(Draft.chosen(tokens, parents))
            continue
        assert isinstance(tree, Dynamic)
        first = len(tree.tokens)  # those before were there
        tree.tokens, tree.parents = tokens.tolist(), parents.tolist()
        for above, (prob_S, id_S) in zip(found.group_BG[i], found.law_BG[i], strict=True):
            below = [node for node in range(first, len(parents)) if parents[node] == above]
            tree.group(above, below, Law(prob_S, id_D if id_S is None else id_S))
        drafts.append(tree.finish()[0])
    return drafts
