"""What drafters offer to a sequence, in tokens: what is kept of a draft, and what its rows cost.

Everything is priced in tokens: seconds times the tokens per second that are to be beaten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outpace.policies.costs import Costs
from outpace.types import Budget, Load


class Offer(NamedTuple):
    """A draft that a drafter may be asked for, and what it should bring."""

    gain: float
    """Of the tokens ``kept``, more than rows and call cost; levels are not in it."""
    drafter: str
    nodes: int
    depth: int
    kept: float
    levels: float = 0.0
    stated: float = 0.0
    """Tokens that a lookup promised; 0 of others."""


class Prices(NamedTuple):
    """What R rows more cost, in tokens that a step must bring for them; and plain decoding."""

    rate: float
    """Tokens per second to beat."""
    plain: float
    """Seconds of a step without drafts."""
    row_R: tuple[float, ...]


def prices_of(costs: Costs, load: Load, own: int, guesses: int) -> Prices:
    """What rows cost, in tokens. In a batch a row costs its share of what all guesses take, as many as in
    the last step. ``own``: sequences of this policy.
    """
    batch, rows = load.batch, own + load.beside if load.beside else load.batch
    first, *more = costs.passes(rows, load.context, batch)
    plain = first + costs.rest(batch)
    rate = max(batch / plain, costs.lately(batch))
    if batch > 1:
        many = max(batch // 2, guesses)
        one = max(0.0, costs.passed(rows + many, load.context, batch) - first) / many
        more = [first + one * n for n in range(1, len(more) + 1)]
    row_R = [0.0]
    for seconds in more:
        row_R.append(max(row_R[-1], rate * (seconds - first)))
    return Prices(rate, plain, tuple(row_R))


def look_up(
    name: str, told: Sequence[float], limit: Budget, scale: float, call: float, prices: Prices
) -> Offer | None:
    """The best draft of a lookup that says what it would propose. ``scale``: what its chances are worth;
    ``call``: tokens that asking it costs.
    """
    row_R, best = prices.row_R, None
    kept = stated = 0.0
    for count, chance in enumerate(told[: min(limit.max_nodes, limit.max_depth, len(row_R) - 1)], 1):
        kept += min(1.0, chance * scale)
        stated += chance
        if best is None or kept - row_R[count] > best[0]:
            best = kept - row_R[count], name, count, count, kept, 0.0, stated
    return None if best is None else Offer(best[0] - call, *best[1:])


def offers_of(name: str, budget: Budget, limit: Budget, chance: float, prices: Prices) -> list[Offer]:
    """Drafts of a drafter that has to be asked, by depth: of all nodes, a third of them and so on.
    ``chance``: of a level, to be kept if the one before is.
    """
    row_R, found, tree = prices.row_R, list[Offer](), budget.shape.beam or budget.shape.parent_N
    size = min(budget.max_nodes, limit.max_nodes, len(row_R) - 1)
    while size > 0:
        kept, whole = 0.0, 1.0
        for depth in range(1, min(size, budget.max_depth, limit.max_depth) + 1):
            whole *= min(1.0, chance)
            kept += whole
            nodes = size if tree else depth
            found.append(Offer(kept - row_R[nodes], name, nodes, depth, kept, float(depth)))
        size = (size + 2) // 3 if budget.shape.beam and size > 1 else 0
    return found
