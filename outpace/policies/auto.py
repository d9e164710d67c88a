"""The drafter that gains most here and now, or none: chosen per sequence and per step.

    gain = E[tokens kept] - throughput * E[seconds more]

``throughput`` is what the batch emits lately, in tokens per second, and at least that of plain decoding.
A draft with a positive gain raises it, so `none` is what remains where no gain is positive.

A level of a drafter is paid for once by all sequences that use it. So drafters with levels are weighed for
all sequences together: the depth is chosen at which the sum of the gains, less the levels, is largest.

A drafter that is not asked teaches nothing. It is tried for one sequence when the last trial lies so far
back that trials lose no more than their share of the time.

Sources: the gain is the marginal value of a renewal process, as in goodput (SmartSpec, arXiv:2406.14066)
and in trees by measured cost (Sequoia, arXiv:2402.12374).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.policies.acceptance import Pool, Ratio
from outpace.policies.base import Evidence, Policy, PolicyRow
from outpace.policies.costs import Costs
from outpace.policies.offers import Offer, Prices, look_up, offers_of, prices_of
from outpace.policies.tuning import TUNING, Tuning
from outpace.types import NOTHING, Budget, Choice, Load, Plan, Price

NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoConfig:
    """No settings: what depends on machine, model and text is measured."""


@dataclass(slots=True)
class State:
    """What is known of one sequence."""

    pools: dict[str, Pool]
    """Drafter -> what texts of its kind taught."""
    here: dict[str, Ratio] = field(default_factory=dict)
    """Drafter -> what is kept, over what is expected by all texts."""
    asked: Offer | None = None
    quiet: int = 0
    """Grows with every look that led to no draft; 2 to this power steps pass till the next."""
    offers: dict[str, tuple[Prices, int, int, list[Offer]]] = field(default_factory=dict)
    """Drafter -> its offers, and what they follow from: prices, drafts seen, room left."""


class Auto(Policy):
    """Picks among all drafters of a sequence, and how far each may go."""

    Config = AutoConfig
    deterministic = False
    reads_previews = True

    def __init__(self, config: Any, tuning: Tuning = TUNING) -> None:
        super().__init__(config)
        self.tuning = tuning
        self.costs = Costs(tuning=tuning)
        self._pools: dict[str, Pool] = {}
        self._recalled: dict[str, Pool] = {}
        self._tick = 0
        self._wait = 0.0  # steps until an idle drafter may be tried
        self._tried: dict[str, int] = {}
        self._guesses = 0  # of the last step
        self._prices: dict[tuple[int, ...], tuple[int, Prices]] = {}  # with the step until which they hold

    def begin(self) -> State:
        """Nothing is known of the sequence but what others taught."""
        return State(self._pools)

    def asks(self, state: State, load: Load) -> float | None:
        """No previews for a sequence that is left out of this step."""
        return None if self._tick % (1 << state.quiet) else 0.0

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """Cost: some ten microseconds per sequence that is looked at, one for each other."""
        awake = [i for i, row in enumerate(rows) if not self._tick % (1 << row.state.quiet)]
        self._tick += 1
        prices = self._priced(len(rows), load)
        looked_B: dict[int, Offer] = {}
        levelled: dict[str, dict[int, list[Offer]]] = {}
        for i in awake:
            row = rows[i]
            for name, budget in row.drafters.items() if row.limit.max_depth > 0 else ():
                told = row.previews.get(name)
                if told is None:
                    if name != NONE and (offers := self._offers(row, name, budget, prices)):
                        levelled.setdefault(name, {})[i] = offers
                elif told:
                    pool, call = self._pool(row.state, name), prices.rate * self.costs.price(name)
                    offer = look_up(name, told, row.limit, pool, self._here(row, name), call, prices)
                    if offer is not None and (i not in looked_B or offer.gain > looked_B[i].gain):
                        looked_B[i] = offer
        chosen = {i: offer for i, offer in looked_B.items() if offer.gain > 0.0}
        if levelled:
            chosen.update(self._together(levelled, chosen, prices))
        tried = self._trial(levelled, looked_B, chosen, prices)
        left = self.costs.most(load.batch)
        for i in sorted(chosen, key=lambda i: -chosen[i].gain):
            left -= chosen[i].nodes
            if left < 0:
                del chosen[i]
        self._guesses = sum(offer.nodes for offer in chosen.values())
        plans, longest = [], min(self.tuning.quiet, load.batch.bit_length() - 1)
        looked = set(awake)
        for i, row in enumerate(rows):
            offer = row.state.asked = chosen.get(i)
            if offer is not None:
                row.state.quiet = 0
            elif i in looked:
                row.state.quiet = min(row.state.quiet + 1, longest)
            reason = "probe" if i == tried else "best" if i in looked else "pause"
            plans.append(self._plan(row, offer, reason, prices, load))
        return plans

    def _priced(self, own: int, load: Load) -> Prices:
        """Prices, which hold for some steps: finding them takes longer than using them."""
        key = own, load.beside, load.batch, load.context // 64
        until, prices = self._prices.get(key, (0, None))
        if prices is None or until <= self._tick:
            if len(self._prices) > 64:
                self._prices.clear()
            prices = prices_of(self.costs, load, own, self._guesses)
            self._prices[key] = self._tick + min(self.tuning.renew, 1 + self._tick // 8), prices
        return prices

    def _offers(self, row: PolicyRow, name: str, budget: Budget, prices: Prices) -> list[Offer]:
        pool, state, room = self._pool(row.state, name), row.state, row.limit.max_depth
        room = min(room, budget.max_depth)
        found = state.offers.get(name)
        if found is None or found[0] is not prices or found[1] != pool.seen or found[2] != room:
            here = self._here(row, name)
            offers = offers_of(name, budget, row.limit, pool, here, prices, self.tuning)
            found = state.offers[name] = prices, pool.seen, room, offers
        return found[3]

    def _together(
        self, levelled: Mapping[str, Mapping[int, list[Offer]]], chosen: Mapping[int, Offer], prices: Prices
    ) -> dict[int, Offer]:
        """The drafter and depth that pay best for all sequences together, beside what is chosen."""
        best, found = 0.0, {}
        for name, offers_B in levelled.items():
            level = prices.rate * self.costs.price(name, len(offers_B))
            if len(offers_B) == 1:
                ((i, offers),) = offers_B.items()
                gain, offer = max([(one.gain - level * one.levels, one) for one in offers])
                gain -= chosen[i].gain if i in chosen else 0.0
                if gain > best:
                    best, found = gain, {i: offer}
                continue
            for depth in range(1, max(one.depth for offers in offers_B.values() for one in offers) + 1):
                users: dict[int, Offer] = {}
                total = levels = 0.0
                for i, offers in offers_B.items():
                    offer = max([one for one in offers if one.depth <= depth], key=_gain)
                    more = offer.gain - (chosen[i].gain if i in chosen else 0.0)
                    if more > 0.0:
                        users[i] = offer
                        total += more
                        levels = max(levels, offer.levels)
                if total - level * levels > best:
                    best, found = total - level * levels, users
        return found

    def _trial(
        self,
        levelled: Mapping[str, Mapping[int, list[Offer]]],
        looked_B: Mapping[int, Offer],
        chosen: dict[int, Offer],
        prices: Prices,
    ) -> int | None:
        """Have the drafter that was idle longest tried for one sequence, if a trial is due."""
        self._wait -= 1.0
        if self._wait > 0.0:
            return None
        used = {offer.drafter for offer in chosen.values()}
        step = prices.rate * prices.plain
        found: list[tuple[int, int, Offer, float]] = []
        for name, offers_B in levelled.items():
            i = list(offers_B)[self._tick % len(offers_B)]
            if name in used:
                continue
            level = prices.rate * self.costs.price(name)
            loss, offer = min((level * one.levels - one.gain, one) for one in offers_B[i][:2])
            found.append((self._tried.get(name, 0), i, offer, loss))
        for i, offer in looked_B.items():
            if i not in chosen:
                found.append((self._tried.get(offer.drafter, 0), i, offer, -offer.gain))
        for _, i, offer, loss in sorted(found, key=lambda one: one[0]):
            loss += chosen[i].gain if i in chosen else 0.0
            if loss > max(1.0, step / 8):  # while a lookup copies well, others wait
                continue
            self._tried[offer.drafter] = self._tick
            self._wait = max(0.0, loss) / step / self.tuning.explore
            chosen[i] = offer
            return i
        return None

    def _plan(self, row: PolicyRow, offer: Offer | None, reason: str, prices: Prices, load: Load) -> Plan:
        """Put an offer into a plan, and say why."""
        rates = {NONE: load.batch / prices.plain}
        if offer is None:
            return Plan(NONE, NOTHING, Choice(reason, rates))
        level = self.costs.price(offer.drafter, 1)
        more = (offer.kept - offer.gain) / prices.rate + level * offer.levels
        rates[offer.drafter] = (load.batch + offer.kept) / (prices.plain + more)
        own, limit = row.drafters[offer.drafter], row.limit
        asked = Budget(
            min(offer.nodes, own.max_nodes, limit.max_nodes),
            min(offer.depth, own.max_depth, limit.max_depth),
            min(own.max_rows, limit.max_rows),
            shape=own.shape,
            stop=own.stop,
            price=Price((prices.rate * level,), prices.row_R),
        )
        return Plan(offer.drafter, asked, Choice(reason, rates))

    def learn(self, rows: Sequence[PolicyRow], evidence: Sequence[Evidence]) -> None:
        """Take in what was kept of the drafts."""
        for row, seen in zip(rows, evidence, strict=True):
            offer = row.state.asked
            if offer is not None and offer.drafter == seen.drafter:
                self._learn(row.state, offer, seen)

    def _learn(self, state: State, offer: Offer, seen: Evidence) -> None:
        pool, here = self._pool(state, seen.drafter), state.here.setdefault(seen.drafter, Ratio())
        pool.seen += 1
        if offer.stated:
            if not seen.censored and seen.depth:
                here.add(seen.accepted, offer.stated * pool.kept.ratio(offer.kind), self.tuning.text)
                pool.kept.add(offer.kind, seen.accepted, offer.stated)
            return
        # Silence where a level was asked for is a level that was not kept.
        refused = not seen.censored and seen.accepted < offer.depth
        (width,) = offer.kind
        if width:
            pool.grew(width, offer.depth, seen.drafted, seen.depth)
        for level in range(seen.accepted + refused):
            kept, kind = float(level < seen.accepted), (level, width)
            here.add(kept, self.tuning.hope * pool.kept.ratio(kind), self.tuning.text)
            pool.kept.add(kind, kept, self.tuning.hope)

    def learned(self) -> dict[str, Any]:
        """What is known of drafters over all texts; numbers alone, and no text."""
        return {name: pool.to_json() for name, pool in self._pools.items()}

    def recall(self, learned: Any) -> None:
        """Begin with what ``learned`` gave, for drafters that were not asked yet; ignore what is broken."""
        for name, data in learned.items() if isinstance(learned, dict) else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                self._recalled[name] = Pool.from_json(data, self.tuning)

    def _pool(self, state: State, name: str) -> Pool:
        pool = state.pools.get(name)
        if pool is None:
            pool = self._recalled.get(name) or Pool(self.tuning, *self.costs.kept(name))
            state.pools[name] = pool
        return pool

    def _here(self, row: PolicyRow, name: str) -> float:
        found = row.state.here.get(name)
        return 1.0 if found is None else found.value(self.tuning.doubt)


def _gain(offer: Offer) -> float:
    return offer.gain
