"""Replay: run a policy against recorded texts, on a machine of given costs.

    result = replay(policy, device, walks, batch=lambda step: 8)
    result.rate                             tokens per second
    best_choice(device, walks, batch=...)   the best fixed rule in hindsight

The policy plans, the recorded text says what would have been drafted and accepted, and the device says
what the step takes. The policy is told noisy seconds, as on a real machine. The score adds up the
expected ones, so that two policies are compared without noise. Nothing here is read by a policy.

Shape letters: R row counts.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace import registry
from outpace.analysis.recording import Text
from outpace.coins import KeyedCoins, Stream
from outpace.policies.base import Evidence, Policy, PolicyRow
from outpace.types import NOTHING, Budget, Choice, Load, Plan, RowRecord, StepRecord

USUAL = 8
"""Tokens that a drafter reads within the price of its first level."""
_ROOMY = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What steps take, in milliseconds: a machine, a target and its drafters."""

    name: str
    rows_R: tuple[int, ...]
    pass_R: tuple[float, ...]
    """Of a pass over so many rows; beyond the last one the last slope goes on."""
    sequence: float = 0.0
    """Of each sequence beside its rows: its keys and values."""
    levels: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """A level of a trained ``head``, of a language ``model``, or of a drafter by its spec: for one sequence,
    and for each further one."""
    unread: float = 0.0
    """Of each token that a drafter reads late."""
    look: float = 0.05
    """Of a preview, and of weighing one sequence."""
    step: float = 0.3
    """Of a step, outside draft and pass."""
    judge: float = 0.03
    """Of each sequence that drafts, outside draft and pass."""
    noise: float = 0.0
    """Standard deviation of the logarithm of seconds."""
    stalls: float = 0.0
    """Share of steps that stall, for ten passes."""
    cold: int = 0
    """Steps at the start that take up to ten times as long."""

    def passed(self, rows: int, batch: int) -> float:
        """Milliseconds of a pass."""
        x, y = self.rows_R, self.pass_R
        end = next((i for i in range(1, len(x)) if rows <= x[i]), len(x) - 1)
        slope = (y[end] - y[end - 1]) / (x[end] - x[end - 1])
        return y[end - 1] + slope * (rows - x[end - 1]) + self.sequence * batch

    def level(self, spec: str, sequences: int) -> float:
        """Milliseconds of a level of a drafter for so many sequences."""
        one, more = self.levels.get(spec) or self.levels.get(self.kind(spec), (0.0, 0.0))
        return one + more * (sequences - 1)

    @staticmethod
    def kind(spec: str) -> str:
        """Whether a drafter is a language ``model`` or a ``head``."""
        model = registry.can("drafter", spec.partition("[")[0], registry.RUNS_MODEL)
        return "model" if model else "head"


@dataclass(frozen=True, slots=True)
class Walk:
    """Positions of recorded texts, one after the other: a request."""

    parts: tuple[tuple[Text, int, int], ...]
    """Text, first position, and the one behind the last."""

    @property
    def length(self) -> int:
        """Tokens."""
        return sum(end - start for _, start, end in self.parts)

    def at(self, place: int) -> tuple[Text, int, int]:
        """Text and position of a place, and how many tokens of that part are left."""
        for text, start, end in self.parts:
            if place < end - start:
                return text, start + place, end - start - place
            place -= end - start
        raise IndexError(place)


def whole(text: Text) -> Walk:
    """A request that is one text."""
    return Walk(((text, 0, text.positions),))


def turning(first: Text, second: Text) -> Walk:
    """A request whose text changes kind half-way."""
    half = first.positions // 2
    return Walk(((first, 0, half), (second, half, second.positions)))


