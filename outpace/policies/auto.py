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

from outpace.policies.acceptance import SURE, Pool, Ratio
from outpace.policies.base import Evidence, Policy, PolicyRow, within
from outpace.policies.offers import Offer, Prices, gain_of, look_up, offers_of, prices_of
from outpace.policies.tuning import TUNING
from outpace.types import NOTHING, Budget, Choice, Load, Plan, Price

NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoConfig:
    """No settings: what depends on machine, model and text is measured."""


@dataclass(slots=True)
class State:
    """What is known of one sequence."""

    here: dict[str, Ratio] = field(default_factory=dict)
    """Drafter -> what is kept, over what is expected by all texts."""
    asked: Offer | None = None
    quiet: int = 0
    """Grows with every look that led to no draft; 2 to this power steps pass till the next."""


class Auto(Policy):
    """Picks among all drafters of a sequence, and how far each may go."""

    Config = AutoConfig
    deterministic = False
    reads_previews = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._pools: dict[str, Pool] = {}
        self._recalled: dict[str, Pool] = {}
        self._lately: dict[int, tuple[float, float]] = {}  # binary digits of the batch -> tokens, seconds
        self._tick = 0
        self._wait = 0.0  # steps until an idle drafter may be tried
        self._tried: dict[str, int] = {}
        self._expected = 0.0  # seconds of the step at hand
        self._guesses, self._batch = 0, 1  # of the last step

    def begin(self) -> State:
        """Nothing is known of the sequence but what others taught."""
        return State()

    def asks(self, state: State, load: Load) -> float | None:
        """No previews for a sequence that is left out of this step."""
        return None if self._tick % (1 << state.quiet) else 0.0

    def candidates(self, row: PolicyRow) -> Mapping[str, Budget]:
        """Drafters to weigh for a sequence."""
        return row.drafters

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """Cost: some ten microseconds per sequence that is looked at, one for each other."""
        awake = [i for i, row in enumerate(rows) if not self._tick % (1 << row.state.quiet)]
        self._tick, self._batch = self._tick + 1, load.batch
        tokens, seconds = self._lately.get(load.batch.bit_length(), (0.0, 0.0))
        lately = tokens / seconds if seconds else 0.0
        prices = prices_of(self.costs, load, len(rows), lately, self._guesses)
        looked_B: dict[int, Offer] = {}
        levelled: dict[str, dict[int, list[Offer]]] = {}
        for i in awake:
            row = rows[i]
            for name, budget in self.candidates(row).items() if row.limit.max_depth > 0 else ():
                told = row.previews.get(name)
                if told is not None:
                    ratio = self._pool(name, budget).ratio
                    offer = look_up(self.costs, row, name, told, ratio, _here(row, name), prices)
                    if offer is not None and (i not in looked_B or offer.gain > looked_B[i].gain):
                        looked_B[i] = offer
                elif name != NONE and (offers := self._offers(row, name, budget, prices)):
                    levelled.setdefault(name, {})[i] = offers
        chosen = {i: offer for i, offer in looked_B.items() if offer.gain > 0.0}
        chosen.update(self._together(levelled, chosen, prices))
        tried = self._trial(rows, levelled, looked_B, chosen, prices)
        left = self.costs.most(load.batch)
        for i in sorted(chosen, key=lambda i: -chosen[i].gain):
            left -= chosen[i].nodes
            if left < 0:
                del chosen[i]
        self._expect(chosen, levelled, prices)
        plans, longest = [], min(TUNING.quiet, load.batch.bit_length() - 1)
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

    def _offers(self, row: PolicyRow, name: str, budget: Budget, prices: Prices) -> list[Offer]:
        return offers_of(self.costs, row, name, self._pool(name, budget), _here(row, name), prices)

    def _together(
        self, levelled: Mapping[str, Mapping[int, list[Offer]]], chosen: Mapping[int, Offer], prices: Prices
    ) -> dict[int, Offer]:
        """The drafter and depth that pay best for all sequences together, beside what is chosen."""
        best, found = 0.0, {}
        for name, offers_B in levelled.items():
            level = prices.rate * self.costs.price(name, len(offers_B))
            for depth in range(1, max(one.depth for offers in offers_B.values() for one in offers) + 1):
                users: dict[int, Offer] = {}
                total = levels = 0.0
                for i, offers in offers_B.items():
                    offer = max((one for one in offers if one.depth <= depth), key=gain_of)
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
        rows: Sequence[PolicyRow],
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
            offer = max((one for one in offers_B[i][:2]), key=lambda one: one.gain - level * one.levels)
            late = self.costs.late(name, rows[i].num_uncached.get(name, 0))
            loss = level * offer.levels + prices.rate * late - offer.gain
            found.append((self._tried.get(name, 0), i, offer, loss))
        for i, offer in looked_B.items():
            if i not in chosen:
                found.append((self._tried.get(offer.drafter, 0), i, offer, -offer.gain))
        for _, i, offer, loss in sorted(found, key=lambda one: one[0]):
            loss += chosen[i].gain if i in chosen else 0.0
            if loss > max(1.0, step / 8):  # while a lookup copies well, others wait
                continue
            self._tried[offer.drafter] = self._tick
            self._wait = max(0.0, loss) / step / TUNING.explore
            chosen[i] = offer
            return i
        return None

    def _expect(
        self, chosen: Mapping[int, Offer], levelled: Mapping[str, Mapping[int, list[Offer]]], prices: Prices
    ) -> None:
        """Note what the step should take."""
        self._guesses = sum(offer.nodes for offer in chosen.values())
        levels: dict[str, float] = {}
        tokens = 0.0  # what they cost
        for offer in chosen.values():
            tokens += offer.kept - offer.gain
            if offer.drafter in levelled:
                levels[offer.drafter] = max(levels.get(offer.drafter, 0.0), offer.levels)
        drafts = sum(self.costs.price(name, len(levelled[name])) * n for name, n in levels.items())
        self._expected = prices.plain + tokens / prices.rate + drafts

    def _plan(self, row: PolicyRow, offer: Offer | None, reason: str, prices: Prices, load: Load) -> Plan:
        """Put an offer into a plan, and say why."""
        rates = {NONE: load.batch / prices.plain}
        if offer is None:
            return Plan(NONE, NOTHING, Choice(reason, rates))
        level = self.costs.price(offer.drafter, 1) * offer.levels
        more = (offer.kept - offer.gain) / prices.rate + level
        rates[offer.drafter] = (load.batch + offer.kept) / (prices.plain + more)
        own = row.drafters[offer.drafter]
        nodes, depth = min(offer.nodes, own.max_nodes), min(offer.depth, own.max_depth)
        price = Price((prices.rate * self.costs.price(offer.drafter, 1),), tuple(prices.row_R))
        asked = Budget(nodes, depth, own.max_rows, shape=own.shape, stop=own.stop, price=price)
        return Plan(offer.drafter, within(asked, row.limit), Choice(reason, rates))

    def learn(self, rows: Sequence[PolicyRow], evidence: Sequence[Evidence]) -> None:
        """Take in what was kept of the drafts, and what the step brought."""
        for row, seen in zip(rows, evidence, strict=True):
            offer = row.state.asked
            if offer is not None and offer.drafter == seen.drafter:
                self._learn(row.state, offer, seen)
        if self.costs.known:
            size = self._batch.bit_length()
            tokens, seconds = self._lately.get(size, (0.0, 0.0))
            tokens = TUNING.remember * tokens + self._batch + sum(seen.accepted for seen in evidence)
            self._lately[size] = tokens, TUNING.remember * seconds + self._expected

    def _learn(self, state: State, offer: Offer, seen: Evidence) -> None:
        pool, here = self._pools[seen.drafter], state.here.setdefault(seen.drafter, Ratio())
        if offer.kind[0] == SURE:
            if not seen.censored and seen.depth:
                here.add(seen.accepted, offer.stated * pool.ratio(offer.kind), TUNING.text)
                if not seen.ruled:
                    pool.add(offer.kind, seen.accepted, offer.stated)
            return
        # Silence where a level was asked for is a level that was not kept.
        refused = not seen.censored and seen.accepted < offer.depth
        width = offer.kind[0]
        pool.grew(width, offer.depth, seen.drafted, seen.depth)
        for level in range(seen.accepted + refused):
            kept = float(level < seen.accepted)
            here.add(kept, TUNING.hope * pool.ratio((width, level)), TUNING.text)
            if not seen.ruled:
                pool.add((width, level), kept, TUNING.hope)

    def learned(self) -> dict[str, Any]:
        """What is known of drafters over all texts; numbers alone, and no text."""
        return {name: pool.to_json() for name, pool in self._pools.items()}

    def recall(self, learned: Any) -> None:
        """Begin with what ``learned`` gave, for drafters that were not asked yet; ignore what is broken."""
        for name, data in learned.items() if isinstance(learned, dict) else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                self._recalled[name] = Pool.from_json(data)

    def _pool(self, name: str, budget: Budget) -> Pool:
        pool = self._pools.get(name)
        if pool is None:
            width = budget.max_nodes if budget.shape.beam else 0
            pool = self._recalled.get(name) or Pool(*self.costs.kept(name), width)
            self._pools[name] = pool
        return pool


def _here(row: PolicyRow, name: str) -> float:
    found = row.state.here.get(name)
    return 1.0 if found is None else found.value
