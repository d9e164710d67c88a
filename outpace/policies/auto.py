"""The drafter that gains most here and now, or none: chosen per sequence and per step.

    gain = E[tokens kept] - throughput * E[seconds more]

``throughput`` is that of the step as it is planned, in tokens per second. So the drafts that win are those
whose step has most, and `none` is what remains where no gain is positive. Other steps do not count: after
an easy passage a hard one has to be written all the same. A level of a drafter is paid for once by all
sequences that use it, so drafters with levels are weighed for all together.
A drafter that is not asked teaches nothing. It is tried for one sequence when the last trial lies so far
back that trials lose no more than their share of the time.

Sources: goodput (SmartSpec, arXiv:2406.14066) and trees by measured cost (Sequoia, arXiv:2402.12374). The
largest ratio by gains at a rate that is put right until they agree (Dinkelbach 1967).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.policies.acceptance import KEPT, Pool, Ratio
from outpace.policies.base import Evidence, Policy, PolicyRow
from outpace.policies.costs import PAGE, Costs
from outpace.policies.offers import NONE, Menu, Offer, Prices
from outpace.policies.tuning import TUNING, Tuning
from outpace.types import Load, Plan

_KEPT = 64  # keys whose counts are kept, and loads whose prices are
_TRIES = 2
"""Plans of a step at most, until its rate is the one that it was planned for. One loses 1.2 % in replay, and
three or five gain nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoConfig:
    """No settings: what depends on machine, model and text is measured."""


@dataclass(slots=True)
class State:
    """What is known of one sequence."""

    pools: dict[str, Pool]
    """Drafter -> what texts of its kind taught."""
    here: dict[str, Ratio] = field(default_factory=dict)
    """Drafter -> what is kept, over what was stated."""
    asked: Offer | None = None
    quiet: int = 0
    """Plans in a row that led to no draft, up to a limit. It is planned for in one of 2**quiet steps."""


