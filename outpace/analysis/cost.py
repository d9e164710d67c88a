"""Measured costs: of a target's pass, and of a drafter's levels.

    curve = curve_for(target, measure_if_missing=True)
    curve.ratio(rows=16, context=300)     what 15 guesses cost, in passes over one row

Every figure is a median, after a warm-up, of measurements in turns. Each round visits every point
once, in alternating order. So a machine that slows down does so for all of them.

What was measured is kept in the user's cache folder, a file per model, dtype, threads, machine and
version. Files are replaced as a whole, so that several processes may share the folder.

Shape letters: L levels of a draft; those of ``CostCurve``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from outpace.analysis.roofline import medians, now
from outpace.cache.base import KVCache, Lease
from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.engine.method import Method
from outpace.errors import RequestError
from outpace.models.base import Target
from outpace.models.measured import dtype_name, kept, machine, store
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.types import CostCurve as CostCurve
from outpace.types import Draft, Drawn, Feed, Outcome, Verdict

Tick = Callable[[str, int], None]
"""Receives what is measured now, and how many rounds were finished since the last call."""

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (64, 256, 1024)
BATCHES = (1, 2, 4)
REPEAT = 11
LEVELS = 8
"""Deepest draft that is timed."""

_CHUNK = 256  # rows per pass while a context is read
_PERIOD = 24  # tokens after which the fixed text repeats itself, so that lookups find something
_DRAFT_CONTEXT = 192


def measure(
    target: Target,
    *,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] = BATCHES,
    repeat: int = REPEAT,
    progress: Tick | None = None,
) -> CostCurve:
    """Time passes over chains, with logits for every row.

    Args:
        target: any; its layout of rows counts as part of a pass.
        rows: row counts of one sequence; 1 is always among them.
        contexts: committed tokens; None takes those of CONTEXTS that the model has room for.
        batches: sequences with one row each; 1 is always among them.
        repeat: timed rounds, after one that is not counted.

    Raises:
        RequestError: a count below 1, a negative context, or one that does not fit the model.

    Cost: reads every context once per sequence of the largest batch, then ``repeat`` + 1 rounds.
    Memory: keys and values of all contexts at once, for the largest batch.
    """
    counts, sizes = _counts("rows", rows), _counts("batches", batches)
    lengths = _contexts(target, max(counts), contexts)
    if repeat < 1:
        raise RequestError(f"repeat must be at least 1, got {repeat}")
    tell = progress or (lambda part, step: None)
    points: list[Callable[[], float]] = []
    for length in lengths:
        tell(f"reading {length} tokens", 0)
        cache, slots = filled(target, length, sizes[-1], max(counts))
        points += [timed(target, cache, slots[:1], count) for count in counts]
        points += [timed(target, cache, slots[:size], 1) for size in sizes[1:]]
    tell("timing passes", 0)
    found = iter(medians(points, repeat, partial(tell, "timing passes")))
    of_rows, of_batches = [], []
    for _ in lengths:
        of_rows.append(tuple(next(found) for _ in counts))
        of_batches.append((of_rows[-1][0], *(next(found) for _ in sizes[1:])))
    return CostCurve(
        model=target.name,
        dtype=dtype_name(target.dtype),
        threads=torch.get_num_threads(),
        device=machine(target.device),
        rows_R=counts,
        context_C=lengths,
        seconds_CR=tuple(of_rows),
        batch_B=sizes,
        seconds_CB=tuple(of_batches),
    )


def curve_for(
    target: Target,
    *,
    measure_if_missing: bool,
    repeat: int = REPEAT,
    progress: Tick | None = None,
    note: Callable[[str], None] | None = None,
) -> CostCurve | None:
    """The cost curve of a target on this machine, with the threads that torch has now.

    Args:
        measure_if_missing: whether to measure, over the default points, and keep the result;
            otherwise the answer is None where nothing is known.
        note: told, in one line, of a file that cannot be used or written.
    """
    return kept(
        "passes",
        target,
        "",
        CostCurve.from_json,
        (lambda: measure(target, repeat=repeat, progress=progress)) if measure_if_missing else None,
        note,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCost:
    """What a draft costs by its levels, for one sequence."""

    spec: str
    seconds_L: tuple[float, ...]
    """Of a ``propose`` that may go 1, 2, ... levels deep; empty if the drafter never drafts."""
    pass_seconds_L: tuple[float, ...]
    """Of them, inside passes of the drafter's model."""
    passes_L: tuple[int, ...]
    """Passes of the drafter's model; 0 for one that has none."""
    depth_L: tuple[int, ...]
    """Levels that were really drafted; fewer than allowed where the drafter fell silent."""

    def __post_init__(self) -> None:
        tables = (self.seconds_L, self.pass_seconds_L, self.passes_L, self.depth_L)
        if len({len(table) for table in tables}) != 1 or min(self.seconds_L, default=1) <= 0:
            raise ValueError(f"need as many seconds, all above 0, as passes and depths: {tables}")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DraftCost:
        """Read what ``dataclasses.asdict`` gave, through JSON."""
        spec = data["spec"]
        tables = {name: tuple(data[name]) for name in cls.__slots__ if name != "spec"}
        return cls(spec=spec, **tables)

    @property
    def per_level(self) -> float:
        """Seconds per level of the deepest draft; of the whole call if it drafted nothing."""
        return self.seconds_L[-1] / max(1, self.depth_L[-1]) if self.seconds_L else 0.0


