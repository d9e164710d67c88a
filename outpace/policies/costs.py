"""What steps cost here and now, in seconds: read by policies, learned from steps.

Every cost is a line in two numbers, by least squares that forget:

    seconds of a pass  = a * plain + b * more      of rows without and with guesses, see ``start``
    seconds of a draft = a         + b * further   levels behind the first

What a draft takes beyond its line, for texts of which much is unread, is the price of reading.

A pass is meant with planning for it, and with judging and committing what it scored. There is a line for
each power of two of sequences; a new one begins like its neighbour. Passes are also corrected by what
those of so many guesses took lately, for hardware that has free rows up to a number. Nothing of this
outlives the process: prices that were learned on a busy machine cost no later answer. Steps wait until a
cost is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeVar

from outpace.curve import CostCurve, KnownDrafter
from outpace.policies.tuning import TUNING, Tuning
from outpace.types import RowRecord, StepRecord

T = TypeVar("T")
PAGE = 64
"""Positions of a context for which a price holds."""
_WAITING = 64  # steps that costs were not read for, at most
_UNREAD = 8
"""Tokens of a sequence that a draft reads as a part of its first level; one in every step reads no more.
While late readers shared a line with others, levels of `eagle3` were free in batches."""
_DEAREST = 0.3
"""What a row more costs at most before one was seen, in passes over a batch for each of its sequences. With
1.5 a server that started under 64 clients tried no drafts for all, and had 1.0 in place of 1.1 times none."""


class Line:
    """y = a * u + b * v by least squares that forget, at first with these ``a`` and ``ratio`` = b / a.

    Without ``a`` the first step sets it. While v does not vary, b / a stays.
    """

    firm = 0.0
    """Sum of v squared from which b / a is believed. Below it, the last one that was believed counts more."""

    def __init__(self, a: float | None, ratio: float, tuning: Tuning = TUNING) -> None:
        self._tuning = tuning
        self.a = 1.0 if a is None else max(a, 1e-9)
        self.b, self._tie = ratio * self.a, ratio
        self.seen, self._high = 0, False
        self._uu = 0.0 if a is None else 1.0
        self._uy, self._uv, self._vv, self._vy = self._uu * self.a, 0.0, 0.0, 0.0

    def learn(self, u: float, v: float, y: float, over: float = 1.0) -> float:
        """Take in that a step took ``y``, where ``over`` times the line's value was expected. One that stalls
        counts as a slow one; two in a row are no stall. Returns what it counts as.
        """
        most = self._tuning.stall * self.of(u, v) * over
        self._high = self.seen > 2 and y > most and not self._high
        y = most if self._high else y
        self.seen += 1
        # The first steps of a process may be slow, and are forgotten sooner.
        keep, tie = min(self._tuning.remember, (self.seen + 1) / (self.seen + 2)), self._tie
        self._uu, self._uv = keep * self._uu + u * u, keep * self._uv + u * v
        self._vv, self._vy = keep * self._vv + v * v, keep * self._vy + v * y
        self._uy = keep * self._uy + u * y
        one = max(min(1.0, self._vv) or 1.0, self.firm)  # observation that says: b = tie * a
        uu, uv, vv = self._uu + one * tie * tie, self._uv - one * tie, self._vv + one
        det = uu * vv - uv * uv
        if det > 0.0 and u > 0.0:
            self.a = max((vv * self._uy - uv * self._vy) / det, 1e-9)
            self.b = max((uu * self._vy - uv * self._uy) / det, 0.0)
            if self._vv >= self.firm:
                self._tie = self.b / self.a
        return y

    def of(self, u: float, v: float) -> float:
        return self.a * u + self.b * v


class Passes(Line):
    """Seconds of passes over about so many sequences: a line, and by bins of guesses what it misses."""

    def __init__(self, a: float | None, ratio: float, size: int, tuning: Tuning) -> None:
        super().__init__(a, ratio, tuning)
        self.size, self.most = size, 0  # sequences; guesses of the largest pass
        # A pass varies by what some guesses cost: the single one of a trial tells little.
        self.firm = (size / tuning.first) ** 2
        self.off: dict[int, tuple[float, float, int]] = {}
        """Bin of guesses -> weight, what passes take over the line's value, when it was last seen."""

    def took(self, plain: float, more: float, guesses: int, seconds: float) -> None:
        """Take in a pass."""
        bin_ = _bin(guesses)
        over = self.learn(plain, more, seconds, self.over(bin_)) / self.of(plain, more)
        self.most = max(self.most, guesses)
        weight, mean, last = self.off.get(bin_, (0.0, 1.0, 0))
        weight = 1.0 + weight * self._tuning.remember ** (self.seen - last)
        self.off[bin_] = weight, mean + (over - mean) / weight, self.seen

    def over(self, bin_: int) -> float:
        """What passes of a bin take, over the line's value."""
        weight, mean, last = self.off.get(bin_, (0.0, 1.0, 0))
        weight *= self._tuning.remember ** (self.seen - last)
        return 1.0 + (mean - 1.0) * weight / (weight + 1.0)


