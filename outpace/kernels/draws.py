"""Distributions over a vocabulary and draws from them, each in one call of compiled code.

A vocabulary has 50,000 entries, and after a pass none of them is near the processor: every operation of
torch reads and writes them again. ``draws.c`` reads them once or twice. Torch does it everywhere
else, and for float64. Either way a row's numbers depend on that row alone. Those of a softmax differ in the
last bits of float32. Draws from the same numbers are the same, but where a coin falls within 1e-13 of an
edge.

Shape letters: V vocabulary, S support of a distribution, R rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outpace.kernels.compiled import library

GOLDEN = 0x9E3779B97F4A7C15
"""What SplitMix64 steps by."""
_LARGEST = float(torch.finfo(torch.float32).max)
_COLDEST = float(torch.finfo(torch.float32).tiny)
"""Below this temperature, float32 has no reciprocal; all is on the largest scores well before."""


def softmax(x_V: Tensor, temperature: float) -> Tensor | None:
    """Make a distribution of scores.

    Returns:
        None where there is none: the largest score, over the temperature, is no number of float32.
    """
    code, temperature = _code(x_V), max(temperature, _COLDEST)
    if code is not None:
        out_V = torch.empty_like(x_V)
        fine = code.outpace_softmax(x_V.data_ptr(), len(x_V), temperature, out_V.data_ptr())
        return out_V if fine else None
    fine = abs(float(x_V.max()) / temperature) <= _LARGEST
    return (x_V / temperature).softmax(0) if fine else None


def truncate(
    x_V: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor] | None:
    """Make the distribution that top-k, top-p and min-p leave of scores; 0, 1 and 0 leave all.

    Returns:
        Entries [S] in ascending order, and their probabilities. None where torch has to do it, and where
        there is none, as ``softmax``.
    """
    code = _code(x_V)
    if code is None:
        return None
    at_V, prob_V = torch.empty(len(x_V), dtype=torch.int64), torch.empty_like(x_V)
    row, out = (x_V.data_ptr(), len(x_V), temperature), (at_V.data_ptr(), prob_V.data_ptr())
    count = code.outpace_truncate(*row, top_k, top_p, min_p, *out)
    return (at_V[:count].clone(), prob_V[:count].clone()) if count else None


def choose(weight_S: Tensor, coin: float) -> int:
    """Find the first entry up to which the weights sum to more than ``coin``, below 1, of all."""
    code = _code(weight_S)
    if code is not None:
        return int(code.outpace_choose(weight_S.data_ptr(), len(weight_S), coin))
    # float64: the sum of 50000 float32 entries is off by more than one part in 10^7.
    edge_S = weight_S.double().cumsum(0)
    at = torch.searchsorted(edge_S, coin * edge_S[-1], right=True)
    index = int(at.clamp_max(len(edge_S) - 1))
    if weight_S[index] == 0:  # an edge hit exactly, or rounding past the last entry
        index = int(weight_S.argmax())
    return index


def place(id_S: Tensor, token: int) -> int:
    """Find a token among distinct ones; -1 if it is not there."""
    code = library() if id_S.is_cpu and id_S.is_contiguous() else None
    if code is not None:
        return int(code.outpace_place(id_S.data_ptr(), len(id_S), token))
    found = (id_S == token).nonzero()
    return int(found[0]) if len(found) else -1


def strike(prob_S: Tensor, places: Sequence[int]) -> Tensor | None:
    """Make the distribution without the entries at these places; None where no other may come."""
    code, count = _code(prob_S), len(places)
    if code is not None:
        out_S, at = torch.empty_like(prob_S), (ctypes.c_int64 * count)(*places)
        some = code.outpace_strike(prob_S.data_ptr(), len(prob_S), at, count, out_S.data_ptr())
        return out_S if some else None
    at_K = torch.tensor(places, dtype=torch.int64, device=prob_S.device)
    out_S = prob_S.index_fill(0, at_K, 0.0)
    mass = float(out_S.sum())
    return out_S.div_(mass) if mass > 0 else None


def excess(
    p_V: Tensor, q_S: Tensor, id_S: Tensor | None, weight: float
) -> tuple[float, Tensor | None] | None:
    """Compare ``weight`` times a distribution over a vocabulary with another one.

    Args:
        id_S: tokens of the other one's entries; None: their places.

    Returns:
        Mass of [weight * p - q]_+, and its distribution, None where nothing is left. In the place of both
        None where torch has to do it.
    """
    code = _code(p_V)
    if code is None or _code(q_S) is None or not (id_S is None or id_S.is_contiguous()):
        return None
    out_V, mass, ids = torch.empty_like(p_V), ctypes.c_double(), None if id_S is None else id_S.data_ptr()
    some = code.outpace_excess(
        *(p_V.data_ptr(), len(p_V), weight),
        *(q_S.data_ptr(), ids, len(q_S), out_V.data_ptr(), ctypes.byref(mass)),
    )
    return mass.value, out_V if some else None


def race(prob_S: Tensor, id_S: Tensor | None, key: int, count: int) -> list[int]:
    """Find the entries whose arrivals, exponential noise of (key, token) over probability, are the earliest.

    Returns:
        The first one first; fewer than ``count`` where fewer may come.
    """
    code = _code(prob_S)
    if code is not None and count > 0 and (id_S is None or id_S.is_contiguous()):
        count = min(count, len(prob_S))
        winner = (ctypes.c_int64 * count)()
        ids = None if id_S is None else id_S.data_ptr()
        found = code.outpace_race(prob_S.data_ptr(), ids, len(prob_S), key, count, winner)
        return winner[:found]
    ids_S = torch.arange(len(prob_S)) if id_S is None else id_S
    time_S = exponentials(key, ids_S).to(prob_S.device) / prob_S.double()  # as Gumbel-max
    count = min(count, int((prob_S > 0).sum()))
    return [int(i) for i in time_S.topk(count, largest=False).indices.tolist()]


def rank(x_RV: Tensor, id_V: Tensor | None, count: int) -> list[list[tuple[int, float]]] | None:
    """List the likeliest tokens of every row and their probabilities under softmax, best first.

    Args:
        id_V: tokens of the columns; None: their indices.

    Returns:
        Fewer than ``count`` where fewer may come; None where torch has to do it.
    """
    code = _code(x_RV)
    if code is None or count < 1 or x_RV.requires_grad or not (id_V is None or id_V.is_contiguous()):
        return None
    rows, width = x_RV.shape
    count = min(count, width)
    best, prob = (ctypes.c_int64 * (rows * count))(), (ctypes.c_float * (rows * count))()
    ids = None if id_V is None else id_V.data_ptr()
    code.outpace_rank(x_RV.data_ptr(), ids, rows, width, count, best, prob)
    ranked = list(zip(best, prob, strict=True))
    return [[one for one in ranked[i : i + count] if one[0] >= 0] for i in range(0, rows * count, count)]


def exponentials(key: int, id_S: Tensor) -> Tensor:
    """Independent Exp(1) noise, a function of (key, token) alone.

    Keyed per token and not per entry, so that distributions with different supports share their noise.

    Returns:
        float64 [S] on the host.
    """
    state = id_S.cpu().numpy().astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(key)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    uniform = ((state >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return torch.from_numpy(-np.log(uniform))


def _code(x_S: Tensor) -> ctypes.CDLL | None:
    """The compiled code, if it reads these numbers."""
    fits = x_S.dtype is torch.float32 and x_S.is_cpu and x_S.is_contiguous()
    return library() if fits and len(x_S) > 0 else None
