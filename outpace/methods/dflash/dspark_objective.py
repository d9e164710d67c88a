"""Dspark: the block of `dflash` with a Markov head and a confidence head.

The Markov head is learned with the true token above.

Paper: DSpark, arXiv:2607.05147. Its loss is 0.1 cross-entropy to the text and 0.9 |p - q|_1; here it
is ``loss``.

Shape letters: R guesses that learn, H hidden size, I its width with the Markov head's, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.methods.dflash.net import BlockShape
from outpace.methods.dflash.objective import DflashObjective, DflashTraining


@dataclass(frozen=True, kw_only=True, slots=True)
class DsparkTraining(DflashTraining):
    rank: int = 64
    """Of the Markov head."""
    confidence: float = 1.0
    """Weight of the confidence head's loss; 0: no such head."""

    def __post_init__(self) -> None:
        DflashTraining.__post_init__(self)
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")


class DsparkObjective(DflashObjective):
    Config = DsparkTraining
    method: ClassVar[str] = "dspark"

    @classmethod
    def shaped(cls, shape: BlockShape, config: Any) -> BlockShape:
        if shape.draft_vocab < 2:
            raise ModelError("dspark: a vocabulary of one token has nothing to follow")
        return replace(shape, from_anchor=True, rank=config.rank, known=shape.draft_vocab)

    def joint(self, y_RH: Tensor, above_R: Tensor) -> tuple[Tensor, Tensor]:
        head = self.module.markov_head
        joint_RI = torch.cat([y_RH, head.above(above_R).float()], -1)
        return joint_RI, torch.cat([self._head_DH, head.markov_w2.weight], -1)
