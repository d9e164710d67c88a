"""Attention of a few rows of one sequence, without the preparations that many rows pay for.

Shape letters: T rows of a pass, K key-value heads, G query heads of each, X = K * (G + 2) heads of
all kinds, W their width, M = rows * G, N keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.models.attention import BLOCK, LEAST, LOG2E, HeadShape, Span
from outpace.models.fused import fits

_FEW = 16
"""Most rows that are attended to without the preparations that many rows pay for."""


def is_few(spans: Sequence[Span]) -> bool:
    """Whether ``attend_few`` serves: few rows of one sequence, none outside its block."""
    return len(spans) == 1 and len(spans[0].stored) <= _FEW and (spans[0].chain or not any(spans[0].strays()))


def few_is_best(cache: DenseCache, spans: Sequence[Span], heads: HeadShape, dtype: torch.dtype) -> bool:
    """Whether ``attend_few`` serves, and nothing faster does here."""
    device = cache.key_store.device
    return heads.softcap is None and is_few(spans) and not fits(heads, dtype, device)


def attend_few(
    cache: DenseCache, span: Span, head_TXW: Tensor, heads: HeadShape, dtype: torch.dtype
) -> Tensor:
    """What `Attention` gives, bit for bit, in a third of its time for one layer.

    It follows the same rules, but prepares nothing for further layers or sequences.

    Args:
        cache: where keys and values are written, in layer 0.
        head_TXW: float32 queries, keys and values, queries and keys rotated.

    Returns:
        [T, K * G * W].
    """
    slots, stop, own = range(span.slot, span.slot + 1), span.reach, len(span.stored)
    rows = slice(span.stored.start, span.stored.stop)
    new_TYW = head_TXW[:own, heads.queries :]
    for store, new_TKW in zip(cache.by_row, (new_TYW[:, : heads.kv], new_TYW[:, heads.kv :]), strict=True):
        store[0, span.slot, rows].copy_(new_TKW)
    asked, shape = own * heads.group, (heads.kv, own, heads.group, -1)
    query_KMW = head_TXW.new_zeros(heads.kv, max(asked, LEAST), heads.width)
    query = head_TXW[:own, : heads.queries].view(own, heads.kv, heads.group, heads.width)
    scale = heads.scale * LOG2E
    torch.mul(query.transpose(0, 1), scale, out=query_KMW[:, :asked].view(shape))
    weight_KMN = torch.bmm(query_KMW, cache.keys(slots, range(stop))[0])
    split = weight_KMN[:, :asked].view(shape)
    split[..., span.base :].add_(_mask(span).to(head_TXW.device).unsqueeze(1))
    weight_KMN.sub_(weight_KMN.amax(-1, keepdim=True)).exp2_()
    total_KM1 = weight_KMN.sum(-1, keepdim=True, dtype=torch.float64).float()
    first = range(min(BLOCK, stop))
    sum_KMW = torch.bmm(weight_KMN[:, :, : first.stop], cache.values(slots, first)[0])
    for low in range(BLOCK, stop, BLOCK):
        block = range(low, min(low + BLOCK, stop))
        sum_KMW.baddbmm_(weight_KMN[:, :, low : block.stop], cache.values(slots, block)[0])
    out = head_TXW.new_zeros(len(head_TXW), heads.kv, heads.group, heads.width, dtype=dtype)
    sums, shares = (part[:, :asked].view(shape).transpose(0, 1) for part in (sum_KMW, total_KM1))
    torch.div(sums, shares, out=out[:own])
    return out.flatten(1)


def _mask(span: Span) -> Tensor:
    """0 where a row sees a key behind the committed text, else minus infinity."""
    width, lines = span.reach - span.base, []
    for row in range(span.stored.start - span.base, span.stored.stop - span.base):
        line, at = [-math.inf] * width, row
        while at >= 0:
            line[at] = 0.0
            at = span.parents[at]
        lines.append(line)
    return torch.tensor(lines)