class Auto(Policy):
    """Picks among all drafters of a sequence, and how far each may go."""

    Config = AutoConfig
    deterministic = False
    reads_previews = True
    form = Pool

    def __init__(self, config: Any, tuning: Tuning = TUNING) -> None:
        super().__init__(config)
        self.tuning, self.costs = tuning, Costs(tuning=tuning)
        self._pools: dict[tuple[str, bool, bool], dict[str, Pool]] = {}  # by what ``begin`` was told
        self._tick = self._guesses = 0  # steps, and guesses of the last one
        self._wait = 0.0  # steps until an idle drafter may be tried
        self._tried: dict[str, int] = {}
        self._told: set[str] = set()  # drafters that preview
        self._prices: dict[tuple[int, ...], tuple[int, Prices]] = {}  # with the step until which they hold
        self._pace = 0  # planned throughput of the last step, see ``Prices.at``

    def begin(self, key: str = "", greedy: bool = True, ruled: bool = False) -> State:
        """Nothing is known of the sequence but what others of its kind taught."""
        kind = key, greedy, ruled
        pools = self._pools[kind] = self._pools.pop(kind, {})
        if len(self._pools) > _KEPT:
            del self._pools[next(iter(self._pools))]
        return State(pools)

    def wants_previews(self, state: State, load: Load) -> bool:
        """Unless it is left out of this step."""
        return not self._tick % (1 << state.quiet)

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """Cost: some ten microseconds per sequence that is looked at, one for each other."""
        awake = {i for i, row in enumerate(rows) if not self._tick % (1 << row.state.quiet)}
        self._tick += 1
        prices = self._priced(len(rows), load)
        for _ in range(_TRIES):
            prices.at(self._pace)
            previewed, asked = self._offered(rows, awake, prices)
            chosen = self._best(previewed, asked, prices)
            before, self._pace = self._pace, prices.pace(chosen.values())
            if abs(self._pace - before) <= 1:
                break
        self._wait -= 1.0
        tried = None
        if self._wait <= 0.0:
            idle = {
                name: {i: one for i, one in m.items() if i not in chosen} for name, m in previewed.items()
            }
            tried = self._trial({**idle, **asked}, chosen, prices)
        self._guesses = round(sum([offer.rows for offer in chosen.values()]))
        if tried is not None or 2 * self._guesses > prices.foreseen:
            self._prices.clear()  # the step tells something new
        longest = min(self.tuning.quiet, load.batch.bit_length() - 1)
        for i in awake:
            rows[i].state.quiet = 0 if i in chosen else min(rows[i].state.quiet + 1, longest)
        users: dict[str, int] = {}
        for offer in chosen.values():
            users[offer.drafter] = users.get(offer.drafter, 0) + 1
        plans = []
        for i, row in enumerate(rows):
            own = row.state.asked = chosen.get(i)
            reason = "probe" if i == tried else "best" if i in awake else "pause"
            plans.append(prices.plan(row, own, reason, users[own.drafter] if own else 0))
        return plans

    def _best(
        self,
        previewed: Mapping[str, Mapping[int, Menu]],
        asked: Mapping[str, Mapping[int, Menu]],
        prices: Prices,
    ) -> dict[int, Offer]:
        """What gains most, by sequence."""
        chosen: dict[int, Offer] = {}
        for menu_B in previewed.values():
            for i, menu in menu_B.items():
                if menu.offers[0].gain > (chosen[i].gain if i in chosen else 0.0):
                    chosen[i] = menu.offers[0]
        chosen |= self._together(asked, chosen, prices)
        return prices.paying(chosen) if prices.batch > 1 else chosen

    def _offered(
        self, rows: Sequence[PolicyRow], awake: Collection[int], prices: Prices
    ) -> tuple[dict[str, dict[int, Menu]], dict[str, dict[int, Menu]]]:
        """By drafter and sequence: offers of those that preview their drafts, and of those that do not."""
        previewed: dict[str, dict[int, Menu]] = {}
        asked: dict[str, dict[int, Menu]] = {}
        for i in awake:
            self._told |= rows[i].previews.keys()
        for i, row in enumerate(rows):
            for name, budget in row.drafters.items() if row.limit.max_depth > 0 else ():
                state, preview = row.state, row.previews.get(name)
                if preview:
                    scale = self._pool(state, name).ratio(KEPT) * self._here(state, name)
                    offer = prices.look_up(name, preview, row.limit, scale)
                    previewed.setdefault(name, {})[i] = Menu((offer,))
                elif name not in self._told and budget.max_nodes and name != NONE:
                    pool, here = self._pool(state, name), self._here(state, name)
                    left = 0 if name in state.here else row.limit.max_depth
                    menu = prices.menu(name, budget, row.limit, pool, here, left)
                    if menu.best is not None:
                        asked.setdefault(name, {})[i] = menu
        return previewed, asked

    def _priced(self, own: int, load: Load) -> Prices:
        key = own, load.beside, load.batch, load.context // PAGE
        until, prices = self._prices.get(key, (0, None))
        if prices is None or until <= self._tick:
            if len(self._prices) > _KEPT:
                self._prices.clear()
            prices = Prices(self.costs, load, own, self._guesses)
            self._prices[key] = self._tick + min(self.tuning.renew, 1 + self._tick // 8), prices
        return prices

    def _together(
        self, menus: Mapping[str, Mapping[int, Menu]], chosen: Mapping[int, Offer], prices: Prices
    ) -> dict[int, Offer]:
        """The drafter and depth that pay best for all sequences together, beside what is chosen."""
        found: dict[int, Offer] = {}
        best = 0.0
        for name, menu_B in menus.items():
            most = max([len(menu.offers) for menu in menu_B.values()])
            for depth in range(most) if len(menu_B) > 1 else (None,):
                users: dict[int, Offer] = {}
                total = levels = 0.0
                for i, menu in menu_B.items():
                    offer = menu.best if depth is None else menu.offers[: depth + 1][-1]
                    assert offer is not None
                    more = offer.gain - (chosen[i].gain if i in chosen else 0.0)
                    if more > 0.0:
                        users[i] = offer
                        total, levels = total + more, max(levels, offer.levels)
                total -= prices.draft(name, levels, len(menu_B))
                if total > best:
                    best, found = total, users
        return found

    def _trial(
        self, menus: Mapping[str, Mapping[int, Menu]], chosen: dict[int, Offer], prices: Prices
    ) -> int | None:
        """Have the drafter that was idle longest tried for one sequence."""
        used, step = {offer.drafter for offer in chosen.values()}, prices.rate * prices.plain
        idle = [name for name in menus if menus[name] and name not in used]
        for name in sorted(idle, key=lambda name: self._tried.get(name, 0)):
            i, menu = list(menus[name].items())[self._tick % len(menus[name])]
            loss, offer = min([(prices.draft(name, one.levels) - one.gain, one) for one in menu.offers[:2]])
            loss += chosen[i].gain if i in chosen else 0.0 if chosen else prices.begun(round(offer.rows))
            # While a lookup copies well, others wait. What a bad moment taught is not believed for ever.
            saved = 0.0 if i in chosen else -self._wait * step * self.tuning.explore
            if loss <= max(1.0, saved):
                self._tried[name], chosen[i] = self._tick, offer
                self._wait = (max(0.0, loss) + menu.read) / step / self.tuning.explore
                return i
        return None

    def learn(self, rows: Sequence[PolicyRow], evidence: Sequence[Evidence]) -> None:
        """Take in what was kept of the drafts."""
        for row, seen in zip(rows, evidence, strict=True):
            offer = row.state.asked
            if offer is not None and offer.drafter == seen.drafter:
                self._learn(row.state, offer, seen)

    def _learn(self, state: State, offer: Offer, seen: Evidence) -> None:
        pool, here = self._pool(state, seen.drafter), state.here.setdefault(seen.drafter, Ratio())
        guesses: list[tuple[float, float, tuple[str | int, ...]]] = []  # kept, stated, of which kind
        if offer.stated:
            if not seen.censored and seen.depth:
                guesses.append((seen.accepted, offer.stated, (KEPT,)))
        else:
            if offer.width:
                pool.grew(offer.width, offer.depth, seen.drafted, seen.depth)
            # Silence where a level was asked for is a level that was not kept.
            refused = not seen.censored and seen.accepted < offer.depth
            for level in range(seen.accepted + refused):
                guesses.append((level < seen.accepted, self.tuning.hope, (KEPT, level, offer.width)))
        for kept, stated, kind in guesses:
            here.add(kept, stated * pool.ratio(*kind) / pool.ratio(KEPT), self.tuning.text)
            pool.add(kept, stated, *kind)

    def learned(self) -> dict[str, Any]:
        """What is known of drafters over all texts without a key; numbers alone, and no text."""
        return {
            "greedy" if greedy else "drawn": {name: pool.to_json() for name, pool in pools.items()}
            for (key, greedy, ruled), pools in self._pools.items()
            if pools and not key and not ruled
        }

    def recall(self, learned: Any) -> None:
        """Begin with what ``learned`` gave, for drafters that were not asked yet; ignore what is broken."""
        for kind in ("greedy", "drawn") if isinstance(learned, dict) else ():
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError):
                found = {name: Pool.from_json(one, self.tuning) for name, one in learned[kind].items()}
                pools = self._pools.setdefault(("", kind == "greedy", False), {})
                pools |= {**found, **pools}

    def _pool(self, state: State, name: str) -> Pool:
        pool = state.pools.get(name)
        if pool is None:
            kept = self.costs.kept(name)  # which recalls what was learned before
            pool = state.pools.setdefault(name, self.form(self.tuning, *kept))
        return pool

    def _here(self, state: State, name: str) -> float:
        """What chances by all texts are worth for this one; all of them count as a few guesses of it."""
        one, doubt = state.here.get(name), self.tuning.doubt
        if one is None:
            return 1.0
        return (one.kept / self._pool(state, name).ratio(KEPT) + doubt) / (one.expected + doubt)
