"""Noise on features: a drafter shall not trust them more than its own outputs, which are never exact."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from outpace.train.batches import Batch


def noisy(batch: Batch, taps: Sequence[str], amount: float) -> Batch:
    """The batch with uniform noise on some features.

    Args:
        amount: largest noise, in root mean squares of the feature's rows; 0 leaves the batch as it is.

    The noise is a function of the batch alone, so that a training that goes on after a break is the same.
    Source: Li et al. 2024 (EAGLE), arXiv:2401.15077, which adds up to 0.2 at a scale of the features' own.
    """
    if not amount:
        return batch
    coins = torch.Generator().manual_seed(zlib.crc32(batch.token_BT.cpu().numpy().tobytes()))
    feature = dict(batch.feature)
    for tap in dict.fromkeys(taps):
        x_BTH = feature[tap].float()
        noise_BTH = (2 * torch.rand(x_BTH.shape, generator=coins) - 1).to(x_BTH.device)
        size_BT1 = x_BTH.square().mean(-1, keepdim=True).sqrt()
        feature[tap] = (x_BTH + amount * size_BT1 * noise_BTH).to(batch.feature[tap].dtype)
    return replace(batch, feature=feature)
