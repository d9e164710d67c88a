"""Drafters that guess at every learning row what follows, one depth after another.

The loss of a deeper guess counts less. Held-out rows also give what the static tree is made of.
That is how often the i-th likeliest token of a depth was the target's. Only rows count where the
target's tokens before it were among the likeliest of their depths. ``save_tree`` stores it, from
the measurement before.

Shape letters: B sequences, A learning rows, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.drafters.trained import head_rows
from outpace.law import VocabMap
from outpace.models.base import Target
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.train.align import EAGLE, Aligned, rows_at
from outpace.train.batches import Batch
from outpace.train.losses import depth_weights, feature_loss
from outpace.train.networks import Embed, Turns
from outpace.train.objective import LAST, LossTraining, Objective, Step
from outpace.train.ranks import Ranks, judge_ranks, write_tree


@dataclass(frozen=True, kw_only=True, slots=True)
class AheadTraining(LossTraining):
    """Options that all of them have."""

    decay: float = 0.8
    """Weight of a depth relative to the one before."""

    def __post_init__(self) -> None:
        LossTraining.__post_init__(self)
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {self.decay}")

    @staticmethod
    def at_least_one(**counts: int) -> None:
        """Refuse counts below 1.

        Raises:
            ValueError: names them all.
        """
        if min(counts.values()) < 1:
            values = " and ".join(str(one) for one in counts.values())
            raise ValueError(f"{' and '.join(counts)} must be at least 1, got {values}")


class AheadObjective(Objective):
    """Guesses of all depths at every learning row, through the target's unembedding.

    Args:
        depths: how many.
    """

    config: Any

    def __init__(self, config: Any, target: Decoder, vocab: VocabMap | None, depths: int) -> None:
        self.config, self.target, self.vocab = config, target, vocab
        self._head_DH = head_rows(target, vocab, target.dtype)
        self._weights = depth_weights(depths, config.decay)
        self.ranks = Ranks(depths)

    @classmethod
    def taps(cls, config: Any, target: Target) -> tuple[str, ...]:
        return (LAST,)

    @abstractmethod
    def states(self, batch: Batch, aligned: Aligned) -> Sequence[Tensor]:
        """What the unembedding reads at the learning rows, [B, A, H] for every depth."""

    def loss(self, batch: Batch) -> Step:
        aligned = Aligned(batch, EAGLE)
        self.ranks.clear()
        states = self.states(batch, aligned)
        return self.learn(states, batch, aligned, EAGLE, self._head_DH, self._weights)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        aligned = Aligned(batch, EAGLE)
        return judge_ranks(self.ranks, self.states(batch, aligned), batch, aligned, self, self._head_DH)

    def save_tree(self, folder: Path, config: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """Write the drafter folder with its tree, from the measurement before."""
        write_tree(folder, config, self, self.ranks, provenance)


class LayerObjective(AheadObjective):
    """A network around decoder layers as wide as the target, whose rows read tokens as the target does.

    Args:
        net: all that is trained.
        shape: of its layers.
    """

    def __init__(
        self,
        config: Any,
        target: Decoder,
        vocab: VocabMap | None,
        net: nn.Module,
        shape: DecoderConfig,
        depths: int,
    ) -> None:
        super().__init__(config, target, vocab, depths)
        self.module, self.shape = net, shape
        self.embed, self.turns = Embed(target), Turns(shape.ropes[0], target.device)

    def regression(self, batch: Batch, aligned: Aligned, outputs: Sequence[Tensor]) -> Tensor:
        """SmoothL1 between outputs and the features that they stand for, weighted like the depths; a sum."""
        feature_BTH, total = batch.feature[LAST].float(), torch.zeros((), device=batch.token_BT.device)
        for depth, (state_BAH, weight) in enumerate(zip(outputs, self._weights, strict=True)):
            keep_BA = aligned.teaches(EAGLE + depth)
            place_BA = (aligned.place_BA + depth + 1).clamp_max(feature_BTH.shape[1] - 1)
            wanted = rows_at(feature_BTH, place_BA)[keep_BA]
            total = total + weight * feature_loss(state_BAH[keep_BA], wanted).sum()
        return total
