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
from outpace.policies.offers import Menu, Offer, Prices, fill, look_up, prices_of
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
    menus: dict[str, Menu] = field(default_factory=dict)
    """Drafter -> what it offers, as it was weighed last."""


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
        awake = [i for i, row in enumerate(rows) if self.asks(row.state, load) is not None]
        self._tick += 1
        prices = self._priced(len(rows), load)
        told: dict[int, Offer] = {}  # the best of the lookups
        menus: dict[str, dict[int, Menu]] = {}
        for i in awake:
            row = rows[i]
            for name in row.drafters if row.limit.max_depth > 0 else ():
                preview = row.previews.get(name)
                if preview:
                    offer = look_up(name, preview, row.limit, self._scale(row.state, name), prices)
                    told[i] = max(told.get(i, offer), offer)
                elif preview is None and row.drafters[name].max_nodes and name != NONE:
                    menu = self._menu(row, name, prices, load)
                    if menu.best is not None:
                        menus.setdefault(name, {})[i] = menu
        chosen = {i: offer for i, offer in told.items() if offer.gain > 0.0}
        chosen |= self._together(menus, chosen, prices)
        if load.batch > 1:
            chosen = prices.paying(chosen)
        self._wait -= 1.0
        tried = self._trial(menus, told, chosen, prices) if self._wait <= 0.0 else None
        self._guesses = sum([offer.nodes for offer in chosen.values()])
        while self._guesses > prices.most:
            self._guesses -= chosen.pop(min(chosen, key=chosen.__getitem__)).nodes
        if tried is not None or 2 * self._guesses > prices.most:
            self._prices.clear()  # the step tells something new
        longest = min(self.tuning.quiet, load.batch.bit_length() - 1)
        for i in awake:
            rows[i].state.quiet = 0 if i in chosen else min(rows[i].state.quiet + 1, longest)
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

    def _menu(self, row: PolicyRow, name: str, prices: Prices, load: Load) -> Menu:
        """Offers hold as long as prices do."""
        state, budget = row.state, row.drafters[name]
        room = min(row.limit.max_depth, budget.max_depth)
        menu: Menu | None = state.menus.get(name)
        if menu is None or menu.prices is not prices or menu.room != room:
            level = prices.level(name)
            read = 0.0 if name in state.here else prices.rate * self.costs.reading(name, load.context)
            pool, here = self._pool(state, name), self._here(state, name)
            state.menus[name] = menu = fill(
                Menu(prices, room, level, read), name, budget, row.limit, pool, here
            )
        return menu

    def _together(
        self, menus: Mapping[str, Mapping[int, Menu]], chosen: Mapping[int, Offer], prices: Prices
    ) -> dict[int, Offer]:
        """The drafter and depth that pay best for all sequences together, beside what is chosen."""
        best, found = 0.0, dict[int, Offer]()
        for name, menu_B in menus.items():
            level = prices.level(name, len(menu_B))
            most = max([len(menu.offers) for menu in menu_B.values()])
            depths: Sequence[int | None] = range(most) if len(menu_B) > 1 else (None,)
            for depth in depths:
                users, total, levels = dict[int, Offer](), 0.0, 0.0
                for i, menu in menu_B.items():
                    offer = menu.best if depth is None else menu.offers[: depth + 1][-1]
                    assert offer is not None
                    more = offer.gain - (chosen[i].gain if i in chosen else 0.0)
                    if more > 0.0:
                        users[i] = offer
                        total, levels = total + more, max(levels, offer.levels)
                if total - level * levels > best:
                    best, found = total - level * levels, users
        return found

    def _trial(
        self,
        menus: Mapping[str, Mapping[int, Menu]],
        told: Mapping[int, Offer],
        chosen: dict[int, Offer],
        prices: Prices,
    ) -> int | None:
        """Have the drafter that was idle longest tried for one sequence."""
        used, step = {offer.drafter for offer in chosen.values()}, prices.rate * prices.plain
        guesses = sum([offer.rows for offer in chosen.values()])
        beside = prices.together(guesses)
        ideas: dict[str, list[tuple[int, float, float, Offer]]] = {}
        for i, offer in told.items():
            if i not in chosen:
                loss = prices.together(guesses + offer.rows) - beside - offer.kept
                ideas.setdefault(offer.drafter, []).append((i, loss, 0.0, offer))
        for name, menu_B in menus.items():
            for i, menu in menu_B.items() if name not in used else ():
                loss, offer = min([(menu.level * one.levels - one.gain, one) for one in menu.offers[:2]])
                ideas.setdefault(name, []).append((i, loss, menu.read, offer))
        for name in sorted(ideas, key=lambda name: self._tried.get(name, 0)):
            i, loss, read, offer = ideas[name][self._tick % len(ideas[name])]
            loss += chosen[i].gain if i in chosen else 0.0
            if loss <= max(1.0, step / 8):  # while a lookup copies well, others wait
                self._tried[name], chosen[i] = self._tick, offer
                self._wait = (max(0.0, loss) + read) / step / self.tuning.explore
                return i
        return None

    def _plan(self, row: PolicyRow, offer: Offer | None, reason: str, prices: Prices, load: Load) -> Plan:
        """Put an offer into a plan, and say why."""
        rates = {NONE: load.batch / prices.plain}
        if offer is None:
            if reason not in prices.still:
                prices.still[reason] = Plan(NONE, NOTHING, Choice(reason, rates))
            return prices.still[reason]
        own, limit = row.drafters[offer.drafter], row.limit
        nodes, depth = min(offer.nodes, own.max_nodes), min(offer.depth, own.max_depth)
        level = prices.level(offer.drafter) if offer.levels else 0.0
        price = Price((level,), prices.row_R) if offer.levels else None
        fits = min(own.max_rows, limit.max_rows)
        asked = Budget(nodes, depth, fits, shape=own.shape, stop=own.stop, price=price)
        more = (offer.kept - offer.gain + level * offer.levels) / prices.rate
        rates[offer.drafter] = (load.batch + offer.kept) / (prices.plain + more)
        return Plan(offer.drafter, asked, Choice(reason, rates))

    def learn(self, rows: Sequence[PolicyRow], evidence: Sequence[Evidence]) -> None:
        """Take in what was kept of the drafts."""
        for row, seen in zip(rows, evidence, strict=True):
            offer = row.state.asked
            if offer is not None and offer.drafter == seen.drafter:
                self._learn(row.state, offer, seen)

    def _learn(self, state: State, offer: Offer, seen: Evidence) -> None:
        pool, here = self._pool(state, seen.drafter), state.here.setdefault(seen.drafter, Ratio())
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
