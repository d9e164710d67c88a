"""What passes and drafts cost here and now, in seconds: read by policies, refreshed by steps.

    costs = Costs(curve)                   a measured curve, or none
    engine.listeners.append(costs.watch)   the engine does this for policies that read costs
    costs.passed(rows=12, context=300, batch=1)

A curve says how the cost of a pass grows; the steps that are watched say how this machine differs
from it today: for each power of two of sequences, one factor on what a pass without guesses takes,
and one on what guesses add. Without a curve the shape is that of a small model on a CPU, and the
first steps do all of the work.

What was measured of drafters is handed on as well (``know``): prices, which steps then refresh, and
how much of their drafts was kept, for policies to begin with (``kept``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
STALL = 5.0
"""More than so many times what a step without drafts takes beside its pass is no draft's doing."""
FEW = 1.0
"""Drafts beside which nothing is done, that count as seen."""
BORROWED = 2.0
"""Passes that count as seen, of those of another number of sequences."""
LATE = 8
"""Tokens that a draft may read first, per sequence, as part of its first level: those that the last
step brought."""
TOKEN = 1 / 64
"""Of a level, for one sequence: what reading one more token is thought to cost, till it is seen."""
_FAST, _SLOW, _CLIP = 0.15, 0.03, 1.65
_ALIKE = 0.3
"""Passes that it counts as, that both factors of a ``_Fit`` are alike."""
_GRAIN = 64  # tokens of context that share an entry of the table


class BySize:
    """Seconds that depend on how many sequences share them, by powers of two of these.

    Between the numbers that were seen a straight line, beyond them the nearest: a batch that was
    never tried is thought to cost little, so that it is.
    """

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._seconds)

    def of(self, sequences: int) -> float:
        """For so many; 0 where nothing is known."""
        if not self._seconds:
            return 0.0
        place = math.log2(max(1, sequences))
        low = max((power for power in self._seconds if power <= place), default=None)
        high = min((power for power in self._seconds if power >= place), default=None)
        if low is None or high is None or low == high:
            return self._seconds[min(self._seconds) if low is None else low]
        part = (sequences - (1 << low)) / ((1 << high) - (1 << low))
        return self._seconds[low] + part * (self._seconds[high] - self._seconds[low])

    def learn(self, sequences: int, seconds: float, rate: float, first: float) -> None:
        """Move toward what so many took just now.

        Args:
            sequences: at least one.
            seconds: what they took.
            rate: weight of it.
            first: where to begin with a new power.
        """
        power = _power(sequences)
        before = self._seconds.get(power, first)
        self._seconds[power] = before + rate * (seconds - before)


@dataclass(slots=True)
class DraftPrice:
    """Seconds of a draft: of the call, for each sequence, and of each level, for all together."""

    call: float
    level: float
    """Lately, for however many sequences."""
    seen: int = 0
    """Steps behind the numbers."""
    sized: BySize = field(default_factory=BySize)
    """The same, from steps with about so many sequences."""
    token: float = 0.0
    """Seconds for each token that it reads late; 0 until some were."""

    def late(self, tokens: int) -> float:
        """Seconds for a draft's reading beyond what is usual, of one sequence."""
        return max(0, tokens - LATE) * (self.token or TOKEN * self.level_for(1))

    def level_for(self, sequences: int) -> float:
        """Seconds of a level for so many."""
        return self.sized.of(sequences) if self.sized else self.level


class _Fit:
    """How passes of about so many sequences differ from the curve.

        seconds = plain * on_plain + more * on_more

    ``plain`` is what the curve says of a pass without guesses, ``more`` what it says that guesses
    add. Fitted by least squares to the latest passes. Where they say nothing of one factor, because
    all had the same number of guesses, it is like the other.
    """

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y", "on_more", "on_plain")

    def __init__(self) -> None:
        self._n = self._x = self._xx = self._y = self._xy = 0.0
        self.on_plain = self.on_more = 1.0

    def like(self, weight: float) -> _Fit:
        """The same, as if it had seen so many passes."""
        made, scale = _Fit(), weight / self._n
        made._n, made._x, made._xx = self._n * scale, self._x * scale, self._xx * scale
        made._y, made._xy = self._y * scale, self._xy * scale
        made.on_plain, made.on_more = self.on_plain, self.on_more
        return made

    def learn(self, plain: float, more: float, seconds: float) -> None:
        """Take in a pass; a stall of the machine counts as a slow one."""
        x, y = more / plain, seconds / plain
        if self._n:
            thought = self.on_plain + self.on_more * x
            y = min(thought * _CLIP, max(thought / _CLIP, y))
        keep = 1.0 - _SLOW
        self._n, self._x, self._y = keep * self._n + 1.0, keep * self._x + x, keep * self._y + y
        self._xx, self._xy = keep * self._xx + x * x, keep * self._xy + x * y
        n, cross, xx = self._n + _ALIKE, self._x - _ALIKE, self._xx + _ALIKE
        det = n * xx - cross * cross
        plain_ = (xx * self._y - cross * self._xy) / det
        more_ = (n * self._xy - cross * self._y) / det
        self.on_plain = max(plain_, 0.05 * y)
        self.on_more = max(more_, 0.1 * self.on_plain)


def _power(count: int) -> int:
    return round(math.log2(count))


