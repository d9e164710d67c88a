"""Guesses of rows that ride on texts, in training: what `ppd`, `s3d`, `streaming` and `coral` share.

In every step some places of every text carry riders, all in one pass (`rider_net`). Labels are the
target's distributions along the text; the loss of a later guess counts less. Held-out places also give how
often the i-th likeliest token of a guess was the target's. Only places count where the target's tokens
before it were among the likeliest of their guesses.

Shape letters: B sequences, T tokens, A learning rows, G places with riders, N distributions, H hidden
size, R rows, D draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.drafters.trained import head_rows
from outpace.law import VocabMap
from outpace.models.base import Target
from outpace.models.decoder import Decoder
from outpace.train.ahead import AheadTraining
from outpace.train.align import DRAFT_MODEL, Aligned
from outpace.train.batches import Batch
from outpace.train.losses import depth_weights
from outpace.train.objective import LAST, Objective, Step
from outpace.train.ranks import Ranks, judge_ranks
from outpace.train.rider_net import RiderNet

UNIT = 50.0
"""Distance of vectors from their start, in what is trained: Adam's steps are so much longer."""
BLEND = 32
"""Embeddings whose mean a vector starts as: single tokens say something that is to be unlearned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RiderTraining(AheadTraining):
    """Options that they share."""

    places: int = 64
    """Places of a text that carry guesses in a step; memory and time grow with them."""
    seed: int = 0
    """Of what is drawn at the start."""

    POSITIVE: ClassVar[Sequence[str]] = ("places",)
    """Options that are None or at least 1."""

    def __post_init__(self) -> None:
        AheadTraining.__post_init__(self)
        for name in self.POSITIVE:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def mean_embeddings(target: Decoder, vocab: VocabMap | None, seed: int, *shape: int) -> Tensor:
    """Means of ``BLEND`` embeddings of tokens that are drawn, [*shape, H]."""
    coins = torch.Generator().manual_seed(seed)
    known_D = torch.arange(target.vocab_size) if vocab is None else vocab.to_target_D.cpu()
    drawn = torch.randint(len(known_D), (torch.Size((*shape, BLEND)).numel(),), generator=coins)
    return target.embed(known_D[drawn].tolist()).view(*shape, BLEND, target.hidden_size).mean(-2)


class RiderObjective(Objective):
    """A method whose riders guess ``depths`` tokens from ``first`` tokens ahead on.

    Args:
        net: the target's layers that riders run through.
        module: all that is trained.
        depths: guesses of a place.
    """

    first: ClassVar[int]
    config: Any
    target: Decoder

    def __init__(
        self,
        config: Any,
        target: Decoder,
        vocab: VocabMap | None,
        net: RiderNet,
        module: nn.Module,
        depths: int,
    ) -> None:
        self.config, self.target, self.vocab, self.net, self.module = config, target, vocab, net, module
        self.head_DH = head_rows(target, vocab)
        self.depths, self.ranks = depths, Ranks(depths)

    @classmethod
    @abstractmethod
    def layers(cls, config: Any, target: Target) -> Sequence[int]:
        """Layers of the target that riders run through."""

    @classmethod
    def taps(cls, config: Any, target: Target) -> tuple[str, ...]:
        return RiderNet.wanted(cls.layers(config, target), (LAST,))

    @abstractmethod
    def guesses(self, batch: Batch, aligned: Aligned) -> tuple[list[Tensor], Tensor]:
        """What the head reads of each guess at the chosen places, [B, G, H] each, and the feature
        ``hidden.-1``. What is behind the last of the ranks guesses the next token, with full weight.
        """

    def chosen(self, batch: Batch) -> Aligned:
        """Learning rows that carry riders; the same for the same batch."""
        aligned = Aligned(batch, self.first)
        coins = torch.Generator().manual_seed(int(aligned.token(self.first).sum()))
        turn_BA = torch.rand(aligned.real_BA.shape, generator=coins).to(aligned.real_BA.device)
        order_BA = turn_BA.masked_fill(~aligned.real_BA, 2.0).argsort(1)
        return aligned.only(order_BA[:, : self.config.places].sort(1).values)

    def loss(self, batch: Batch) -> Step:
        self.ranks.clear()
        aligned = self.chosen(batch)
        guesses, last_BTH = self.guesses(batch, aligned)
        shown, more = replace(batch, feature={LAST: last_BTH}), len(guesses) - self.depths
        ahead = [*range(self.first, self.first + self.depths), *[DRAFT_MODEL] * more]
        weights = [*depth_weights(self.depths, self.config.decay), *[1.0] * more]
        return self.learn(guesses, shown, aligned, ahead, self.head_DH, weights)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        aligned = self.chosen(batch)
        guesses, last_BTH = self.guesses(batch, aligned)
        shown, states = replace(batch, feature={LAST: last_BTH}), guesses[: self.depths]
        return judge_ranks(self.ranks, states, shown, aligned, self, self.head_DH, ahead=self.first)
