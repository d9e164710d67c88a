"""Candidates for the first token of a cascade's draft, each with the lookup's words behind it.

the --+-- cat sat on the mat      the model's first, and its chain
      +-- dog ran                 its second, and what the lookup says to that
      +-- bird
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outpace.methods.cascade.guesses import Guesses, State
from outpace.methods.cascade.levels import LookupLevel
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import children
from outpace.types import ROOT, Draft, Drawn, Group

LEADERS = 3
"""Candidates where the shape of a tree is left to the drafter."""


def split(row: DraftRow[State]) -> tuple[int, list[int]]:
    """Share a budget out.

    Returns:
        Tokens of the chain, and of the branch of every other leader, itself counted. No other
        where siblings have to be drawn all together: the model drew the first alone.
    """
    budget = row.budget
    left = min(budget.max_nodes, budget.max_rows)
    most = min(left, budget.max_depth)
    template = budget.shape.parent_N
    if most < 2 or row.drawn in (Drawn.GREEDY_PLUS_ONE, Drawn.HUB):
        return most, []
    if template is None:
        others = [left // 4] * (LEADERS - 1) if budget.shape.beam else []
    else:
        kids = children(template)
        most, *others = (min(_height(kids, child), budget.max_depth) for child in kids[ROOT])
    others = others[: left - 1]
    most = max(1, min(most, left - len(others)))
    left -= most + len(others)
    sizes = []
    for size in others:
        more = max(0, min(size - 1, left, budget.max_depth - 1))
        left -= more
        sizes.append(1 + more)
    return most, sizes


def with_tails(g: Guesses, sizes: Sequence[int], lookup: LookupLevel | None) -> Draft:
    """The draft of ``g``; the lookup goes on from every rival, up to so many tokens in all."""
    draft = g.draft()
    tokens, parents = list(draft.token_N), list(draft.parent_N)
    groups = list(draft.groups)
    for token, size in zip(dict.fromkeys(g.rivals), sizes, strict=False):
        node = next(n for n, p in enumerate(parents) if p == ROOT and tokens[n] == token)
        if lookup is None or size < 2 or node < g.count:
            continue
        tail = Guesses(g.row, size)
        tail.append(token, None)
        lookup.guess([tail], size)
        for guess in tail.guessed[1:]:
            tokens.append(guess)
            parents.append(node)
            groups.append(Group(node, Drawn.CHOSEN, (len(tokens) - 1,)))
            node = len(tokens) - 1
    return Draft(tuple(tokens), tuple(parents), tuple(groups), draft.laws, memo=draft.memo)


def _height(kids: Mapping[int, Sequence[int]], node: int) -> int:
    return 1 + max((_height(kids, child) for child in kids.get(node, ())), default=0)
