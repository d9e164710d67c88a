"""What slows this machine down: threads, quotas, other load, frequency, code that is not compiled."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outpace.analysis.doctor.findings import Diagnosis
from outpace.analysis.roofline import read_bandwidth
from outpace.kernels.compiled import described, library
from outpace.models.base import Target
from outpace.models.load import fast_dtype
from outpace.models.measured import dtype_name

_WATCH = 0.5
"""Seconds for which one thread spins while the machine is watched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A machine as it is now."""

    cores: int
    """That this process may use."""
    threads: int
    """With which torch computes."""
    quota: float | None = None
    """Cores' worth of time that the system grants; None: no limit is known."""
    throttled: float = 0.0
    """Share of the quota's periods in which the process was stopped, while it was watched."""
    own: float = 1.0
    """Share of a core that one thread of ours got."""
    busy: float = 0.0
    """Cores that others kept busy meanwhile."""
    stolen: float = 0.0
    """Share of time that the host gave to other virtual machines."""
    frequency: float | None = None
    """Clock as a share of the highest; None: not told."""
    bandwidth: float | None = None
    """Bytes per second that were read from memory."""
    compiled: bool = True
    code: str = ""
    on_cpu: bool = True
    dtype: str = ""
    fast_dtype: str = ""
    """The dtype that the machine multiplies fastest."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def facts(target: Target) -> Facts:
    """Watch the machine for a moment."""
    allowed = getattr(os, "sched_getaffinity", None)
    before, stats = _ticks(), _throttled()
    began, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < _WATCH:
        pass
    wall, own = time.perf_counter() - began, time.process_time() - used
    after, later = _ticks(), _throttled()
    spent = {key: after[key] - before[key] for key in after} if after and before else {}
    tick = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
    total = sum(spent.values()) or 1
    periods = later[0] - stats[0]
    on_cpu = target.device.type == "cpu"
    return Facts(
        cores=len(allowed(0)) if allowed is not None else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        quota=_quota(),
        throttled=(later[1] - stats[1]) / periods if periods > 0 else 0.0,
        own=own / wall,
        busy=max(0.0, spent.get("busy", 0) / tick - own) / wall if spent else 0.0,
        stolen=spent.get("steal", 0) / total,
        frequency=_frequency(),
        bandwidth=read_bandwidth(target.device, 3) if on_cpu else None,
        compiled=not on_cpu or library() is not None,
        code=described() if on_cpu else "",
        on_cpu=on_cpu,
        dtype=dtype_name(target.dtype),
        fast_dtype=dtype_name(fast_dtype(target.device)),
    )


def check(seen: Facts, to: Diagnosis) -> None:
    """Say what of it costs speed."""
    to.machine = seen.to_json()
    if seen.threads > seen.cores:
        to.find(
            "threads",
            "more threads than cores",
            f"{seen.threads} threads on {seen.cores} cores wait for each other",
            f"--threads {seen.cores}",
        )
    if seen.quota is not None and seen.quota < 0.95 * min(seen.threads, seen.cores):
        to.find(
            "throttled",
            "the system grants less time than the threads need",
            f"{seen.threads} threads share {seen.quota:.2g} cores' worth of time",
            f"raise the quota of the container, or --threads {max(1, int(seen.quota))}",
        )
    elif seen.throttled > 0.1:
        to.find(
            "throttled",
            "the system stops this process again and again",
            f"in {seen.throttled:.0%} of its periods",
            "raise the quota of the container, or take fewer threads",
        )
    if seen.frequency is not None and seen.frequency < 0.7:
        to.find(
            "throttled",
            "the processor runs slowly",
            f"at {seen.frequency:.0%} of its highest frequency",
            "look for heat, a power limit, or a governor that saves power",
        )
    if seen.own < 0.9 or seen.busy > seen.cores - seen.threads + 0.25 or seen.stolen > 0.05:
        to.find(
            "busy",
            "something else uses this machine",
            f"one thread got {seen.own:.0%} of a core, others kept {seen.busy:.1f} cores busy, "
            f"{seen.stolen:.0%} of the time was stolen",
            "stop it, or take fewer threads; timings of a busy machine mean little",
        )
    if not seen.compiled:
        to.find(
            "not_compiled",
            "no compiled code runs here",
            f"passes are computed by {seen.code}",
            "install a C compiler, or a wheel that carries the code; drop OUTPACE_COMPILE=0",
        )
    elif seen.on_cpu and seen.dtype != seen.fast_dtype:
        to.find(
            "slow_dtype",
            "the weights are in a dtype that is slow here",
            f"{seen.dtype}, where {seen.fast_dtype} is multiplied faster",
            "--dtype auto",
        )


def _ticks() -> dict[str, int]:
    """Clock ticks of all cores; empty where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        values = [int(v) for v in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        user, nice, system, idle, wait, irq, soft, steal = values
        return {"busy": user + nice + system + irq + soft, "idle": idle + wait, "steal": steal}
    return {}


def _quota() -> float | None:
    with contextlib.suppress(OSError, ValueError):
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    return None


def _throttled() -> tuple[int, int]:
    """Periods of the quota so far, and how many of them were cut short."""
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines())
        found: Mapping[str, int] = {name: int(value) for name, value in lines}
        return found.get("nr_periods", 0), found.get("nr_throttled", 0)
    return 0, 0


def _frequency() -> float | None:
    """Mean clock of the cores as a share of their highest."""
    shares = []
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"):
        with contextlib.suppress(OSError, ValueError):
            now = int((folder / "scaling_cur_freq").read_text())
            shares.append(now / int((folder / "cpuinfo_max_freq").read_text()))
    return sum(shares) / len(shares) if shares else None
