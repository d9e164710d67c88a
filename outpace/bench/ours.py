"""Contenders of this package: a drafter of the engine, run and timed unit by unit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from outpace.bench.records import STALL, Case, Kind, Run, Settings
from outpace.engine.engine import Engine
from outpace.engine.method import Method
from outpace.engine.requests import GenerationRequest, check
from outpace.engine.results import Result
from outpace.models.measured import dtype_name
from outpace.params import NEUTRAL, SamplingParams
from outpace.types import StepRecord

_PROC = Path("/proc/self")
_RESET_PEAK = "5"  # see proc(5), clear_refs


class Ours:
    """A drafter of the engine as a contender.

    Args:
        engine: shared by all of them, so that they run on the same weights.
        fresh: answer each unit with an engine of its own, on the same target. It knows nothing of other
            answers, nor what was measured of this machine.
    """

    kind: Kind = "drafter"

    def __init__(self, engine: Engine, method: Method, *, fresh: bool = False) -> None:
        self.engine = engine
        self.method = method
        self.fresh = fresh
        self.name = method.spec
        self.about: Mapping[str, Any] = {
            "dtype": dtype_name(engine.target.dtype),
            "lossless": method.lossless(method.verifier),
            "synthetic": False,
        }

    def reference(self, case: Case, settings: Settings) -> tuple[int, ...] | None:
        """What the drafter is told to expect as the answer."""
        return case.reference

    def run(self, unit: tuple[Case, ...], settings: Settings) -> Run:
        """Answer a unit in one batch.

        Every setting of sampling but the temperature is neutral, whatever the model recommends:
        all contenders have to draw from the same distribution.
        """
        watch, engine, method = Watch(len(unit)), self.engine, self.method
        if self.fresh:
            engine = Engine(
                engine.target, self.name, allow_lossy=engine.allow_lossy, draft_model=engine.draft_model
            )
            method = engine.method()
        with engine.listening(watch), _peak(engine.target.device) as peak:
            began = watch.last = time.perf_counter()
            results = self._answer(engine, method, unit, settings)
        return Run(
            tokens=tuple(result.tokens for result in results),
            seconds=watch.last - began,
            prefill_seconds=watch.last - began - sum(watch.steps),
            counters=tuple(result.counters for result in results),
            verb_seconds=watch.verbs,
            draft_levels=watch.draft_levels,
            stalled_seconds=watch.stalled(),
            peak_memory_bytes=peak[0] if peak else None,
            full_tokens=watch.full_tokens,
            full_seconds=watch.full_seconds,
        )

    def _answer(
        self, engine: Engine, method: Method, unit: tuple[Case, ...], settings: Settings
    ) -> list[Result]:
        """What ``Engine.generate`` does, with a seed per case."""
        verifier = engine.verifier(method, settings.reproducible)
        ready = []
        for index, case in enumerate(unit):
            params = SamplingParams(
                **NEUTRAL | {"temperature": settings.temperature},
                max_new_tokens=settings.max_new_tokens,
                ignore_eos=settings.ignore_eos,
                seed=case.seed,
            )
            check(case.ids, params, engine.target, engine.eos_ids)
            ready.append(
                GenerationRequest(
                    prompt=case.ids,
                    params=params,
                    seed=case.seed,
                    index=index,
                    reference=self.reference(case, settings),
                )
            )
        rows = (engine.start_sequence(one, engine.cache.open(), method, verifier) for one in ready)
        done: dict[int, Result] = {}
        for chunk in engine.chunks(rows, method):
            if chunk.result is not None:
                done[chunk.index] = chunk.result
        return [done[index] for index in range(len(unit))]

    def close(self) -> None:
        """The engine is not its own."""


class Watch:
    """Listens to the steps of one run: when the last one ended, and where the time of decoding went.

    Args:
        count: sequences of the run.
    """

    def __init__(self, count: int = 1) -> None:
        self._count = count
        self.full_tokens, self.full_seconds = 0, 0.0
        self.last = time.perf_counter()
        self.draft_levels = 0
        self.verbs: dict[str, float] = {}
        self.steps: list[float] = []

    def stalled(self) -> float:
        """Seconds of decoding steps beyond `STALL` times their median."""
        most = STALL * median(self.steps) if self.steps else 0.0
        return sum(max(0.0, spent - most) for spent in self.steps)

    def __call__(self, record: StepRecord) -> None:
        before, self.last = self.last, time.perf_counter()
        if record.prompt:
            return
        self.steps.append(self.last - before)
        if len(record.rows) == self._count and all(row.emitted for row in record.rows):
            self.full_tokens += sum(len(row.emitted) for row in record.rows)
            self.full_seconds += self.last - before
        inside = record.pass_seconds
        draft, score = inside.get("draft", 0.0), inside.get("score", 0.0)
        caught_up = inside.get("commit", 0.0)  # a drafter's model reads what was emitted
        self.draft_levels += record.draft_levels
        for verb, spent in (
            ("plan", record.seconds["plan"] - record.preview_seconds),
            ("draft_host", record.seconds["draft"] - draft + record.preview_seconds),
            ("draft_pass", draft + caught_up),
            ("score_host", record.seconds["score"] - score),
            ("score_pass", score),
            ("judge", record.seconds["judge"]),
            ("commit", record.seconds["commit"] - caught_up),
        ):
            self.verbs[verb] = self.verbs.get(verb, 0.0) + spent


@contextlib.contextmanager
def _peak(device: torch.device) -> Iterator[list[int]]:
    """Yields a list that holds, at the end, the peak of memory since the beginning.

    Memory of the device on a GPU, else the resident set of the process; the list stays empty
    where the system does not tell.
    """
    found: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found.append(torch.cuda.max_memory_allocated(device))
        return
    try:
        (_PROC / "clear_refs").write_text(_RESET_PEAK)
        told = True
    except OSError:
        told = False
    yield found
    if told:
        status = (_PROC / "status").read_text()
        found += [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")]
