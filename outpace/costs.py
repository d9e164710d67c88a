"""What passes and drafts cost here and now, in seconds: read by policies, refreshed by steps.

    costs = Costs(curve)                   a measured curve, or none
    engine.listeners.append(costs.watch)   the engine does this for policies that read costs
    costs.passed(rows=12, context=300, batch=1)

A curve says how the cost of a pass grows; the steps that are watched say how this machine differs
from it today: one factor for everything, which follows fast, and one for each power of two of
rows, which follows slowly. Without a curve the shape is that of a small model on a CPU, and the
first steps do all of the work.

What was measured of drafters is handed on as well (``know``): prices, which steps then refresh, and
how much of their drafts was kept, for policies to begin with (``kept``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outpace.curve import CostCurve, KnownDrafter, assumed
from outpace.types import StepRecord

GUESS = 0.1
"""Of a draft level that nobody has timed yet, in passes over one row."""
TRUST = 8
"""Steps that a price measured beforehand is worth."""
KNOTS = 12  # powers of two of rows; more rows count as the last
_FAST, _SLOW, _CLIP = 0.15, 0.03, 0.5
_GRAIN = 64  # tokens of context that share an entry of the table


@dataclass(slots=True)
class DraftPrice:
    """Seconds of a draft: of the call, for each sequence, and of each level, for all together."""

    call: float
    level: float
    seen: int = 0
    """Steps behind the numbers."""


class Costs:
    """Costs of one target and its drafters. Changes in ``watch``, ``start``, ``know``,
    ``known_as`` and ``suppose`` alone.

    Args:
        curve: of the target, on this machine; see ``outpace bench passes``.
        drafts: drafter -> seconds per level, where they were measured.
    """

    def __init__(
        self, curve: CostCurve | None = None, drafts: Mapping[str, float] | None = None
    ) -> None:
        self._drafts = {name: DraftPrice(0.0, level) for name, level in (drafts or {}).items()}
        self._before: dict[int, str] = {}  # sequence -> who drafted for it a step ago
        self._rest = 0.0
        self._known: dict[str, KnownDrafter] = {}
        self._names: dict[str, str] = {}  # method spec -> the one that it was measured as
        self.start(curve)

    def start(self, curve: CostCurve | None) -> None:
        """Take a curve, and forget what steps taught about passes. Drafts keep their prices."""
        self._fill: Callable[[], object] | None = None
        self._curve = curve
        self._table: dict[tuple[int, int, int], float] = {}
        self._all = 0.0  # log of the factor for everything
        self._knot_K = [0.0] * KNOTS  # logs of the factors by rows
        self._factor_K = [1.0] * KNOTS
        self._seen_K = [0] * KNOTS
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
        place = math.log2(rows)
        low = min(int(place), KNOTS - 2)
        part = min(1.0, place - low)
        factor = self._factor_K[low] * (1.0 - part) + self._factor_K[low + 1] * part
        return self._plain(rows, context, batch) * factor

    def price(self, drafter: str) -> tuple[float, float]:
        """Seconds of a draft: for each sequence, and for each level, of all together."""
        if self._fill is not None:
            self._begin()
        price = self._drafts.get(drafter)
        if price is None:
            return 0.0, GUESS * self._plain(1, 0, 1) * self._factor_K[0]
        return price.call, price.level

    @property
    def known(self) -> bool:
        """Whether costs are seconds, by a curve or a watched step; else only their ratios count."""
        self._begin()
        return self._curve is not None or self._seen > 0

    @property
    def rest(self) -> float:
        """Seconds of a step outside drafting and the pass."""
        return self._rest

    def timed(self, drafter: str) -> int:
        """How many steps the price of a drafter rests on."""
        price = self._drafts.get(drafter)
        return 0 if price is None else price.seen

    def watch(self, record: StepRecord) -> None:
        """Take a step in. Prompts teach nothing: their rows have no logits."""
        if record.prompt or not record.rows or record.seconds.get("score", 0.0) <= 0.0:
            return
        seconds = record.seconds
        self._learn_pass(record.passed_rows, record.context, len(record.rows), seconds["score"])
        rest = sum(seconds.get(verb, 0.0) for verb in ("plan", "judge", "commit"))
        self._rest += (rest - self._rest) * max(_FAST, 1.0 / self._seen)
        asked = {row.sequence: row.drafter for row in record.rows if row.drafter != "none"}
        if len(set(asked.values())) == 1:
            name = next(iter(asked.values()))
            # One that was silent for a while first reads what it missed, which is no level.
            steady = all(self._before.get(number) == name for number in asked)
            if steady or not self.timed(name):
                self._learn_draft(name, len(asked), record)
        self._before = asked

    def _learn_pass(self, rows: int, context: int, batch: int, seconds: float) -> None:
        off = math.log(seconds / self._plain(rows, context, batch)) - self._all
        knot = min(KNOTS - 1, round(math.log2(rows)))
        off -= self._knot_K[knot]
        if self._seen:
            off = max(-_CLIP, min(_CLIP, off))
        self._seen += 1
        self._seen_K[knot] += 1
        fast, slow = max(_FAST, 1.0 / self._seen), max(_SLOW, 1.0 / (3 + self._seen_K[knot]))
        self._all += fast * off
        if self._seen > 1:
            self._knot_K[knot] += slow * off
        self._factor_K = [math.exp(self._all + own) for own in self._knot_K]

    def _learn_draft(self, name: str, sequences: int, record: StepRecord) -> None:
        spent, levels = record.seconds.get("draft", 0.0), record.draft_levels
        price = self._drafts.setdefault(name, DraftPrice(0.0, 0.0))
        price.seen += 1
        rate = max(_FAST, 1.0 / price.seen)
        call, level = (0.0, spent / levels) if levels else (spent / sequences, 0.0)
        if price.seen > 3:  # a stall of the machine is no price
            call, level = min(call, 3.0 * price.call + 1e-4), min(level, 3.0 * price.level + 1e-4)
        price.call += rate * (call - price.call)
        price.level += rate * (level - price.level)

    def _plain(self, rows: int, context: int, batch: int) -> float:
        """By the curve alone."""
        if self._fill is not None:
            self._begin()
        if self._curve is None:
            return assumed(rows)
        key = (rows, context // _GRAIN, batch)
        found = self._table.get(key)
        if found is None:
            found = self._curve.seconds(rows / batch, key[1] * _GRAIN, batch)
            self._table[key] = found
        return found
