"""Jetspec: the block of `dflash` with rows that see those before them alone, all of equal weight.

Paper: JetSpec, arXiv:2606.18394 (forward divergence from the target, uniform over the rows).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from outpace.methods.dflash.net import BlockShape
from outpace.methods.dflash.objective import DflashObjective, DflashTraining


@dataclass(frozen=True, kw_only=True, slots=True)
class JetspecTraining(DflashTraining):
    decay: float = 1.0
    """Weight of a row relative to the one before."""


class JetspecObjective(DflashObjective):
    Config = JetspecTraining
    method: ClassVar[str] = "jetspec"

    @classmethod
    def shaped(cls, shape: BlockShape, config: Any) -> BlockShape:
        return replace(shape, causal=True)
