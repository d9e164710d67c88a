"""This machine as a device: six passes of a model are timed, and the few numbers of a `Device` fitted.

    found = calibrated(shape, load, model="smollm2-135m")     timed once, then read from the cache folder

An operator takes

    reading     weights / bandwidth + keys, values and activations / traffic
    arithmetic  FLOPs / peak + quantized weights / widen;  of attention FLOPs / attend

either the longer of both or their sum. Codes of quantized weights are read while others are computed with;
plain numbers on a CPU are not. Elsewhere both ways are tried, the longer one with an overhead for
every operator. Speeds are fitted by least squares of relative errors, all of them positive. One model does
not tell what quantized weights take to be read from what they take to be widened, so the bandwidth of
memory is measured apart for them.

Shape letters: P points, K what costs time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outpace import __version__
from outpace.analysis.cost import filled, timed
from outpace.analysis.prediction.model import Planned
from outpace.analysis.roofline import (
    ATTENTION,
    GROUPS,
    PRODUCT,
    ROWS,
    Device,
    Op,
    medians,
    read_bandwidth,
    seconds,
)
from outpace.models.decoder import Decoder
from outpace.models.measured import file_of, machine, recalled
from outpace.models.products import works

Floats = NDArray[np.float64]
FREE = 1e21
"""A speed that costs nothing: no point showed what it costs."""
_ROUNDS = 30
"""Most rounds in which operators change sides."""


@dataclass(frozen=True, order=True, slots=True)
class Point:
    """A pass: sequences of one batch, rows of each, and committed tokens before them."""

    rows: int
    context: int
    batch: int = 1


POINTS = (Point(1, 64), Point(1, 1024), Point(4, 256), Point(32, 64), Point(32, 1024), Point(1, 256, 8))
"""The six passes that are timed."""
REPEAT = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Passes of a model that were timed."""

    model: str
    passes: tuple[tuple[Point, float], ...]
    reads: float
    """Bytes per second that memory gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """This machine, and how it was fitted."""

    device: Device
    timed: Timed
    misfit: float
    fresh: bool
    """Whether it was timed now."""


def calibrated(
    shape: Planned,
    load: Callable[[], Decoder],
    *,
    model: str,
    fresh: bool = False,
    note: Callable[[str], None] | None = None,
) -> Calibration:
    """This machine, with the threads that torch has now, for weights held in one form.

    Args:
        shape: of the model that is timed.
        load: loads that model, if need be.
        model: what it is called.
        fresh: time passes even where they are known.
        note: told of a file that cannot be used.

    Effects: keeps the times in the cache folder. A file of another machine, version or number of
    threads, or one that was changed, is not used; the fit is made anew from the times.
    """
    made = False

    def make() -> Timed:
        nonlocal made
        made = True
        return time_passes(load(), POINTS)

    here = machine(torch.device("cpu"))
    key = {
        "kind": "device",
        "model": model,
        "form": shape.form,
        "bytes": shape.weight_bytes,
        "threads": torch.get_num_threads(),
        "machine": here,
        "compiled": works(),
        "outpace": __version__,
        "points": [list(asdict(point).values()) for point in POINTS],
    }
    file = file_of(key, ("device", shape.form))
    if fresh:
        file.unlink(missing_ok=True)
    found = recalled(key, file, _read, make, note)
    assert found is not None
    passes = [(shape.ops(rows=p.rows, context=p.context, batch=p.batch), spent) for p, spent in found.passes]
    device = fit(passes, here, found.reads)
    return Calibration(device=device, timed=found, misfit=misfit(passes, device), fresh=made)


def time_passes(
    target: Decoder, points: Sequence[Point], repeat: int = REPEAT, tell: Callable[[int], None] | None = None
) -> Timed:
    """Time passes in turns, each over a context that its sequences hold already; medians."""
    ready = {}
    for context in sorted({point.context for point in points}):
        here = [point for point in points if point.context == context]
        ready[context] = filled(target, context, max(p.batch for p in here), max(p.rows for p in here))
    runs = [
        timed(target, cache, slots[: point.batch], point.rows)
        for point in points
        for cache, slots in [ready[point.context]]
    ]
    before = read_bandwidth(target.device)
    spent = medians(runs, repeat, tell)
    # What memory can do: of two moments, before and after, the better one.
    reads = max(before, read_bandwidth(target.device))
    return Timed(model=target.name, passes=tuple(zip(points, spent, strict=True)), reads=reads)


def _read(found: Mapping[str, Any]) -> Timed:
    passes = tuple((Point(**point), float(spent)) for point, spent in found["passes"])
    if [point for point, _ in passes] != list(POINTS) or not all(0 < s < 1e6 for _, s in passes):
        raise ValueError("it holds other passes, or times that cannot be")
    reads = float(found["reads"])
    if not 0 < reads < FREE:
        raise ValueError(f"memory cannot give {reads:g} bytes per second")
    return Timed(model=str(found["model"]), passes=passes, reads=reads)


Passes = Sequence[tuple[Sequence[Op], float]]
"""Operators of each, and its seconds."""


def fit(passes: Passes, name: str, reads: float | None = None) -> Device:
    """The device whose predictions are nearest to timed passes.

    Args:
        reads: bytes per second that its memory gives; needed where weights are quantized.
    """
    if any(op.coded for ops, _ in passes for op in ops):
        if reads is None:
            raise ValueError("quantized weights need the bandwidth of memory")
        return _fit(passes, name, (PRODUCT,), reads)
    found = [_fit(passes, name, overlaps, None) for overlaps in ((), GROUPS)]
    return min(found, key=lambda one: misfit(passes, one))


def misfit(passes: Passes, device: Device) -> float:
    """Root of the mean squared relative error."""
    off = [seconds(ops, device) / spent - 1 for ops, spent in passes]
    return math.sqrt(sum(one * one for one in off) / len(off))


def _fit(passes: Passes, name: str, overlaps: tuple[str, ...], reads: float | None) -> Device:
    """The best device of one kind: where an operator's times overlap, its longer side counts.

    Sides are those of the device found so far, until none changes.
    """
    device = Device(name=name, peak=1.0, bandwidth=reads or 1.0, overlaps=())
    spent_P = np.array([spent for _, spent in passes])
    for turn in range(_ROUNDS):
        rows = [_amounts(ops, device, overlaps if turn else (), reads) for ops, _ in passes]
        amount_PK, known_P = np.array([row for row, _ in rows]), np.array([known for _, known in rows])
        *costs, overhead = _least(amount_PK, spent_P, known_P).tolist()
        peak, bandwidth, attend, traffic, widen = (1 / one if one > 1 / FREE else FREE for one in costs)
        after = replace(
            device,
            peak=peak,
            bandwidth=reads or bandwidth,
            attend=attend,
            traffic=traffic,
            widen=widen if reads else None,
            overhead=overhead,
            overlaps=overlaps,
        )
        if after == device:
            break
        device = after
    return device


def _amounts(
    ops: Sequence[Op], device: Device, overlaps: tuple[str, ...], reads: float | None
) -> tuple[list[float], float]:
    """What a pass does of all that takes time, and the seconds of it that are known."""
    total, known = [0.0] * 6, 0.0
    for op in ops:
        attends = op.group == ATTENTION
        work, reading = op.work(device), op.reading(device)
        total[5] += op.count * (ROWS in overlaps)
        if op.group not in overlaps or work >= reading:
            total[2 if attends else 0] += op.count * op.flops
            total[4] += op.count * op.coded * bool(reads)
        if op.group not in overlaps or work < reading:
            if reads:
                known += op.count * op.weights / reads
            else:
                total[1] += op.count * op.weights
            total[3] += op.count * op.moved
    return total, known


def _least(amount_PK: Floats, spent_P: Floats, known_P: Floats) -> Floats:
    """Least squares of relative errors without negative costs: the best of all subsets of costs."""
    share_PK, rest_P = amount_PK / spent_P[:, None], 1 - known_P / spent_P
    scale_K = np.maximum(np.abs(share_PK).max(0), 1e-300)
    count = share_PK.shape[1]
    best, best_K = math.inf, np.zeros(count)
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            some = list(chosen)
            x, *_ = np.linalg.lstsq(share_PK[:, some] / scale_K[some], rest_P, rcond=None)
            if (x < 0).any():
                continue
            off = float((((share_PK[:, some] / scale_K[some]) @ x - rest_P) ** 2).sum())
            if off < best - 1e-12:
                best, best_K = off, np.zeros(count)
                best_K[some] = x / scale_K[some]
    return best_K