@dataclass(slots=True)
class _Sequence:
    walk: Walk
    number: int
    state: Any
    place: int = 0
    read: dict[str, int] = field(default_factory=dict)
    """Drafter -> tokens that it has read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What came of a replay."""

    tokens: int
    milliseconds: float
    steps: int
    by_drafter: Mapping[str, int]
    """Drafter -> drafts."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return 1e3 * self.tokens / self.milliseconds


class Replay:
    """Sequences under one policy.

    Args:
        policy: fresh, or one that has run already.
        device: what steps take.
        seed: of noise and of the policy's coins.
    """

    def __init__(self, policy: Policy, device: Device, seed: int = 0) -> None:
        self.policy, self.device = policy, device
        self._random = random.Random(seed)
        self._count = itertools.count()
        self.active: list[_Sequence] = []
        self.steps = self.tokens = 0
        self.milliseconds = 0.0
        self.by_drafter: dict[str, int] = {}

    def run(
        self, walks: Sequence[Walk], batch: Callable[[float], int], until: float | None = None
    ) -> Replayed:
        """Run requests, as many at a time as ``batch`` says of each moment, in milliseconds.

        Args:
            walks: taken in order.
            batch: milliseconds since the start -> requests at a time; the oldest ones stay.
            until: the milliseconds to run, over and over the same requests. None: once, till too few are
                left; how a queue ends tells nothing of how fast a batch is.
        """
        waiting = itertools.chain.from_iterable(itertools.repeat(walks, 1 if until is None else 1 << 20))
        tokens, start, steps = self.tokens, self.milliseconds, self.steps
        while until is None or self.milliseconds - start < until:
            wanted = batch(self.milliseconds - start)
            for walk in itertools.islice(waiting, max(0, wanted - len(self.active))):
                self.active.append(_Sequence(walk, next(self._count), self.policy.begin()))
            if not self.active or (until is None and len(self.active) < wanted):
                break
            self.step()
        self.active = []
        return Replayed(
            tokens=self.tokens - tokens,
            milliseconds=self.milliseconds - start,
            steps=self.steps - steps,
            by_drafter=dict(self.by_drafter),
        )

    def step(self) -> None:
        """One step of all active sequences."""
        rows_of = self.active
        load = Load(len(rows_of), max(one.walk.parts[0][0].start + one.place for one in rows_of))
        looks = 0
        rows = []
        for one in rows_of:
            row, looked = self._row(one, load)
            rows.append(row)
            looks += looked
        plans = self.policy.plan(rows, load)
        users: dict[str, tuple[int, int]] = {}
        records, late = [], 0.0
        for one, plan in zip(rows_of, plans, strict=True):
            record, more = self._drafted(one, plan, users)
            records.append(record)
            late += more
        total, drafting = len(rows_of) + sum(one.drafted for one in records), sum(map(_drafts, plans))
        draft = late + sum(
            self.device.level(spec, count) * deepest for spec, (count, deepest) in users.items()
        )
        self.policy.learn(
            rows, [Evidence(one.drafter, one.drafted, one.depth, one.accepted, False) for one in records]
        )
        verbs = {
            "plan": self.device.look * looks,
            "draft": draft + 0.02 * drafting,
            "score": self.device.passed(total, len(rows_of)),
            "judge": self.device.step + self.device.judge * drafting,
            "commit": 0.0,
        }
        self.milliseconds += sum(verbs.values())
        levels = sum(deepest for _, deepest in users.values())
        self.policy.costs.watch(
            StepRecord(
                self.steps,
                tuple(records),
                {verb: 1e-3 * self._noisy(spent) for verb, spent in verbs.items()},
                total,
                draft_levels=levels,
                context=load.context,
            )
        )
        self.steps += 1
        self.active = [one for one in rows_of if one.place < one.walk.length]

    def _drafted(
        self, one: _Sequence, plan: Plan, users: dict[str, tuple[int, int]]
    ) -> tuple[RowRecord, float]:
        """Draft for a sequence and let it go on; and the milliseconds of reading what it had not read.

        Args:
            users: drafter that runs passes -> sequences that it drafted for, and its levels; gains this one.
        """
        text, position, left = one.walk.at(one.place)
        nodes = depth = kept = unread = levels = 0
        late = 0.0
        if _drafts(plan):
            drafter = text.drafters[plan.drafter]
            nodes, depth, kept, levels = drafter.draft(position, plan.budget)
            kept = min(kept, left - 1)
            self.by_drafter[plan.drafter] = self.by_drafter.get(plan.drafter, 0) + (nodes > 0)
            if drafter.passes:
                unread = one.place + text.start - one.read.get(plan.drafter, 0)
                late = self.device.unread * max(0, unread - USUAL)
                one.read[plan.drafter] = one.place + text.start
                count, deepest = users.get(plan.drafter, (0, 0))
                users[plan.drafter] = count + 1, max(deepest, levels)
        one.place += kept + 1
        self.tokens += kept + 1
        emitted = (0,) * (kept + 1)
        record = RowRecord(one.number, plan.drafter, nodes, kept, emitted, depth, False, plan.choice, unread)
        return record, late

    def _noisy(self, milliseconds: float) -> float:
        if self.device.noise:
            milliseconds *= math.exp(self._random.gauss(0.0, self.device.noise))
        if self.device.stalls and self._random.random() < self.device.stalls:
            milliseconds += 10.0 * self.device.pass_R[0]
        if self.steps < self.device.cold:
            milliseconds *= self._random.uniform(1.0, 10.0)
        return milliseconds

    def _row(self, one: _Sequence, load: Load) -> tuple[PolicyRow, int]:
        """What the policy sees of a sequence, and what was asked of drafters for it."""
        text, position, left = one.walk.at(one.place)
        wanted = self.policy.wants_previews(one.state, load)
        previews: dict[str, Sequence[float]] = {}
        if wanted:
            for spec, drafter in text.drafters.items():
                if drafter.previews_P is not None:
                    previews[spec] = drafter.previews_P[position][: max(0, left - 1)]
        row = PolicyRow(
            one.state,
            {spec: drafter.budget for spec, drafter in text.drafters.items()},
            Budget(_ROOMY, left - 1) if left > 1 else NOTHING,
            KeyedCoins(one.number, one.place, Stream.POLICY),
            previews,
        )
        return row, int(wanted)


def _drafts(plan: Plan) -> bool:
    """Whether somebody is asked for guesses."""
    return plan.drafter != "none" and plan.budget.max_nodes > 0


def replay(
    policy: Policy,
    device: Device,
    walks: Sequence[Walk],
    batch: Callable[[float], int],
    until: float | None = None,
) -> Replayed:
    """Replay requests from a fresh start."""
    return Replay(policy, device).run(walks, batch, until)


@dataclass(frozen=True, slots=True)
class Rule:
    """One fixed choice: guesses of a lookup that it holds likely enough; else another drafter."""

    least: float | None
    """Least chance of a lookup's guess to be drafted; None never asks one."""
    other: str | None = None
    nodes: int = 0
    depth: int = 0
    """Asked of the other, where the lookup has nothing to say."""

    def __str__(self) -> str:
        first = "" if self.least is None else f"lookup>={self.least:g}"
        name = (self.other or "").partition("[")[0]
        second = "" if self.other is None else f"{name} {self.nodes}/{self.depth}"
        return " else ".join(part for part in (first, second) if part) or "none"


