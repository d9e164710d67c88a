"""How the guesses of a chain are picked where no Python runs between its levels.

Shape letters: B sequences, L levels, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import Any

from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.coins import KeyedCoins
from outpace.models.levels import Found, Picks, Start
from outpace.tree.growth import Branch, DraftRow, Fixed, Growing, Level
from outpace.types import ROOT, Draft, Drawn, Law, chain


def picked(rows: Sequence[DraftRow[Any]], branches: Sequence[Branch[Any]], levels: int) -> Picks | None:
    """Say how guesses below the nodes of chains are picked.

    Returns:
        None where a setting of some sequence needs more than a softmax and a coin.
    """
    temperature_B: list[float] = []
    coins_B: list[KeyedCoins | None] = []
    for row in rows:
        drawn = row.drawn is not Drawn.CHOSEN
        if not row.warp.raw or (drawn and (row.warp.truncates() or not isinstance(row.coins, KeyedCoins))):
            return None
        temperature_B.append(row.warp.temperature if drawn else 0.0)
        coins_B.append(row.coins if isinstance(row.coins, KeyedCoins) and drawn else None)
    races = {row.drawn is Drawn.COUPLED for row in rows if row.drawn is not Drawn.CHOSEN}
    if len(races) > 1:
        return None
    # Nodes of a chain are numbered by their depth, and that of the pending token's child is 1.
    nodes_LB = [
        (coins, b.nodes[0] + i) for i in range(levels) for coins, b in zip(coins_B, branches, strict=True)
    ]
    if races == {True}:
        keys = [0 if coins is None else coins.race_key(node + 2) for coins, node in nodes_LB]
        return Picks(levels=levels, temperature_B=temperature_B, key_LB=keys)
    coin_LB = [0.0 if coins is None else coins.uniform(node, 0) for coins, node in nodes_LB] if races else ()
    return Picks(levels=levels, temperature_B=temperature_B, coin_LB=coin_LB)


def chained(trees: Sequence[Growing], branches: Sequence[Branch[Any]]) -> Picks | None:
    """Say how chains are drawn whole; None where some tree is none, or longer than another."""
    chains = [tree for tree in trees if isinstance(tree, Fixed)]
    lengths = {tree.straight(0) for tree in chains}
    if len(chains) < len(trees) or len(lengths) > 1 or not (levels := lengths.pop()):
        return None
    return picked([tree.row for tree in chains], branches, levels)


def chains_of(found: Found, trees: Sequence[Growing], id_D: Tensor | None) -> list[Draft]:
    """The drafts that were found, where all levels were run."""
    count, drafts = len(trees), []
    drawn = [] if found.law_LBD is None else found.law_LBD.flatten(0, 1).unbind()
    for i, tree in enumerate(trees):
        how = tree.row.drawn
        laws = () if how is Drawn.CHOSEN else tuple([Law(law, id_D) for law in drawn[i::count]])
        drafts.append(Draft(tuple(found.token_LB[i::count]), *chain(found.levels, how), laws))
    return drafts


def start_of(
    cache: DenseCache, branches: Sequence[Branch[Any]], levels: int, offset_B: Sequence[int]
) -> Start:
    """The first rows of levels, for which room is made.

    Args:
        offset_B: positions of the first rows of the slots.
    """
    slot_B = [branch.state.slot for branch in branches]
    row_B = [cache.scratch(slot, levels).start for slot in slot_B]
    position_B = list(map(add, row_B, offset_B))
    id_B: list[int] = []
    if branches[0].nodes != (ROOT,):
        id_B = [branch.token_N[branch.nodes[0]] for branch in branches]
    return Start(cache, slot_B, row_B, position_B, id_B, offset_B)


def note(cache: DenseCache, branches: Sequence[Branch[Any]], found: Found) -> None:
    """Number the rows of levels as those of passes are, and put them into the tails of their slots.

    A first level below the pending token is a pass of its own, whose rows are there already.
    """
    count, levels = len(branches), found.levels
    for i, branch in enumerate(branches):
        state, node = branch.state, branch.nodes[0]
        tokens = found.token_LB[i : levels * count : count]
        if node == ROOT:
            node, before = 0, state.row[ROOT]
            if not levels:
                cache.drop(state.slot)
        else:
            tokens, before = [branch.token_N[node], *tokens], state.row[branch.parent_N[node]]
        at, rows = len(state.row) - 1 + state.lead, len(tokens) - 1
        cache.append(state.slot, tokens[:rows], [before, *range(at, at + rows - 1)][:rows])
        state.row |= {node + row: at + row for row in range(rows)}


def levels_of(found: Found, rows: Sequence[DraftRow[Any]], id_D: Tensor | None) -> list[Level]:
    """What was found, level by level. Distributions are those of rows that draw; others have none."""
    listed: list[Level] = []
    for level in range(found.levels):
        at = slice(level * len(rows), (level + 1) * len(rows))
        law_B: list[Law | None] = [None] * len(rows)
        if found.law_LBD is not None:
            law_B = [
                None if row.drawn is Drawn.CHOSEN else Law(law, id_D)
                for row, law in zip(rows, found.law_LBD[level], strict=True)
            ]
        listed.append((found.token_LB[at], found.prob_LB[at], law_B))
    return listed
