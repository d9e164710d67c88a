"""What drafters offer to a sequence: so many tokens, for so many rows and levels.

A lookup says by previews what it would propose, and its word is scaled by what it was worth lately.
Of all others it is learned, level by level, how much of their drafts is kept
(`outpace.policies.acceptance_model`): over all sequences, and how the one at hand differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outpace.policies.acceptance_model import Belief, Pool, cuts, sizes
from outpace.policies.base import Evidence, PolicyRow
from outpace.policies.batch_cost import Option, described
from outpace.policies.costs import Costs
from outpace.types import Budget

MOST_WORTH, LEAST_WORTH = 2.0, 0.05
"""How many of the tokens that a lookup promises it may be thought to keep."""

DOUBT, KEEP = 6.0, 0.95
"""Tokens that a lookup must have promised before its word is doubted, and how slowly it is
forgotten whether it kept it: lookups learn from refusals themselves, so this is for boasters."""


@dataclass(slots=True)
class Learned:
    """What one sequence taught about its drafters."""

    beliefs: dict[str, Belief] = field(default_factory=dict)
    promised: dict[str, list[float]] = field(default_factory=dict)
    """Of those that give previews: tokens kept and tokens promised, lately."""

    def reopen(self, candidates: Candidates, but: str) -> list[str]:
        """The text has changed: what was known of the others is void. Returns who they are."""
        others = [name for name in self.beliefs if name != but]
        for name in others:
            self.beliefs[name].reopen(candidates.pool(name))
        return others


@dataclass(slots=True)
class _Known:
    """What is known of a drafter, whatever the sequence."""

    budget: Budget
    learned: int
    """Levels that the pool had taken in."""
    cuts: list[tuple[tuple[int, int], int, float, float]]
    """Nodes and depth asked for, width, nodes and levels expected; for every cut."""
    chances: dict[int, list[float]]
    """Width -> chance of each level."""
    deepest: int
    largest: int


class Candidates:
    """What is known of drafters, over all sequences. Changes in ``learn`` alone."""

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}
        self._known: dict[str, _Known] = {}

    def pool(self, name: str) -> Pool:
        """Of a drafter that was asked for an option before."""
        return self._pools[name]

    def young(self, options: Iterable[Option]) -> bool:
        """Whether next to nothing is known of one of these."""
        return any(not one.previewed and self._pools[one.drafter].young for one in options)

    def option(
        self, row: PolicyRow, name: str, budget: Budget, learned: Learned, costs: Costs
    ) -> Option | None:
        """What a drafter offers; None if it has nothing to propose or there is no room.

        Args:
            row: the sequence.
            name: the drafter.
            budget: that its spec asks for.
            learned: what the sequence taught.
            costs: of passes and drafts.
        """
        depth, nodes = row.limit.max_depth, row.limit.max_nodes
        if depth <= 0 or nodes <= 0:
            return None
        preview = row.previews.get(name)
        if preview is not None:
            kept, promised = learned.promised.get(name, (0.0, 0.0))
            scale = (kept + DOUBT) / (promised + DOUBT)
            scale = min(MOST_WORTH, max(LEAST_WORTH, scale))
            return described(name, preview[:nodes], min(depth, budget.max_depth), scale)
        known = self._know(name, budget, costs)
        belief = learned.beliefs.get(name)
        if belief is None:
            belief = learned.beliefs[name] = Belief()
        reach = {width: belief.reach(chance_D) for width, chance_D in known.chances.items()}
        all_C = known.cuts
        if depth < known.deepest or nodes < known.largest:
            all_C = [cut for cut in all_C if cut[0][0] <= nodes and cut[0][1] <= depth]
        if not all_C:
            return None
        asked_C, width_C, nodes_C, levels_C = zip(*all_C, strict=True)
        kept_C = [reach[width][ask[1] - 1] for ask, width in zip(asked_C, width_C, strict=True)]
        late = costs.late(name, row.num_uncached.get(name, 0))
        return Option(name, kept_C, nodes_C, levels_C, asked_C, tree=budget.shape.beam > 0, late=late)

    def _know(self, name: str, budget: Budget, costs: Costs) -> _Known:
        """What is known of a drafter before a look at the sequence."""
        tree = budget.shape.beam > 0
        pool = self._pools.get(name)
        if pool is None:
            width = budget.max_nodes if tree else 0
            pool = self._pools[name] = Pool(*costs.kept(name), width)
        found = self._known.get(name)
        if found is not None and found.learned == pool.learned and found.budget is budget:
            return found
        if tree:
            asks = cuts(budget)
            deepest = {nodes: depth for nodes, depth in asks}  # the last one of each
            all_C = [(ask, ask[0], *pool.growth.expect(*ask)) for ask in asks]
            chances = {width: pool.chances(depth, width) for width, depth in deepest.items()}
        else:
            size_D = sizes(budget)
            all_C = [((nodes, depth), 0, float(nodes), float(depth)) for depth, nodes in enumerate(size_D, 1)]
            chances = {0: pool.chances(len(size_D))}
        found = self._known[name] = _Known(
            budget,
            pool.learned,
            all_C,
            chances,
            max((ask[1] for ask, *_ in all_C), default=0),
            max((ask[0] for ask, *_ in all_C), default=0),
        )
        return found

    def learn(
        self, learned: Learned, asked: Option, grant: tuple[int, int], promised: float, seen: Evidence
    ) -> tuple[bool, bool]:
        """Take in a draft.

        Args:
            learned: of its sequence.
            asked: what was offered.
            grant: nodes and depth that it might have.
            promised: tokens that it promised.
            seen: what became of it.

        Returns:
            Whether a level was refused, and whether so much less was kept than expected that the
            text must have changed.
        """
        if asked.previewed:
            pair = learned.promised.setdefault(seen.drafter, [0.0, 0.0])
            if not seen.censored:
                pair[0] = KEEP * pair[0] + seen.accepted
                pair[1] = KEEP * pair[1] + promised
            return False, False
        nodes, depth = grant
        # Silence where a level was asked for is a level that was not kept.
        refused = not seen.censored and seen.accepted < depth
        pool, belief = self._pools[seen.drafter], learned.beliefs[seen.drafter]
        if asked.tree:
            pool.growth.learn(nodes, depth, seen.drafted, seen.depth)
        width = nodes if asked.tree else 0
        return refused, belief.learn(pool, seen.accepted, refused, width)
