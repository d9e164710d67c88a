"""Drafts against their costs: which drafter, and how deep, so that the batch emits most per second.

    rate = tokens that the sequences of the pass are expected to emit / seconds of the step

A further level or node is worth it only if the rate rises. Sequences share a pass, so its price
depends on all of them: they are settled one after the other, each with the others as they are or
were a step ago. A drafter that is not asked teaches nothing; it is probed now and then, from an
allowance of time that bounds what may be lost, and again at once when a probe was kept.

Sources: the rule, DSpark's and Sequoia's choice by measured cost (arXiv:2402.12374); rates as what
to maximise, Goodput (SmartSpec), arXiv:2406.14066. The allowance, the margin and the mean over
sequences (``outpace.policies.batch_cost``) are our own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outpace.policies.base import Evidence, Policy, PolicyRow
from outpace.policies.batch_cost import NONE, BatchCost, Option, Share, at_once
from outpace.policies.candidates import MOST_WORTH, Candidates, Learned
from outpace.policies.exploration import Exploration
from outpace.types import NOTHING, Budget, Choice, Load, Plan

PROBE_LEVELS, PROBE_GAP, LONGEST_GAP = 2, 8, 16
"""Depth of a probe, and steps between two of one drafter, which double while probes fail."""
FIRST_ALLOWANCE, ALARM_ALLOWANCE, DEBT = 2.0, 1.5, 1.0
"""In steps: where a drafter is unknown, after a change of text, what a kept probe may borrow."""
PROBE_LOSS = 0.4
"""Most that one probe may lose, in steps: while a lookup copies well, others wait till it stops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputConfig:
    """Settings of policies that weigh drafts against costs."""

    probe: float = 0.015
    """Share of the time that may be spent on finding out what idle drafters are worth, and half
    as much on passes without drafts, to learn what those cost; 0: on neither."""
    margin: float = 0.04
    """Gain, as a share, below which the drafter is not changed. Keeps batches that grow and shrink
    from changing to and fro."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.probe <= 0.5:
            raise ValueError(f"probe must be in [0, 0.5], got {self.probe}")
        if not 0.0 <= self.margin <= 1.0:
            raise ValueError(f"margin must be in [0, 1], got {self.margin}")


@dataclass(slots=True)
class State:
    """What a policy knows of one sequence."""

    learned: Learned = field(default_factory=Learned)
    share: Share = field(default_factory=Share)
    usual: str = NONE
    """The drafter, probes apart."""
    asked: Option | None = None
    grant: tuple[int, int] = (0, 0)
    """Nodes and depth that it may have."""
    promised: float = 0.0
    """Tokens that it promised."""
    probing: bool = False
    again: str | None = None
    """A drafter whose probe was kept."""
    tried: dict[str, int] = field(default_factory=dict)
    gap: dict[str, int] = field(default_factory=dict)
    step: int = 0
    allowance: float | None = None
    """What probes may lose, in steps."""
    part: float = 1.0
    """Its part of a step: what it has to answer for."""


class ThroughputPolicy(Policy):
    """Base of policies that pick by expected tokens per second. They differ in whom they ask."""

    config: ThroughputConfig
    deterministic = False
    reads_previews = True

    def __init__(self, config: ThroughputConfig) -> None:
        super().__init__(config)
        self._candidates = Candidates()
        self._exploration = Exploration(config.probe / 2)
        self._heard: tuple[Load, float] | None = None  # the latest load, and the bound for it

    def asks(self, state: State, load: Load) -> float | None:
        """Those that pay for their row if they are kept as often as may be; none in a pause."""
        if self._exploration.paused(load.batch):
            return None
        if self._heard is None or self._heard[0] != load:
            one, two = (self.costs.passed(n * load.batch, load.context, load.batch) for n in (1, 2))
            self._heard = load, (two / one - 1.0) / MOST_WORTH
        return self._heard[1]

    def begin(self) -> State:
        """Nothing is known of the sequence but what others taught."""
        return State()

    def candidates(self, row: PolicyRow) -> Iterable[tuple[str, Budget]]:
        """Drafters to weigh for a sequence; drafting nothing is always weighed too."""
        raise NotImplementedError

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """Cost: some microseconds per sequence, drafter and level; less than one in a pause."""
        if self._exploration.pause(load.batch):
            return [_without(row.state, Choice("pause", {})) for row in rows]
        options_B = [self._options(row) for row in rows]
        for row in rows:
            row.state.share.late = 0.0  # the last step has paid it
        before = [row.state.share for row in rows]
        batch_cost = BatchCost(self.costs, load, before)
        if len(rows) > 1 and not any(self._levelled(one.drafter) for one in before):
            for index, options in enumerate(options_B):
                batch_cost.put(index, batch_cost.alike(options, self.config.margin) or before[index])
        plans = []
        for index, (row, options) in enumerate(zip(rows, options_B, strict=True)):
            batch_cost.leave_out(index)
            plans.append(self._settle(row, options, batch_cost))
            batch_cost.put(index, row.state.share)
        if len(rows) > 1:
            self._together(rows, options_B, before, batch_cost, plans)
        drafting = any(one.drafter != NONE for one in plans)
        if (
            self.config.probe
            and not any(row.state.probing for row in rows)
            and (self._exploration.due(batch_cost, drafting))
        ):
            return [
                _without(row.state, _because("explore", plan)) for row, plan in zip(rows, plans, strict=True)
            ]
        for row, plan in zip(rows, plans, strict=True):
            if plan.drafter != NONE:
                row.state.tried[plan.drafter] = row.state.step
        self._exploration.weighed(load.batch, batch_cost.slower())
        return plans

    def _options(self, row: PolicyRow) -> list[Option]:
        found = (
            self._candidates.option(row, name, budget, row.state.learned, self.costs)
            for name, budget in self.candidates(row)
        )
        return [one for one in found if one is not None]

    def _together(
        self,
        rows: Sequence[PolicyRow],
        options_B: Sequence[list[Option]],
        before: Sequence[Share],
        batch_cost: BatchCost,
        plans: list[Plan],
    ) -> None:
        """Give up a drafter that pays for each sequence only because others pay for it too.

        What is given up teaches nothing: one of its users may try it, when that is due.
        """
        shares = batch_cost.shares
        for name in {one.drafter for one in shares if self._levelled(one.drafter)}:
            users = [i for i, row in enumerate(rows) if shares[i].drafter == name and not row.state.probing]
            batch_cost.leave_out(-1)
            drafting = batch_cost.total()
            kept = [shares[i] for i in users]
            for i in users:
                batch_cost.put(i, Share())
            batch_cost.leave_out(-1)
            margin = 1.0 + self.config.margin
            was = any(one.drafter == name for one in before)
            if batch_cost.total() * (1.0 / margin if was else margin) <= drafting:
                for i, one in zip(users, kept, strict=True):
                    batch_cost.put(i, one)
                continue
            tried = False
            for i in users:
                state = rows[i].state
                state.share, state.usual = shares[i], NONE
                batch_cost.leave_out(i)
                rate, step = batch_cost.rate(state.share), batch_cost.seconds(state.share)
                probe = None if tried else self._probe(state, options_B[i], NONE, rate, step, batch_cost)
                if probe is None:
                    plans[i] = _without(state, _because("together", plans[i]))
                    continue
                tried = state.probing = True
                plans[i] = self._ask(rows[i], *probe, _because("probe", plans[i]))
                batch_cost.put(i, state.share)

    def learn(self, rows: Sequence[PolicyRow], evidence: Sequence[Evidence]) -> None:
        """Take in what was kept of the drafts, and what they gained."""
        self._exploration.learn(1.0 + sum(seen.accepted for seen in evidence) / len(evidence))
        for row, seen in zip(rows, evidence, strict=True):
            if row.state.asked is not None and row.state.asked.drafter == seen.drafter:
                self._learn(row.state, row.state.asked, seen)

    def _settle(self, row: PolicyRow, options: list[Option], batch_cost: BatchCost) -> Plan:
        """Pick for one sequence."""
        state: State = row.state
        nothing = Share()
        rates, cut_of = {NONE: batch_cost.rate(nothing)}, {NONE: 0}
        for option in options:
            rates[option.drafter], cut_of[option.drafter] = batch_cost.best(option)
        of = {option.drafter: option for option in options}
        pick, reason = max(rates, key=lambda name: rates[name]), "best"
        margin = 1.0 + self.config.margin / self._parts(of.get(pick) or of.get(state.usual), batch_cost)
        if pick != state.usual and rates[pick] < rates.get(state.usual, 0.0) * margin:
            pick, reason = state.usual, "stay"
        state.usual = pick
        state.step += 1
        picked = (of[pick], cut_of[pick]) if pick in of else None
        share = picked[0].share(picked[1]) if picked else nothing
        before, state.part = state.part, 1.0 / batch_cost.batch
        if state.allowance is not None:  # what was saved in a small batch is little in a large one
            state.allowance *= state.part / before
        else:
            state.allowance = FIRST_ALLOWANCE * state.part * self._candidates.young(options)
        state.allowance += self.config.probe * state.part
        probe = self._probe(state, options, pick, rates[pick], batch_cost.seconds(share), batch_cost)
        state.probing, state.again = probe is not None, None
        ask, reason = (picked, reason) if probe is None else (probe, "probe")
        if ask is None:
            state.share = nothing
            return _without(state, Choice(reason, rates))
        return self._ask(row, *ask, Choice(reason, rates))

    def _ask(self, row: PolicyRow, option: Option, cut: int, choice: Choice | None) -> Plan:
        """Ask a drafter, as far as the cut says."""
        state: State = row.state
        state.share, state.asked = option.share(cut), option
        state.grant = option.asked_C[cut]
        state.promised = (option.promised_C or (0.0,) * (cut + 1))[cut]
        return Plan(option.drafter, self._budget(row, option.drafter, state.grant), choice)

    def _probe(
        self, state: State, options: list[Option], pick: str, rate: float, step: float, batch_cost: BatchCost
    ) -> tuple[Option, int] | None:
        """An idle drafter that it is time to try, and how far, if the allowance pays for it."""
        found: tuple[int, Option, int, float] | None = None
        for option in options:
            name = option.drafter
            # Who was measured beforehand need not be tried first of all.
            age = state.step - state.tried.get(name, 0 if self._measured(name) else -LONGEST_GAP)
            due = age >= state.gap.get(name, PROBE_GAP) or name == state.again
            if option.previewed or name == pick or not due:
                continue
            worth, cut = batch_cost.best(option, PROBE_LEVELS)
            seconds = batch_cost.seconds(option.share(cut)) + at_once(option.late)
            loss = max(0.0, seconds - seconds * worth / rate) / step
            credit = state.allowance or 0.0
            if name == state.again:
                credit += DEBT * state.part
            if loss <= min(credit, PROBE_LOSS) and (found is None or age > found[0]):
                found = age, option, cut, loss
        if found is None:
            return None
        state.allowance = (state.allowance or 0.0) - found[3]
        return found[1], found[2]

    def _parts(self, option: Option | None, batch_cost: BatchCost) -> int:
        """Into how many parts the margin is split: rates are those of the batch.

        A drafter with levels is settled for all together as well (``_together``), and what a lookup
        says holds for this step. One that does neither is settled by each sequence alone, from
        chances that waver: it gets the whole margin.
        """
        if option is None or option.previewed or self._levelled(option.drafter):
            return batch_cost.batch
        return 1

    def _levelled(self, drafter: str) -> bool:
        """Whether its levels cost something, once for all who use it."""
        return drafter != NONE and self.costs.price(drafter)[1] > 0.0

    def _measured(self, name: str) -> bool:
        """Whether acceptance was measured before the first request."""
        return bool(self.costs.kept(name)[1])

    def _budget(self, row: PolicyRow, name: str, grant: tuple[int, int]) -> Budget:
        own, limit = row.drafters[name], row.limit
        return Budget(
            max_nodes=min(grant[0], own.max_nodes, limit.max_nodes),
            max_depth=min(grant[1], own.max_depth, limit.max_depth),
            max_rows=min(own.max_rows, limit.max_rows),
            shape=own.shape,
            stop=own.stop,
            least=self._heard[1] if self._heard else 0.0,
        )

    def _learn(self, state: State, asked: Option, seen: Evidence) -> None:
        refused, worse = self._candidates.learn(state.learned, asked, state.grant, state.promised, seen)
        if asked.previewed:
            return
        if state.probing and not refused:
            state.again = seen.drafter
            state.gap.pop(seen.drafter, None)
        elif state.probing:
            gap = 2 * state.gap.get(seen.drafter, PROBE_GAP)
            state.gap[seen.drafter] = min(LONGEST_GAP, gap)
        if worse and not state.probing:
            state.gap[seen.drafter] = 2 * PROBE_GAP
            for name in state.learned.reopen(self._candidates, but=seen.drafter):  # they are tried soon
                state.tried.pop(name, None)
                state.gap.pop(name, None)
            state.allowance = max(state.allowance or 0.0, ALARM_ALLOWANCE * state.part)


def _without(state: State, choice: Choice | None) -> Plan:
    """Ask nobody."""
    state.asked, state.probing = None, False
    return Plan(NONE, NOTHING, choice)


def _because(reason: str, plan: Plan) -> Choice | None:
    """Why a plan was changed after all."""
    return plan.choice and Choice(reason, plan.choice.rates)
