"""Which layers a model can do without: found on a text, and remembered.

    search     leave out a set, read the text in one pass, count the guesses that are the target's;
               sets come at random, or from a linear model of what each layer is worth
    cosine     leave out the layers that turn the residual stream least

The first and the last layer always stay. A search costs one pass of a part of the model per trial.

Papers: SWIFT, arXiv:2410.06916 (there a Gaussian process proposes, over halves of layers); Draft on
the Fly, arXiv:2410.01028 (there attentions alone are left out, by a threshold).

Shape letters: T tokens, S sets tried, L layers, H hidden size.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.clock import PassClock
from outpace.errors import ModelError
from outpace.files import write_whole
from outpace.models.base import Target
from outpace.models.fields import read_json
from outpace.types import Feed

_RANDOM = 6
"""Sets tried before the linear model is asked; then it has every second turn."""
_ENOUGH = 0.95
"""Share of guesses that ends a search."""
_PRIOR, _NOISE, _BOLD = 0.1, 0.05, 1.0
"""Of the linear model: how far layers differ in worth, how far a score is off, and how many
standard deviations above its mean a layer is believed to be dispensable."""


@dataclass(frozen=True, slots=True)
class Found:
    """A set of layers to leave out."""

    skip: tuple[int, ...]
    """Ascending, counted from 0."""
    score: float
    """Share of the guesses that were the target's, in search; mean cosine of what is left out."""
    tried: int
    """Sets tried."""


def part(target: Target, skip: Sequence[int]) -> Target:
    """The target without some layers; it shares the weights."""
    return target.variant(layers=[i for i in range(target.num_layers) if i not in set(skip)])


def even(layers: int, count: int) -> tuple[int, ...]:
    """A set of ``count`` layers, or as many as may go, evenly spread."""
    middle = range(1, layers - 1)
    count = min(count, len(middle))
    return tuple(middle[(2 * i + 1) * len(middle) // (2 * count)] for i in range(count))


def search(
    target: Target, tokens: Sequence[int], guess_T: Tensor, *, count: int, trials: int, clock: PassClock
) -> Found:
    """Try sets of ``count`` layers; the same text gives the same set.

    Args:
        guess_T: int64, what the target itself would say after each of them.
        trials: most sets.
    """
    first = even(target.num_layers, count)
    coins, best = random.Random(0), Found(first, -1.0, 0)
    tried: dict[tuple[int, ...], float] = {}
    candidate = first
    middle = range(1, target.num_layers - 1)
    for trial in range(trials):
        score = _agreement(part(target, candidate), tokens, guess_T, clock)
        tried[candidate] = score
        if score > best.score:
            best = Found(candidate, score, 0)
        if best.score >= _ENOUGH or not first or len(first) == len(middle):
            break
        candidate = tuple(sorted(coins.sample(middle, len(first))))
        if trial >= _RANDOM and trial % 2:
            modelled = propose(tried, target.num_layers)
            candidate = candidate if modelled in tried else modelled
    return Found(best.skip, best.score, len(tried))


def _agreement(model: Target, tokens: Sequence[int], guess_T: Tensor, clock: PassClock) -> float:
    cache = model.new_cache(len(tokens))
    with clock:
        logits_TV = model.score([Feed.chain(cache.open(), tokens)], cache).logits_TV
    return float((logits_TV.argmax(1) == guess_T).float().mean())


def propose(tried: dict[tuple[int, ...], float], layers: int) -> tuple[int, ...]:
    """The set that a Bayesian linear model of the scores holds for the best, if it is lucky.

    score(set) = mean + sum of the worth of leaving out each of its layers; the worths have a
    normal prior. Layers rank by posterior mean plus ``_BOLD`` deviations.
    """
    size = len(next(iter(tried)))
    x_SL = torch.zeros(len(tried), layers, dtype=torch.float64)
    for row, skip in enumerate(tried):
        x_SL[row, list(skip)] = 1.0
    y_S = torch.tensor(list(tried.values()), dtype=torch.float64)
    precision_LL = x_SL.T @ x_SL / _NOISE**2 + torch.eye(layers, dtype=torch.float64) / _PRIOR**2
    spread_LL = torch.linalg.inv(precision_LL)
    mean_L = spread_LL @ (x_SL.T @ (y_S - y_S.mean())) / _NOISE**2
    worth_L = mean_L + _BOLD * spread_LL.diagonal().sqrt()
    return tuple(sorted((worth_L[1 : layers - 1].topk(size).indices + 1).tolist()))


def by_cosine(stream_LTH: Sequence[Tensor], count: int) -> Found:
    """The layers whose output points most where their input did.

    Args:
        stream_LTH: L + 1 residual streams, before the first layer and after each, over a text.
    """
    middle = range(1, len(stream_LTH) - 2)
    turn = [float(F.cosine_similarity(stream_LTH[i], stream_LTH[i + 1], dim=-1).mean()) for i in middle]
    order = sorted(range(len(middle)), key=lambda i: -turn[i])[:count]
    score = sum(turn[i] for i in order) / max(1, len(order))
    return Found(tuple(sorted(middle[i] for i in order)), score, 1)


def recall(file: Path, layers: int) -> tuple[int, ...] | None:
    """Read a set; None if there is none.

    Raises:
        ModelError: the file holds something else.
    """
    data = read_json(file)
    if not data:
        return None
    said = data.get("skip")
    listed = said if isinstance(said, list) else []
    skip = {i for i in listed if type(i) is int and 0 <= i < layers}
    if len(skip) != len(listed) or len(skip) in (0, layers):
        raise ModelError(f"{file}: skip {said!r} is no part of layers 0 to {layers - 1}; delete it")
    return tuple(sorted(skip))


def remember(file: Path, found: Found, target: Target) -> None:
    """Write a set; the file is whole or not there."""
    data = {"target": target.name, "skip": list(found.skip), "score": found.score, "tried": found.tried}
    write_whole(file, json.dumps(data))
