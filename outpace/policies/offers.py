"""What drafters offer to a sequence, in tokens: what is kept of a draft, and what its rows cost.

Everything is priced in tokens: seconds times the tokens per second that are to be beaten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outpace.policies.acceptance import Pool, asks, sure
from outpace.policies.base import PolicyRow
from outpace.policies.costs import Costs
from outpace.policies.tuning import TUNING
from outpace.types import Load

_MOST = 64  # guesses of one sequence that are priced one by one


@dataclass(frozen=True, slots=True)
class Offer:
    """A draft that a drafter may be asked for, and what it should bring."""

    drafter: str
    nodes: int
    depth: int
    kept: float
    """Tokens expected to be kept."""
    gain: float
    """Of these, more than the rows and the call cost; levels are not in it."""
    kind: tuple[int, int]
    """Width of a tree, or SURE and how sure a lookup is."""
    levels: float = 0.0
    stated: float = 0.0
    """Tokens that a lookup promised."""


@dataclass(slots=True)
class Prices:
    """What a step may add, in tokens that it must bring; and plain decoding.

    Shape letters: R rows more.
    """

    rate: float
    """Tokens per second to beat."""
    plain: float
    """Seconds of a step without drafts."""
    row_R: list[float]
    each: float
    """Of a sequence that drafts."""


def prices_of(costs: Costs, load: Load, own: int, lately: float, guesses: int) -> Prices:
    """What rows cost, in tokens. In a batch a row costs its share of what all guesses take."""
    batch = load.batch
    rows = own + load.beside if load.beside else batch
    first = costs.passed(rows, load.context, batch)
    still, each = costs.rest(batch)
    plain = first + still
    rate = max(batch / plain, lately)
    most = min(_MOST, costs.most(batch))
    if batch > 1:
        many = max(batch // 2, guesses)
        one = rate * max(0.0, costs.passed(rows + many, load.context, batch) - first) / many
        return Prices(rate, plain, [one * n for n in range(most + 1)], rate * each)
    row_R = [0.0]
    for n in range(1, most + 1):
        row_R.append(max(row_R[-1], rate * (costs.passed(rows + n, load.context, batch) - first)))
    return Prices(rate, plain, row_R, rate * each)


def look_up(
    costs: Costs,
    row: PolicyRow,
    name: str,
    told: Sequence[float],
    ratio: Callable[[tuple[int, int]], float],
    here: float,
    prices: Prices,
) -> Offer | None:
    """The best draft of a lookup that says what it would propose."""
    most = min(len(told), row.limit.max_nodes, row.limit.max_depth, len(prices.row_R) - 1)
    if most <= 0:
        return None
    kind = sure(told[0])
    scale = ratio(kind) * here
    before = prices.each + prices.rate * costs.price(name)
    kept = stated = 0.0
    best: Offer | None = None
    for count in range(1, most + 1):
        chance = told[count - 1]
        kept += min(1.0, chance * scale)
        stated += chance
        gain = kept - prices.row_R[count] - before
        if best is None or gain > best.gain:
            best = Offer(name, count, count, kept, gain, kind, stated=stated)
    return best


def offers_of(
    costs: Costs, row: PolicyRow, name: str, pool: Pool, here: float, prices: Prices
) -> list[Offer]:
    """Drafts of a drafter that has to be asked, by nodes and depth."""
    budget, limit, row_R = row.drafters[name], row.limit, prices.row_R
    scale = TUNING.hope * here
    late = costs.late(name, row.num_uncached.get(name, 0))
    before = prices.each + prices.rate * late / TUNING.spread
    kept_W: dict[int, list[float]] = {}
    sizes_W: dict[int, tuple[list[float], list[float]]] = {}
    found = []
    for nodes, depth in asks(budget):
        if nodes > limit.max_nodes or depth > limit.max_depth or nodes >= len(row_R):
            continue
        width = nodes if budget.shape.beam else 0
        if width not in sizes_W:
            sizes_W[width] = pool.sizes(width, budget.max_depth)
            kept_W[width] = [0.0, 1.0]  # tokens kept, and chance that the whole was
        kept = kept_W[width]
        kept[1] *= min(1.0, scale * pool.ratio((width, depth - 1)))
        kept[0] += kept[1]
        made = sizes_W[width][0][depth - 1] if budget.shape.beam else float(nodes)
        low = min(int(made), len(row_R) - 2)
        price = row_R[low] + (made - low) * (row_R[low + 1] - row_R[low]) + before
        levels = sizes_W[width][1][depth - 1]
        found.append(Offer(name, nodes, depth, kept[0], kept[0] - price, (width, depth), levels))
    return found


def gain_of(offer: Offer) -> float:
    """For comparisons."""
    return offer.gain
