"""Selecting from rows of logits, through maxima of blocks.

`argmax`, `topk` and `nonzero` of torch read a row of 49152 entry by entry on a CPU. A maximum
over blocks of 64 vectorizes and leaves them 768 entries to read.

Shape letters: R rows, V entries of a row, B blocks of a row, K selected entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kernels import draws

_BLOCK = 64
_FEW = 1 << 15
"""Most entries that are read one by one all the same, as those of a few rows over a draft vocabulary.
The operations on blocks take longer there."""


def as_float(logits: Tensor) -> Tensor:
    """The same values in float32, or unchanged if they are float64."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _blocks(x_RV: Tensor) -> Tensor:
    """Rows cut into blocks [R, V / 64, 64], padded with -inf. Maxima of blocks vectorize."""
    short = -x_RV.shape[-1] % _BLOCK
    padded = torch.nn.functional.pad(x_RV, (0, short), value=-math.inf) if short else x_RV
    return padded.reshape(*padded.shape[:-1], -1, _BLOCK)


def best_rows(parts: Sequence[Tensor]) -> tuple[list[int], list[float]]:
    """The largest entry of each row of all parts: its index, the lowest one on ties, and its value.

    A value that is not finite says that the row has no distribution: it holds a NaN or an infinity,
    or nothing but -inf. Cost: as ``argmax_rows``, and one host sync.
    """
    found = []
    for logits_RV in parts:
        index_R = argmax_rows(logits_RV)
        value_R = logits_RV.gather(1, index_R[:, None])[:, 0]
        found.append(torch.stack((index_R.double(), value_R.double())))
    index, value = torch.cat(found, 1).tolist()
    return [int(i) for i in index], value


def argmax_rows(logits_RV: Tensor) -> Tensor:
    """Index [R] of the largest entry of each row, the lowest one on ties; no sync.

    The same as ``argmax(-1)``, through block maxima. 16 rows of 49152 take 0.11 ms instead of
    0.65 (float32) and 0.20 instead of 2.9 (bfloat16), one thread.
    """
    if logits_RV.numel() <= _FEW:
        return as_float(logits_RV).argmax(-1)
    block_RBb = _blocks(as_float(logits_RV))
    block_R = block_RBb.amax(-1).argmax(-1)
    row_R = torch.arange(len(block_R), device=block_R.device)
    return block_R * _BLOCK + block_RBb[row_R, block_R].argmax(-1)


def top(x_RV: Tensor, k: int) -> Tensor:
    """Indices [R, k] of the k largest entries of every row, best first. Which of equal ones is
    left to torch, but for k = 1 (the lower one). ``k`` is at most V.
    """
    if k == 1:
        return argmax_rows(x_RV)[:, None]
    if x_RV.numel() <= _FEW:
        return x_RV.topk(k).indices
    blocks = _blocks(x_RV)
    if k >= blocks.shape[1]:
        return x_RV.topk(k).indices
    # The k best entries lie in the k blocks of largest maximum.
    near_RK = blocks.amax(-1).topk(k).indices
    near = blocks.gather(1, near_RK[..., None].expand(-1, -1, _BLOCK)).flatten(1)
    in_RK = near.topk(k).indices
    return near_RK.gather(1, in_RK // _BLOCK) * _BLOCK + in_RK % _BLOCK


def rank(
    x_RV: Tensor, ids: Tensor | None, k: int, score_RV: Tensor | None = None
) -> list[list[tuple[int, float]]]:
    """List the k best entries of each row that are not -inf, best first.

    Args:
        x_RV: what to rank by. Of equal entries the lower id comes first. Which of them make
            the list if it ends among them is left to torch, but for k = 1 (the lower column).
        ids: target ids of the columns; None: their indices.
        k: fewer are listed where fewer exist.
        score_RV: reported for each entry; None: the softmax of ``x_RV``.

    Cost: one host sync. 16 rows of 49152, k = 4, one thread: 0.17 ms beside the softmax
    (0.96 ms through ``topk`` of whole rows).
    """
    if score_RV is None and (listed := draws.rank(x_RV, ids, k)) is not None:
        return listed
    at_RK = top(x_RV, min(k, x_RV.shape[-1]))
    value_RK = x_RV.gather(1, at_RK)
    score_RK = (x_RV.softmax(-1) if score_RV is None else score_RV).gather(1, at_RK)
    id_RK = at_RK if ids is None else ids[at_RK]
    parts = [-value_RK, id_RK, score_RK]
    if x_RV.is_cpu:
        rows = [list(zip(*row, strict=True)) for row in zip(*(part.tolist() for part in parts), strict=True)]
    else:  # one copy to the host
        rows = torch.stack([part.double() for part in parts], -1).tolist()
    return [[(int(token), score) for value, token, score in sorted(row) if value < math.inf] for row in rows]


def largest(x_V: Tensor, k: int) -> Tensor:
    """Indices of the k largest entries, best first, lowest index first on ties."""
    block_B = _blocks(x_V).amax(-1)
    bound = (block_B if k < len(block_B) else x_V).topk(k).values[-1]
    at_K = at_least(x_V, bound)
    return at_K[x_V[at_K].sort(descending=True, stable=True).indices[:k]]


def at_least(x_V: Tensor, bound: Tensor | float) -> Tensor:
    """Ascending indices of the entries that reach the bound."""
    if len(x_V) % _BLOCK:
        return (x_V >= bound).nonzero()[:, 0]
    blocks = x_V.reshape(-1, _BLOCK)
    high_B = (blocks.amax(-1) >= bound).nonzero()[:, 0]
    at = (blocks[high_B] >= bound).nonzero()
    return high_B[at[:, 0]] * _BLOCK + at[:, 1]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model itself thought of one emitted token."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, best first, with their log-probabilities."""


def logprobs(logits_RV: Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Raw log-probabilities: of the model's distribution before any processor, as vLLM's default.

    Args:
        logits_RV: for each token the row that it was drawn from.
        k: alternatives to report, of equal ones those of lower id, whatever other rows there are. The
            token itself is among them if it is likely enough.

    Cost: a few host syncs per row; 0.25 ms for one of 49152 with k = 5, two threads.
    """
    x_RV = as_float(logits_RV)
    log_RV = x_RV.log_softmax(-1)
    own_R = log_RV.gather(1, torch.tensor(list(tokens), device=x_RV.device)[:, None])
    tops = []
    for x_V, log_V in zip(x_RV, log_RV, strict=True):
        at_K = largest(x_V, min(k, len(x_V))) if k else own_R.new_empty(0, dtype=torch.int64)
        pairs = zip(at_K.tolist(), log_V[at_K].tolist(), strict=True)
        tops.append(tuple((one, value) for one, value in pairs if value > -math.inf))
    return [TokenLogprobs(*one) for one in zip(tokens, own_R[:, 0].tolist(), tops, strict=True)]