class Always(Policy):
    """Follows one rule."""

    reads_previews = True

    def __init__(self, rule: Rule) -> None:
        super().__init__(None)
        self.rule = rule

    def wants_previews(self, state: Any, load: Load) -> bool:
        """Not if the rule drafts nothing."""
        return self.rule.least is not None or self.rule.other is not None

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """The same choice for every sequence."""
        return [self._one(row) for row in rows]

    def _one(self, row: PolicyRow) -> Plan:
        rule, room = self.rule, row.limit
        if rule.least is not None:
            for spec, told in row.previews.items():
                likely = sum(chance >= rule.least for chance in told)
                if likely:
                    return Plan(spec, Budget(min(likely, room.max_nodes), min(likely, room.max_depth)))
        if rule.other is None:
            return Plan("none", NOTHING)
        own = row.drafters[rule.other]
        nodes, depth = min(rule.nodes, room.max_nodes), min(rule.depth, room.max_depth)
        return Plan(rule.other, Budget(nodes, depth, shape=own.shape), Choice("best", {}))


def best_choice(
    device: Device, walks: Sequence[Walk], batch: Callable[[float], int], until: float | None = None
) -> tuple[Rule, float, float]:
    """The rule that would have been best.

    All thresholds of lookups are tried without another drafter, and all others without a lookup. Then the
    three best of each are tried together.

    Returns:
        The rule, its tokens per second, and those of the rule that drafts nothing.
    """
    rates: dict[Rule, float] = {}

    def run(found: Iterable[Rule]) -> list[Rule]:
        for rule in found:
            if rule not in rates:
                rates[rule] = replay(Always(rule), device, walks, batch, until).rate
        return sorted(rates, key=lambda rule: -rates[rule])

    alone = run(Rule(least) for least in (None, 0.1, 0.2, 0.3, 0.4, 0.55, 0.7))[:3]
    others = []
    for spec, drafter in walks[0].parts[0][0].drafters.items():
        if drafter.previews_P is None:
            for nodes in sorted({1, 2, *drafter.guesses}):
                depths = range(1, min(nodes, drafter.budget.max_depth) + 1)
                others += [Rule(None, spec, nodes, depth) for depth in depths]
    known = set(rates)
    best = [rule for rule in run(others) if rule not in known][:3]
    first = run(Rule(one.least, two.other, two.nodes, two.depth) for one in alone for two in best)[0]
    return first, rates[first], rates[Rule(None)]
