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

Kind = tuple[str, bool]  # whose a sequence is, and whether it is greedy


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoConfig:
    """No settings: what depends on machine, model and text is measured."""


@dataclass(slots=True)
class State:
    """What is known of one sequence."""

    kind: Kind
    pools: dict[str, Pool]
    """Drafter -> what texts of its kind taught."""
    here: dict[str, Ratio] = field(default_factory=dict)
    """Drafter -> what is kept, over what is expected by all texts."""
    asked: Offer | None = None
    quiet: int = 0
    """Grows with every look that led to no draft; 2 to this power steps pass till the next."""
    offers: dict[str, tuple[tuple[Prices, int, int], list[Offer]]] = field(default_factory=dict)
    """Drafter -> what its offers follow from: prices, drafts seen and room left; and its offers."""


class Auto(Policy):
    """Picks among all drafters of a sequence, and how far each may go."""

    Config = AutoConfig
    deterministic = False
    reads_previews = True
    form = Pool

    def __init__(self, config: Any, tuning: Tuning = TUNING) -> None:
        super().__init__(config)
        self.tuning, self.costs = tuning, Costs(tuning=tuning)
        self._pools: dict[Kind, dict[str, Pool]] = {}
        self._recalled: dict[Kind, dict[str, Pool]] = {}
        self._tick = self._guesses = 0  # steps, and guesses of the last one
        self._wait = 0.0  # steps until an idle drafter may be tried
        self._tried: dict[str, int] = {}
        self._prices: dict[tuple[int, ...], tuple[int, Prices]] = {}  # with the step until which they hold

    def begin(self, key: str = "", greedy: bool = True) -> State:
        """Nothing is known of the sequence but what others of its kind taught."""
        pools = self._pools[key, greedy] = self._pools.pop((key, greedy), {})
        if len(self._pools) > self.tuning.most:
            del self._pools[next(iter(self._pools))]
        return State((key, greedy), pools)

    def asks(self, state: State, load: Load) -> float | None:
        """No previews for a sequence that is left out of this step."""
        return None if self._tick % (1 << state.quiet) else 0.0

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """Cost: some ten microseconds per sequence that is looked at, one for each other."""
        awake = {i: row for i, row in enumerate(rows) if self.asks(row.state, load) is not None}
        self._tick += 1
        prices = self._priced(len(rows), load)
        looked: dict[int, Offer] = {}
        levelled: dict[str, dict[int, list[Offer]]] = {}
        for i, row in awake.items():
            for name in row.drafters if row.limit.max_depth > 0 else ():
                told = row.previews.get(name)
                if told:
                    scale, call = self._scale(row.state, name), prices.rate * self.costs.price(name)
                    offer = look_up(name, told, row.limit, scale, call, prices)
                    if offer is not None and (i not in looked or offer > looked[i]):
                        looked[i] = offer
                elif told is None and name != NONE and (offers := self._offers(row, name, prices)):
                    levelled.setdefault(name, {})[i] = offers
        chosen = {i: offer for i, offer in looked.items() if offer.gain > 0.0}
        chosen |= self._together(levelled, chosen, prices)
        tried = self._trial(levelled, looked, chosen, prices)
        left = self.costs.most(load.batch)
        for i in sorted(chosen, key=chosen.__getitem__, reverse=True):
            left -= chosen[i].nodes
            if left < 0:
                del chosen[i]
        self._guesses = sum([offer.nodes for offer in chosen.values()])
        longest = min(self.tuning.quiet, load.batch.bit_length() - 1)
        for i, row in awake.items():
            row.state.quiet = 0 if i in chosen else min(row.state.quiet + 1, longest)
        plans = []
        for i, row in enumerate(rows):
            row.state.asked = chosen.get(i)
            reason = "probe" if i == tried else "best" if i in awake else "pause"
            plans.append(self._plan(row, row.state.asked, reason, prices, load))
        return plans

    def _priced(self, own: int, load: Load) -> Prices:
        key = own, load.beside, load.batch, load.context // 64
        until, prices = self._prices.get(key, (0, None))
        if prices is None or until <= self._tick:
            if len(self._prices) > self.tuning.most:
                self._prices.clear()
            prices = prices_of(self.costs, load, own, self._guesses)
            self._prices[key] = self._tick + min(self.tuning.renew, 1 + self._tick // 8), prices
        return prices

    def _offers(self, row: PolicyRow, name: str, prices: Prices) -> list[Offer]:
        """Offers change where prices do, and where the drafter was asked."""
        state: State = row.state
        pool, budget = self._pool(state, name), row.drafters[name]
        now = prices, pool.seen, min(row.limit.max_depth, budget.max_depth)
        found = state.offers.get(name)
        if found is None or found[0][0] is not prices or found[0] != now:
            offers = offers_of(name, budget, row.limit, pool, self._here(state, name), prices, self.tuning)
            found = state.offers[name] = now, offers
        return found[1]

    def _together(
        self, levelled: Mapping[str, Mapping[int, list[Offer]]], chosen: Mapping[int, Offer], prices: Prices
    ) -> dict[int, Offer]:
        """The drafter and depth that pay best for all sequences together, beside what is chosen."""
        best, found = 0.0, dict[int, Offer]()
        for name, offers_B in levelled.items():
            level = prices.rate * self.costs.price(name, len(offers_B))
            depths = {one.depth for offers in offers_B.values() for one in offers}
            for depth in sorted(depths):
                users, total, levels = dict[int, Offer](), 0.0, 0.0
                for i, offers in offers_B.items():
                    offer = max([one for one in offers if one.depth <= depth])
                    more = offer.gain - (chosen[i].gain if i in chosen else 0.0)
                    if more > 0.0:
                        users[i] = offer
                        total, levels = total + more, max(levels, offer.levels)
                if total - level * levels > best:
                    best, found = total - level * levels, users
        return found

    def _trial(
        self,
        levelled: Mapping[str, Mapping[int, list[Offer]]],
        looked: Mapping[int, Offer],
        chosen: dict[int, Offer],
        prices: Prices,
    ) -> int | None:
        """Have the drafter that was idle longest tried for one sequence, if a trial is due."""
        self._wait -= 1.0
        if self._wait > 0.0:
            return None
        used, step = {offer.drafter for offer in chosen.values()}, prices.rate * prices.plain
        ideas = {name: {**offers_B} for name, offers_B in levelled.items() if name not in used}
        for i, offer in looked.items():
            if i not in chosen:
                ideas.setdefault(offer.drafter, {})[i] = [offer]
        for name in sorted(ideas, key=lambda name: self._tried.get(name, 0)):
            i = list(ideas[name])[self._tick % len(ideas[name])]
            level = prices.rate * self.costs.price(name)
            loss, offer = min([(level * one.levels - one.gain, one) for one in ideas[name][i][:2]])
            loss += chosen[i].gain if i in chosen else 0.0
            if loss <= max(1.0, step / 8):  # while a lookup copies well, others wait
                self._tried[name], chosen[i] = self._tick, offer
                self._wait = max(0.0, loss) / step / self.tuning.explore
                return i
        return None

    def _plan(self, row: PolicyRow, offer: Offer | None, reason: str, prices: Prices, load: Load) -> Plan:
        """Put an offer into a plan, and say why."""
        rates = {NONE: load.batch / prices.plain}
        if offer is None:
            return Plan(NONE, NOTHING, Choice(reason, rates))
        level = self.costs.price(offer.drafter)
        more = (offer.kept - offer.gain) / prices.rate + level * offer.levels
        rates[offer.drafter] = (load.batch + offer.kept) / (prices.plain + more)
        own, limit, price = (
            row.drafters[offer.drafter],
            row.limit,
            Price((prices.rate * level,), prices.row_R),
        )
        nodes, depth = min(offer.nodes, own.max_nodes), min(offer.depth, own.max_depth)
        rows = min(own.max_rows, limit.max_rows)
        asked = Budget(nodes, depth, rows, shape=own.shape, stop=own.stop, price=price)
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
                here.add(seen.accepted, offer.stated * pool.ratio(), self.tuning.text)
                if not seen.ruled:
                    pool.add(seen.accepted, offer.stated)
            return
        if offer.width:
            pool.grew(offer.width, offer.depth, seen.drafted, seen.depth)
        # Silence where a level was asked for is a level that was not kept.
        refused = not seen.censored and seen.accepted < offer.depth
        for level in range(seen.accepted + refused):
            kept, kind = float(level < seen.accepted), (level, offer.width)
            here.add(kept, self.tuning.hope * pool.ratio(kind), self.tuning.text)
            if not seen.ruled:
                pool.add(kept, self.tuning.hope, kind)

    def learned(self) -> dict[str, Any]:
        """What is known of drafters over all texts without a key; numbers alone, and no text."""
        return {
            "greedy" if greedy else "drawn": {name: pool.to_json() for name, pool in pools.items()}
            for (key, greedy), pools in self._pools.items()
            if pools and not key
        }

    def recall(self, learned: Any) -> None:
        """Begin with what ``learned`` gave, for drafters that were not asked yet; ignore what is broken."""
        for kind in ("greedy", "drawn") if isinstance(learned, dict) else ():
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError):
                pools = {name: Pool.from_json(one, self.tuning) for name, one in learned[kind].items()}
                self._recalled["", kind == "greedy"] = pools

    def _pool(self, state: State, name: str) -> Pool:
        pool = state.pools.get(name)
        if pool is None:
            kept = self.costs.kept(name)  # which reads what was learned before
            recalled = self._recalled.get(state.kind, {})
            pool = state.pools[name] = recalled.get(name) or self.form(self.tuning, *kept)
        return pool

    def _here(self, state: State, name: str) -> float:
        one, doubt = state.here.get(name), self.tuning.doubt
        return 1.0 if one is None else (one.kept + doubt) / (one.expected + doubt)

    def _scale(self, state: State, name: str) -> float:
        """What the stated chances of a lookup are worth."""
        return self._pool(state, name).ratio() * self._here(state, name)
