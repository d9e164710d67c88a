"""This machine as a device: seven passes of a model are timed, and the few numbers of a `Device` fitted.

    found = calibrated(shape, load, model="smollm2-135m")     timed once, then read from the cache folder

An operator takes

    reading     weights / bandwidth + keys, values and activations / traffic
    arithmetic  FLOPs / peak + quantized weights / widen;  of attention FLOPs / attend
    overhead    of every operator

Reading and arithmetic take the longer of both or their sum; both are tried. Quantized weights are widened
once for each tile of rows. One pass is over the model's first layers alone. What it shares with a whole pass
is no work of layers; and a drafter is a small model. Speeds are fitted by least squares of relative errors,
all of them positive. What a step of plain decoding does outside of its pass is timed as well.

Shape letters: P points, K what costs time.
"""

from __future__ import annotations

import math
import statistics
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
from outpace.analysis.roofline import ATTENTION, GROUPS, PRODUCT, Device, Op, medians, seconds
from outpace.engine.engine import Engine
from outpace.models.decoder import Decoder
from outpace.models.measured import file_of, machine, recalled
from outpace.models.products import tile_rows, works
from outpace.types import StepRecord

Floats = NDArray[np.float64]
FREE = 1e21
"""A speed that costs nothing: no point showed what it costs."""
_ROUNDS = 30
"""Most rounds in which operators change sides."""


@dataclass(frozen=True, order=True, slots=True)
class Point:
    """A pass: rows of each sequence, committed tokens before them, and sequences."""

    rows: int
    context: int
    batch: int = 1
    layers: int | None = None
    """Of a model cut to its first layers; None: of the whole."""

    @property
    def logits(self) -> int | None:
        """Rows of each sequence whose logits are wanted: of a prompt the last one."""
        return None if self.context else 1


POINTS = (
    Point(1, 64),
    Point(1, 1024),
    Point(4, 256),
    Point(32, 64),
    Point(32, 1024),
    Point(1, 256, 8),
    Point(1, 64, layers=2),
)
"""The passes that are timed."""
REPEAT = 7
_STEPS = 24
"""Of plain decoding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Passes of a model that were timed."""

    model: str
    passes: tuple[tuple[Point, float], ...]
    host: float
    """Seconds of a step of plain decoding outside of its pass."""


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
    threads, or one that was changed, is not used. The fit is made anew from the times.
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
    passes = [(ops_of(shape, point), spent) for point, spent in found.passes]
    device = fit(passes, here)
    return Calibration(device=device, timed=found, misfit=misfit(passes, device), fresh=made)


def ops_of(shape: Planned, point: Point) -> list[Op]:
    """Operators of a pass of a model."""
    whole = shape if point.layers is None else shape.cut(point.layers)
    return whole.ops(rows=point.rows, context=point.context, batch=point.batch, logits=point.logits)


def time_passes(
    target: Decoder,
    points: Sequence[Point],
    repeat: int = REPEAT,
    clock: Callable[[torch.device], float] | None = None,
) -> Timed:
    """Time passes in turns, each over a context that its sequences hold already; medians."""
    cuts = {point.layers for point in points}
    models = {n: target if n is None else target.variant(layers=range(n)) for n in cuts}
    ready = {}
    for layers, context in {(point.layers, point.context) for point in points}:
        here = [point for point in points if (point.layers, point.context) == (layers, context)]
        most = max(p.batch for p in here), max(p.rows for p in here)
        ready[layers, context] = filled(models[layers], context, *most)
    runs = [
        timed(models[point.layers], cache, slots[: point.batch], point.rows, clock, point.logits)
        for point in points
        for cache, slots in [ready[point.layers, point.context]]
    ]
    spent = medians(runs, repeat)
    return Timed(model=target.name, passes=tuple(zip(points, spent, strict=True)), host=_host_work(target))


def _host_work(target: Decoder) -> float:
    """Seconds that a step of plain decoding spends outside of its pass: a median."""
    steps: list[StepRecord] = []
    engine = Engine.load(target, drafter="none")
    with engine.listening(steps.append):
        engine.generate(list(range(16)), temperature=0.0, max_new_tokens=_STEPS, ignore_eos=True)
    outside = [
        sum(step.seconds.values()) - sum(step.pass_seconds.values()) for step in steps if not step.prompt
    ]
    return max(0.0, statistics.median(outside))


def _read(found: Mapping[str, Any]) -> Timed:
    passes = tuple((Point(**point), float(spent)) for point, spent in found["passes"])
    if [point for point, _ in passes] != list(POINTS) or not all(0 < s < 1e6 for _, s in passes):
        raise ValueError("it holds other passes, or times that cannot be")
    host = float(found["host"])
    if not 0 <= host < 1e3:
        raise ValueError(f"no step takes {host:g} s")
    return Timed(model=str(found["model"]), passes=passes, host=host)


Passes = Sequence[tuple[Sequence[Op], float]]
"""Operators of each, and its seconds."""


def fit(passes: Passes, name: str) -> Device:
    """The device whose predictions are nearest to timed passes."""
    coded = any(op.coded for ops, _ in passes for op in ops)
    plain = (((), False), (GROUPS, False), (GROUPS, True))
    ways = (((), False), ((PRODUCT,), False)) if coded else plain
    found = [_fit(passes, name, coded, *way) for way in ways]
    return min(found, key=lambda one: misfit(passes, one))


def misfit(passes: Passes, device: Device) -> float:
    """Root of the mean squared relative error."""
    off = [seconds(ops, device) / spent - 1 for ops, spent in passes]
    return math.sqrt(sum(one * one for one in off) / len(off))


def _fit(passes: Passes, name: str, coded: bool, overlaps: tuple[str, ...], alike: bool) -> Device:
    """The best device of one kind: where an operator's times overlap, its longer side counts.

    Sides are those of the device found so far, until none changes. The first one is that whose times add
    up; with ``alike``, attention is then taken to be as fast as products.
    """
    tile = tile_rows() if coded else None
    device = Device(name=name, peak=1.0, bandwidth=1.0, tile=tile, overlaps=())
    spent_P = np.array([spent for _, spent in passes])
    for turn in range(_ROUNDS):
        amount_PK = np.array([_amounts(ops, device, overlaps if turn else ()) for ops, _ in passes])
        *costs, overhead = _least(amount_PK, spent_P).tolist()
        peak, bandwidth, attend, traffic, widen = (1 / one if one > 1 / FREE else FREE for one in costs)
        after = replace(
            device,
            peak=peak,
            bandwidth=bandwidth,
            attend=attend,
            traffic=traffic,
            widen=widen if coded else None,
            overhead=overhead,
            overlaps=overlaps,
        )
        if after == device:
            break
        device = replace(after, attend=None, traffic=None) if alike and not turn else after
    return device


def _amounts(ops: Sequence[Op], device: Device, overlaps: tuple[str, ...]) -> list[float]:
    """What a pass does of all that takes time."""
    total = [0.0] * 6
    for op in ops:
        work, reading = op.work(device), op.reading(device)
        total[5] += op.count
        if op.group not in overlaps or work >= reading:
            total[2 if op.group == ATTENTION else 0] += op.count * op.flops
            total[4] += op.count * op.widened(device.tile)
        if op.group not in overlaps or work < reading:
            total[1] += op.count * op.weights
            total[3] += op.count * op.moved
    return total


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
