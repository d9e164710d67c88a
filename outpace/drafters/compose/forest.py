"""Several chosen drafts as one forest: common prefixes are shared, the least likely is left out."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.curve import assumed
from outpace.drafters.lookup.worth import LEAST, Chances
from outpace.types import ROOT, Budget, Draft


@dataclass(frozen=True, slots=True)
class Forest:
    """What came of a merge."""

    draft: Draft
    worth: float
    """Tokens expected per unit of cost; 1 is plain decoding."""


@dataclass(slots=True, eq=False)
class _Node:
    """A guess, by whomever."""

    token: int
    depth: int
    refused: float = 1.0
    """Probability that it is not reached and kept, its drafters taken to be independent."""
    below: dict[int, _Node] = field(default_factory=dict)


def chances(draft: Draft, rate: float) -> list[float]:
    """Probability that each node is reached and kept.

    Args:
        draft: with `Chances` as its memo if its drafter has an opinion.
        rate: of a drafter that has none: how often its first guesses were right.
    """
    memo = draft.memo
    reach: list[float] = []
    siblings: dict[int, int] = {}
    for node, parent in enumerate(draft.parent_N):
        if isinstance(memo, Chances):
            own = memo.own_N[node]
        else:
            rank = siblings.get(parent, 0)
            siblings[parent] = rank + 1
            own = rate * 0.5**rank
        reach.append(own * (1.0 if parent == ROOT else reach[parent]))
    return reach


def merge(
    drafts: Sequence[Draft], rates: Sequence[float], budget: Budget, branches: bool
) -> Forest:
    """One draft of several.

    Args:
        drafts: chosen, without riders.
        rates: of their drafters, see ``chances``.
        budget: not exceeded.
        branches: whether it may branch; otherwise it is the likeliest path.

    Returns:
        As many guesses, likeliest first, as make the most of a pass. A single draft that is
        wanted whole comes back as the object that it was.
    """
    root: dict[int, _Node] = {}
    for draft, rate in zip(drafts, rates, strict=True):
        places: list[_Node] = []
        for node, reach in enumerate(chances(draft, rate)):
            parent, token = draft.parent_N[node], draft.token_N[node]
            level = root if parent == ROOT else places[parent].below
            place = level.setdefault(token, _Node(token, draft.depth_N[node]))
            place.refused *= 1.0 - min(reach, 0.999)
            places.append(place)
    picked, worth = _best(root, budget, branches)
    tokens = [node.token for node, _ in picked]
    parents = [parent for _, parent in picked]
    only = [draft for draft in drafts if len(draft)]
    if len(only) == 1 and len(only[0]) == len(tokens):
        return Forest(only[0], worth)
    return Forest(Draft.chosen(tokens, parents), worth)


def _best(
    root: dict[int, _Node], budget: Budget, branches: bool
) -> tuple[list[tuple[_Node, int]], float]:
    """Nodes and their parents, in an order that has parents first and siblings by chance."""
    most = min(budget.max_nodes, budget.max_rows)
    heap: list[tuple[float, int, _Node, int]] = []
    ties = 0

    def offer(level: dict[int, _Node], parent: int, above: float) -> None:
        nonlocal ties
        for node in level.values():
            ties += 1
            # Rounding apart, a child is no likelier than its parent.
            chance = min(above, 1.0 - node.refused)
            if node.depth <= budget.max_depth and chance >= LEAST:
                heapq.heappush(heap, (-chance, ties, node, parent))

    offer(root, ROOT, 1.0)
    picked: list[tuple[_Node, int]] = []
    expected = worth = 1.0
    length = 0
    while heap and len(picked) < most:
        loss, _, node, parent = heapq.heappop(heap)
        if not branches and parent != len(picked) - 1:
            continue
        picked.append((node, parent))
        expected -= loss
        if expected / assumed(1 + len(picked)) >= worth:
            worth, length = expected / assumed(1 + len(picked)), len(picked)
        offer(node.below, len(picked) - 1, -loss)
    return picked[:length], worth
