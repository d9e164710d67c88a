"""Whether two programs say the same of the same weights, but for rounding.

Shape letters: T rows, V vocabulary.
"""

from __future__ import annotations

import copy
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
0.013 and 0.07, which hides such a module (see `beside_its_weights`). An ignored mask gave 0.6 and a tenth of
the rotary base 0.31."""
_PROBE = 48  # tokens: enough for another rotary table to show


def off(got_TV: Tensor, wanted_TV: Tensor) -> float:
    """Mean difference, in standard deviations of a wanted logit."""
    return float((got_TV - wanted_TV).abs().mean() / wanted_TV.std())


def apart(model: Any, target: Target) -> tuple[float, float]:
    """How far the logits of a model of transformers are from a target's, and what rounding explains.

    Cost: a pass of each over a few tokens.
    """
    ids = _probe(target.vocab_size, target.max_positions)
    want = tuple(range(len(ids) // 2, len(ids)))
    cache = target.new_cache()
    wanted_TV = target.score([Feed.chain(cache.open(), ids, want)], cache).logits_TV.float()
    with evaluating(model), torch.no_grad():
        out = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    got_TV = out.logits[0, want[0] :].float()
    smaller = min(model.dtype.itemsize, target.dtype.itemsize)
    return off(got_TV, wanted_TV.to(got_TV.device)), ROUNDING[smaller]


def beside_its_weights(model: Any) -> tuple[float, float]:
    """How far a model of transformers is from a new one of its class with its weights; as ``apart``.

    Both compute in float32, whatever their dtype: hooks and modules of its own then show. 0 where such a new
    model cannot be run, for example because the weights are on several devices.

    Cost: two passes over a few tokens; one module at a time has weights in float32.
    """
    config = model.config.get_text_config()
    ids = _probe(config.vocab_size, config.max_position_embeddings)
    given = {"input_ids": torch.tensor([ids], device=model.device), "use_cache": False}
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    try:
        with torch.device("meta"):
            bare = type(model)(copy.deepcopy(model.config)).eval()
        with evaluating(model), _in_float32(model), _in_float32(bare), torch.no_grad():
            wanted_TV = torch.func.functional_call(bare, weights, (), given).logits[0]
            return off(model(**given).logits[0], wanted_TV), ROUNDING[4]
    except Exception:  # every architecture has its own kinds
        return 0.0, ROUNDING[4]


def _probe(vocab: int, positions: int) -> list[int]:
    return [(101 * i + i * i) % vocab for i in range(min(_PROBE, positions))]


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Have each module compute with its weights in float32, which it has only while it runs."""
    kept: dict[Any, dict[str, Any]] = {}

    def widen(module: Any, *_: Any) -> None:
        kept[module] = dict(module._parameters)
        for name, weight in kept[module].items():
            if weight is not None and weight.is_floating_point():
                module._parameters[name] = torch.nn.Parameter(weight.float(), requires_grad=False)

    def restore(module: Any, *_: Any) -> None:
        module._parameters.update(kept.pop(module, {}))

    hooks = []
    for module in model.modules():
        if module._parameters:
            hooks.append(module.register_forward_pre_hook(widen, prepend=True))
            hooks.append(module.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in list(kept):  # of a forward that failed
            restore(module)


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
