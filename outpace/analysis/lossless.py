"""What a losslessness check found, level by level; `outpace.analysis.check` fills it in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outpace.analysis.agreement import OracleReport
from outpace.analysis.law import LawReport
from outpace.analysis.shapes import ShapeReport

LAW_TOLERANCE = 1e-12
"""Largest error of a probability that enumeration in float64 may leave."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a text first leaves the plain one."""

    prompt: str
    """Its id."""
    batch: int
    position: int
    """Index among the new tokens."""
    plain: int | None
    """The plain text's token there; None if it has ended."""
    token: int | None
    """The other's."""
    gap: float | None
    """Logit of the plain token less that of the other, in one pass over all before them."""


@dataclass(slots=True)
class Tally:
    """What one drafter did over all prompts and batch sizes."""

    sequences: int = 0
    equal: int = 0
    """Sequences whose tokens are those of plain decoding."""
    drafted: int = 0
    accepted: int = 0
    differences: list[Difference] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        first = dataclasses.asdict(self.differences[0]) if self.differences else None
        return {
            "sequences": self.sequences,
            "equal": self.equal,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "first_difference": first,
        }


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    dtype: str
    device: str
    promised: bool
    """Whether equal tokens are promised for this model in this dtype on this device."""
    prompts: int
    max_new_tokens: int
    laws: Mapping[str, LawReport]
    oracles: Mapping[str, OracleReport]
    plain: Tally
    """Plain decoding in batches against plain decoding alone."""
    drafters: Mapping[str, Tally]
    """Normalised method spec -> what it did."""
    shapes: ShapeReport | None = None
    """Rows in the shapes of a server, where that was asked for."""

    @property
    def promise(self) -> str:
        """What this target promises of greedy tokens, and why."""
        if self.promised:
            return "promised: every row of a pass is what it is alone"
        return (
            "not promised here, measured: the rows of this target may differ in the last bits between "
            "passes of different shapes; the own decoder on a CPU promises it"
        )

    @property
    def tallies(self) -> dict[str, Tally]:
        """``plain`` and all drafters, under the names of their rows."""
        guessing = {spec: tally for spec, tally in self.drafters.items() if spec != "none"}
        return {"none, in batches": self.plain, **guessing}

    @property
    def idle(self) -> list[str]:
        """Drafters that had nothing accepted: their equal tokens show nothing."""
        return [spec for spec, tally in self.drafters.items() if tally.accepted == 0 and spec != "none"]

    @property
    def broken(self) -> list[str]:
        """The promises that do not hold, a line each."""
        lines = []
        for name, law in self.laws.items():
            if not law.error < LAW_TOLERANCE:
                lines.append(f"distributions: verifier {name} is off by {law.error:.1e}")
            if law.planted_bugs_caught < law.planted_bugs:
                lines.append(f"distributions: planted bugs not caught under {name}: {', '.join(law.missed)}")
        for name, oracle in self.oracles.items():
            if oracle.agreed < oracle.cases:
                lines.append(
                    f"code: verifier {name} differs from its oracle in "
                    f"{oracle.cases - oracle.agreed} of {oracle.cases} cases"
                )
        if self.promised:
            for name, tally in self.tallies.items():
                if tally.equal < tally.sequences:
                    lines.append(
                        f"tokens: {name}: {tally.sequences - tally.equal} of "
                        f"{tally.sequences} sequences differ from plain decoding"
                    )
        return lines + ([] if self.shapes is None else self.shapes.broken)

    def hardware(self) -> dict[str, Any]:
        """Level 4: the share of differing sequences, and how close the two tokens were."""
        tallies = self.tallies.values()
        sequences = sum(tally.sequences for tally in tallies)
        differences = [d for tally in tallies for d in tally.differences]
        gaps = [abs(d.gap) for d in differences if d.gap is not None]
        return {
            "dtype": self.dtype,
            "device": self.device,
            "promised": self.promised,
            "promise": self.promise,
            "sequences": sequences,
            "different": len(differences),
            "share": len(differences) / sequences if sequences else 0.0,
            "largest_gap": max(gaps, default=None),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.dtype,
            "prompts": self.prompts,
            "max_new_tokens": self.max_new_tokens,
            "distributions": {name: dataclasses.asdict(law) for name, law in self.laws.items()},
            "code": {name: dataclasses.asdict(o) for name, o in self.oracles.items()},
            "plain": self.plain.to_json(),
            "drafters": {spec: tally.to_json() for spec, tally in self.drafters.items()},
            "hardware": self.hardware(),
            "shapes": None if self.shapes is None else self.shapes.to_json(),
            "idle": self.idle,
            "broken": self.broken,
        }
