"""What steps cost here and now, in seconds: read by policies, learned from steps.

    costs = Costs(curve)                   a measured curve, or none
    engine.listeners.append(costs.watch)   the engine does this for policies that read costs
    costs.passed(rows=12, context=300, batch=1)

Every cost is a line in two numbers, by least squares that forget (`Line`):

    seconds of a pass  = a * plain  + b * more     of rows without and with guesses, see ``start``
    seconds of a draft = a * levels + b * tokens   that the drafter reads first

A pass is meant with judging and committing what it scored: guesses make those dearer too.

There is a line for each power of two of sequences; a new one begins like its neighbour. A pass is also
corrected by what passes of so many guesses took lately, for hardware that has free rows up to a number.
Nothing of this outlives the process: prices that were learned on a busy machine cost no later answer.

Shape letters: R guesses of a pass, from 0.
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


class Line:
    """y = a * u + b * v. While v does not vary, b keeps its ratio to a.

    Args:
        a: before anything is seen; None: the first step says it. Likewise b / a, the ``ratio``.
    """

    __slots__ = ("_high", "_tuning", "_uu", "_uv", "_uy", "_vv", "_vy", "a", "b", "seen")

    def __init__(self, a: float | None, ratio: float, tuning: Tuning = TUNING) -> None:
        self._tuning = tuning
        self.a = 1.0 if a is None else max(a, 1e-9)
        self.b = ratio * self.a
        self.seen, self._high = 0, False
        self._uu = 0.0 if a is None else 1.0
        self._uy = self._uu * self.a
        self._uv = self._vv = self._vy = 0.0

    def learn(self, u: float, v: float, y: float, expected: float | None = None) -> float:
        """Take in that a step took ``y``, where so much was ``expected``: None, the line's value.

        One that stalls counts as a slow one; two in a row are no stall. Returns what it counts as.
        """
        most = self._tuning.stall * (self.of(u, v) if expected is None else expected)
        stalled = self.seen > 2 and y > most
        if stalled and not self._high:
            y = most
        self._high = stalled and not self._high
        self.seen += 1
        keep, tie = self._tuning.remember, self.b / self.a
        self._uu = keep * self._uu + u * u
        self._uv = keep * self._uv + u * v
        self._vv = keep * self._vv + v * v
        self._uy, self._vy = keep * self._uy + u * y, keep * self._vy + v * y
        one = min(1.0, self._vv) or 1.0  # observation that says: b = tie * a
        uu, uv, vv = self._uu + one * tie * tie, self._uv - one * tie, self._vv + one
        det = uu * vv - uv * uv
        if det > 0.0 and u > 0.0:
            self.a = max((vv * self._uy - uv * self._vy) / det, 0.02 * y / u, 1e-9)
            self.b = max((uu * self._vy - uv * self._uy) / det, 0.0)
        return y

    def of(self, u: float, v: float) -> float:
        return self.a * u + self.b * v


class Passes:
    """Seconds of passes over about so many sequences: a line, and by bins of guesses what it misses."""

    __slots__ = ("_off", "_tick", "_tuning", "line", "most", "size")

    def __init__(self, line: Line, size: int, tuning: Tuning) -> None:
        self.line, self.size, self._tuning = line, size, tuning
        self.most = self._tick = 0  # guesses of the largest pass; passes
        self._off: dict[int, tuple[float, float, int]] = {}  # bin -> weight, over the line's, last seen

    def learn(self, plain: float, more: float, guesses: int, seconds: float) -> None:
        """Take in a pass."""
        seconds = self.line.learn(plain, more, seconds, self.line.of(plain, more) * self.over(guesses))
        self._tick += 1
        self.most = max(self.most, guesses)
        weight, mean, last = self._off.get(_bin(guesses), (0.0, 1.0, 0))
        weight = 1.0 + weight * self._tuning.remember ** (self._tick - last)
        mean += (seconds / self.line.of(plain, more) - mean) / weight
        self._off[_bin(guesses)] = weight, mean, self._tick

    def over(self, guesses: int) -> float:
        """What passes with about so many guesses take, over the line's value."""
        if _bin(guesses) not in self._off:
            return 1.0
        weight, mean, last = self._off[_bin(guesses)]
        weight *= self._tuning.remember ** (self._tick - last)
        return 1.0 + (mean - 1.0) * weight / (weight + 1.0)


