"""What a diagnosis consists of: findings, and the measurements behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong."""

    name: str
    """For programs, such as ``layer_taps``."""
    what: str
    evidence: str
    do: str
    """What to do about it."""

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "what": self.what, "evidence": self.evidence, "do": self.do}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The drafter with one thing changed, at the same positions as without."""

    name: str
    """Kind of change: the finding if it is a cure."""
    change: str
    """What was changed, in words."""
    kept: int
    """First guesses that were right."""
    positions: int
    won: int
    """Positions right with the change alone."""
    lost: int
    """Positions right without it alone."""

    @property
    def share(self) -> float:
        return self.kept / self.positions if self.positions else 0.0

    @property
    def gain(self) -> float:
        """Right first guesses gained, as a share of positions."""
        return (self.won - self.lost) / self.positions if self.positions else 0.0

    @property
    def chance(self) -> float:
        """Probability of so many gains, or more, if the change made no difference (McNemar, exact)."""
        pairs = self.won + self.lost
        return sum(math.comb(pairs, k) for k in range(self.won, pairs + 1)) / 2.0**pairs

    def cures(self, trials: int) -> bool:
        """Whether the change helps for sure, one of so many trials."""
        return self.gain >= LEAST_GAIN and self.chance * trials < SURE

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "change": self.change,
            "acceptance": self.share,
            "positions": self.positions,
            "gain": self.gain,
            "chance": self.chance,
        }


LEAST_GAIN = 0.05
"""Smallest gain of first guesses that counts as a cure; less is not worth a finding."""
SURE = 1e-3
"""Chance of a false cure in a whole diagnosis that is put up with."""


@dataclass(slots=True)
class Diagnosis:
    """All that was found."""

    model: str
    drafter: str
    findings: list[Finding] = field(default_factory=list)
    acceptance: tuple[float, ...] = ()
    """By depth, given that all before was right; as far as there were positions."""
    counted: tuple[int, ...] = ()
    """Positions behind each."""
    reached: tuple[float, ...] = ()
    """What training reached on held-out text; empty if it is not known."""
    trials: list[Trial] = field(default_factory=list)
    contexts: list[tuple[int, int, int]] = field(default_factory=list)
    """Tokens of context, right first guesses, positions."""
    coverage: float | None = None
    """Share of the target's tokens that the drafter's vocabulary has; None: all of it."""
    guesses_at: dict[int, float] = field(default_factory=dict)
    """Offset from the next token -> share of first guesses that are the token there."""
    level_cost: float | None = None
    """Of a level of the drafter, in passes of the target over one row."""
    predicted: float | None = None
    """Speed-up of the best chain, from acceptance and costs."""
    machine: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def find(self, name: str, what: str, evidence: str, do: str) -> None:
        self.findings.append(Finding(name=name, what=what, evidence=evidence, do=do))

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.findings]

    @property
    def low(self) -> bool:
        """Whether first guesses are right much less often than training reached."""
        if not self.reached or not self.counted or not self.counted[0]:
            return False
        usual, count = EXPECTED * self.reached[0], self.counted[0]
        return below(round(self.acceptance[0] * count), count, usual) < 0.01

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "drafter": self.drafter,
            "findings": [one.to_json() for one in self.findings],
            "acceptance": list(self.acceptance),
            "counted": list(self.counted),
            "reached": list(self.reached),
            "trials": [one.to_json() for one in self.trials],
            "contexts": [
                {"context": context, "acceptance": kept / count if count else None, "positions": count}
                for context, kept, count in self.contexts
            ],
            "coverage": self.coverage,
            "guesses_at": {str(offset): share for offset, share in self.guesses_at.items()},
            "level_cost": self.level_cost,
            "predicted": self.predicted,
            "machine": self.machine,
            "notes": self.notes,
        }


EXPECTED = 0.7
"""Share of the acceptance of held-out training text that other prompts may be expected to give. The
shipped drafters keep 0.8 to 1.0 of it on the built-in prompts."""


def below(kept: int, count: int, share: float) -> float:
    """Probability of at most so many successes of ``count`` at a chance of ``share``."""
    return sum(math.comb(count, k) * share**k * (1.0 - share) ** (count - k) for k in range(kept + 1))


def apart(a: tuple[int, int], b: tuple[int, int]) -> float:
    """Probability that two shares differ so much by chance (normal, two-sided).

    Args:
        a: successes and trials of one.
        b: those of the other.
    """
    if not a[1] or not b[1]:
        return 1.0
    pooled = (a[0] + b[0]) / (a[1] + b[1])
    spread = math.sqrt(pooled * (1 - pooled) * (1 / a[1] + 1 / b[1]))
    if spread == 0:
        return 1.0
    return math.erfc(abs(a[0] / a[1] - b[0] / b[1]) / spread / math.sqrt(2))


def by_depth(runs: Sequence[tuple[int, int]]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Acceptance and counts by depth, as far as any draft came, from (drafted levels, accepted)."""
    deepest = max((drafted for drafted, _ in runs), default=0)
    tried = [sum(d > level and a >= level for d, a in runs) for level in range(deepest)]
    counts = tuple(filter(None, tried))
    kept = [sum(a > level for _, a in runs) for level in range(len(counts))]
    return tuple(k / t for k, t in zip(kept, counts, strict=True)), counts