@cache
def _bin(guesses: int) -> int:
    return guesses if guesses < 6 else 6 + int(4.0 * math.log2(guesses / 6.0))


class Costs:
    """Costs of one target and its drafters, perhaps from a curve that ``outpace bench passes`` measured."""

    form = Passes

    def __init__(self, curve: CostCurve | None = None, tuning: Tuning = TUNING) -> None:
        self.tuning = tuning
        self._known: dict[str, KnownDrafter] = {}
        self._names: dict[str, str] = {}  # method spec -> the one that it was measured as
        self._supposed: dict[str, Sequence[float]] = {}
        self._drafts: dict[str, dict[int, Line]] = {}
        self._reads: dict[str, tuple[float, float]] = {}  # seconds of late reading, and its tokens
        self.start(curve)

    def start(self, curve: CostCurve | None) -> None:
        """Take a curve, in whose passes passes are then measured, and forget what steps taught about
        them. Without one, ``plain`` is 1 and ``more`` the guesses. Drafts keep their prices.
        """
        self._curve = curve
        self._fill: Callable[[], object] | None = None
        self._seen: list[StepRecord] = []
        self._table: dict[tuple[int, int], list[float]] = {}
        self._passes: dict[int, Passes] = {}

    def later(self, fill: Callable[[], object]) -> None:
        """Have ``fill`` called when costs are first read, as from a file, unless ``start`` comes before."""
        self._fill = fill

    def know(self, drafters: Mapping[str, KnownDrafter]) -> None:
        """Begin with what was measured of drafters; what steps taught already stays."""
        self._known.update(drafters)

    def known_as(self, drafter: str, other: str) -> None:
        """Say that a method spec drafts as another one does, which may have been measured."""
        self._names[drafter] = other

    def suppose(self, drafter: str, level_D: Sequence[float]) -> None:
        """Say what its levels cost, in passes over one row, until something is known; see ``Scale``."""
        self._supposed.setdefault(drafter, level_D)

    def kept(self, drafter: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Drafts that kept a token at depth 1, 2, ..., and those that were tried there; measured before."""
        self._settle()
        return (known.kept_D, known.tried_D) if (known := self._find(drafter)) else ((), ())

    def _find(self, drafter: str) -> KnownDrafter | None:
        return self._known.get(drafter) or self._known.get(self._names.get(drafter, drafter))

    @property
    def known(self) -> bool:
        """Whether costs are seconds, by a curve or a watched step; else only their ratios count."""
        self._settle()
        return self._curve is not None or bool(self._passes)

    def passes(self, rows: int, context: int, batch: int, more: int = 0) -> list[float]:
        """Seconds of a pass over ``rows``, of all sequences together, and over 1, 2, ... rows ``more``."""
        self._settle()
        first, last, found = rows - batch, rows - batch + more, self._of(batch)
        shape_R = self._shape(context, batch, last)
        plain = shape_R[0]
        a, b, over = found.a, found.b, {bin_: found.over(bin_) for bin_ in found.off}
        return [
            (a * plain + b * (shape_R[n] - plain)) * over.get(_bin(n), 1.0) for n in range(first, last + 1)
        ]

    def passed(self, rows: int, context: int, batch: int) -> float:
        """Seconds of one pass."""
        return self.passes(rows, context, batch)[0]

    def foreseen(self, batch: int) -> int:
        """Guesses of a pass whose cost is foreseen: by a curve all, else twice of what was tried."""
        self._settle()
        if self._curve is not None:
            return 1 << 20
        tried, first = found.most if (found := self._passes.get(_power(batch))) else 0, self.tuning.first
        return max(first, batch // first, 2 * tried)

    def price(self, drafter: str, sequences: int = 1, levels: float = 1.0) -> float:
        """Seconds of a draft for so many sequences together; of a call each, where no model runs."""
        self._settle()
        return self._draft(drafter, sequences).of(1.0, levels - 1.0)

    def reading(self, drafter: str, tokens: int) -> float:
        """Seconds that a drafter takes to read so many tokens, before its first guess for a text."""
        self._settle()
        seconds, of = self._reads.get(drafter, (0.0, 1.0))
        return max(0.0, seconds) / of * tokens

    def watch(self, record: StepRecord) -> None:
        """Put a step by. Prompts teach nothing: their rows have no logits."""
        if not record.prompt and record.rows:
            self._seen.append(record)
            if len(self._seen) >= _WAITING:
                self._settle()

    def _settle(self) -> None:
        """Read what is to be read first, and learn from the steps that were put by."""
        if self._fill is not None or self._seen:
            (seen, self._seen), (fill, self._fill) = (self._seen, []), (self._fill, None)
            if fill is not None:
                fill()
            for record in seen:
                self._learn(record)

    def _learn(self, record: StepRecord) -> None:
        seconds, count = record.seconds, len(record.rows)
        if seconds.get("score", 0.0) <= 0.0:
            return
        guesses = max(0, record.passed_rows - count)
        passes = self._passes[_power(count)] = self._of(count)
        shape_R = self._shape(record.context, count, guesses)
        spent = sum([seconds.get(verb, 0.0) for verb in ("plan", "score", "judge", "commit")])
        passes.took(shape_R[0], shape_R[guesses] - shape_R[0], guesses, spent)
        asked = [row for row in record.rows if row.drafter != "none"]
        if record.draft_levels:  # those that run no model cost next to nothing
            asked = [row for row in asked if any(self._supposed.get(row.drafter, (1.0,)))]
        if len({row.drafter for row in asked}) == 1 and seconds.get("draft", 0.0) > 0.0:
            self._learn_draft(asked, record.draft_levels, seconds["draft"])

    def _learn_draft(self, rows: Sequence[RowRecord], levels: int, spent: float) -> None:
        """Learn the price of the one drafter of a step."""
        name, count, keep = rows[0].drafter, len(rows), self.tuning.remember
        line, lines = self._draft(name, count), self._drafts.setdefault(name, {})
        units, further = (1.0, levels - 1.0) if levels else (float(count), 0.0)
        late, usual = sum([max(0, row.num_uncached - _UNREAD) for row in rows]), line.of(units, further)
        seconds, of = self._reads.get(name, (0.0, 0.0))
        first, reading = not lines, self.reading(name, late)
        line = lines.setdefault(_power(count), Line(line.a, line.b / line.a, self.tuning))
        # The first draft warms up; a price that forbids a second one would stay.
        if late and not first:
            self._reads[name] = keep * seconds + spent - usual, keep * of + late
        if not late or (of and reading < usual):
            warm = first and self._find(name) is None
            line.learn(units, further, min(spent, self.tuning.stall * usual) if warm else spent - reading)

    def _draft(self, name: str, sequences: int) -> Line:
        """The line of a drafter for so many sequences: the nearest, or what is supposed."""
        if found := _nearest(self._drafts.get(name, {}), sequences):
            return found
        if (known := self._find(name)) and (level := known.level or known.call):
            return Line(level, 1.0, self.tuning)
        first, *further = self._supposed.get(name, (self.tuning.part,))
        ratio = further[0] / first if further else 1.0
        return Line(first * self.passed(1, 0, 1), ratio, self.tuning)

    def _of(self, batch: int) -> Passes:
        """Passes over about so many sequences; at first like the nearest."""
        found = self._passes.get(_power(batch))
        if found is None:
            near = _nearest(self._passes, batch)
            if near is None:
                ratio = min(self.tuning.part, _DEAREST / batch) if self._curve is None else 1.0
                return self.form(None, ratio, batch, self.tuning)
            a, b = near.a, near.b
            if self._curve is None:
                a = max(b, a + b * (batch - near.size))
                b = min(b, _DEAREST * a / batch)
            found = self.form(a, b / a, batch, self.tuning)
        return found

    def _shape(self, context: int, batch: int, guesses: int) -> Sequence[float]:
        """Passes with 0, 1, 2, ... guesses, by the curve alone; as many at least."""
        if self._curve is None:
            return range(1, guesses + 2)
        if len(self._table) > 256:
            self._table.clear()
        found = self._table.setdefault((context // PAGE, batch), [])
        for more in range(len(found), guesses + 1):
            found.append(self._curve.seconds(1 + more / batch, context // PAGE * PAGE, batch))
        return found


@cache
def _power(count: int) -> int:
    return round(math.log2(max(1, count)))


def _nearest(found: Mapping[int, T], count: int) -> T | None:
    """What there is of the power of two of a count, or of the nearest one."""
    power = _power(count)
    near = power if power in found else min(found, key=lambda other: abs(other - power), default=power)
    return found.get(near)
