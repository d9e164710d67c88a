"""Drafters that guess at every learning row what follows, one depth after another.

The loss of a deeper guess counts less. Held-out rows also give what the static tree is made of: how
often the i-th likeliest token of a depth was the target's, among rows where the target's tokens
before it were among the likeliest of their depths. ``save_tree`` stores it, from the measurement
before.

Shape letters: B sequences, A learning rows, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.static_tree import LARGEST, likeliest
from outpace.drafters.trained import head_rows
from outpace.files import write_whole
from outpace.law import VocabMap
from outpace.models.decoder import Decoder
from outpace.train.align import EAGLE, Aligned
from outpace.train.batches import Batch
from outpace.train.losses import check, depth_weights
from outpace.train.objective import Objective, Step, write_drafter
from outpace.train.ranks import Ranks, judge_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class AheadTraining:
    """Options that all of them have."""

    decay: float = 0.8
    """Weight of a depth relative to the one before."""
    loss: str = "kl"
    """One of the losses of `outpace.train.losses`: ce, kl, rkl, jsd, tv, lk, lk_mix."""
    temperature: float = 1.0
    """Divides the target's logits before they become labels."""

    def __post_init__(self) -> None:
        check(self.loss)
        if not 0 < self.decay <= 1 or self.temperature <= 0:
            raise ValueError(
                f"decay must be in (0, 1] and temperature above 0, got {self.decay} and {self.temperature}"
            )

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
        """Write the drafter folder, and in it the calibrated tree alone, as ``tree.json``.

        ``tree=FOLDER/tree.json`` serves every ``tree_size``; the default ends at its 15th node.
        """
        rates = self.ranks.acceptance()
        parents = list(likeliest(rates, LARGEST))
        whole = {**config, "acceptance": rates, "tree": parents}
        write_drafter(folder, whole, self.named(), self.vocab, provenance)
        if parents:
            write_whole(folder / "tree.json", json.dumps({"parents": parents}) + "\n")
