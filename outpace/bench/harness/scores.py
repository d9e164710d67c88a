"""Score tasks with several drafters, and compare every answer with that of plain decoding.

report = evaluate(engine, ["none", "auto"], tasks, folders, limit=20)
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from outpace.bench.harness.model import language_model
from outpace.bench.harness.scorer import Scorer
from outpace.bench.harness.tasks import Task
from outpace.bench.stats import add_up
from outpace.engine.engine import Engine
from outpace.errors import OutpaceError, RequestError
from outpace.models.measured import dtype_name

PLAIN = "none"
CLOSE = 1e-4
"""Log-likelihoods that are farther apart count as different."""
_STDERR = 2  # where other programs write, whatever sys.stderr is


def harness() -> tuple[Any, Any]:
    """``simple_evaluate`` and ``TaskManager`` of lm-evaluation-harness.

    Raises:
        RequestError: it is not installed.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise RequestError(
            f"outpace eval needs lm-evaluation-harness ({error}); try pip install 'outpace[eval]'"
        ) from error
    return simple_evaluate, TaskManager


def evaluate(
    engine: Engine,
    drafters: Sequence[str],
    tasks: Sequence[Task],
    folders: Sequence[Path] = (),
    *,
    limit: int | None = None,
    shots: int | None = None,
    chat: bool = False,
    batch: int = 8,
    tick: Callable[[str, int], None] = lambda part, done: None,
) -> dict[str, Any]:
    """Run the harness once per drafter.

    Args:
        drafters: method specs; plain decoding goes first, asked for or not.
        tasks: as ``read_tasks`` gives them.
        limit: samples per task, at most.
        shots: examples before every question; None: as the task says.
        chat: wrap what is asked in the model's chat template.
        tick: told of every drafter.

    Returns:
        Plain data: see docs/json.md.

    Raises:
        RequestError: no lm-evaluation-harness, a task that it does not know, or no answer.
    """
    simple_evaluate, TaskManager = harness()
    for name in ("lm_eval", "lm_eval.evaluator", "lm_eval.api.task", "lm_eval.tasks"):
        logging.getLogger(name).setLevel(logging.ERROR)
    manager = TaskManager(include_path=[str(folder) for folder in folders] or None)
    if unknown := [one for one in tasks if isinstance(one, str) and one not in manager.all_tasks]:
        raise RequestError(
            f"lm-evaluation-harness knows no task {unknown[0]!r}; give one of its names, or a file"
        )
    found: dict[str, Any] = {}
    runs: dict[str, dict[str, Any]] = {}
    for spec in dict.fromkeys((PLAIN, *drafters)):
        tick(spec, 0)
        scorer = Scorer(engine, spec, batch)
        start = time.perf_counter()
        try:
            # Its bars and warnings would stand between ours; what goes wrong is raised.
            with contextlib.redirect_stderr(io.StringIO()), _without_stderr():
                done = simple_evaluate(
                    model=language_model(scorer),
                    tasks=[dict(one) if isinstance(one, dict) else one for one in tasks],
                    task_manager=manager,
                    limit=limit,
                    num_fewshot=shots,
                    apply_chat_template=chat,
                    bootstrap_iters=1000,
                    log_samples=True,
                )
        except OutpaceError:
            raise
        except Exception as error:  # whatever a task of a stranger may raise
            raise RequestError(f"a task cannot be scored: {type(error).__name__}: {error}") from error
        if done is None or not done.get("samples"):
            raise RequestError("no task gave a sample; give other tasks")
        found[spec] = done
        counters = add_up(scorer.counters)
        runs[spec] = {
            "drafter": spec,
            "seconds": time.perf_counter() - start,
            "passes": counters.passes,
            "drafted": counters.drafted,
            "accepted": counters.accepted,
            "mean_emitted": counters.mean_emitted if counters.passes else None,
        }
        tick(spec, 1)
    return {
        "model": engine.target.name,
        "dtype": dtype_name(engine.target.dtype),
        "promised": engine.target.equal_rows,
        "runs": list(runs.values()),
        "tasks": [compared(name, found) for name in found[PLAIN]["samples"]],
    }


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Drop what programs write that the harness starts: outside a checkout, git complains."""
    try:
        kept = os.dup(_STDERR)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, _STDERR)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
        os.close(nowhere)


def compared(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """One task: its metrics by drafter, and how many samples are answered as plainly."""
    plain = found[PLAIN]["samples"][name]
    metrics: dict[str, dict[str, Any]] = {}
    same = []
    for spec, done in found.items():
        for key, value in done["results"][name].items():
            metric, _, _ = key.partition(",")
            if isinstance(value, int | float) and not isinstance(value, bool) and "," in key:
                if metric.endswith("_stderr"):
                    continue
                metrics.setdefault(metric, {})[spec] = float(value)
        other = {_key(one): one["filtered_resps"] for one in done["samples"][name]}
        gaps = [_gap(one["filtered_resps"], other.get(_key(one))) for one in plain]
        same.append(
            {
                "drafter": spec,
                "equal": sum(gap <= CLOSE for gap in gaps),
                "largest_gap": max((gap for gap in gaps if gap < math.inf), default=0.0),
            }
        )
    return {
        "task": name,
        "samples": len(plain),
        "metrics": [
            {"metric": metric, "scores": [{"drafter": spec, "score": value} for spec, value in by.items()]}
            for metric, by in metrics.items()
        ],
        "same": same,
    }


def broken(report: dict[str, Any], lossless: Sequence[str]) -> list[str]:
    """Answers of lossless drafters that differ from the plain ones, where equal ones are promised."""
    if not report["promised"]:
        return []
    return [
        f"{task['task']}: {task['samples'] - one['equal']} of {task['samples']} samples with "
        f"{one['drafter']} differ from plain decoding"
        for task in report["tasks"]
        for one in task["same"]
        if one["drafter"] in lossless and one["equal"] < task["samples"]
    ]


def _key(sample: dict[str, Any]) -> tuple[Any, Any]:
    return sample["doc_id"], sample.get("filter")


def _gap(plain: Any, other: Any) -> float:
    """How far two answers are apart: 0 for equal texts, a difference of log-likelihoods; else infinite."""
    if isinstance(plain, bool | str) or plain is None or type(plain) is not type(other):
        return 0.0 if plain == other else math.inf
    if isinstance(plain, int | float):
        return abs(float(plain) - float(other))
    if isinstance(plain, list | tuple) and len(plain) == len(other):
        return max((_gap(a, b) for a, b in zip(plain, other, strict=True)), default=0.0)
    return 0.0 if plain == other else math.inf