@cache
def _bin(guesses: int) -> int:
    return guesses if guesses < 6 else 6 + int(4.0 * math.log2(guesses / 6.0))


class Costs:
    """Costs of one target and its drafters, perhaps from a curve that ``outpace bench passes`` measured."""

    form = Passes

    def __init__(self, curve: CostCurve | None = None, tuning: Tuning = TUNING) -> None:
        self._tuning = tuning
        self._known: dict[str, KnownDrafter] = {}
        self._names: dict[str, str] = {}  # method spec -> the one that it was measured as
        self._supposed: dict[str, float] = {}
        self._drafts: dict[str, dict[int, Line]] = {}
        self._lately: dict[int, tuple[float, float]] = {}
        """Tokens of steps lately, and their seconds."""
        self.start(curve)

    def start(self, curve: CostCurve | None) -> None:
        """Take a curve, in whose passes passes are then measured, and forget what steps taught about
        them. Without one, ``plain`` is 1 and ``more`` the guesses. Drafts keep their prices.
        """
        self._fill: Callable[[], object] | None = None
        self._curve = curve
        self._table: dict[tuple[int, int], list[float]] = {}
        self._passes: dict[int, Passes] = {}

    def later(self, fill: Callable[[], object]) -> None:
        """Have ``fill`` called when costs are first read, as from a file, unless ``start`` comes before."""
        self._fill = fill

    def _begin(self) -> None:
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill()

    def know(self, drafters: Mapping[str, KnownDrafter]) -> None:
        """Begin with what was measured of drafters; what steps taught already stays."""
        self._known.update(drafters)

    def known_as(self, drafter: str, other: str) -> None:
        """Say that a method spec drafts as another one does, which may have been measured."""
        self._names[drafter] = other

    def suppose(self, drafter: str, level: float) -> None:
        """Say what a level costs, in seconds, unless something is known already."""
        self._supposed.setdefault(drafter, level)

    def kept(self, drafter: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Drafts that kept a token at depth 1, 2, ..., and those that were tried there; measured before."""
        self._begin()
        known = self._find(drafter)
        return ((), ()) if known is None else (known.kept_D, known.tried_D)

    def _find(self, drafter: str) -> KnownDrafter | None:
        return self._known.get(drafter) or self._known.get(self._names.get(drafter, drafter))

    @property
    def known(self) -> bool:
        """Whether costs are seconds, by a curve or a watched step; else only their ratios count."""
        self._begin()
        return self._curve is not None or bool(self._passes)

    def passes(self, rows: int, context: int, batch: int) -> list[float]:
        """Seconds of a pass over ``rows``, of all sequences together, and of passes over 1, 2, ... rows
        more: as many as are foreseen. ``context``: committed tokens of each sequence.
        """
        first, last = rows - batch, rows - batch + min(self._tuning.most, self.most(batch))
        shape_R, found = self._shape(context, batch, last), self._of(batch)
        plain, line = shape_R[0], found.line
        return [line.of(plain, shape_R[n] - plain) * found.over(n) for n in range(first, last + 1)]

    def passed(self, rows: int, context: int, batch: int) -> float:
        """Seconds of a pass; arguments as of ``passes``."""
        guesses, found = rows - batch, self._of(batch)
        shape_R = self._shape(context, batch, guesses)
        return found.line.of(shape_R[0], shape_R[guesses] - shape_R[0]) * found.over(guesses)

    def most(self, batch: int) -> int:
        """Guesses of a pass whose cost is foreseen: by a curve all, else twice of what was tried."""
        self._begin()
        if self._curve is not None:
            return 1 << 20
        found = self._passes.get(_power(batch))
        return max(self._tuning.first, batch // 4, 2 * found.most if found else 0)

    def price(self, drafter: str, sequences: int = 1) -> float:
        """Seconds of a level of so many sequences together; of a call each, where no model runs."""
        return self._draft(drafter, sequences).a

    def reading(self, drafter: str, tokens: int) -> float:
        """Seconds that a drafter takes to read so many tokens, before its first guess for a text."""
        return self._draft(drafter, 1).b * tokens

    def lately(self, batch: int) -> float:
        """Tokens per second of steps of about so many sequences; 0 before the first."""
        found = self._lately.get(_power(batch))
        return found[0] / found[1] if found else 0.0

    def watch(self, record: StepRecord) -> None:
        """Take a step in. Prompts teach nothing: their rows have no logits."""
        seconds, count = record.seconds, len(record.rows)
        if record.prompt or not count or seconds.get("score", 0.0) <= 0.0:
            return
        power, guesses = _power(count), max(0, record.passed_rows - count)
        passes = self._passes[power] = self._of(count)
        shape_R = self._shape(record.context, count, guesses)
        spent = sum([seconds.get(verb, 0.0) for verb in ("score", "judge", "commit")])
        passes.learn(shape_R[0], shape_R[guesses] - shape_R[0], guesses, spent)
        emitted, keep = sum([len(row.emitted) for row in record.rows]), self._tuning.remember
        tokens, took = self._lately.get(power, (0.0, 0.0))
        self._lately[power] = keep * tokens + emitted, keep * took + sum(seconds.values())
        asked = [row for row in record.rows if row.drafter != "none"]
        if record.draft_levels:  # those that run no model cost next to nothing
            asked = [row for row in asked if self._supposed.get(row.drafter) != 0.0]
        if len({row.drafter for row in asked}) == 1 and seconds.get("draft", 0.0) > 0.0:
            self._watch_draft(asked, record.draft_levels, seconds["draft"])

    def _watch_draft(self, rows: Sequence[RowRecord], levels: int, spent: float) -> None:
        """Learn the price of the one drafter of a step."""
        name, power = rows[0].drafter, _power(len(rows))
        line, lines = self._draft(name, len(rows)), self._drafts.setdefault(name, {})
        units, tokens = float(levels or len(rows)), float(sum([row.num_uncached for row in rows]))
        if not lines and self._find(name) is None:
            # The first draft warms up; a price that forbids a second one would stay.
            spent = min(spent, self._tuning.stall * line.of(units, tokens))
        lines.setdefault(power, Line(line.a, line.b / line.a, self._tuning)).learn(units, tokens, spent)

    def _draft(self, name: str, sequences: int) -> Line:
        """The line of a drafter for so many sequences: the nearest, or what is supposed."""
        self._begin()
        found = _nearest(self._drafts.get(name, {}), sequences)
        if found is not None:
            return found
        known, plain = self._find(name), self.passed(1, 0, 1)
        supposed = self._supposed.get(name, self._tuning.part * plain)
        level = supposed if known is None else known.level or known.call
        return Line(level or 0.005 * plain, 0.0, self._tuning)

    def _of(self, batch: int) -> Passes:
        """Passes over about so many sequences; at first like the nearest."""
        self._begin()
        found, near = self._passes.get(_power(batch)), _nearest(self._passes, batch)
        if found is not None:
            return found
        if near is None:
            ratio = self._tuning.part if self._curve is None else 1.0
            return self.form(Line(None, ratio, self._tuning), batch, self._tuning)
        a, b = near.line.a, near.line.b
        if self._curve is None:
            a = max(b, 0.2 * a, a + b * (batch - near.size))
        return self.form(Line(a, b / a, self._tuning), batch, self._tuning)

    def _shape(self, context: int, batch: int, guesses: int) -> Sequence[float]:
        """Passes with 0, 1, 2, ... guesses, by the curve alone; as many at least."""
        self._begin()
        if self._curve is None:
            return range(1, guesses + 2)
        if len(self._table) > 256:
            self._table.clear()
        found = self._table.setdefault((context // 64, batch), [])
        for more in range(len(found), guesses + 1):
            found.append(self._curve.seconds(1 + more / batch, 64 * (context // 64), batch))
        return found


def _power(count: int) -> int:
    return round(math.log2(max(1, count)))


def _nearest(found: Mapping[int, T], count: int) -> T | None:
    """What there is of the power of two of a count, or of the nearest one."""
    return found[min(found, key=lambda other: abs(other - _power(count)))] if found else None
