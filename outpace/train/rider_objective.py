"""Guesses of rows that ride on texts, in training: what `ppd`, `s3d`, `streaming` and `coral` share.

In every step some places of every text carry riders, all in one pass (`rider_net`). Labels are the
target's distributions along the text; the loss of a later guess counts less. Held-out places also give how
often the i-th likeliest token of a guess was the target's, among places where the target's tokens before it
were among the likeliest of their guesses.

Shape letters: B sequences, T tokens, A learning rows, G places with riders, N distributions, H hidden
size, R rows, D draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
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
from outpace.train.losses import depth_weights, head_loss, weighted
from outpace.train.objective import Objective, Step, draft_ids, target_laws, whole_laws
from outpace.train.ranks import RankedChain, Ranks, ranked
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
        self.ranks = Ranks(depths)

    @classmethod
    def taps(cls, config: Any, target: Target) -> tuple[str, ...]:
        return ()  # the texts are read again in every step

    @abstractmethod
    def guesses(self, batch: Batch, aligned: Aligned, pick_BG: Tensor) -> tuple[list[Tensor], Tensor]:
        """What the head reads of each guess at the chosen places, [B, G, H] each, and the feature
        ``hidden.-1``. What is behind the last of the ranks guesses the next token, with full weight.
        """

    def chosen(self, aligned: Aligned) -> Tensor:
        """Learning rows that carry riders, indices [B, G]; the same for the same batch."""
        real_BA = aligned.real_BA
        coins = torch.Generator().manual_seed(int(aligned.token(self.first).sum()))
        turn_BA = torch.rand(real_BA.shape, generator=coins).to(real_BA.device)
        order_BA = turn_BA.masked_fill(~real_BA, 2.0).argsort(1)
        return order_BA[:, : self.config.places].sort(1).values

    def loss(self, batch: Batch) -> Step:
        aligned, config, depths = Aligned(batch, self.first), self.config, len(self.ranks.count_SB)
        self.ranks.clear()
        pick_BG = self.chosen(aligned)
        guesses, last_BTH = self.guesses(batch, aligned, pick_BG)
        labels, keeps, laws = [], [], []
        for depth in range(len(guesses)):
            ahead = self.first + depth if depth < depths else DRAFT_MODEL
            label_BG = draft_ids(aligned.token(ahead), self.vocab).gather(1, pick_BG)
            keep_BG = aligned.teaches(ahead).gather(1, pick_BG) & (label_BG >= 0)
            labels.append(label_BG[keep_BG])
            laws.append(aligned.law(ahead).gather(1, pick_BG)[keep_BG])
            keeps.append(keep_BG)
        p_ND, rows = None, laws
        if config.loss != "ce":
            used_N, row = torch.unique(torch.cat(laws), return_inverse=True)
            rows = list(torch.split(row, [len(one) for one in laws]))
            last_NH = aligned.laws_of(last_BTH)[used_N]
            p_ND = target_laws(self.target, self.vocab, last_NH, config.temperature)
        losses = [
            head_loss(x_BGH[keep_BG], self.head_DH, config.loss, p_ND=p_ND, row_R=row_R, label_R=label_R)
            for x_BGH, keep_BG, row_R, label_R in zip(guesses, keeps, rows, labels, strict=True)
        ]
        weights = [*depth_weights(depths, config.decay), *[1.0] * (len(losses) - depths)]
        tokens = max(1, len(labels[0]))
        return Step(weighted(losses, weights) / tokens, tokens)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        aligned = Aligned(batch, self.first)
        pick_BG = self.chosen(aligned)
        guesses, last_BTH = self.guesses(batch, aligned, pick_BG)
        p_ND, truth_N = whole_laws(self.target, self.vocab, aligned.laws_of(last_BTH))
        real_BG = aligned.real_BA.gather(1, pick_BG)
        chain = RankedChain(self.ranks, real_BG)
        for depth in range(len(self.ranks.count_SB)):
            row_BG, known_BG, token_BG = (
                one(self.first + depth).gather(1, pick_BG)
                for one in (aligned.law, aligned.teaches, aligned.token)
            )
            truth_BG = truth_N[row_BG]
            x_RH = guesses[depth].flatten(0, 1)
            rank_R, alpha_R = ranked(
                x_RH, self.head_DH, self.vocab, truth_BG.flatten(), p_ND, row_BG.flatten()
            )
            chain.add(known_BG, token_BG == truth_BG, rank_R, alpha_R)
        return chain.step(int(real_BG.sum()))
