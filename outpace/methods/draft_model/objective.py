"""A small decoder that learns to speak like the target: some of its layers, or narrower ones.

The layers are copies of the target's, by default of the first two. The target's embedding, and the
rows of its head for the draft vocabulary, are borrowed and not stored. With ``width``, narrower
layers are drawn at random, between a projected embedding and a head of their own. All answer
tokens are learned at once, from the target's distributions.

With ``on_policy`` a share of the batches gets answers that the draft model wrote itself, judged by the
target's distributions. Those are the texts on which it will be asked
(`outpace.methods.draft_model.on_policy`).

Paper: DistillSpec, Zhou et al. 2023, arXiv:2310.08461.

Shape letters: B sequences, T tokens, A learning rows, H hidden size, V vocabulary, D draft
vocabulary, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.drafters.trained import decoder_to_json, head_rows, lender, read_embedding
from outpace.law import VocabMap
from outpace.methods.draft_model.on_policy import student_answers
from outpace.methods.draft_model.training_net import DraftNet, chosen_layers, narrow_start, shape_of
from outpace.models.base import HEAD, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.train.align import DRAFT_MODEL, Aligned, places
from outpace.train.batches import Batch
from outpace.train.objective import LAST, LossTraining, Objective, Step, judge_rows, write_drafter


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModelTraining(LossTraining):
    layers: int = 2
    """Layers of the draft model."""
    take: str | None = None
    """Layers of the target to start from, as ``0,29``; the first ones by default."""
    width: int | None = None
    """Hidden size, a multiple of the target's head width; the target's by default. Another one
    starts at random."""
    train_head: bool = False
    """Train and store a head of its own; False borrows the target's. A narrow one always has its
    own."""
    on_policy: float = 0.0
    """Share of batches whose answers the draft model writes itself."""
    seed: int = 0
    """Of random weights."""

    def __post_init__(self) -> None:
        LossTraining.__post_init__(self)
        if self.layers < 1 or not 0 <= self.on_policy <= 1:
            raise ValueError(
                f"layers must be at least 1 and on_policy in [0, 1], got {self.layers} and {self.on_policy}"
            )
        if self.width is not None and self.take is not None:
            raise ValueError("take copies layers of the target, which have the target's width")


class DraftModelObjective(Objective):
    Config = DraftModelTraining
    module: DraftNet
    config: DraftModelTraining

    def __init__(
        self, config: DraftModelTraining, target: Decoder, vocab: VocabMap | None, net: DraftNet
    ) -> None:
        self.config, self.target, self.vocab, self.module = config, target, vocab, net
        self._head_DH: Tensor | None = None
        self._embed_VW = read_embedding(target) if net.embed is None else None

    @classmethod
    def taps(cls, config: DraftModelTraining, target: Target) -> tuple[str, ...]:
        return (LAST,)

    @classmethod
    def build(cls, config: DraftModelTraining, target: Target, vocab: VocabMap | None) -> DraftModelObjective:
        lent = lender(target, "draft_model", TAPS, HEAD)
        narrow = config.width is not None and config.width != lent.hidden_size
        taken = chosen_layers(config.layers, config.take, lent)
        shape = shape_of(lent.config, taken, config.width if narrow else None)
        rows = lent.vocab_size if vocab is None else len(vocab.to_target_D)
        own_head = config.train_head or narrow
        net = DraftNet(shape, lent.device, embed=narrow, head=rows if own_head else None)
        net.to(lent.device)
        if narrow:
            narrow_start(net, lent, vocab, config.seed)
        else:
            net.take(lent, taken, vocab)
        return cls(config, lent, vocab, net)

    def head(self) -> Tensor:
        """Rows of the head, [D, W]: its own, or the target's, which are read once."""
        if self.module.lm_head is not None:
            return self.module.lm_head.weight
        if self._head_DH is None:
            self._head_DH = head_rows(self.target, self.vocab)
        return self._head_DH

    def hidden(self, batch: Batch, aligned: Aligned) -> Tensor:
        """Normed last states of the learning rows, [B, A, W]."""
        net = self.module
        embed_BTW = F.embedding(batch.token_BT, self.embedding())
        hidden_BAW: Tensor = net(embed_BTW, places(batch), aligned)
        return hidden_BAW

    def loss(self, batch: Batch) -> Step:
        aligned = Aligned(batch, DRAFT_MODEL)
        return self.learn([self.hidden(batch, aligned)], batch, aligned, DRAFT_MODEL, self.head())

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        hidden_BAW = self.hidden(batch, Aligned(batch, DRAFT_MODEL))
        return judge_rows(batch, self.target, self.vocab, hidden_BAW, self.head())

    @property
    def on_policy_share(self) -> float:
        return self.config.on_policy

    def on_policy(self, batch: Batch, seed: int) -> Batch:
        """Answers by the draft model as it is now, at ``temperature``; features of these texts."""
        return student_answers(
            self.module,
            self.embedding(),
            self.head(),
            self.vocab,
            self.target,
            batch,
            temperature=self.config.temperature,
            seed=seed,
        )

    def embedding(self) -> Tensor:
        """The embedding that the draft model reads, [V, W]: its own, or a copy of the target's."""
        if self.module.embed is not None:
            return self.module.embed.weight
        assert self._embed_VW is not None
        return self._embed_VW

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        config = {**self.about("draft_model", []), "decoder": decoder_to_json(self.module.shape)}
        write_drafter(folder, config, self.named(), self.vocab, provenance)

    def named(self) -> Mapping[str, Tensor]:
        return self.module.stored()