class Costs:
    """Costs of one target and its drafters. Changes in ``watch``, ``start``, ``know``,
    ``known_as`` and ``suppose`` alone.

    Args:
        curve: of the target, on this machine; see ``outpace bench passes``.
    """

    def __init__(self, curve: CostCurve | None = None) -> None:
        self._drafts: dict[str, DraftPrice] = {}
        self._still, self._planning = BySize(), BySize()
        self._more, self._drafted = 0.0, FEW  # seconds beyond, and drafts that took them; lately
        self._known: dict[str, KnownDrafter] = {}
        self._names: dict[str, str] = {}  # method spec -> the one that it was measured as
        self.start(curve)

    def start(self, curve: CostCurve | None) -> None:
        """Take a curve, and forget what steps taught about passes. Drafts keep their prices."""
        self._fill: Callable[[], object] | None = None
        self._curve = curve
        self._table: dict[tuple[int, int, int], float] = {}
        self._fits: dict[int, _Fit] = {}  # by powers of two of sequences
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
        plain, more = self._parts(rows, context, batch)
        fit = self._at(batch)
        return plain * fit.on_plain + more * fit.on_more

    def price(self, drafter: str, sequences: int = 1) -> tuple[float, float]:
        """Seconds of a draft: for each sequence, and for each level, of so many together."""
        self._begin()
        price = self._drafts.get(drafter)
        if price is None:
            return 0.0, GUESS * self.passed(1, 0, 1)
        return price.call, price.level_for(sequences)

    def late(self, drafter: str, tokens: int) -> float:
        """Seconds that a draft takes once because it reads so many tokens of a sequence first."""
        price = self._drafts.get(drafter)
        return 0.0 if price is None else price.late(tokens)

    @property
    def known(self) -> bool:
        """Whether costs are seconds, by a curve or a watched step; else only their ratios count."""
        self._begin()
        return self._curve is not None or self._seen > 0

    def around(self, sequences: int) -> tuple[float, float, float]:
        """Seconds outside drafting and the pass: of any step, of planning drafts, and for each
        sequence that drafts.
        """
        more = max(0.0, self._more) / self._drafted
        return self._still.of(sequences), self._planning.of(sequences), more

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
        # What drafts add is a mean over drafts, not over steps: where few draft, a step says little
        # of them. Where none do it is forgotten, for nothing else would correct it.
        self._more -= _SLOW * self._more
        self._drafted -= _SLOW * (self._drafted - FEW)
        if asked:  # if there was no step without drafts, all of it is laid to them
            still = self._still.of(count)
            self._more += min(rest - still, STALL * still) if still else rest
            self._drafted += len(asked)
            self._planning.learn(count, plan, _FAST, plan)
        else:
            self._still.learn(count, rest, _FAST, rest)
        self._learn_drafts(asked, record)

    def _learn_pass(self, rows: int, context: int, batch: int, seconds: float) -> None:
        fit = self._fits[_power(batch)] = self._at(batch)
        fit.learn(*self._parts(rows, context, batch), seconds)
        self._seen += 1

    def _at(self, batch: int) -> _Fit:
        """For so many sequences; at first that for the nearest number."""
        power = _power(batch)
        found = self._fits.get(power)
        if found is None:
            if not self._fits:
                return _Fit()
            near = self._fits[min(self._fits, key=lambda other: abs(other - power))]
            found = near.like(BORROWED)
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
        num_uncached = [row.num_uncached for row in record.rows if row.drafter == name]
        self._learn_draft(name, num_uncached, spent, record.draft_levels)

    def _learn_draft(self, name: str, num_uncached: Sequence[int], spent: float, levels: int) -> None:
        price = self._drafts.setdefault(name, DraftPrice(0.0, 0.0))
        sequences, share = len(num_uncached), 1.0
        known = price.level_for(sequences)
        reading = sum(map(price.late, num_uncached)) if levels else 0.0
        if reading:
            # Levels and late reading took their parts as was expected; the one that had more to do
            # with it learns more.
            share -= reading / (reading + levels * known)
            rate = _FAST * (1.0 - share) if price.token else 1.0
            late = sum(max(0, tokens - LATE) for tokens in num_uncached)
            price.token += rate * ((1.0 - share) * spent / late - price.token)
            spent *= share
        call, level = (0.0, spent / levels) if levels else (spent / sequences, 0.0)
        if not price.seen:  # the first draft warms up; a price that forbids a second one stays
            level = min(level, COLD * GUESS * self.passed(1, 0, 1))
        price.seen += 1
        rate = share * max(_FAST, 1.0 / price.seen)
        if price.seen > 3:  # a stall of the machine is no price
            call, level = min(call, 3.0 * price.call + 1e-4), min(level, 3.0 * known + 1e-4)
        price.sized.learn(sequences, level, rate, level if price.sized else price.level)
        price.call += rate * (call - price.call)
        price.level += rate * (level - price.level)

    def _parts(self, rows: int, context: int, batch: int) -> tuple[float, float]:
        """Of a pass without guesses, and what guesses add, by the curve alone."""
        self._begin()
        plain = self._plain(batch, context, batch)
        return plain, self._plain(rows, context, batch) - plain if rows > batch else 0.0

    def _plain(self, rows: int, context: int, batch: int) -> float:
        if self._curve is None:
            return assumed(rows) + SEQUENCE_PRICE * (batch - 1)
        key = (rows, context // _GRAIN, batch)
        found = self._table.get(key)
        if found is None:
            found = self._curve.seconds(rows / batch, key[1] * _GRAIN, batch)
            self._table[key] = found
        return found
