"""What drafters offer to a sequence, in tokens: what is kept of a draft, and what its rows cost.

Everything is priced in tokens: seconds times the tokens per second that are to be beaten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

from outpace.policies.acceptance import DRAFTED, KEPT, Pool
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
    """Nodes expected: a drafter may stop by itself."""
    width: int = 0
    """Of a dynamic tree."""
    levels: float = 0.0
    """Likewise expected."""
    stated: float = 0.0
    """Tokens that a lookup promised; 0 of others."""


class Menu(NamedTuple):
    """What a drafter offers to one sequence at one rate."""

    offers: Sequence[Offer]
    """The ones that gain most with 1, 2, ... levels at most."""
    read: float = 0.0
    """Tokens that the text costs that the drafter has to read first."""
    best: Offer | None = None
    """The one that gains most, less its levels, for one sequence."""


_NEAR = 1.1
"""Rates that differ by less count as one, so that what was weighed at it holds. So do texts, by what chances
are worth in them. In replay 1.02 and 1.05 are the same to 0.1 %, and weigh more often."""


class Prices:
    """What a step may add, in tokens: seconds times the tokens per second that it has to bring, see ``at``.

    Args:
        costs: of the machine.
        own: sequences of this policy.
        guesses: of the last step.

    Shape letters: R rows more.
    """

    def __init__(self, costs: Costs, load: Load, own: int, guesses: int) -> None:
        batch, rows = load.batch, own + load.beside
        self.batch = batch
        self.foreseen = costs.foreseen(batch)  # guesses of a pass whose cost is foreseen
        self.plain, *more = costs.passes(rows, load.context, batch, min(self.foreseen, costs.tuning.most))
        self.none = batch / self.plain  # tokens per second of steps without drafts
        # Seconds of all sequences together. The first rows more may cost as much as several.
        self._pass_R = self._row_R = list(accumulate([s - self.plain for s in (self.plain, *more)], max))
        if batch > 1:  # one sequence pays its share of what all guesses take
            many = max(batch // 2, guesses)
            one = max(0.0, costs.passed(rows + many, load.context, batch) - self.plain) / many
            self._row_R = [one * n for n in range(len(self._pass_R))]
        self._draft = cache(lambda of, together: [costs.price(of, together, levels) for levels in (1.0, 2.0)])
        self._reading = cache(lambda drafter: costs.reading(drafter, load.context))
        self._sizes = cache(self._sized)
        self._idle = cache(lambda reason: Plan(NONE, NOTHING, Choice(reason, {NONE: self.none})))
        self._priced = cache(lambda rate: tuple([rate * more for more in self._row_R]))
        self._menus: dict[tuple[Any, ...], Menu] = {}
        self.at(0)

    def at(self, pace: int) -> None:
        """Have tokens emitted at ``_NEAR ** pace`` times the rate of plain decoding."""
        self._pace, self.rate = pace, self.none * _NEAR**pace

    def pace(self, offers: Iterable[Offer]) -> int:
        """At which rate a step with these drafts emits; see ``at``."""
        kept = price = 0.0
        users: dict[str, list[float]] = {}
        for one in offers:
            kept, price = kept + one.kept, price + one.kept - one.gain
            users.setdefault(one.drafter, []).append(one.levels)
        price += sum([self.draft(name, max(levels), len(levels)) for name, levels in users.items()])
        over = (1.0 + kept / self.batch) / (1.0 + price / (self.rate * self.plain))
        return max(0, round(math.log(over, _NEAR)))

    def draft(self, drafter: str, levels: float, sequences: int = 1) -> float:
        """Of a draft with so many levels, for so many sequences together."""
        first, further = self._levels(drafter, sequences)
        return first + further * (levels - 1.0) if levels else 0.0

    def _levels(self, drafter: str, sequences: int = 1) -> tuple[float, float]:
        """Of the first level of a draft, and of each further one."""
        first, two = self._draft(drafter, sequences)
        return self.rate * first, self.rate * (two - first)

    def look_up(self, name: str, preview: Sequence[float], limit: Budget, scale: float) -> Offer:
        """The best draft of a lookup that says what chances its guesses have; ``scale`` corrects them."""
        more_R, best, kept, stated = self._row_R, (-math.inf, 0, 0.0, 0.0), 0.0, 0.0
        for n, chance in enumerate(preview[: min(limit.max_nodes, limit.max_depth, len(more_R) - 1)], 1):
            kept += min(1.0, chance * scale)
            stated += chance
            if (gain := kept - self.rate * more_R[n]) > best[0]:
                best = gain, n, kept, stated
        gain, count, kept, stated = best
        return Offer(gain, name, count, count, kept, count, stated=stated)

    def menu(self, name: str, budget: Budget, limit: Budget, pool: Pool, here: float, left: int) -> Menu:
        """What a drafter offers that has to be asked; weighed once for all sequences that are alike.

        Args:
            here: what its chances are worth for this text.
            left: tokens of the answer, all of which pay for what the drafter reads first; 0: it has read.
        """
        near, room = round(math.log(here, _NEAR)), min(limit.max_depth, budget.max_depth)
        most, long = min(limit.max_nodes, budget.max_nodes), left.bit_length()
        alike = name, budget, most, room, pool, near, long, self._pace
        menu = self._menus.get(alike)
        if menu is None:
            read = self._reading(name) if left else 0.0
            share = read / (0.75 * 2**long)  # so many tokens are left, give or take a third
            offers = self._weigh(name, budget, most, room, pool, _NEAR**near, share)
            further = self._levels(name)[1]
            best = max(offers, key=lambda one: one.gain - further * one.levels, default=None)
            menu = self._menus[alike] = Menu(offers, self.rate * read, best)
        return menu

    def _weigh(
        self, name: str, budget: Budget, most: int, room: int, pool: Pool, here: float, read: float
    ) -> list[Offer]:
        """The draft that gains most with 1, 2, ... levels at most."""
        best_D: dict[int, Offer] = {}
        width, rate, hope = -1, self.rate, pool.tuning.hope * here
        for nodes, depth, own, ratio, rows, levels, seconds in self._sizes(budget, pool):
            if nodes > most or depth > room:
                continue
            if own != width:
                width, kept, whole = own, 0.0, 1.0
            whole *= min(1.0, hope * ratio)
            kept += whole
            gain = kept - rate * (seconds + read)
            if depth not in best_D or gain > best_D[depth].gain:
                best_D[depth] = Offer(gain, name, nodes, depth, kept, rows, width, levels)
        return list(accumulate([best_D[depth] for depth in sorted(best_D)], max))

    def _sized(self, budget: Budget, pool: Pool) -> list[tuple[int, int, int, float, float, float, float]]:
        """Drafts: nodes, depth, width of a tree, what the chance of the last level is worth. Then rows and
        levels that are expected, and seconds that the rows add to a pass.
        """
        found, row_R, wide = [], self._row_R, -1
        for nodes, depth in pool.sizes_to_weigh(budget):
            if nodes < len(row_R):
                width = nodes if budget.shape.beam else 0
                ratio = pool.ratio(KEPT, depth - 1, width)
                if width and width != wide:
                    wide, level_D = width, pool.levels(min(nodes, budget.max_depth), width)
                levels = level_D[depth - 1] if width else depth
                rows = min(nodes, nodes * pool.ratio(DRAFTED, width, depth)) if width else nodes
                under = int(rows)
                seconds = row_R[under] + (rows - under) * (row_R[min(nodes, under + 1)] - row_R[under])
                found.append((nodes, depth, width, ratio, rows, levels, seconds))
        return found

    def paying(self, offer_B: Mapping[int, Offer]) -> dict[int, Offer]:
        """Of what was offered to sequences, best first, as many as gain most together."""
        found: dict[int, Offer] = {}
        pass_R = self._pass_R
        best, kept, rows, last = 0.0, 0.0, 0.0, len(pass_R) - 1
        order = sorted(offer_B, key=offer_B.__getitem__, reverse=True)
        for n, i in enumerate(order, 1):
            rows, kept = rows + offer_B[i].rows, kept + offer_B[i].kept
            gain = kept - self.rate * pass_R[min(round(rows), last)] * max(1.0, rows / last)
            if rows <= self.foreseen and gain > best:
                best, found = gain, {j: offer_B[j] for j in order[:n]}
        return found

    def begun(self, nodes: int) -> float:
        """What the first guesses of a pass cost, more than their share of what many do."""
        n = min(nodes, len(self._row_R) - 1)
        return self.rate * max(0.0, self._pass_R[n] - self._row_R[n])

    def plan(self, row: PolicyRow, offer: Offer | None, reason: str, users: int = 1) -> Plan:
        """Put an offer into a plan, and say why. Its drafter's levels are paid for by so many users."""
        if offer is None:
            return self._idle(reason)
        own = row.drafters[offer.drafter]
        nodes, depth = min(offer.nodes, own.max_nodes), min(offer.depth, own.max_depth)
        first, further = self._levels(offer.drafter, users)
        shares = first / users, further / users
        price = Price(shares, self._priced(self.rate)) if offer.levels else None
        fits = min(own.max_rows, row.limit.max_rows)
        asked = Budget(nodes, depth, fits, shape=own.shape, stop=own.stop, price=price)
        seconds = self.plain + (offer.kept - offer.gain + self.draft(offer.drafter, offer.levels)) / self.rate
        rates = {NONE: self.none, offer.drafter: (self.batch + offer.kept) / seconds}
        return Plan(offer.drafter, asked, Choice(reason, rates))