def measure_drafter(
    method: Method, target: Target, *, levels: int = LEVELS, repeat: int = REPEAT
) -> DraftCost:
    """Time ``propose`` with budgets of 1, 2, ... levels, greedy, on a text that repeats itself.

    Args:
        method: chains are timed up to ``levels`` whatever its budget, trees up to their depth.
        repeat: timed rounds, after one that is not counted.
    """
    drafter, budget = method.preferred.drafter, method.preferred.budget
    chain = budget.shape.parent_N is None
    deepest = 0 if budget.max_nodes == 0 else levels if chain else min(levels, budget.max_depth)
    room = target.max_positions - deepest - 1
    text = _text(target, min(_DRAFT_CONTEXT, room))
    cache = target.new_cache()
    slot = cache.open()
    state = drafter.begin(Request(prompt=text))
    try:
        fed = text[:-1]
        scored = target.score([Feed.chain(slot, fed, want=())], cache, taps=drafter.traits.taps)
        cache.keep(slot, range(len(fed)))
        drafter.observe(
            [state],
            [
                Outcome(
                    Draft(), scored.of(0), Verdict((), text[-1:]), fed, tuple(range(len(fed))), 0, forced=True
                )
            ],
        )
        coins = KeyedCoins(0, len(fed), Stream.DRAFT)
        warp = Warp(SamplingParams(temperature=0.0), text, frozenset(), target.vocab_size)
        inside: dict[int, list[float]] = {level: [] for level in range(1, deepest + 1)}
        passes, depth = dict.fromkeys(inside, 0), dict.fromkeys(inside, 0)

        def propose(level: int) -> float:
            nodes = level if chain else budget.max_nodes
            asked = replace(budget, max_depth=level, max_nodes=nodes)
            clock = drafter.clock
            seconds, count, start = clock.seconds, clock.count, now(target.device)
            row = DraftRow(state, text, asked, coins, warp, Drawn.CHOSEN, Lease(cache, slot))
            draft = drafter.propose([row])[0]
            spent = now(target.device) - start
            inside[level].append(clock.seconds - seconds)
            passes[level], depth[level] = clock.count - count, draft.levels
            return spent

        found = medians([partial(propose, level) for level in inside], repeat)
    finally:
        drafter.end(state)
    return DraftCost(
        spec=method.spec,
        seconds_L=tuple(found),
        pass_seconds_L=tuple(statistics.median(each[1:]) for each in inside.values()),
        passes_L=tuple(passes.values()),
        depth_L=tuple(depth.values()),
    )


def draft_cost_for(
    method: Method, target: Target, *, measure_if_missing: bool, note: Callable[[str], None] | None = None
) -> DraftCost | None:
    """What the drafts of a method cost on this machine; as ``curve_for``."""
    make = (lambda: measure_drafter(method, target)) if measure_if_missing else None
    return kept("drafts", target, method.spec, DraftCost.from_json, make, note)


def keep(target: Target, value: CostCurve | DraftCost, note: Callable[[str], None] | None = None) -> None:
    """Keep what was measured just now, over the default points, for ``*_for`` to find."""
    kind = {CostCurve: "passes", DraftCost: "drafts"}[type(value)]
    spec = value.spec if isinstance(value, DraftCost) else ""
    store(kind, target, spec, value, note)


def _counts(what: str, given: Iterable[int]) -> tuple[int, ...]:
    counts = sorted({1, *given})
    if counts[0] < 1:
        raise RequestError(f"{what} must be at least 1, got {counts[0]}")
    return tuple(counts)


def _contexts(target: Target, rows: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """The contexts to measure, each with room for ``rows`` more."""
    room = target.max_positions - rows
    lengths = tuple(sorted(set(CONTEXTS if given is None else given)))
    if given is None:
        lengths = tuple(length for length in lengths if length <= room) or (max(0, room),)
    if not lengths or lengths[0] < 0 or lengths[-1] > room:
        raise RequestError(
            f"contexts must be between 0 and {room}, since {target.name} has "
            f"{target.max_positions} positions and {rows} rows follow; got "
            f"{', '.join(map(str, lengths)) or 'none'}"
        )
    return lengths


def _text(target: Target, length: int) -> tuple[int, ...]:
    return tuple((37 * (i % _PERIOD) + 11) % target.vocab_size for i in range(length))


def filled(target: Target, length: int, size: int, rows: int) -> tuple[KVCache, tuple[int, ...]]:
    """A cache with ``size`` slots that hold a text, and room for ``rows`` more in each."""
    cache = target.new_cache(length + rows)
    slots = tuple(cache.open() for _ in range(size))
    text = _text(target, length)
    for i, slot in enumerate(slots):
        if i and length and cache.copies:
            cache.restore(slot, text, [cache.copy(slots[0], 0, length)])
            continue
        for start in range(0, length, _CHUNK):
            chunk = text[start : start + _CHUNK]
            target.score([Feed.chain(slot, chunk, want=())], cache)
            cache.keep(slot, range(len(chunk)))
    return cache, slots


def timed(
    target: Target,
    cache: KVCache,
    slots: Sequence[int],
    rows: int,
    clock: Callable[[torch.device], float] | None = None,
    logits: int | None = None,
) -> Callable[[], float]:
    """A pass to time; it leaves the cache as it was.

    Args:
        clock: None: the wall's.
        logits: last rows of each sequence whose logits are wanted; None: all.
    """
    tell = clock or now
    want = None if logits is None else tuple(range(rows)[-logits:])
    feeds = [Feed.chain(slot, _text(target, rows), want=want) for slot in slots]

    def run() -> float:
        start = tell(target.device)
        target.score(feeds, cache)
        seconds = tell(target.device) - start
        for slot in slots:
            cache.drop(slot)
        return seconds

    return run
