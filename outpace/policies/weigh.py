"""Drafts against their costs: which drafter, and how deep, so that the batch emits most per second.

    rate = tokens that all sequences of the pass are expected to emit / seconds of the step

A further level or node is worth it only if the rate rises. Sequences share a pass, so its price
depends on all of them: they are settled one after the other, each with the others as they are or
were a step ago. A drafter that is not asked teaches nothing; it is probed now and then, from an
allowance of time that bounds what may be lost, and again at once when a probe was kept.

Sources: the rule, DSpark's and Sequoia's choice by measured cost (arXiv:2402.12374); rates as what
to maximise, Goodput (SmartSpec), arXiv:2406.14066. The allowance and the margin are our own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outpace.costs import Costs
from outpace.policies.base import Evidence, Policy, PolicyRow
from outpace.policies.expect import Belief, Pool, sizes
from outpace.types import NOTHING, Budget, Choice, Load, Plan

NONE = "none"
PROBE_LEVELS, PROBE_GAP, LONGEST_GAP = 2, 8, 16
"""Depth of a probe, and steps between two of one drafter, which double while probes fail."""
FIRST_ALLOWANCE, ALARM_ALLOWANCE, DEBT = 2.0, 1.5, 1.0
"""In steps: at the start, after a change of text, and what a kept probe may borrow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeighConfig:
    """Settings of policies that weigh drafts against costs."""

    probe: float = 0.015
    """Share of the time that may be spent on finding out what idle drafters are worth."""
    margin: float = 0.04
    """Gain, as a share, below which the drafter is not changed. Keeps batches that grow and shrink
    from changing to and fro."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.probe <= 0.5:
            raise ValueError(f"probe must be in [0, 0.5], got {self.probe}")
        if not 0.0 <= self.margin <= 1.0:
            raise ValueError(f"margin must be in [0, 1], got {self.margin}")


@dataclass(slots=True)
class Share:
    """A sequence's part of a pass."""

    drafter: str = NONE
    kept: float = 0.0
    nodes: int = 0
    levels: int = 0


@dataclass(slots=True)
class Option:
    """A drafter that may be asked, by how far it is let go."""

    drafter: str
    kept_D: Sequence[float]
    """Tokens expected to be kept of the first 1, 2, ... levels; of nodes, if it gave a hint."""
    nodes_D: Sequence[int]
    hinted: bool

    def share(self, cut: int) -> Share:
        """The part of a pass that it would take."""
        levels = 1 if self.hinted else cut
        return Share(self.drafter, self.kept_D[cut - 1], self.nodes_D[cut - 1], levels)


@dataclass(slots=True)
class State:
    """What a policy knows of one sequence."""

    beliefs: dict[str, Belief] = field(default_factory=dict)
    promised: dict[str, list[float]] = field(default_factory=dict)
    """Of those that give hints: tokens kept and tokens promised, lately."""
    share: Share = field(default_factory=Share)
    usual: str = NONE
    """The drafter, probes apart."""
    asked: Option | None = None
    cut: int = 0
    probing: bool = False
    again: str | None = None
    """A drafter whose probe was kept."""
    tried: dict[str, int] = field(default_factory=dict)
    gap: dict[str, int] = field(default_factory=dict)
    step: int = 0
    allowance: float | None = None
    """Seconds that probes may lose."""
    seconds: float = 0.0
    """Of the last step, its part."""


