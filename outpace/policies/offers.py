"""What drafters offer to a sequence, in tokens: what is kept of a draft, and what its rows cost.

Everything is priced in tokens: seconds times the tokens per second that are to be beaten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
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


_NEAR = 1.1
"""Rates that differ by less count as one, so that what was weighed at it holds."""


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
        # Of all sequences together. The first rows more may cost as much as several.
        self.pass_R = self.row_R = list(accumulate([s - self.plain for s in (self.plain, *more)], max))
        if batch > 1:  # one sequence pays its share of what all guesses take
            many = max(batch // 2, guesses)
            one = max(0.0, costs.passed(rows + many, load.context, batch) - self.plain) / many
            self.row_R = [one * n for n in range(len(self.pass_R))]
        self.draft = cache(costs.price)
        self._at: dict[int, Prices] = {}

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
        self.batch, self.plain, self.foreseen = seconds.batch, seconds.plain, seconds.foreseen
        self.none = seconds.batch / seconds.plain  # tokens per second of steps without drafts
        self.rate = rate = self.none * _NEAR**pace
        self.pass_R = self.row_R = tuple([rate * s for s in seconds.row_R])
        if seconds.batch > 1:
            self.pass_R = tuple([rate * s for s in seconds.pass_R])
        self._draft = seconds.draft
        self._idle = cache(lambda reason: Plan(NONE, NOTHING, Choice(reason, {NONE: self.none})))

    def pace(self, offers: Iterable[Offer]) -> int:
        """At which rate a step with these drafts emits; see ``Seconds.at``."""
        kept = price = 0.0
        users: dict[str, list[float]] = {}
        for one in offers:
            kept, price = kept + one.kept, price + one.kept - one.gain
            users.setdefault(one.drafter, []).append(one.levels)
        price += sum([self.draft(name, max(levels), len(levels)) for name, levels in users.items()])
        over = (1.0 + kept / self.batch) / (1.0 + price / (self.rate * self.plain))
        return max(0, round(math.log(over) / math.log(_NEAR)))

    def draft(self, drafter: str, levels: float, sequences: int = 1) -> float:
        """Of a draft with so many levels, for so many sequences together."""
        first, further = self._levels(drafter, sequences)
        return first + further * (levels - 1.0) if levels else 0.0

    def _levels(self, drafter: str, sequences: int = 1) -> tuple[float, float]:
        """Of the first level of a draft, and of each further one."""
        first = self._draft(drafter, sequences, 1.0)
        return self.rate * first, self.rate * (self._draft(drafter, sequences, 2.0) - first)

    def look_up(self, name: str, preview: Sequence[float], limit: Budget, scale: float) -> Offer:
        """The best draft of a lookup that says what chances its guesses have; ``scale`` corrects them."""
        row_R, best, kept, stated = self.row_R, (-math.inf, 0, 0.0, 0.0), 0.0, 0.0
        for n, chance in enumerate(preview[: min(limit.max_nodes, limit.max_depth, len(row_R) - 1)], 1):
            kept += min(1.0, chance * scale)
            stated += chance
            if kept - row_R[n] > best[0]:
                best = kept - row_R[n], n, kept, stated
        gain, count, kept, stated = best
        return Offer(gain, name, count, count, kept, count, stated=stated)

    def offers(
        self, name: str, budget: Budget, limit: Budget, pool: Pool, here: float, read: float
    ) -> list[Offer]:
        """The ones that gain most with 1, 2, ... levels at most, of a drafter that has to be asked.

        Args:
            here: what its chances are worth for this text.
            read: tokens that the text costs that it reads first; all that is left of an answer pays for it.
        """
        best_D: dict[int, Offer] = {}
        row_R, hope, width = self.row_R, pool.tuning.hope * here, -1
        room, share = min(limit.max_depth, budget.max_depth), read / max(1, limit.max_depth)
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
            price = row_R[low] + (made - low) * (row_R[low + 1] - row_R[low])
            gain = kept - price - share
            if depth not in best_D or gain > best_D[depth].gain:
                best_D[depth] = Offer(gain, name, nodes, depth, kept, made, width, levels)
        return list(accumulate([best_D[depth] for depth in sorted(best_D)], max))

    def paying(self, offer_B: Mapping[int, Offer]) -> dict[int, Offer]:
        """Of what was offered to sequences, best first, as many as gain most together."""
        found: dict[int, Offer] = {}
        best, guesses, kept, nodes, last = 0.0, 0.0, 0.0, 0, len(self.pass_R) - 1
        order = sorted(offer_B, key=offer_B.__getitem__, reverse=True)
        for n, i in enumerate(order, 1):
            guesses, kept = guesses + offer_B[i].rows, kept + offer_B[i].kept
            nodes, count = nodes + offer_B[i].nodes, round(guesses)
            gain = kept - self.pass_R[min(count, last)] * max(1.0, count / last)
            if nodes <= self.foreseen and gain > best:
                best, found = gain, {j: offer_B[j] for j in order[:n]}
        return found

    def plan(self, row: PolicyRow, offer: Offer | None, reason: str) -> Plan:
        """Put an offer into a plan, and say why."""
        if offer is None:
            return self._idle(reason)
        own = row.drafters[offer.drafter]
        nodes, depth = min(offer.nodes, own.max_nodes), min(offer.depth, own.max_depth)
        price = Price(self._levels(offer.drafter), self.row_R) if offer.levels else None
        fits = min(own.max_rows, row.limit.max_rows)
        asked = Budget(nodes, depth, fits, shape=own.shape, stop=own.stop, price=price)
        seconds = self.plain + (offer.kept - offer.gain + self.draft(offer.drafter, offer.levels)) / self.rate
        rates = {NONE: self.none, offer.drafter: (self.none * self.plain + offer.kept) / seconds}
        return Plan(offer.drafter, asked, Choice(reason, rates))
