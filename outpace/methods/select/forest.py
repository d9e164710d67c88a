"""Several chosen drafts as one forest: common prefixes are shared, the least likely is left out.

Drafters of one text read the same words, so their guesses are no independent votes. Where two
agree, the guess is as likely as the surer of them says. Where they differ, the second can be right
only where the first is wrong:

    suffix     sat 0.6                  sat  0.6
    recycling  slept 0.4       ->       slept 0.4 * (1 - 0.6)

So it was for first guesses of suffix and recycling on 24 of the built-in prompts. Taken to be
independent, two that agree say 0.55 where 0.38 are kept. A rival says 0.36 where 0.15 are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.curve import assumed
from outpace.drafters.worth import LEAST, Chances
from outpace.types import ROOT, Budget, Draft


@dataclass(frozen=True, slots=True)
class Forest:
    draft: Draft
    worth: float
    """Tokens expected per unit of cost; 1 is plain decoding."""


NEXT = 0.35
"""Of drafters without an opinion: how likely a guess is, measured by the sibling before it."""


@dataclass(slots=True, eq=False)
class _Node:
    token: int
    depth: int
    chance: float = 0.0
    """Of being kept if its parent is, as the surest of its drafters says."""
    drafters: set[int] = field(default_factory=set)
    below: dict[int, _Node] = field(default_factory=dict)


def chances(draft: Draft, rate: float) -> list[float]:
    """Probability that each node is kept if its parent is.

    Args:
        draft: with `Chances` as its memo if its drafter has an opinion.
        rate: of a drafter that has none: how often its first guesses were right.
    """
    if isinstance(draft.memo, Chances):
        return list(draft.memo.own_N)
    own: list[float] = []
    siblings: dict[int, int] = {}
    for parent in draft.parent_N:
        rank = siblings.get(parent, 0)
        siblings[parent] = rank + 1
        own.append(rate * NEXT**rank)
    return own


def merge(drafts: Sequence[Draft], rates: Sequence[float], budget: Budget, branches: bool) -> Forest:
    """One draft of several.

    Args:
        branches: whether it may branch; otherwise it is the likeliest path.

    Returns:
        As many guesses, likeliest first, as make the most of a pass. A single draft that is
        wanted whole comes back as the object that it was.
    """
    root: dict[int, _Node] = {}
    for drafter, (draft, rate) in enumerate(zip(drafts, rates, strict=True)):
        places: list[_Node] = []
        for node, chance in enumerate(chances(draft, rate)):
            parent, token = draft.parent_N[node], draft.token_N[node]
            level = root if parent == ROOT else places[parent].below
            place = level.setdefault(token, _Node(token, draft.depth_N[node]))
            place.chance = max(place.chance, chance)
            place.drafters.add(drafter)
            places.append(place)
    picked, worth = _best(root, budget, branches)
    tokens = [node.token for node, _ in picked]
    parents = [parent for _, parent in picked]
    only = [draft for draft in drafts if len(draft)]
    if len(only) == 1 and len(only[0]) == len(tokens):
        return Forest(only[0], worth)
    return Forest(Draft.chosen(tokens, parents), worth)


def _best(root: dict[int, _Node], budget: Budget, branches: bool) -> tuple[list[tuple[_Node, int]], float]:
    """Nodes and their parents, in an order that has parents first and siblings by chance."""
    most = min(budget.max_nodes, budget.max_rows)
    heap: list[tuple[float, int, _Node, int]] = []
    ties = 0

    def offer(level: dict[int, _Node], parent: int, above: float) -> None:
        nonlocal ties
        surer: list[tuple[float, _Node]] = []
        for node in sorted(level.values(), key=lambda one: -one.chance):
            ties += 1
            rivals = sum(p for p, one in surer if one.drafters.isdisjoint(node.drafters))
            own = node.chance * max(0.0, 1.0 - rivals)
            surer.append((own, node))
            if node.depth <= budget.max_depth and above * own >= LEAST:
                heapq.heappush(heap, (-above * own, ties, node, parent))

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
