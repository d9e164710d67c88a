"""Who drafted when in one answer, why, what that brought, and what was expected of it.

    told = Explained(engine.costs)
    with engine.listening(told):
        engine.generate(prompt, drafter="auto")
    told.stretches(), told.by_drafter(), told.total()

A stretch is a run of steps in which the same drafter guessed; where whoever was asked had nothing
to say, nobody did. The speed of plain decoding is what the policy expected of it
(``Choice.rates``). For policies that give no reasons, it is the median of this answer's own steps
that had one row, if there were enough of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

from outpace.types import StepRecord

PLAIN = "none"
ENOUGH = 3
"""Steps of one row from which the speed of plain decoding is told."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the answer."""

    number: int
    """From 1."""
    drafter: str
    reason: str | None
    drafted: int
    depth: int
    """Of the draft."""
    accepted: int
    emitted: int
    rows: int
    verbs: Mapping[str, float]
    """Verb -> seconds."""
    expected: float | None
    """Tokens per second with this drafter, as the policy thought before."""
    plain: float | None
    """The same of plain decoding."""

    @property
    def seconds(self) -> float:
        """Of the five verbs."""
        return sum(self.verbs.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    drafter: str
    first: int
    """Number of its first step after the prompt, from 1."""
    last: int
    passes: int
    reasons: tuple[str, ...]
    """Why the policy picked the drafter; empty if it does not say."""
    drafted: int
    accepted: int
    emitted: int
    seconds: float
    """Of the five verbs."""
    expected: float | None
    """Tokens per second that the policy expected, mean over time; None if it did not say."""
    plain: float | None
    """Tokens per second expected of plain decoding in these steps; None if nobody can tell."""

    @property
    def rate(self) -> float:
        return self.emitted / self.seconds if self.seconds > 0 else 0.0

    @property
    def over_plain(self) -> float | None:
        """``rate`` over ``plain``."""
        return None if not self.plain else self.rate / self.plain

    @property
    def gained(self) -> float | None:
        """Seconds that plain decoding would have taken more for the same tokens."""
        return None if not self.plain else self.emitted / self.plain - self.seconds

    def to_json(self) -> dict[str, Any]:
        """Plain values, keys as in the glossary."""
        return {
            "drafter": self.drafter,
            "first_step": self.first,
            "last_step": self.last,
            "passes": self.passes,
            "reasons": list(self.reasons),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "step_seconds": self.seconds,
            "step_tokens_per_second": self.rate,
            "expected_tokens_per_second": self.expected,
            "plain_tokens_per_second": self.plain,
            "over_plain": self.over_plain,
            "gained_seconds": self.gained,
        }


class Explained:
    """Listens to the steps of an engine that answers one prompt.

    Args:
        costs: of the engine. What a policy expects before they are known is in no unit.
    """

    def __init__(self, costs: Any) -> None:
        self._costs = costs
        self.steps: list[Step] = []
        """Those after the prompt."""

    def __call__(self, record: StepRecord) -> None:
        """Take a step in; called before the costs learn from it."""
        if record.prompt:
            return
        (row,) = record.rows
        rates = row.choice.rates if row.choice is not None and self._costs.known else {}
        self.steps.append(
            Step(
                len(self.steps) + 1,
                row.drafter if row.drafted else PLAIN,
                None if row.choice is None else row.choice.reason,
                row.drafted,
                row.depth,
                row.accepted,
                len(row.emitted),
                record.passed_rows,
                record.seconds,
                rates.get(row.drafter),
                rates.get(PLAIN),
            )
        )

    def stretches(self) -> list[Stretch]:
        """Runs of steps with the same drafter, in order."""
        seen = self._seen_plain()
        return [_added(list(run), seen) for _, run in groupby(self.steps, lambda s: s.drafter)]

    def by_drafter(self) -> list[Stretch]:
        """All steps of each drafter, the one with most steps first."""
        seen = self._seen_plain()
        names = dict.fromkeys(step.drafter for step in self.steps)
        found = [_added([s for s in self.steps if s.drafter == name], seen) for name in names]
        return sorted(found, key=lambda one: -one.passes)

    def total(self) -> Stretch | None:
        """The whole answer after its first token; None if that was all."""
        return _added(self.steps, self._seen_plain(), "all") if self.steps else None

    def to_json(self) -> dict[str, Any]:
        total = self.total()
        return {
            "stretches": [one.to_json() for one in self.stretches()],
            "by_drafter": [one.to_json() for one in self.by_drafter()],
            "total": None if total is None else total.to_json(),
        }

    def _seen_plain(self) -> float | None:
        """Tokens per second of the steps that had one row."""
        alone = [step.seconds for step in self.steps if step.rows == 1 and step.seconds > 0]
        return 1.0 / median(alone) if len(alone) >= ENOUGH else None


def _added(steps: Sequence[Step], seen: float | None, name: str | None = None) -> Stretch:
    reasons = dict.fromkeys(step.reason for step in steps if step.reason is not None)
    told = [step.plain for step in steps if step.plain is not None]
    return Stretch(
        drafter=steps[0].drafter if name is None else name,
        first=steps[0].number,
        last=steps[-1].number,
        passes=len(steps),
        reasons=tuple(reasons),
        drafted=sum(step.drafted for step in steps),
        accepted=sum(step.accepted for step in steps),
        emitted=sum(step.emitted for step in steps),
        seconds=sum(step.seconds for step in steps),
        expected=_over_time((step.expected, step.seconds) for step in steps),
        plain=_over_time((step.plain, step.seconds) for step in steps) if told else seen,
    )


def _over_time(pairs: Iterable[tuple[float | None, float]]) -> float | None:
    """Mean rate over the seconds for which there is one; None if there is none at all."""
    told = [(rate, seconds) for rate, seconds in pairs if rate is not None]
    whole = sum(seconds for _, seconds in told)
    return sum(rate * seconds for rate, seconds in told) / whole if whole > 0 else None
