"""What passes and drafts cost here and now, in seconds: read by policies, refreshed by steps.

    costs = Costs(curve)                   a measured curve, or none
    engine.listeners.append(costs.watch)   the engine does this for policies that read costs
    costs.passed(rows=12, context=300, batch=1)

A curve says how the cost of a pass grows; the steps that are watched say how this machine differs
from it today: one factor for everything, which follows fast, and one for each power of two of
guesses and of sequences, which follows slowly. Without a curve the shape is that of a small model
on a CPU, and the first steps do all of the work.

What was measured of drafters is handed on as well (``know``): prices, which steps then refresh, and
how much of their drafts was kept, for policies to begin with (``kept``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outpace.curve import CostCurve, KnownDrafter, assumed
from outpace.types import StepRecord

SEQUENCE_PRICE = 0.05
"""Where no curve is known: what each further sequence adds beside its rows, in passes over one."""
GUESS = 0.1
"""Of a draft level that nobody has timed yet, in passes over one row."""
COLD = 3.0
"""Most that the first draft of a drafter may be said to cost per level, in such guesses."""
TRUST = 8
"""Steps that a price measured beforehand is worth."""
KNOTS = 12  # powers of two of guesses, and one more; more rows count as the last
_FAST, _SLOW, _CLIP = 0.15, 0.03, 0.5
_GRAIN = 64  # tokens of context that share an entry of the table


@dataclass(slots=True)
class DraftPrice:
    """Seconds of a draft: of the call, for each sequence, and of each level, for all together."""

    call: float
    level: float
    """Lately, for however many sequences."""
    seen: int = 0
    """Steps behind the numbers."""
    level_B: dict[int, float] = field(default_factory=dict)
    """The same by powers of two of sequences, from steps with about so many."""

    def level_for(self, sequences: int) -> float:
        """Between the numbers that were seen a straight line, beyond them the nearest: a batch
        that was never tried is thought to cost little, so that it is.
        """
        if not self.level_B:
            return self.level
        place = math.log2(sequences)
        low = max((power for power in self.level_B if power <= place), default=None)
        high = min((power for power in self.level_B if power >= place), default=None)
        if low is None or high is None or low == high:
            return self.level_B[min(self.level_B) if low is None else low]
        part = (sequences - (1 << low)) / ((1 << high) - (1 << low))
        return self.level_B[low] + part * (self.level_B[high] - self.level_B[low])


@dataclass(slots=True)
class _Knots:
    """How passes of so many sequences differ from the curve."""

    log_K: list[float]
    """Logs of the factors by powers of two of rows beyond one for each sequence."""
    factor_K: list[float]
    """With the factor for everything."""
    seen_K: list[int]


def _place(rows: int, batch: int) -> float:
    """Where a pass stands among the knots: one without guesses at the first of them."""
    return math.log2(max(0, rows - batch) + 1)


def _power(count: int) -> int:
    return round(math.log2(count))


def _toward(new: float, old: float) -> float:
    return old + (new - old) * (_FAST if old else 1.0)


class Costs:
    """Costs of one target and its drafters. Changes in ``watch``, ``start``, ``know``,
    ``known_as`` and ``suppose`` alone.

    Args:
        curve: of the target, on this machine; see ``outpace bench passes``.
    """

    def __init__(self, curve: CostCurve | None = None) -> None:
        self._drafts: dict[str, DraftPrice] = {}
        self._before: dict[int, str] = {}  # sequence -> who drafted for it a step ago
        self._still = self._planning = self._more = 0.0
        self._known: dict[str, KnownDrafter] = {}
        self._names: dict[str, str] = {}  # method spec -> the one that it was measured as
        self.start(curve)

    def start(self, curve: CostCurve | None) -> None:
        """Take a curve, and forget what steps taught about passes. Drafts keep their prices."""
        self._fill: Callable[[], object] | None = None
        self._curve = curve
        self._table: dict[tuple[int, int, int], float] = {}
        self._all = 0.0  # log of the factor for everything
        self._knots: dict[int, _Knots] = {}  # by powers of two of sequences
        self._seen = 0

    def later(self, fill: Callable[[], object]) -> None:
        """Have ``fill`` called when costs are first read, unless ``start`` comes before.

        Files that hold measurements are then read by those who need them, and by nobody else.
        """
        self._fill = fill

    def know(self, drafters: Mapping[str, KnownDrafter]) -> None:
        """Begin with what was measured of drafters; what steps taught already stays."""
        self._known.update(drafters)
        for name in {*drafters, *self._names}:
            known = self._find(name)
            if known is not None and not self.timed(name):
                self._drafts[name] = DraftPrice(known.call, known.level, TRUST)

    def known_as(self, drafter: str, other: str) -> None:
        """Say that a method spec drafts as another one does, which may have been measured."""
        self._names[drafter] = other
        self.know({})

    def kept(self, drafter: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Drafts that kept a token at depth 1, 2, ..., and those that were tried there.

        As measured beforehand; empty where nothing is known.
        """
        self._begin()
        known = self._find(drafter)
        return ((), ()) if known is None else (known.kept_D, known.tried_D)

    def _find(self, drafter: str) -> KnownDrafter | None:
        return self._known.get(drafter) or self._known.get(self._names.get(drafter, drafter))

    def _begin(self) -> None:
        fill, self._fill = self._fill, None
        if fill is not None:
            fill()

    def suppose(self, drafter: str, level: float) -> None:
        """Say what a level costs, in seconds, unless something is known already."""
        self._drafts.setdefault(drafter, DraftPrice(0.0, level))

    def passed(self, rows: int, context: int, batch: int) -> float:
        """Seconds of a pass.

        Args:
            rows: of all sequences together, at least ``batch``.
            context: committed tokens of each.
            batch: sequences, at least 1.
        """
        place = _place(rows, batch)
        low = min(int(place), KNOTS - 2)
        part = min(1.0, place - low)
        plain = self._plain(rows, context, batch)  # reads what was measured, if nobody did yet
        factor_K = self._at(batch).factor_K
        return plain * (factor_K[low] * (1.0 - part) + factor_K[low + 1] * part)

    def price(self, drafter: str, sequences: int = 1) -> tuple[float, float]:
        """Seconds of a draft: for each sequence, and for each level, of so many together."""
        self._begin()
        price = self._drafts.get(drafter)
        if price is None:
            return 0.0, GUESS * self.passed(1, 0, 1)
        return price.call, price.level_for(sequences)

    @property
    def known(self) -> bool:
        """Whether costs are seconds, by a curve or a watched step; else only their ratios count."""
        self._begin()
        return self._curve is not None or self._seen > 0

    def around(self, sequences: int) -> tuple[float, float, float]:
        """Seconds outside drafting and the pass: of any step, of planning drafts, and for each
        sequence that drafts.
        """
        return self._still * sequences, self._planning * sequences, self._more

    def timed(self, drafter: str) -> int:
        """How many steps the price of a drafter rests on."""
        price = self._drafts.get(drafter)
        return 0 if price is None else price.seen

    def watch(self, record: StepRecord) -> None:
        """Take a step in. Prompts teach nothing: their rows have no logits."""
        if record.prompt or not record.rows or record.seconds.get("score", 0.0) <= 0.0:
            return
        seconds, count = record.seconds, len(record.rows)
        self._learn_pass(record.passed_rows, record.context, count, seconds["score"])
        plan = seconds.get("plan", 0.0)
        rest = seconds.get("judge", 0.0) + seconds.get("commit", 0.0)
        asked = {row.sequence: row.drafter for row in record.rows if row.drafter != "none"}
        if asked:  # if there was no step without drafts, all of it is laid to them
            self._more = _toward(max(0.0, rest - self._still * count) / len(asked), self._more)
            self._planning = _toward(plan / count, self._planning)
        else:
            self._still = _toward(rest / count, self._still)
        self._learn_drafts(asked, record)
        self._before = asked

    def _learn_pass(self, rows: int, context: int, batch: int, seconds: float) -> None:
        plain = self._plain(rows, context, batch)
        knots, knot = self._at(batch), min(KNOTS - 1, round(_place(rows, batch)))
        self._knots[_power(batch)] = knots
        off = math.log(seconds / plain) - self._all - knots.log_K[knot]
        if self._seen:
            off = max(-_CLIP, min(_CLIP, off))
        self._seen += 1
        knots.seen_K[knot] += 1
        fast, slow = max(_FAST, 1.0 / self._seen), max(_SLOW, 1.0 / (1 + knots.seen_K[knot]))
        self._all += fast * off
        if self._seen > 1:
            knots.log_K[knot] += slow * off
        for one in self._knots.values():
            one.factor_K = [math.exp(self._all + own) for own in one.log_K]

    def _at(self, batch: int) -> _Knots:
        """The factors for so many sequences; at first those for the nearest number."""
        power = _power(batch)
        found = self._knots.get(power)
        if found is None:
            found = _Knots([0.0] * KNOTS, [math.exp(self._all)] * KNOTS, [0] * KNOTS)
            if self._knots:
                near = self._knots[min(self._knots, key=lambda other: abs(other - power))]
                found.log_K, found.factor_K = list(near.log_K), list(near.factor_K)
        return found

    def _learn_drafts(self, asked: Mapping[int, str], record: StepRecord) -> None:
        """Learn a price, if the seconds of drafting can be laid to one drafter."""
        spent = record.seconds.get("draft", 0.0)
        names = set(asked.values())
        if len(names) > 1 and record.draft_levels:
            # Those that run no model cost little, and what: the rest is the one that does.
            calls = {name for name in names if self.timed(name) and not self._drafts[name].level}
            spent -= sum(self._drafts[name].call for name in asked.values() if name in calls)
            names -= calls
        if len(names) != 1 or spent <= 0.0:
            return
        name = names.pop()
        mine = [number for number, who in asked.items() if who == name]
        steady = all(self._before.get(number) == name for number in mine)
        self._learn_draft(name, len(mine), spent, record.draft_levels, steady)

    def _learn_draft(
        self, name: str, sequences: int, spent: float, levels: int, steady: bool
    ) -> None:
        price = self._drafts.setdefault(name, DraftPrice(0.0, 0.0))
        call, level = (0.0, spent / levels) if levels else (spent / sequences, 0.0)
        # One that was silent for a while first reads what it missed, which is no level: what it
        # took then is a bound, and corrects a price that is above it.
        if price.seen and not steady and level >= price.level_for(sequences) and call >= price.call:
            return
        if not price.seen:  # the first draft warms up; a price that forbids a second one stays
            level = min(level, COLD * GUESS * self.passed(1, 0, 1))
        price.seen += 1
        rate = max(_FAST, 1.0 / price.seen)
        if price.seen > 3:  # a stall of the machine is no price
            call, level = min(call, 3.0 * price.call + 1e-4), min(level, 3.0 * price.level + 1e-4)
        power = _power(sequences)
        before = price.level_B.get(power, level if price.level_B else price.level)
        price.level_B[power] = before + rate * (level - before)
        price.call += rate * (call - price.call)
        price.level += rate * (level - price.level)

    def _plain(self, rows: int, context: int, batch: int) -> float:
        """By the curve alone."""
        self._begin()
        if self._curve is None:
            return assumed(rows) + SEQUENCE_PRICE * (batch - 1)
        key = (rows, context // _GRAIN, batch)
        found = self._table.get(key)
        if found is None:
            found = self._curve.seconds(rows / batch, key[1] * _GRAIN, batch)
            self._table[key] = found
        return found
