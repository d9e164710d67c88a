"""What drafters offer to a sequence, in tokens: what is kept of a draft, and what its rows cost.

Everything is priced in tokens: seconds times the tokens per second that are to be beaten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from outpace.policies.acceptance import KEPT, Pool
from outpace.policies.base import PolicyRow
from outpace.policies.costs import Costs
from outpace.types import NOTHING, Budget, Choice, Load, Plan, Price

NONE = "none"


class Offer(NamedTuple):
    """A draft that a drafter may be asked for, and what it should bring."""

    gain: float
    """Tokens kept, more than the rows cost; levels are not in it."""
    drafter: str
    nodes: int
    depth: int
    kept: float
    """Tokens expected to be kept."""
    rows: float
    """Guesses expected; a drafter may stop by itself."""
    width: int = 0
    """Of a dynamic tree."""
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
    none: float
    """Tokens per second of such steps."""
    row_R: tuple[float, ...]
    """For one sequence, that of a batch by its share."""
    pass_R: tuple[float, ...]
    """For all sequences together. The first rows more may cost as much as several."""
    costs: Costs
    most: int
    """Guesses of a pass whose cost is foreseen."""
    still: dict[str, Plan] = field(default_factory=dict)
    """Reason -> the plan that drafts nothing."""
    levels: dict[tuple[str, int], float] = field(default_factory=dict)

    def level(self, drafter: str, sequences: int = 1) -> float:
        """What a level of so many sequences together costs."""
        if (drafter, sequences) not in self.levels:
            self.levels[drafter, sequences] = self.rate * self.costs.price(drafter, sequences)
        return self.levels[drafter, sequences]

    def together(self, guesses: float) -> float:
        """What so many guesses of all sequences cost."""
        last, count = len(self.pass_R) - 1, round(guesses)
        return self.pass_R[count] if count <= last else self.pass_R[last] * count / last

    def paying(self, offer_B: Mapping[int, Offer]) -> dict[int, Offer]:
        """Of what was offered to sequences, best first, as many as gain most together."""
        found: dict[int, Offer] = {}
        best, guesses, kept, nodes = 0.0, 0.0, 0.0, 0
        order = sorted(offer_B, key=offer_B.__getitem__, reverse=True)
        for n, i in enumerate(order, 1):
            guesses, kept = guesses + offer_B[i].rows, kept + offer_B[i].kept
            nodes += offer_B[i].nodes
            if nodes <= self.most and kept - self.together(guesses) > best:
                best, found = kept - self.together(guesses), {j: offer_B[j] for j in order[:n]}
        return found

    def plan(self, row: PolicyRow, offer: Offer | None, reason: str) -> Plan:
        """Put an offer into a plan, and say why."""
        if offer is None:
            if reason not in self.still:
                self.still[reason] = Plan(NONE, NOTHING, Choice(reason, {NONE: self.none}))
            return self.still[reason]
        own, level = row.drafters[offer.drafter], self.level(offer.drafter) if offer.levels else 0.0
        nodes, depth = min(offer.nodes, own.max_nodes), min(offer.depth, own.max_depth)
        price = Price((level,), self.row_R) if offer.levels else None
        fits = min(own.max_rows, row.limit.max_rows)
        asked = Budget(nodes, depth, fits, shape=own.shape, stop=own.stop, price=price)
        seconds = self.plain + (offer.kept - offer.gain + level * offer.levels) / self.rate
        rates = {NONE: self.none, offer.drafter: (self.none * self.plain + offer.kept) / seconds}
        return Plan(offer.drafter, asked, Choice(reason, rates))


class Menu(NamedTuple):
    """What a drafter that has to be asked offers to one sequence, and what that follows from."""

    prices: Prices
    room: int
    """Levels that the sequence has room for."""
    level: float = 0.0
    """Tokens that a level costs, for one sequence."""
    read: float = 0.0
    """Tokens that the text costs that it has to read first."""
    offers: Sequence[Offer] = ()
    """The ones that gain most with 1, 2, ... levels at most."""
    best: Offer | None = None
    """The one that gains most, less its levels, for one sequence."""


def prices_of(costs: Costs, load: Load, own: int, guesses: int) -> Prices:
    """What rows cost, in tokens: in a batch a share of what all guesses take. ``own`` sequences are of this
    policy, and the last step had so many guesses.
    """
    batch, rows = load.batch, own + load.beside if load.beside else load.batch
    most, longest = costs.most(batch), costs.tuning.most
    first, *more = costs.passes(rows, load.context, batch, min(most, longest))
    rate = max(batch / first, costs.lately(batch))
    row_R = pass_R = tuple(accumulate([rate * (seconds - first) for seconds in (first, *more)], max))
    if batch > 1:
        many = max(batch // 2, guesses)
        one = rate * max(0.0, costs.passed(rows + many, load.context, batch) - first) / many
        row_R = tuple([one * n for n in range(len(pass_R))])
    return Prices(rate, first, batch / first, row_R, pass_R, costs, most)


def look_up(name: str, preview: Sequence[float], limit: Budget, scale: float, prices: Prices) -> Offer:
    """The best draft of a lookup that says what chances its guesses have; ``scale`` corrects them."""
    row_R, best, kept, stated = prices.row_R, (-math.inf, 0, 0.0, 0.0), 0.0, 0.0
    for n, chance in enumerate(preview[: min(limit.max_nodes, limit.max_depth, len(row_R) - 1)], 1):
        kept += min(1.0, chance * scale)
        stated += chance
        if kept - row_R[n] > best[0]:
            best = kept - row_R[n], n, kept, stated
    gain, count, kept, stated = best
    return Offer(gain, name, count, count, kept, count, stated=stated)


def fill(menu: Menu, name: str, budget: Budget, limit: Budget, pool: Pool, here: float) -> Menu:
    """The menu with its offers, where chances are worth so much ``here``. All that is left of an answer pays
    for what is read first.
    """
    best_D: dict[int, Offer] = {}
    row_R, hope, width = menu.prices.row_R, pool.tuning.hope * here, -1
    share = menu.read / max(1, limit.max_depth)
    for nodes, depth in pool.asks(budget):
        if nodes > limit.max_nodes or depth > menu.room or nodes >= len(row_R):
            continue
        own = nodes if budget.shape.beam else 0
        if own != width:
            width, kept, whole = own, 0.0, 1.0
            size_D = pool.sizes(width, menu.room) if width else []
        whole *= min(1.0, hope * pool.ratio(KEPT, depth - 1, width))
        kept += whole
        made, levels = size_D[depth - 1] if width else (nodes, depth)
        low = min(int(made), len(row_R) - 2)
        price = row_R[low] + (made - low) * (row_R[low + 1] - row_R[low])
        offer = Offer(kept - price - share, name, nodes, depth, kept, made, width, levels)
        best_D[depth] = max(offer, best_D.get(depth, offer))
    offers = tuple(accumulate([best_D[depth] for depth in sorted(best_D)], max))
    best = max(offers, key=lambda one: one.gain - menu.level * one.levels, default=None)
    return menu._replace(offers=offers, best=best)
