"""Choose what to leave out by dynamic programming over hidden states.

    D[l][k] = the state after l layers with k left out; the better of two, by cosine to h[l]:
              layer l run on D[l-1][k], or D[l-1][k-1] as it is
    h[l]    = D[l][0], the target's own state

All k of a layer are rows of one pass, which are siblings. Each sees the committed text and itself, at the
place of the pending token. Row 0 leaves nothing out, so it is the target, and no state has to be kept from
verification.

Of two ways to k the one that is more alike after l layers is kept, though the other might end better. So
a set is exact for two layers, and a good guess for more. Its cosine is what that set really gives.

Cost: the layers once, over as many rows as there are k. Heads are not run.

Paper: CLaSp, arXiv:2505.24196.

Shape letters: K numbers of layers left out, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.cache.base import KVCache
from outpace.models.base import Target
from outpace.types import Feed, Resume


class Table:
    """The rows of D of one sequence, layer by layer.

    Args:
        start_H: the state before the first layer.
        most: layers to leave out at most.
    """

    def __init__(self, start_H: Tensor, most: int) -> None:
        self.state_KH = start_H.repeat(most + 1, 1)
        """D; rows that no set leads to hold something finite."""
        self.cosine_K = start_H.new_full((most + 1,), -torch.inf, dtype=torch.float64)
        """To the target's state, after the last layer; minus infinity where no set leads."""
        self.cosine_K[0] = 1.0
        self._left: list[Tensor] = []

    def step(self, ran_KH: Tensor) -> None:
        """Take the next layer, run on ``state_KH``."""
        reached_K = self.cosine_K > -torch.inf
        run_K = _cosines(ran_KH).masked_fill(~reached_K, -torch.inf)
        skip_K, before_KH = torch.full_like(run_K, -torch.inf), ran_KH.clone()
        before_KH[1:] = self.state_KH[:-1]
        skip_K[1:] = _cosines(before_KH)[1:].masked_fill(~reached_K[:-1], -torch.inf)
        left_K = skip_K > run_K
        self.state_KH = torch.where(left_K[:, None], before_KH, ran_KH)
        self.cosine_K = torch.maximum(skip_K, run_K)
        self._left.append(left_K)

    def left_out(self, count: int) -> list[int]:
        """The layers that D leaves out if it is so many, ascending."""
        found: list[int] = []
        for layer, left_K in reversed([*enumerate(self._left)]):
            if left_K[count - len(found)]:
                found.append(layer)
        return found[::-1]


def _cosines(x_KH: Tensor) -> Tensor:
    """To the first row, float64."""
    x_KH = x_KH.double()
    return F.cosine_similarity(x_KH, x_KH[:1], dim=-1)


def whole_layers(target: Target, cache: KVCache, asked: Sequence[tuple[int, int]], most: int) -> list[Table]:
    """Tables over all layers.

    Args:
        asked: slot and pending token of each sequence; tails are dropped before and after.
        most: layers to leave out at most.

    Cost: as one pass over ``most + 1`` rows per sequence; counted as one.
    """
    feeds = _begun(cache, asked, most)
    scored = target.score(feeds, cache, taps=frozenset({"hidden.0", "hidden.1"}), layers=1)
    start_TH, ran_TH = scored.taps["hidden.0"].clone(), scored.taps["hidden.1"].clone()
    tables = [Table(x_KH[0], most) for x_KH in torch.split(start_TH, most + 1)]
    _step(tables, ran_TH)
    for layer in range(1, target.num_layers):
        _step(tables, run_layer(target, cache, feeds, tables, layer))
    _end(target, cache, asked, target.num_layers)
    return tables


def run_layer(
    target: Target, cache: KVCache, feeds: Sequence[Feed], tables: Sequence[Table], layer: int
) -> Tensor:
    """What one layer makes of the rows of some tables, one below the other."""
    resumed = [
        replace(feed, resume=Resume(layer, tuple(range(len(feed.token_J))), table.state_KH))
        for feed, table in zip(feeds, tables, strict=True)
    ]
    name = f"hidden.{layer + 1}"
    return target.score(resumed, cache, taps=frozenset({name}), layers=layer + 1).taps[name].clone()


def _begun(cache: KVCache, asked: Sequence[tuple[int, int]], most: int) -> list[Feed]:
    for slot, _ in asked:
        cache.drop(slot)
    rows = most + 1
    return [Feed(slot, (token,) * rows, (-1,) * rows, want=()) for slot, token in asked]


def _step(tables: Sequence[Table], ran_TH: Tensor) -> None:
    rows = [len(table.state_KH) for table in tables]
    for table, ran_KH in zip(tables, torch.split(ran_TH, rows), strict=True):
        table.step(ran_KH)


def _end(target: Target, cache: KVCache, asked: Sequence[tuple[int, int]], passes: int) -> None:
    for slot, _ in asked:
        cache.drop(slot)
    target.clock.count -= passes - 1  # layer by layer, but one pass in all
