"""EAGLE: one layer on the target's own features guesses, chain or tree, greedy or sampled.

    text        x0  x1  x2  x3 | x4 pending        draft: x5 x6 ...
    features    f0  f1  f2  f3                     of the passes that fed x0 to x3
    rows        f0+x1  f1+x2  f2+x3  f3+x4   ->    guesses x5 and gives a
                                     a+x5    ->    guesses x6, and so on

How rows follow each other: `outpace.drafters.feature_rows`. A draft of depth D costs D passes of the
head.

Reads heads that ``outpace train eagle3`` made, EAGLE-3 heads in the speculators format, and the
EAGLE-1, EAGLE-2 and EAGLE-3 checkpoints of the method's authors. Pays wherever such a head is
trained for the target; a head for another target drafts noise, and is refused where that shows.

Papers: Li et al. 2024, arXiv:2401.15077 and arXiv:2406.16858; Li et al. 2025, arXiv:2503.01840.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.drafters.feature_rows import RowDrafter, RowState
from outpace.drafters.features import TrainedConfig
from outpace.drafters.trained import rounding
from outpace.methods.eagle3.files import find_head, read_head
from outpace.methods.eagle3.net import EagleNet
from outpace.models.base import Target
from outpace.tree.growth import Branch


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig(TrainedConfig):
    quantize: str | None = "int8"
    """Round its weights, where compiled code multiplies them: int8 has four bits for the head alone, int4
    for all; none keeps them."""


class Eagle3(RowDrafter):
    """Drafts with an EAGLE head."""

    Config = EagleConfig
    net: EagleNet

    @classmethod
    def load(cls, config: EagleConfig, target: Target) -> Eagle3:
        """Read the head and borrow the target's embedding."""
        head = read_head(find_head(target, config.model), target)
        rounded = rounding(config.quantize, target)
        net = EagleNet(head.shape, head.tensors, target, head.embed_VH, head.id_D, quantize=rounded)
        id_D = None if head.id_D is None else head.id_D.to(target.device)
        drafter = cls(net, id_D, head.temper_D)
        drafter.traits = replace(drafter.traits, foresees=head.shape.confident)
        return drafter

    def foresee(self, branches: Sequence[Branch[RowState]]) -> Tensor:
        """What the confidence head says of draws below the nodes that were just expanded (SpecDec++)."""
        with self.clock, torch.no_grad():
            chance_F = self.net.foresee(self.outputs(branches))
        self.clock.count -= 1  # part of the level, and no pass of its own
        return chance_F
