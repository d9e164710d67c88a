"""Dspark: the block of `dflash` with a Markov head and a confidence head.

The Markov head is learned with the true token above. The confidence head learns the chance that a draw from q
is kept, 1 - |p - q|_1 / 2, on a share of the rows.

Paper: DSpark, arXiv:2607.05147. Its loss is 0.1 cross-entropy to the text and 0.9 |p - q|_1; here it
is ``loss``.

Shape letters: R guesses that learn, C those of them from which confidence is learned, H hidden size,
I its width with the Markov head's, D draft vocabulary, N distributions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.errors import ModelError
from outpace.methods.dflash.net import BlockShape
from outpace.methods.dflash.objective import DflashObjective, DflashTraining
from outpace.train.objective import guesses

SHARE = 4
"""One row of so many teaches the confidence head, which has few weights: each costs a row of the head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DsparkTraining(DflashTraining):
    rank: int = 64
    """Of the Markov head."""
    confidence: float = 1.0
    """Weight of the confidence head's loss; 0: no such head."""

    def __post_init__(self) -> None:
        DflashTraining.__post_init__(self)
        if self.rank < 1 or self.confidence < 0:
            raise ValueError(
                f"rank must be at least 1 and confidence at least 0, got {self.rank} and {self.confidence}"
            )


class DsparkObjective(DflashObjective):
    Config = DsparkTraining
    method: ClassVar[str] = "dspark"

    @classmethod
    def shaped(cls, shape: BlockShape, config: Any) -> BlockShape:
        if shape.draft_vocab < 2:
            raise ModelError("dspark: a vocabulary of one token has nothing to follow")
        return replace(
            shape,
            from_anchor=True,
            rank=config.rank,
            known=shape.draft_vocab,
            confident=config.confidence > 0,
        )

    def joint(self, y_RH: Tensor, above_R: Tensor) -> tuple[Tensor, Tensor]:
        head = self.module.markov_head
        joint_RI = torch.cat([y_RH, head.above(above_R).float()], -1)
        return joint_RI, torch.cat([self._head_DH, head.markov_w2.weight], -1)

    def aside(self, joint_RI: Tensor, head_DI: Tensor, p_ND: Tensor, row_R: Tensor) -> Tensor:
        if not self.shape.confident:
            return super().aside(joint_RI, head_DI, p_ND, row_R)
        some_CI = joint_RI[::SHARE].detach()
        kept_C = guesses(some_CI, head_DI, None, p_ND, row_R[::SHARE])[1]
        said_C = self.module.confidence_head["proj"](some_CI).squeeze(-1).float()
        loss = F.binary_cross_entropy_with_logits(said_C, kept_C.clamp(0, 1), reduction="sum")
        weighed: Tensor = SHARE * self.config.confidence * loss
        return weighed
