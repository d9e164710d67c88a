"""Whether two programs say the same of the same weights, but for rounding.

Shape letters: T rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from outpace.models.base import Target
from outpace.types import Feed

ROUNDING = {8: 1e-9, 4: 3e-5, 2: 0.1}
"""Bytes of the smaller dtype -> mean difference that rounding may cause, in standard deviations of a logit.

Measured on random models of 4 layers of five families, and on a model of 30 layers. In float32 it was
6e-7 and 7e-6 at most; 2e-4 where one module gave a hundredth more than its weights say. In bfloat16 it was
0.013 and 0.07, which hides such a module; an ignored mask gave 0.6 and a tenth of the rotary base 0.31."""
_PROBE = 48  # tokens: enough for another rotary table to show


def off(got_TV: Tensor, wanted_TV: Tensor) -> float:
    """Mean difference, in standard deviations of a wanted logit."""
    return float((got_TV - wanted_TV).abs().mean() / wanted_TV.std())


def apart(model: Any, target: Target) -> tuple[float, float]:
    """How far the logits of a model of transformers are from a target's, and what rounding explains.

    Cost: a pass of each over a few tokens.
    """
    count = min(_PROBE, target.max_positions)
    ids = [(101 * i + i * i) % target.vocab_size for i in range(count)]
    want = tuple(range(count // 2, count))
    cache = target.new_cache()
    wanted_TV = target.score([Feed.chain(cache.open(), ids, want)], cache).logits_TV.float()
    with evaluating(model), torch.no_grad():
        out = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    got_TV = out.logits[0, want[0] :].float()
    smaller = min(model.dtype.itemsize, target.dtype.itemsize)
    return off(got_TV, wanted_TV.to(got_TV.device)), ROUNDING[smaller]


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Have no module in training, and afterwards those that were."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
