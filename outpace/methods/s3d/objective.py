"""Masks in training: what the target's outer layers make of tokens that are not there yet.

    slot 0       token t, at its own position, through the kept layers alone; guesses token t + 1
    slots 1..K   masks at positions t + 1 ... t + K; slot k guesses token t + 1 + k

Slots see the target's own keys and values of the text before t, and each other in order, as riders do. Masks
and one matrix per slot are trained; the layers are the target's and stay as they are.

Masks start as means of embeddings drawn from a seed, matrices as zeros.

Paper: S3D, arXiv:2405.20314.

Shape letters: B sequences, G places with slots, S = K + 1 slots, K masks, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.drafters.trained import lender
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.methods.s3d.files import METHOD
from outpace.models.base import EMBEDDINGS, HEAD, LAYERS, TAPS, Target
from outpace.train.align import DRAFT_MODEL, Aligned
from outpace.train.batches import Batch
from outpace.train.objective import write_drafter
from outpace.train.rider_net import RiderNet
from outpace.train.rider_objective import UNIT, RiderObjective, RiderTraining, mean_embeddings


@dataclass(frozen=True, kw_only=True, slots=True)
class S3dTraining(RiderTraining):
    skip: str | None = None
    """Layers that are left out, as in ``8-21``; without it the middle two fifths."""
    masks: int = 3
    """Tokens that are guessed besides the next one."""
    places: int = 48
    """Places of a text that carry slots in a step; memory and time grow with them."""

    def __post_init__(self) -> None:
        RiderTraining.__post_init__(self)
        if self.masks < 0:
            raise ValueError(f"masks must be 0 or more, got {self.masks}")
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


class S3d(RiderObjective):
    Config = S3dTraining
    first = DRAFT_MODEL
    module: MasksNet

    @classmethod
    def layers(cls, config: S3dTraining, target: Target) -> list[int]:
        return [i for i in range(target.num_layers) if i not in range(*config.gap(target))]

    @classmethod
    def build(cls, config: S3dTraining, target: Target, vocab: VocabMap | None) -> S3d:
        lent = lender(target, METHOD, LAYERS, TAPS, HEAD, EMBEDDINGS)
        net = MasksNet(mean_embeddings(lent, vocab, config.seed, config.masks)).to(lent.device)
        return cls(config, lent, vocab, RiderNet(lent, cls.layers(config, target)), net, config.masks + 1)

    def guesses(self, batch: Batch, aligned: Aligned) -> tuple[list[Tensor], Tensor]:
        text, last_BTH = self.net.texts(batch)
        place_BG = aligned.place_BA
        token_BG = batch.token_BT.gather(1, place_BG)
        own_BGH = self.target.embed(token_BG.flatten().tolist()).view(*token_BG.shape, -1)
        mask_BGKH = self.module().expand(*token_BG.shape, -1, -1)
        embed_BGSH = torch.cat([own_BGH[:, :, None], mask_BGKH], 2)
        n_BGSH = self.net(embed_BGSH[:, :, None], place_BG - 1, text)[:, :, 0]
        slots = zip(n_BGSH.unbind(2), self.module.linears, strict=True)
        return [n_BGH + F.linear(n_BGH, w_HH) for n_BGH, w_HH in slots], last_BTH

    def named(self) -> Mapping[str, Tensor]:
        """Where the masks start; ``save`` writes where they have come."""
        return {"masks": self.module.start_KH, "linears": self.module.linears}

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        said = {
            **self.about(METHOD, []),
            "skip": list(self.config.gap(self.target)),
            "acceptance": self.ranks.acceptance(),
        }
        tensors = {"masks": self.module().detach(), "linears": self.module.linears.detach()}
        write_drafter(folder, said, tensors, self.vocab, provenance)