class Tally:
    """A pass under construction: all sequences but the one that is being settled."""

    def __init__(self, costs: Costs, load: Load, shares: Sequence[Share]) -> None:
        self._costs, self._load, self._shares = costs, load, shares
        self.batch = max(load.batch, len(shares))
        self._own = len(shares)
        self._passed: dict[int, float] = {}  # rows -> seconds; the same few are asked for often

    def passed(self, rows: int) -> float:
        """Seconds of a pass over so many rows."""
        found = self._passed.get(rows)
        if found is None:
            found = self._costs.passed(rows, self._load.context, self.batch)
            self._passed[rows] = found
        return found

    def leave_out(self, index: int) -> None:
        """Look at the pass without this sequence; -1 leaves out none."""
        self._kept, self._draft = float(self.batch), self._costs.rest
        self._rows = self._own + self._load.beside
        self._deepest: dict[str, int] = {}
        for i, share in enumerate(self._shares):
            if i != index and share.levels:
                self._kept += share.kept
                self._rows += share.nodes
                self._draft += self._costs.price(share.drafter)[0]
                self._deepest[share.drafter] = max(
                    share.levels, self._deepest.get(share.drafter, 0)
                )
        for name, levels in self._deepest.items():
            self._draft += self._costs.price(name)[1] * levels

    def alike(self, options: Sequence[Option]) -> Share:
        """The part that a sequence would take if all others were like it."""
        own, beside = self._own, self._load.beside
        best = self.batch / (self.passed(own + beside) + self._costs.rest)
        found = Share()
        for option in options:
            call, level = self._costs.price(option.drafter)
            for cut in range(1, len(option.kept_D) + 1):
                share = option.share(cut)
                seconds = self.passed(own * (1 + share.nodes) + beside) + self._costs.rest
                seconds += own * call + level * share.levels
                rate = (self.batch + own * share.kept) / seconds
                if rate > best:
                    best, found = rate, share
        return found

    def total(self) -> float:
        """Tokens per second, when no sequence is left out."""
        return self._kept / (self._draft + self.passed(self._rows))

    def seconds(self, share: Share) -> float:
        """Of the step, if the sequence takes this part."""
        spent = self._draft
        if share.levels:
            call, level = self._costs.price(share.drafter)
            spent += call + level * max(0, share.levels - self._deepest.get(share.drafter, 0))
        return spent + self.passed(self._rows + share.nodes)

    def rate(self, share: Share) -> float:
        """Tokens per second of the batch, if the sequence takes this part."""
        return (self._kept + share.kept) / self.seconds(share)

    def best(self, option: Option) -> tuple[float, int]:
        """The rate of an option, and how far it is best let go."""
        kept, rows, passed = self._kept, self._rows, self.passed
        call, level = self._costs.price(option.drafter)
        deepest = self._deepest.get(option.drafter, 0)
        found, cut = 0.0, 1
        for depth, (more, nodes) in enumerate(
            zip(option.kept_D, option.nodes_D, strict=True), 1
        ):
            steps = max(0, (1 if option.hinted else depth) - deepest)
            spent = self._draft + call + level * steps
            rate = (kept + more) / (spent + passed(rows + nodes))
            if rate > found:
                found, cut = rate, depth
        return found, cut


