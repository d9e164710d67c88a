"""Masks in training: what the target's outer layers make of tokens that are not there yet.

    slot 0       token t, at its own position, through the kept layers alone; guesses token t + 1
    slots 1..K   masks at positions t + 1 ... t + K; slot k guesses token t + 1 + k

Slots see the target's own keys and values of the text before t, and each other in order, as riders do. Masks
and one matrix per slot are trained; the layers are the target's and stay as they are. In every step some
places of every text carry slots.

Masks start as means of embeddings drawn from a seed, matrices as zeros.

Paper: S3D, arXiv:2405.20314.

Shape letters: B sequences, G places with slots, S = K + 1 slots, K masks, N distributions, H hidden size,
D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.drafters.trained import head_rows, lender
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.methods.s3d.files import METHOD
from outpace.models.base import EMBEDDINGS, HEAD, LAYERS, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.train.align import DRAFT_MODEL, Aligned
from outpace.train.batches import Batch
from outpace.train.losses import check, depth_weights, head_loss, weighted
from outpace.train.objective import Objective, Step, draft_ids, target_laws, whole_laws, write_drafter
from outpace.train.ranks import RankedChain, Ranks, ranked
from outpace.train.rider_net import RiderNet

UNIT = 50.0
"""Distance of masks from their start, in what is trained: Adam's steps are so much longer."""
BLEND = 32
"""Embeddings whose mean a mask starts as."""


