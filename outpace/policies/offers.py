"""What drafters offer to a sequence, in tokens: what is kept of a draft, and what its rows cost.

Everything is priced in tokens: seconds times the tokens per second that are to be beaten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
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


class Size(NamedTuple):
    """A draft, whatever its price: the fields of ``Offer``, and what its rows add to a pass."""

    nodes: int
    depth: int
    kept: float
    rows: float
    width: int
    levels: float
    seconds: float


class Menu(NamedTuple):
    """What a drafter offers to one sequence at one rate."""

    offers: Sequence[Offer]
    """The ones that gain most with 1, 2, ... levels at most."""
    read: float = 0.0
    """Tokens that the text costs that the drafter has to read first."""
    best: Offer | None = None
    """The one that gains most, less its levels, for one sequence."""


_NEAR = 1.1
"""Rates that differ by less count as one, so that what was weighed at it holds. In replay 1.02 and 1.05 are
the same to 0.1 %, and weigh more often."""


class Seconds:
    """What a step may add, in seconds.

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
        # Of all sequences together. The first rows more may cost as much as several.
        self.pass_R = self.row_R = list(accumulate([s - self.plain for s in (self.plain, *more)], max))
        if batch > 1:  # one sequence pays its share of what all guesses take
            many = max(batch // 2, guesses)
            one = max(0.0, costs.passed(rows + many, load.context, batch) - self.plain) / many
            self.row_R = [one * n for n in range(len(self.pass_R))]
        self.draft = cache(costs.price)
        self.idle = cache(lambda reason: Plan(NONE, NOTHING, Choice(reason, {NONE: self.none})))
        self._at: dict[int, Prices] = {}

    def sizes(self, budget: Budget, limit: Budget, pool: Pool, here: float) -> list[Size]:
        """Drafts that a drafter may be asked for.

        Args:
            here: what its chances are worth for this text.
        """
        found: list[Size] = []
        row_R, hope, width = self.row_R, pool.tuning.hope * here, -1
        room = min(limit.max_depth, budget.max_depth)
        for nodes, depth in pool.sizes_to_weigh(budget):
            if nodes > limit.max_nodes or depth > room or nodes >= len(row_R):
                continue
            own = nodes if budget.shape.beam else 0
            if own != width:
                width, kept, whole = own, 0.0, 1.0
                size_D = pool.sizes(width, room) if width else []
            whole *= min(1.0, hope * pool.ratio(KEPT, depth - 1, width))
            kept += whole
            made, levels = size_D[depth - 1] if width else (nodes, depth)
            low = min(int(made), len(row_R) - 2)
            more = row_R[low] + (made - low) * (row_R[low + 1] - row_R[low])
            found.append(Size(nodes, depth, kept, made, width, levels, more))
        return found

    def at(self, pace: int) -> Prices:
        """What that is in tokens, at a rate of ``_NEAR ** pace`` times that of plain decoding."""
        if pace not in self._at:
            self._at[pace] = Prices(self, pace)
        return self._at[pace]


class Prices:
    """What a step may add, in tokens: seconds times the tokens per second that it has to bring.

    Shape letters: R rows more.
    """

    def __init__(self, seconds: Seconds, pace: int) -> None:
        self.seconds, self.batch, self.plain = seconds, seconds.batch, seconds.plain
        self.rate = seconds.none * _NEAR**pace

    @cached_property
    def row_R(self) -> tuple[float, ...]:
        """Of guesses of one sequence."""
        return tuple([self.rate * more for more in self.seconds.row_R])

    def pace(self, offers: Iterable[Offer]) -> int:
        """At which rate a step with these drafts emits; see ``Seconds.at``."""
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
        first, two = [self.seconds.draft(drafter, sequences, levels) for levels in (1.0, 2.0)]
        return self.rate * first, self.rate * (two - first)

    def look_up(self, name: str, preview: Sequence[float], limit: Budget, scale: float) -> Offer:
        """The best draft of a lookup that says what chances its guesses have; ``scale`` corrects them."""
        more_R, best, kept, stated = self.seconds.row_R, (-math.inf, 0, 0.0, 0.0), 0.0, 0.0
        for n, chance in enumerate(preview[: min(limit.max_nodes, limit.max_depth, len(more_R) - 1)], 1):
            kept += min(1.0, chance * scale)
            stated += chance
            if (gain := kept - self.rate * more_R[n]) > best[0]:
                best = gain, n, kept, stated
        gain, count, kept, stated = best
        return Offer(gain, name, count, count, kept, count, stated=stated)

    def menu(self, name: str, sizes: Sequence[Size], read: float, left: int) -> Menu:
        """Weigh the drafts of a drafter that has to be asked.

        Args:
            read: seconds of what it reads first. All that is left of the answer pays for it.
            left: tokens.
        """
        best_D: dict[int, tuple[float, Size]] = {}
        for size in sizes:
            gain = size.kept - self.rate * (size.seconds + read / left)
            if size.depth not in best_D or gain > best_D[size.depth][0]:
                best_D[size.depth] = gain, size
        found = [Offer(best_D[depth][0], name, *best_D[depth][1][:-1]) for depth in sorted(best_D)]
        offers = list(accumulate(found, max))
        further = self._levels(name)[1]
        best = max(offers, key=lambda one: one.gain - further * one.levels, default=None)
        return Menu(offers, self.rate * read, best)

    def paying(self, offer_B: Mapping[int, Offer]) -> dict[int, Offer]:
        """Of what was offered to sequences, best first, as many as gain most together."""
        found: dict[int, Offer] = {}
        pass_R = self.seconds.pass_R
        best, guesses, kept, nodes, last = 0.0, 0.0, 0.0, 0, len(pass_R) - 1
        order = sorted(offer_B, key=offer_B.__getitem__, reverse=True)
        for n, i in enumerate(order, 1):
            guesses, kept = guesses + offer_B[i].rows, kept + offer_B[i].kept
            nodes, count = nodes + offer_B[i].nodes, round(guesses)
            gain = kept - self.rate * pass_R[min(count, last)] * max(1.0, count / last)
            if nodes <= self.seconds.foreseen and gain > best:
                best, found = gain, {j: offer_B[j] for j in order[:n]}
        return found

    def begun(self, rows: float) -> float:
        """What the first guesses of a pass cost, more than their share of what many do."""
        n = min(round(rows), len(self.row_R) - 1)
        return self.rate * max(0.0, self.seconds.pass_R[n] - self.seconds.row_R[n])

    def plan(self, row: PolicyRow, offer: Offer | None, reason: str) -> Plan:
        """Put an offer into a plan, and say why."""
        if offer is None:
            return self.seconds.idle(reason)
        own = row.drafters[offer.drafter]
        nodes, depth = min(offer.nodes, own.max_nodes), min(offer.depth, own.max_depth)
        price = Price(self._levels(offer.drafter), self.row_R) if offer.levels else None
        fits = min(own.max_rows, row.limit.max_rows)
        asked = Budget(nodes, depth, fits, shape=own.shape, stop=own.stop, price=price)
        seconds = self.plain + (offer.kept - offer.gain + self.draft(offer.drafter, offer.levels)) / self.rate
        rates = {NONE: self.seconds.none, offer.drafter: (self.batch + offer.kept) / seconds}
        return Plan(offer.drafter, asked, Choice(reason, rates))
