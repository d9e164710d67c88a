"""A prediction as plain data: passes by operator, memory, verification, and the gain of a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from outpace.analysis.prediction.calibration import Calibration
from outpace.analysis.prediction.devices import Record
from outpace.analysis.prediction.model import CPU, Planned
from outpace.analysis.prediction.speedup import Drafter, Gain, best_tree, chains, gain
from outpace.analysis.roofline import Device, Op, seconds

BATCHES = (1, 4, 16)
"""Whose passes are drawn, besides the one asked for."""
READING, ARITHMETIC, OVERHEAD = "reading", "arithmetic", "overhead"


def predicted(
    planned: Planned,
    device: Device,
    record: Record | None,
    calibration: Calibration | None,
    *,
    prompt: int,
    context: int,
    batch: int,
    rows: Sequence[int],
) -> dict[str, Any]:
    """Everything but the drafter; docs/json.md says what the keys mean."""

    def over(count: int, sequences: int) -> float:
        return planned.seconds(device, rows=count, context=context, batch=sequences)

    spent = [over(count, batch) for count in rows]
    reading = _phase(planned.ops(rows=prompt, batch=batch, logits=1), device)
    decoding = _phase(planned.ops(context=context, batch=batch), device)
    return {
        "model": planned.name,
        "form": planned.form,
        "weight_types": list(planned.kinds),
        "dtype": planned.dtype,
        "kv_dtype": planned.cache,
        "device": _device(device, record, calibration, planned),
        "memory": _memory(planned, record, context + max(rows), batch),
        "prefill": {
            "prompt": prompt,
            "batch": batch,
            "tokens_per_second": prompt * batch / reading["seconds"],
        }
        | reading,
        "decode": {"context": context, "batch": batch, "tokens_per_second": batch / decoding["seconds"]}
        | decoding,
        "verify": {
            "context": context,
            "batch": batch,
            "rows": list(rows),
            "pass_seconds": spent,
            "ratios": [one / spent[0] for one in spent],
        },
        "batches": [
            {"batch": size, "pass_seconds": [over(count, size) for count in rows]}
            for size in sorted({*BATCHES, batch})
        ],
        "drafter": None,
    }


def _device(
    device: Device, record: Record | None, calibration: Calibration | None, planned: Planned
) -> dict[str, Any]:
    numbers = {
        "title": device.name,
        "kind": record.kind if record else CPU,
        "peak": {planned.dtype: device.peak},
        **{
            name: getattr(device, name)
            for name in ("bandwidth", "attend", "traffic", "widen", "tile", "overhead", "call", "overlaps")
            if getattr(device, name) is not None
        },
    }
    fitted = None
    if calibration is not None:
        fitted = {
            "model": calibration.timed.model,
            "misfit": calibration.misfit,
            "host_seconds": calibration.timed.host,
            "timed_now": calibration.fresh,
            "passes": [{**asdict(point), "seconds": spent} for point, spent in calibration.timed.passes],
        }
    return {
        "name": device.name,
        "source": record.source if record else "seven passes of this machine",
        "record": numbers,
        "calibration": fitted,
    }


def _memory(planned: Planned, record: Record | None, length: int, batch: int) -> dict[str, Any]:
    there = record.memory if record else None
    each = planned.token_bytes * length
    room = None if there is None else max(0, int((there - planned.resident_bytes) // each))
    return {
        "weight_bytes": planned.weight_bytes,
        "resident_bytes": planned.resident_bytes,
        "kv_token_bytes": planned.token_bytes,
        "kv_bytes": each * batch,
        "total_bytes": planned.resident_bytes + each * batch,
        "device_bytes": there,
        "room_for": room,
    }


def _phase(ops: Sequence[Op], device: Device) -> dict[str, Any]:
    whole = seconds(ops, device)
    call = Op(name="call", count=1, flops=0, weights=0, moved=0)
    rest = replace(device, overhead=device.call)
    rows = [(op, device) for op in ops] + ([(call, rest)] if device.call else [])
    return {
        "seconds": whole,
        "flops": sum(op.count * op.flops for op in ops),
        "bytes": sum(op.count * (op.weights + op.moved) for op in ops),
        "operators": [
            {
                "operator": op.name,
                "count": op.count,
                "flops": op.count * op.flops,
                "bytes": op.count * (op.weights + op.moved),
                "bound": bound(op, on),
                "seconds": op.count * op.seconds(on),
            }
            for op, on in rows
        ],
    }


def bound(op: Op, device: Device) -> str:
    """What most of an operator's time goes into."""
    parts = {READING: op.reading(device), ARITHMETIC: op.work(device), OVERHEAD: device.overhead}
    return max(parts, key=lambda name: parts[name])


def gains(
    drafter: Drafter, ratio: Callable[[int], float], parents: Sequence[int] | None = None
) -> dict[str, Any]:
    """What a drafter gains by the length of a chain, as the best tree, and as one that was asked for.

    Args:
        ratio: rows -> cost of a step, in steps of plain decoding.
        parents: of the tree that was asked for.
    """
    found, tree = chains(drafter, ratio), best_tree(drafter, ratio)
    best = max(found, key=lambda one: one.speedup)
    return {
        "acceptance": list(drafter.acceptance),
        "cost": drafter.cost,
        "sibling": drafter.sibling,
        "chains": [_gain(one) for one in found],
        "best_chain": _gain(best),
        "best_tree": _gain(tree) | {"parents": list(tree.parents)},
        "tree": None if parents is None else _gain(gain(drafter, ratio, parents)),
        "break_even_cost": break_even(drafter, ratio),
    }


def break_even(drafter: Drafter, ratio: Callable[[int], float]) -> float:
    """Largest cost of a level with which one guess still gains; 0: none does."""
    return max(0.0, gain(drafter, ratio, (-1,)).emitted - ratio(2))


def _gain(one: Gain) -> dict[str, Any]:
    return {
        "guesses": len(one.parents),
        "levels": one.levels,
        "emitted": one.emitted,
        "step_cost": one.cost,
        "speedup": one.speedup,
    }
