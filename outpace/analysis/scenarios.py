"""Scenarios in which policies are judged: devices, batches, and requests made of recorded texts.

The devices are examples of kinds of machines, not measurements of one. There are CPUs whose rows are dear,
whose first rows are free, that stall, that start slowly, or that take rows one by one. Besides, there are
matrix units, and an accelerator whose cost is flat.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from outpace.analysis.recording import Text
from outpace.analysis.replay import Device, Walk, turning, whole

CPU = Device(
    name="cpu",
    rows_R=(1, 2, 4, 8, 16, 64, 256),
    pass_R=(4.6, 5.0, 6.5, 8.8, 15.8, 62.0, 250.0),
    levels={"head": (1.0, 0.2), "model": (1.5, 0.3)},
    unread=0.02,
)
SLOW_CPU = Device(
    name="slow cpu",
    rows_R=(1, 4, 16, 64, 256),
    pass_R=(61.0, 63.0, 233.0, 700.0, 2700.0),
    levels={"head": (4.0, 0.4), "model": (6.0, 0.6)},
    unread=0.03,
)
MATRIX = Device(
    name="matrix units",
    rows_R=(1, 16, 32, 64, 128, 512),
    pass_R=(6.0, 7.0, 9.0, 15.0, 28.0, 110.0),
    sequence=0.3,
    levels={"head": (0.9, 0.05), "model": (1.5, 0.1)},
    unread=0.004,
)
GPU = Device(
    name="gpu",
    rows_R=(1, 64, 128, 256, 512),
    pass_R=(8.0, 8.2, 9.0, 12.0, 22.0),
    sequence=0.02,
    levels={"head": (0.6, 0.004), "model": (1.6, 0.01)},
    unread=0.0005,
)
NOISY = replace(CPU, name="noisy cpu", noise=0.25, stalls=0.02)
COLD = replace(CPU, name="cold cpu", cold=8)
NO_BATCH = Device(
    name="rows one by one",
    rows_R=(1, 2, 64),
    pass_R=(10.0, 20.0, 640.0),
    levels={"head": (2.0, 0.3), "model": (2.0, 0.3)},
    unread=0.02,
    judge=1.0,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One thing that a policy must be good at."""

    name: str
    device: Device
    walks: Sequence[Walk]
    batch: Callable[[float], int]
    """Milliseconds since the start -> requests at a time."""
    until: float | None = None
    """Milliseconds to run; None: every request once."""
    before: Sequence[Walk] = ()
    """Requests that the policy has served already; they do not count."""


def scenarios(texts: Sequence[Text], seed: int = 0) -> list[Scenario]:
    """All scenarios, from recorded texts of several kinds."""
    draw = random.Random(seed)
    mixed = [whole(text) for text in texts]
    draw.shuffle(mixed)
    kinds = {
        kind: [whole(text) for text in texts if text.kind == kind]
        for kind in dict.fromkeys(t.kind for t in texts)
    }
    other = [draw.sample(list(texts), 2) for _ in texts if len(texts) > 1]
    turns = [turning(first, second) for first, second in other if first.kind != second.kind]
    found = []
    for kind, walks in kinds.items():
        rest = [walk for walk in mixed if walk.parts[0][0].kind != kind]
        found.append(Scenario(name=f"cpu, fresh, {kind}", device=CPU, walks=walks[:1], batch=_one))
        found.append(Scenario(name=f"cpu, {kind}", device=CPU, walks=walks, batch=_one, before=rest))
    for device in (CPU, SLOW_CPU, MATRIX, GPU, NOISY, COLD, NO_BATCH):
        found.append(Scenario(name=f"{device.name}, 1", device=device, walks=mixed, batch=_one))
    for device, size in (
        (CPU, 4),
        (CPU, 16),
        (CPU, 64),
        (MATRIX, 8),
        (GPU, 8),
        (GPU, 64),
        (NOISY, 16),
        (SLOW_CPU, 8),
    ):
        many = [walk for _ in range(max(2, 3 * size // len(mixed))) for walk in mixed]
        found.append(
            Scenario(name=f"{device.name}, {size}", device=device, walks=many, batch=partial(_always, size))
        )
    for device in (CPU, GPU):
        found.append(
            Scenario(
                name=f"{device.name}, come and go", device=device, walks=mixed, batch=_waves, until=6000.0
            )
        )
        if turns:
            found.append(Scenario(name=f"{device.name}, turning", device=device, walks=turns, batch=_one))
    return found


def _always(size: int, moment: float) -> int:
    return size


def _one(moment: float) -> int:
    return 1


def _waves(moment: float) -> int:
    """Requests come and go: 1, 4, 16, 32, 8 and 2 at a time, for half a second each."""
    return (1, 4, 16, 32, 8, 2)[int(moment / 500.0) % 6]