@dataclass(frozen=True, kw_only=True, slots=True)
class S3dTraining:
    skip: str | None = None
    """Layers that are left out, as in ``8-21``; without it the middle two fifths."""
    masks: int = 3
    """Tokens that are guessed besides the next one."""
    places: int = 48
    """Places of a text that carry slots in a step; memory and time grow with them."""
    decay: float = 0.8
    """Weight of a slot relative to the one before."""
    loss: str = "kl"
    """One of the losses of `outpace.train.losses`: ce, kl, rkl, jsd, tv, lk, lk_mix."""
    temperature: float = 1.0
    """Divides the target's logits before they become labels."""
    seed: int = 0
    """Of the embeddings that masks start from."""

    def __post_init__(self) -> None:
        check(self.loss)
        if self.masks < 0 or self.places < 1:
            raise ValueError(f"masks must be 0 or more and places 1, got {self.masks} and {self.places}")
        if not 0 < self.decay <= 1 or self.temperature <= 0:
            raise ValueError(
                f"decay must be in (0, 1] and temperature above 0, got {self.decay} and {self.temperature}"
            )
        ends = [] if self.skip is None else self.skip.split("-")
        if self.skip is not None and (len(ends) != 2 or not all(part.isdecimal() for part in ends)):
            raise ValueError(f"skip must be two layers, as in 8-21, got {self.skip!r}")

    def gap(self, target: Target) -> tuple[int, int]:
        """The first layer that is left out, and the first behind it.

        Raises:
            ModelError: nothing would be left before it, or the target has no such layers.
        """
        layers = target.num_layers
        first = max(1, layers * 3 // 10)
        low, high = first, max(first, layers * 7 // 10 - 1)
        if self.skip is not None:
            low, high = (int(part) for part in self.skip.split("-"))
        if not 0 < low <= high < layers:
            raise ModelError(f"{METHOD}: cannot skip layers {low}-{high} of {target.name}, of {layers}")
        return low, high + 1


class MasksNet(nn.Module):
    start_KH: Tensor

    def __init__(self, start_KH: Tensor) -> None:
        super().__init__()
        slots, hidden = len(start_KH) + 1, start_KH.shape[1]
        self.register_buffer("start_KH", start_KH)
        self.moved_KH = nn.Parameter(torch.zeros_like(start_KH))
        self.linears = nn.Parameter(torch.zeros(slots, hidden, hidden, device=start_KH.device))

    def forward(self) -> Tensor:
        """The masks."""
        return self.start_KH + UNIT * self.moved_KH


class S3d(Objective):
    Config = S3dTraining
    module: MasksNet

    def __init__(self, config: S3dTraining, target: Decoder, vocab: VocabMap | None, net: MasksNet) -> None:
        self.config, self.target, self.vocab, self.module = config, target, vocab, net
        self.gap = config.gap(target)
        kept = [i for i in range(target.num_layers) if i not in range(*self.gap)]
        self.net = RiderNet(target, kept)
        self._head_DH = head_rows(target, vocab)
        self._weights = depth_weights(config.masks + 1, config.decay)
        self.ranks = Ranks(config.masks + 1)

    @classmethod
    def taps(cls, config: Any, target: Target) -> tuple[str, ...]:
        return ()  # the texts are read again in every step

    @classmethod
    def build(cls, config: S3dTraining, target: Target, vocab: VocabMap | None) -> S3d:
        target.require(frozenset({LAYERS, TAPS, HEAD, EMBEDDINGS}), METHOD)
        lent = lender(target, METHOD)
        coins = torch.Generator().manual_seed(config.seed)
        known_D = torch.arange(lent.vocab_size) if vocab is None else vocab.to_target_D.cpu()
        ids = known_D[torch.randint(len(known_D), (config.masks * BLEND,), generator=coins)].tolist()
        start_KH = lent.embed(ids).view(config.masks, BLEND, lent.hidden_size).mean(1)
        return cls(config, lent, vocab, MasksNet(start_KH).to(lent.device))

    def chosen(self, aligned: Aligned) -> Tensor:
        """Learning rows that carry slots, indices [B, G]; the same for the same batch."""
        real_BA = aligned.real_BA
        coins = torch.Generator().manual_seed(int(aligned.token(DRAFT_MODEL).sum()))
        turn_BA = torch.rand(real_BA.shape, generator=coins).to(real_BA.device)
        order_BA = turn_BA.masked_fill(~real_BA, 2.0).argsort(1)
        return order_BA[:, : self.config.places].sort(1).values

    def states(self, batch: Batch, aligned: Aligned, pick_BG: Tensor, text: list[Any]) -> Tensor:
        """What the head reads at the chosen places, [B, G, S, H]."""
        place_BG = aligned.place_BA.gather(1, pick_BG)
        token_BG = batch.token_BT.gather(1, place_BG)
        own_BGH = self.target.embed(token_BG.flatten().tolist()).view(*token_BG.shape, -1)
        mask_BGKH = self.module().expand(*token_BG.shape, -1, -1)
        embed_BGSH = torch.cat([own_BGH[:, :, None], mask_BGKH], 2)
        n_BGSH = self.net(embed_BGSH[:, :, None], place_BG - 1, text)[:, :, 0]
        bent = [F.linear(n_BGH, w) for n_BGH, w in zip(n_BGSH.unbind(2), self.module.linears, strict=True)]
        return n_BGSH + torch.stack(bent, 2)

    def loss(self, batch: Batch) -> Step:
        aligned, config = Aligned(batch, DRAFT_MODEL), self.config
        self.ranks.clear()
        pick_BG = self.chosen(aligned)
        text, last_BTH = self.net.texts(batch)
        y_BGSH = self.states(batch, aligned, pick_BG, text)
        labels, keeps, laws = [], [], []
        for ahead in range(DRAFT_MODEL, DRAFT_MODEL + config.masks + 1):
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
                y_BGSH[:, :, k][keep_BG],
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
        aligned = Aligned(batch, DRAFT_MODEL)
        pick_BG = self.chosen(aligned)
        text, last_BTH = self.net.texts(batch)
        p_ND, truth_N = whole_laws(self.target, self.vocab, aligned.laws_of(last_BTH))
        y_BGSH = self.states(batch, aligned, pick_BG, text)
        real_BG = aligned.real_BA.gather(1, pick_BG)
        chain = RankedChain(self.ranks, real_BG)
        for k in range(self.config.masks + 1):
            row_BG, known_BG, token_BG = (
                one(DRAFT_MODEL + k).gather(1, pick_BG)
                for one in (aligned.law, aligned.teaches, aligned.token)
            )
            truth_BG = truth_N[row_BG]
            rank_R, alpha_R = ranked(
                y_BGSH[:, :, k].flatten(0, 1),
                self._head_DH,
                self.vocab,
                truth_BG.flatten(),
                p_ND,
                row_BG.flatten(),
            )
            chain.add(known_BG, token_BG == truth_BG, rank_R, alpha_R)
        return chain.step(int(real_BG.sum()))

    def named(self) -> Mapping[str, Tensor]:
        """Where the masks start; ``save`` writes where they have come."""
        return {"masks": self.module.start_KH, "linears": self.module.linears}

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        said = {**self.about(METHOD, []), "skip": list(self.gap), "acceptance": self.ranks.acceptance()}
        tensors = {"masks": self.module().detach(), "linears": self.module.linears.detach()}
        write_drafter(folder, said, tensors, self.vocab, provenance)
