"""This machine as a device: six passes of a model are timed, and the few numbers of a `Device` fitted.

    device = calibrated(planned, load)       timed once; then read from the cache folder

The time of a pass is taken to be linear in what it does:

    seconds = weights / bandwidth + products / peak + attention / attend + traffic / traffic' + operators * overhead

where reading and computing do not overlap, as in code that widens weights in registers; else the larger
of both counts for each operator. Both forms are fitted by least squares of relative errors, with all
numbers positive, and the better one is kept.

Shape letters: P points, K what costs time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outpace import __version__
from outpace.analysis.cost import filled, timed
from outpace.analysis.prediction.model import Planned, planned
from outpace.analysis.roofline import ATTENTION, Device, Op, medians, seconds
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


POINTS = (
    Point(1, 64),
    Point(1, 1024),
    Point(4, 256),
    Point(32, 64),
    Point(32, 1024),
    Point(1, 256, 8),
)
"""The six passes that are timed."""
REPEAT = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Passes of a model that were timed."""

    model: str
    passes: tuple[tuple[Point, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """This machine, and how it was fitted."""

    device: Device
    timed: Timed
    misfit: float
    fresh: bool
    """Whether it was timed now."""


def calibrated(
    form: str,
    load: Callable[[], Decoder],
    read: Callable[[], Planned],
    *,
    model: str,
    fresh: bool = False,
    note: Callable[[str], None] | None = None,
) -> Calibration:
    """This machine, with the threads that torch has now, for weights held in one form.

    Args:
        form: of the weights, as ``Planned.form``.
        load: loads the model that is timed, if need be.
        read: gives its shape.
        model: what it is called.
        fresh: time passes even where they are known.
        note: told of a file that cannot be used.

    Effects: keeps the times in the cache folder. A file of another machine, version or number of
    threads, or one that was changed, is not used.
    """
    made = False

    def make() -> Timed:
        nonlocal made
        made = True
        return time_passes(load(), POINTS)

    key = {
        "kind": "device",
        "model": model,
        "form": form,
        "threads": torch.get_num_threads(),
        "machine": machine(torch.device("cpu")),
        "compiled": works(),
        "outpace": __version__,
        "points": [list(asdict(point).values()) for point in POINTS],
    }
    file = file_of(key, ("device", form))
    if fresh:
        file.unlink(missing_ok=True)
    found = recalled(key, file, _read, make, note)
    assert found is not None
    shape = read()
    passes = [(shape.ops(rows=p.rows, context=p.context, batch=p.batch), spent) for p, spent in found.passes]
    device = fit(passes, machine(torch.device("cpu")))
    return Calibration(device=device, timed=found, misfit=misfit(passes, device), fresh=made)


def time_passes(
    target: Decoder,
    points: Sequence[Point],
    repeat: int = REPEAT,
    tell: Callable[[int], None] | None = None,
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
    return Timed(model=target.name, passes=tuple(zip(points, medians(runs, repeat, tell), strict=True)))


def _read(found: Mapping[str, Any]) -> Timed:
    passes = tuple((Point(**point), float(spent)) for point, spent in found["passes"])
    if [point for point, _ in passes] != list(POINTS) or not all(0 < s < 1e6 for _, s in passes):
        raise ValueError("it holds other passes, or times that cannot be")
    return Timed(model=str(found["model"]), passes=passes)


def fit(passes: Sequence[tuple[Sequence[Op], float]], name: str) -> Device:
    """The device whose predictions are nearest to timed passes.

    Args:
        passes: operators of each, and its seconds.
    """
    costs = [_costs(passes, overlaps) for overlaps in (False, True)]
    made = [
        _device(cost_K, name, overlaps) for cost_K, overlaps in zip(costs, (False, True), strict=True)
    ]
    return min(made, key=lambda one: misfit(passes, one))


def misfit(passes: Sequence[tuple[Sequence[Op], float]], device: Device) -> float:
    """Root of the mean squared relative error."""
    off = [seconds(ops, device) / spent - 1 for ops, spent in passes]
    return math.sqrt(sum(one * one for one in off) / len(off))


def _device(cost_K: Floats, name: str, overlaps: bool) -> Device:
    bandwidth, peak, attend, traffic = (float(1 / one) if one > 1 / FREE else FREE for one in cost_K[:4])
    return Device(
        name=name,
        peak=peak,
        bandwidth=bandwidth,
        attend=attend,
        traffic=traffic,
        overhead=float(cost_K[4]),
        overlaps=overlaps,
    )


def _amounts(op: Op) -> tuple[list[float], list[float], list[float]]:
    """What an operator reads, computes, and that it is one: multiples of the five costs."""
    attends = op.group == ATTENTION
    reads = [op.weights, 0.0, 0.0, op.moved, 0.0]
    works = [0.0, 0.0 if attends else op.flops, op.flops if attends else 0.0, 0.0, 0.0]
    return reads, works, [0.0, 0.0, 0.0, 0.0, 1.0]


def _costs(passes: Sequence[tuple[Sequence[Op], float]], overlaps: bool) -> Floats:
    """The five costs; where operators overlap each counts on its longer side, until none changes it."""
    spent_P = np.array([spent for _, spent in passes])
    amounts = [[(op.count, *map(np.array, _amounts(op))) for op in ops] for ops, _ in passes]
    cost_K = _least(np.array([sum(n * (r + w + o) for n, r, w, o in ops) for ops in amounts]), spent_P)
    for _ in range(_ROUNDS if overlaps else 0):
        longer = [sum(n * ((r if r @ cost_K > w @ cost_K else w) + o) for n, r, w, o in ops) for ops in amounts]
        found_K = _least(np.array(longer), spent_P)
        if np.allclose(found_K, cost_K, rtol=1e-6, atol=0):
            break
        cost_K = np.sqrt(found_K * cost_K)
    return cost_K


def _least(amount_PK: Floats, spent_P: Floats) -> Floats:
    """Least squares of relative errors without negative costs: the best of all subsets of costs."""
    share_PK = amount_PK / spent_P[:, None]
    scale_K = np.maximum(np.abs(share_PK).max(0), 1e-300)
    count = share_PK.shape[1]
    best, best_K = math.inf, np.zeros(count)
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            some = list(chosen)
            x, *_ = np.linalg.lstsq(share_PK[:, some] / scale_K[some], np.ones(len(spent_P)), rcond=None)
            if (x < 0).any():
                continue
            off = float((((share_PK[:, some] / scale_K[some]) @ x - 1) ** 2).sum())
            if off < best - 1e-12:
                best, best_K = off, np.zeros(count)
                best_K[some] = x / scale_K[some]
    return best_K