class Weighing(Policy):
    """Base of policies that pick by expected tokens per second. They differ in whom they ask."""

    config: WeighConfig
    steady = False
    reads_hints = True

    def __init__(self, config: WeighConfig) -> None:
        super().__init__(config)
        self._pools: dict[str, Pool] = {}
        self._sizes: dict[str, tuple[Budget, tuple[int, ...]]] = {}

    def begin(self) -> State:
        """Nothing is known of the sequence but what others taught."""
        return State()

    def candidates(self, row: PolicyRow) -> Iterable[tuple[str, Budget]]:
        """Drafters to weigh for a sequence; drafting nothing is always weighed too."""
        raise NotImplementedError

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """Cost: some microseconds per sequence, drafter and level."""
        before = [row.state.share for row in rows]
        chances: dict[str, list[float]] = {}
        options_B = [
            [
                option
                for name, budget in self.candidates(row)
                if (option := self._option(row, name, budget, chances)) is not None
            ]
            for row in rows
        ]
        shares = list(before)
        tally = Tally(self.costs, load, shares)
        if len(rows) > 1 and not any(self.costs.price(one.drafter)[1] for one in shares):
            # A level is paid for once, so it may pay for all together and for none alone.
            shares[:] = [tally.alike(options) for options in options_B]
        plans = []
        for index, (row, options) in enumerate(zip(rows, options_B, strict=True)):
            tally.leave_out(index)
            plans.append(self._settle(row, options, tally))
            shares[index] = row.state.share
        if len(rows) > 1:
            self._together(rows, before, shares, tally, plans)
        return plans

    def _together(
        self,
        rows: Sequence[PolicyRow],
        before: Sequence[Share],
        shares: list[Share],
        tally: Tally,
        plans: list[Plan],
    ) -> None:
        """Give up a drafter that pays for each sequence only because others pay for it too."""
        for name in {one.drafter for one in shares if self.costs.price(one.drafter)[1]}:
            users = [
                i for i, row in enumerate(rows)
                if shares[i].drafter == name and not row.state.probing
            ]
            tally.leave_out(-1)
            drafting = tally.total()
            kept = [shares[i] for i in users]
            for i in users:
                shares[i] = Share()
            tally.leave_out(-1)
            margin = 1.0 + self.config.margin
            was = any(one.drafter == name for one in before)
            if tally.total() * (1.0 / margin if was else margin) <= drafting:
                for i, one in zip(users, kept, strict=True):
                    shares[i] = one
                continue
            for i in users:
                state, choice = rows[i].state, plans[i].choice
                state.share, state.usual, state.asked = shares[i], NONE, None
                plans[i] = Plan(NONE, NOTHING, choice and Choice("together", choice.rates))

    def learn(self, rows: Sequence[PolicyRow], evidence: Sequence[Evidence]) -> None:
        """Take in what was kept of the drafts."""
        for row, seen in zip(rows, evidence, strict=True):
            if row.state.asked is not None and row.state.asked.drafter == seen.drafter:
                self._learn(row.state, row.state.asked, seen)

    def _option(
        self, row: PolicyRow, name: str, budget: Budget, chances: dict[str, list[float]]
    ) -> Option | None:
        """What a drafter offers; None if it has nothing to propose or there is no room."""
        depth, nodes = row.limit.max_depth, row.limit.max_nodes
        if depth <= 0 or nodes <= 0:
            return None
        hint = row.hints.get(name)
        if hint is not None:
            kept, promised = row.state.promised.get(name, (0.0, 0.0))
            scale = min(2.0, max(0.05, (kept + 2.0) / (promised + 2.0)))
            total, reach = 0.0, []
            for chance in hint[:nodes]:
                total += chance * scale
                reach.append(total)
            return Option(name, reach, range(1, len(reach) + 1), True) if reach else None
        known = self._sizes.get(name)
        if known is None or known[0] is not budget:
            known = self._sizes[name] = (budget, sizes(budget))
        levels = min(depth, len(known[1]))
        if name not in chances:
            if name not in self._pools:
                self._pools[name] = Pool(*self.costs.kept(name))
            chances[name] = self._pools[name].chances(len(known[1]))
        belief = row.state.beliefs.get(name)
        if belief is None:
            belief = row.state.beliefs[name] = Belief()
        reach = belief.reach(chances[name][:levels])
        return Option(name, reach, known[1][:levels], False) if reach else None

    def _settle(self, row: PolicyRow, options: list[Option], tally: Tally) -> Plan:
        """Pick for one sequence."""
        state: State = row.state
        nothing = Share()
        rates, cuts = {NONE: tally.rate(nothing)}, {NONE: 0}
        for option in options:
            rates[option.drafter], cuts[option.drafter] = tally.best(option)
        of = {option.drafter: option for option in options}
        pick, reason = max(rates, key=lambda name: rates[name]), "best"
        if pick != state.usual and rates[pick] < rates.get(state.usual, 0.0) * (
            1.0 + self.config.margin
        ):
            pick, reason = state.usual, "stay"
        state.usual = pick
        state.step += 1
        share = of[pick].share(cuts[pick]) if pick in of else nothing
        step = tally.seconds(share)
        state.seconds = step / tally.batch
        if state.allowance is None:
            new = any(not (one.hinted or self._measured(one.drafter)) for one in options)
            state.allowance = FIRST_ALLOWANCE * step / tally.batch * new
        state.allowance += self.config.probe * step / tally.batch
        probe = self._probe(state, options, pick, rates[pick], step, tally)
        if probe is not None:
            pick, reason = probe.drafter, "probe"
            share = probe
        state.probing, state.again = probe is not None, None
        state.share = share
        state.asked, state.cut = of.get(pick), share.levels
        choice = Choice(reason, rates)
        if pick == NONE:
            return Plan(NONE, NOTHING, choice)
        state.tried[pick] = state.step
        return Plan(pick, self._budget(row, pick, of[pick], share), choice)

    def _probe(
        self, state: State, options: list[Option], pick: str, rate: float, step: float, tally: Tally
    ) -> Share | None:
        """An idle drafter that it is time to try, if the allowance pays for it."""
        found: tuple[int, Share, float] | None = None
        for option in options:
            name = option.drafter
            # Who was measured beforehand need not be tried first of all.
            age = state.step - state.tried.get(name, 0 if self._measured(name) else -LONGEST_GAP)
            due = age >= state.gap.get(name, PROBE_GAP) or name == state.again
            if option.hinted or name == pick or not due:
                continue
            share = option.share(min(PROBE_LEVELS, len(option.kept_D)))
            seconds = tally.seconds(share)
            loss = max(0.0, seconds - seconds * tally.rate(share) / rate)
            credit = state.allowance or 0.0
            if name == state.again:
                credit += DEBT * step / tally.batch
            if loss <= credit and (found is None or age > found[0]):
                found = age, share, loss
        if found is None:
            return None
        state.allowance = (state.allowance or 0.0) - found[2]
        return found[1]

    def _measured(self, name: str) -> bool:
        """Whether acceptance was measured before the first request."""
        return bool(self.costs.kept(name)[1])

    def _budget(self, row: PolicyRow, name: str, option: Option, share: Share) -> Budget:
        own, limit = row.drafters[name], row.limit
        depth = min(own.max_depth, limit.max_depth)
        return Budget(
            max_nodes=min(share.nodes, own.max_nodes, limit.max_nodes),
            max_depth=depth if option.hinted else min(depth, share.levels),
            max_rows=min(own.max_rows, limit.max_rows),
            shape=own.shape,
            stop=own.stop,
        )

    def _learn(self, state: State, asked: Option, seen: Evidence) -> None:
        if asked.hinted:
            pair = state.promised.setdefault(seen.drafter, [0.0, 0.0])
            if not seen.censored:
                pair[0] = 0.9 * pair[0] + seen.accepted
                pair[1] = 0.9 * pair[1] + state.share.kept
            return
        # Silence where a level was asked for is a level that was not kept.
        refused = not seen.censored and seen.accepted < state.cut
        pool, belief = self._pools[seen.drafter], state.beliefs[seen.drafter]
        worse = belief.learn(pool, seen.accepted, refused)
        if state.probing and not refused:
            state.again = seen.drafter
            state.gap.pop(seen.drafter, None)
        elif state.probing:
            gap = 2 * state.gap.get(seen.drafter, PROBE_GAP)
            state.gap[seen.drafter] = min(LONGEST_GAP, gap)
        if worse and not state.probing:
            state.gap[seen.drafter] = 2 * PROBE_GAP
            # The text has changed: what was known of the others is void, and they are tried soon.
            for name, other in state.beliefs.items():
                if other is not belief:
                    other.reopen(self._pools[name])
                    state.tried.pop(name, None)
                    state.gap.pop(name, None)
            state.allowance = max(state.allowance or 0.0, ALARM_ALLOWANCE * state.seconds)
