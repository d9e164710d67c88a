"""Prompt tokens: vectors that, fed behind a text, make the target guess further ahead.

    row t of a text       the target's own row, which gives token t + 1
    riders P1 ... PK      positions t + 1 ... t + K; they see the text up to t and each other;
                          rider k guesses token t + 1 + k

K vectors (or K ensembles of E) are all that is trained; the target is frozen, and gradients come
down through all of its layers. In every step some places of every text carry riders, all in one
pass (`rider_net`): the text itself is read once, by the target as it drafts. The first guess of a
place is its depth 1, as for EAGLE: token t + 1 is known when drafting begins.

Labels are the target's distributions along the text; the loss of a later rider counts less. The vectors
start as means of embeddings of tokens drawn from a seed, and are learned as a distance from there
in units of ``UNIT``, so that the rate of the training loop fits.

Held-out places also give how often the i-th likeliest token of rider k was the target's, among
places where the target's tokens before it were among the likeliest of their riders: what the
drafter's trees and riders are decided by.

Paper: Chen et al. 2024 (PPD), arXiv:2405.18628.

Shape letters: B sequences, T tokens, A learning rows, G places with riders, N distributions, K riders,
E vectors of each, H hidden size, R rows, C rows of a chunk, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.drafters.trained import head_rows, lender
from outpace.law import VocabMap
from outpace.methods.ppd.files import METHOD, PROMPTS
from outpace.models.base import EMBEDDINGS, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.train.align import EAGLE, Aligned
from outpace.train.batches import Batch
from outpace.train.losses import check, depth_weights, head_loss, weighted
from outpace.train.objective import Objective, Step, draft_ids, target_laws, whole_laws, write_drafter
from outpace.train.ranks import RankedChain, Ranks, ranked
from outpace.train.rider_net import RiderNet

UNIT = 50.0
"""Distance from the start, in what is trained: Adam's steps are so much longer."""
BLEND = 32
"""Embeddings whose mean a vector starts as: single tokens say something that is to be unlearned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PpdTraining:
    riders: int = 3
    """Prompt tokens: tokens that can be guessed at a time."""
    ensemble: int = 1
    """Vectors for each prompt token; each takes a row in every chain."""
    places: int = 64
    """Places of a text that carry riders in a step; memory and time grow with them."""
    decay: float = 0.8
    """Weight of a rider relative to the one before."""
    loss: str = "kl"
    """One of the losses of `outpace.train.losses`: ce, kl, rkl, jsd, tv, lk, lk_mix."""
    temperature: float = 1.0
    """Divides the target's logits before they become labels."""
    seed: int = 0
    """Of the tokens to start from."""

    def __post_init__(self) -> None:
        check(self.loss)
        for name in ("riders", "ensemble", "places"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.decay <= 1 or self.temperature <= 0:
            raise ValueError(
                f"decay must be in (0, 1] and temperature above 0, got {self.decay} and {self.temperature}"
            )


class PromptsNet(nn.Module):
    start_KEH: Tensor

    def __init__(self, start_KEH: Tensor) -> None:
        super().__init__()
        self.register_buffer("start_KEH", start_KEH)
        self.moved_KEH = nn.Parameter(torch.zeros_like(start_KEH))

    def forward(self) -> Tensor:
        return self.start_KEH + UNIT * self.moved_KEH


class Ppd(Objective):
    Config = PpdTraining
    module: PromptsNet

    def __init__(self, config: PpdTraining, target: Decoder, vocab: VocabMap | None, net: PromptsNet) -> None:
        self.config, self.target, self.vocab, self.module = config, target, vocab, net
        self.net = RiderNet(target)
        self._head_DH = head_rows(target, vocab)
        self._weights = depth_weights(config.riders, config.decay)
        self.ranks = Ranks(config.riders)

    @classmethod
    def taps(cls, config: Any, target: Target) -> tuple[str, ...]:
        return ()  # the texts are read again in every step

    @classmethod
    def build(cls, config: PpdTraining, target: Target, vocab: VocabMap | None) -> Ppd:
        target.require(frozenset({TAPS, EMBEDDINGS}), METHOD)
        lent = lender(target, METHOD)
        coins = torch.Generator().manual_seed(config.seed)
        shape = (config.riders, config.ensemble, BLEND)
        known_D = torch.arange(lent.vocab_size) if vocab is None else vocab.to_target_D.cpu()
        ids = known_D[torch.randint(len(known_D), (prod(shape),), generator=coins)].tolist()
        start_KEH = lent.embed(ids).view(*shape, -1).mean(2)
        return cls(config, lent, vocab, PromptsNet(start_KEH).to(lent.device))

    def chosen(self, aligned: Aligned) -> Tensor:
        """Learning rows that carry riders, indices [B, G]; the same for the same batch."""
        real_BA = aligned.real_BA
        coins = torch.Generator().manual_seed(int(aligned.token(EAGLE).sum()))
        turn_BA = torch.rand(real_BA.shape, generator=coins).to(real_BA.device)
        order_BA = turn_BA.masked_fill(~real_BA, 2.0).argsort(1)
        return order_BA[:, : self.config.places].sort(1).values

    def states(self, aligned: Aligned, pick_BG: Tensor, text: list[Any]) -> Tensor:
        """What the unembedding reads at the chosen places, [B, G, K, H]."""
        place_BG = aligned.place_BA.gather(1, pick_BG)
        embed_EKH = self.module().transpose(0, 1)
        return self.net(embed_EKH, place_BG, text).mean(2)

    def loss(self, batch: Batch) -> Step:
        aligned, config = Aligned(batch, EAGLE), self.config
        self.ranks.clear()
        pick_BG = self.chosen(aligned)
        text, last_BTH = self.net.texts(batch)
        x_BGKH = self.states(aligned, pick_BG, text)
        labels, keeps, laws = [], [], []
        for ahead in range(EAGLE, EAGLE + config.riders):
            label_BG = draft_ids(aligned.token(ahead), self.vocab).gather(1, pick_BG)
            keep_BG = aligned.teaches(ahead).gather(1, pick_BG) & (label_BG >= 0)
            labels.append(label_BG[keep_BG])
            laws.append(aligned.law(ahead).gather(1, pick_BG)[keep_BG])
            keeps.append(keep_BG)
        p_ND, rows = None, laws
        if config.loss != "ce":
            used_N, row = torch.unique(torch.cat(laws), return_inverse=True)
            rows = list(row.split([len(one) for one in laws]))
            last_NH = aligned.laws_of(last_BTH)[used_N]
            p_ND = target_laws(self.target, self.vocab, last_NH, config.temperature)
        losses = [
            head_loss(
                x_BGKH[:, :, k][keep_BG],
                self._head_DH,
                config.loss,
                p_ND=p_ND,
                row_R=rows[k],
                label_R=labels[k],
            )
            for k, keep_BG in enumerate(keeps)
        ]
        tokens = max(1, len(labels[0]))
        return Step(weighted(losses, self._weights) / tokens, tokens)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        aligned = Aligned(batch, EAGLE)
        pick_BG = self.chosen(aligned)
        text, last_BTH = self.net.texts(batch)
        p_ND, truth_N = whole_laws(self.target, self.vocab, aligned.laws_of(last_BTH))
        x_BGKH = self.states(aligned, pick_BG, text)
        real_BG = aligned.real_BA.gather(1, pick_BG)
        chain = RankedChain(self.ranks, real_BG)
        for k in range(self.config.riders):
            row_BG, known_BG, token_BG = (
                one(EAGLE + k).gather(1, pick_BG) for one in (aligned.law, aligned.teaches, aligned.token)
            )
            truth_BG = truth_N[row_BG]
            rank_R, alpha_R = ranked(
                x_BGKH[:, :, k].flatten(0, 1),
                self._head_DH,
                self.vocab,
                truth_BG.flatten(),
                p_ND,
                row_BG.flatten(),
            )
            chain.add(known_BG, token_BG == truth_BG, rank_R, alpha_R)
        return chain.step(int(real_BG.sum()))

    def named(self) -> Mapping[str, Tensor]:
        """Where the vectors start; ``save`` writes where they have come."""
        return {PROMPTS: self.module.start_KEH}

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        config = self.config
        said = {
            **self.about(METHOD, []),
            "riders": config.riders,
            "ensemble": config.ensemble,
            "acceptance": self.ranks.acceptance(),
        }
        tensors = {PROMPTS: self.module().detach()}
        write_drafter(folder, said, tensors, self.vocab, provenance)
