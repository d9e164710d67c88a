"""What drafters offer to a sequence, in tokens: what is kept of a draft, and what its rows cost.

Everything is priced in tokens: seconds times the tokens per second that are to be beaten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outpace.policies.acceptance import Kind, Pool, asks
from outpace.policies.costs import Costs
from outpace.policies.tuning import Tuning
from outpace.types import Budget, Load


class Offer(NamedTuple):
    """A draft that a drafter may be asked for, and what it should bring."""

    drafter: str
    nodes: int
    depth: int
    kept: float
    """Tokens expected to be kept."""
    gain: float
    """Of these, more than the rows and the call cost; levels are not in it."""
    kind: Kind
    """How sure a lookup is, in eighths; of others the width of the tree."""
    levels: float = 0.0
    stated: float = 0.0
    """Tokens that a lookup promised; 0 of others."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What a step may add, in tokens that it must bring; and plain decoding.

    Shape letters: R rows more.
    """

    rate: float
    """Tokens per second to beat."""
    plain: float
    """Seconds of a step without drafts."""
    row_R: tuple[float, ...]
    each: float
    """Of a sequence that drafts."""


def prices_of(costs: Costs, load: Load, own: int, guesses: int) -> Prices:
    """What rows cost, in tokens. In a batch a row costs its share of what all guesses take."""
    batch = load.batch
    rows = own + load.beside if load.beside else batch
    still, each = costs.rest(batch)
    first, *more = costs.passes(rows, load.context, batch)
    rate = max(batch / (first + still), costs.lately(batch))
    if batch > 1:
        many = max(batch // 2, guesses)
        one = max(0.0, costs.passed(rows + many, load.context, batch) - first) / many
        more = [first + one * n for n in range(1, len(more) + 1)]
    row_R = [0.0]
    for seconds in more:
        row_R.append(max(row_R[-1], rate * (seconds - first)))
    return Prices(rate, first + still, tuple(row_R), rate * each)


def look_up(
    name: str, told: Sequence[float], limit: Budget, pool: Pool, here: float, call: float, prices: Prices
) -> Offer | None:
    """The best draft of a lookup that says what it would propose.

    Args:
        call: tokens that asking it costs.
    """
    row_R = prices.row_R
    most = min(len(told), limit.max_nodes, limit.max_depth, len(row_R) - 1)
    if most <= 0:
        return None
    kind = (int(8 * told[0]),)
    scale = pool.kept.ratio(kind) * here
    kept = stated = promised = 0.0
    best, found = -1e9, (0, 0.0, 0.0)
    for count in range(1, most + 1):
        chance = told[count - 1]
        kept += min(1.0, chance * scale)
        stated += chance
        if kept - row_R[count] > best:
            best, found = kept - row_R[count], (count, kept, stated)
    count, kept, promised = found
    return Offer(name, count, count, kept, best - prices.each - call, kind, 0.0, promised)


def offers_of(
    name: str, budget: Budget, limit: Budget, pool: Pool, here: float, prices: Prices, tuning: Tuning
) -> list[Offer]:
    """Drafts of a drafter that has to be asked, by nodes and depth."""
    row_R, scale = prices.row_R, tuning.hope * here
    found: list[Offer] = []
    width = -1
    for nodes, depth in asks(budget):
        if nodes > limit.max_nodes or depth > limit.max_depth or nodes >= len(row_R):
            continue
        own = nodes if budget.shape.beam else 0
        if own != width:
            width, kept, whole = own, 0.0, 1.0
            made_D, levels_D = pool.sizes(width, budget.max_depth) if width else ((), ())
        whole *= min(1.0, scale * pool.kept.ratio((depth - 1, width)))
        kept += whole
        made, levels = (made_D[depth - 1], levels_D[depth - 1]) if width else (nodes, depth)
        low = min(int(made), len(row_R) - 2)
        price = row_R[low] + (made - low) * (row_R[low + 1] - row_R[low])
        found.append(Offer(name, nodes, depth, kept, kept - price - prices.each, (width,), levels))
    return found
