"""A cascade on a model: acceptance between its levels, its costs, and what they promise.

    found = measure(engine, "draft_model[model=M]+max_gram", prompts, max_new_tokens=64)
    found.predicted()      the best K of every kind, and its speed-up

One cascade with a generous K answers the prompts; a tally behind every verifier counts, for each
level of every reviewed draft, how far it was kept. Another one, with a token of every model, does
so for the lookup at the target: behind five tokens of a model it is hardly ever reached. Then every
lower level drafts alone, so that a cascade can be compared with the best of its members. Passes
are timed by rows (`cost.measure`) and scaled to what they took among the others; the host's share
is what else a step took.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from outpace.analysis import cost
from outpace.analysis.theory import Ladder, Prediction, best_alone, best_k, predict
from outpace.analysis.theory import break_even as break_even
from outpace.analysis.theory import closed as closed
from outpace.engine.engine import Engine
from outpace.errors import RequestError
from outpace.methods.cascade.check import check_levels as check_levels
from outpace.methods.cascade.drafter import Cascade
from outpace.methods.cascade.drafter import read_k as read_k
from outpace.methods.cascade.tally import Counts, Note, Part, note_parts, noted
from outpace.params import NEUTRAL, SamplingParams
from outpace.types import CostCurve, StepRecord

LENIENCES = (1.0, 2.0, 4.0)
"""Those that are tried where none is given."""
MODEL_QUOTA, LOOKUP_QUOTA, INNER_QUOTA = 5, 8, 3
"""K of the probes: of models and of the lookup for the target, and of models for models."""
_ROWS = (1, 2, 4, 8, 16, 32)
_REPEAT = 7


@dataclass(slots=True)
class _Passes:
    """What passes of one reviewer took in the probe."""

    count: int = 0
    rows: int = 0
    seconds: float = 0.0
    whole: float = 0.0
    """Of the steps, drafting and all."""

    def listen(self, record: StepRecord) -> None:
        if not record.prompt:
            self.count += 1
            self.rows += record.passed_rows
            self.seconds += record.pass_seconds.get("score", 0.0)
            self.whole += sum(record.seconds.values())


@dataclass(frozen=True, kw_only=True)
class Found:
    levels: str
    ladder: Ladder
    parts: Mapping[tuple[int, int], Part]
    names: tuple[str, ...]
    """Target, then levels."""
    alone: Mapping[int, Part] = field(default_factory=dict)
    """Level from 2 -> how its drafts were kept where nobody else drafted."""
    lenience: float = 1.0
    without: tuple[tuple[Mapping[tuple[int, int], Part], Mapping[int, Part]], ...] = ()
    """``parts`` and ``alone`` less one text, for every text."""

    def spread(self, k: Sequence[Sequence[int]]) -> float | None:
        """Standard error of a predicted speed-up, as a share of it: how far texts differ.

        By the jackknife; costs are taken as they are. None for a single text.
        """
        values = [
            replace(self, ladder=self._seen(parts), parts=parts, alone=alone).predict(k).speedup
            for parts, alone in self.without
        ]
        if len(values) < 2:
            return None
        return math.sqrt(len(values) - 1) * statistics.pstdev(values) / statistics.fmean(values)

    def _seen(self, parts: Mapping[tuple[int, int], Part]) -> Ladder:
        return replace(self.ladder, **_shares(parts, self.ladder.levels))

    def priced(self, costs: Mapping[int, float]) -> Found:
        """The same with costs by hand: level -> share of a pass of the target, whatever its rows.

        Models that are not named keep what a row of theirs was measured to take; a lookup is free.
        """
        plain = self.ladder.seconds[0](1.0)
        shares = [
            1.0,
            *(costs.get(i, cost_(1.0) / plain) for i, cost_ in enumerate(self.ladder.seconds[1:], 1)),
        ]
        lookup = costs.get(self.ladder.levels, 0.0) if self.ladder.lookup else 0.0
        fixed = [_always(share) for share in shares]
        return replace(self, ladder=replace(self.ladder, seconds=fixed, lookup_seconds=lookup))

    def predicted(self) -> dict[str, tuple[list[list[int]], Prediction]]:
        """Kind of cascade -> its best K and what that promises; every level alone is one."""
        kinds: dict[str, Callable[[int, int], bool]] = {
            "model alone": lambda reviewer, level: reviewer == 0 and level == 1,
            "vertical": lambda reviewer, level: level == reviewer + 1,
            "horizontal": lambda reviewer, level: reviewer == 0,
            "both": lambda reviewer, level: True,
        }
        if self.ladder.levels == 1:
            kinds = {"model alone": kinds["model alone"]}
        found = {name: best_k(self.ladder, allowed) for name, allowed in kinds.items()}
        for level in self.alone:
            found[f"{self.names[level]} alone"] = best_alone(self._only(level), level)
        return found

    def predict(self, k: Sequence[Sequence[int]]) -> Prediction:
        used = [i for i, quota in enumerate(k[0], 1) if quota]
        return predict(self._only(used[0]) if used[0] in self.alone and len(used) == 1 else self.ladder, k)

    def _only(self, level: int) -> Ladder:
        """The ladder as a level sees it that drafts alone."""
        part = self.alone[level]
        return replace(self.ladder, survival={(0, level): part.expected}, drafted={0: part.drafted})


def _shares(parts: Mapping[tuple[int, int], Part], lowest: int) -> dict[str, Any]:
    """What a ladder needs of these counts."""
    return {
        "survival": {pair: part.expected for pair, part in parts.items()},
        "drafted": {pair[0]: part.drafted for pair, part in parts.items() if pair[1] == lowest},
    }


def _always(share: float) -> Callable[[float], float]:
    return lambda rows: share


def text_of(k: Sequence[Sequence[int]]) -> str:
    """K as a cascade's spec has it, without what is 0 at the ends."""
    rows = []
    for row in k:
        short = list(row)
        while len(short) > 1 and not short[-1]:
            short.pop()
        rows.append(",".join(map(str, short)))
    while len(rows) > 1 and rows[-1] in ("", "0"):
        rows.pop()
    return "/".join(rows)


def spec_of(levels: str, k: Sequence[Sequence[int]], lenience: float = 1.0) -> str:
    more = "" if lenience == 1 else f" lenience={lenience:g}"
    return f"cascade[levels={levels} k={text_of(k)}{more}]"


def probe_k(models: int, lookup: bool) -> list[list[int]]:
    """A K that shows every level to every reviewer."""
    return [
        [MODEL_QUOTA if row == 0 else INNER_QUOTA] * (models - row) + [LOOKUP_QUOTA] * lookup
        for row in range(models + 1)
    ]


def measure(
    engine: Engine,
    levels: str,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    lenience: float = 1.0,
    base: Found | None = None,
    tick: Callable[[str, int], None] = lambda part, prompts: None,
) -> Found:
    """Answer prompts plainly and with a probing cascade, and time passes of every model.

    Args:
        max_new_tokens: per prompt, at least 2.
        base: found with another lenience on the same prompts: its costs are taken over, and what no
            inner review touches.
        tick: told what runs, and how many prompts were finished since the last call.

    Raises:
        RequestError: nothing was drafted.
    """
    params = SamplingParams(
        **NEUTRAL | {"temperature": temperature}, max_new_tokens=max_new_tokens, ignore_eos=True, seed=0
    )
    loaded = engine.method(f"cascade[levels={levels}]").preferred.drafter
    assert isinstance(loaded, Cascade)
    k = probe_k(len(loaded.models), loaded.lookup is not None)
    method = engine.method(spec_of(levels, k, lenience))
    probe = method.preferred.drafter
    assert isinstance(probe, Cascade)
    lookup = len(probe.models) + 1
    tail_k = [[1] * len(probe.models) + [LOOKUP_QUOTA]]
    probed = probe.lookup is not None and base is None
    tail = engine.method(spec_of(levels, tail_k, lenience)) if probed else method
    singles = {}
    for number in range(2, lookup + (probe.lookup is not None)) if base is None else ():
        row = [0] * (number - 1) + [LOOKUP_QUOTA if number == lookup else MODEL_QUOTA]
        singles[number] = ([row], engine.method(spec_of(levels, [row], lenience)))
    tables: list[dict[tuple[int, int], Part]] = [defaultdict(Part) for _ in range(3)]
    parts, tails, lone = tables
    passes = [_Passes() for _ in range(len(probe.models) + 1)]
    alone = _Passes()
    seen = [Counts({}, {}, {})]
    """After so many texts."""

    for spec in ("none", method.spec):  # the first answers pay for what is set up on the way
        engine.generate(list(prompts[0]), params, drafter=spec, reproducible=False)
    notes: dict[Any, Note] = {one: note_parts(lone, 0, own_k, probe) for own_k, one in singles.values()}
    notes |= {tail: note_parts(tails, 0, tail_k, probe), method: note_parts(parts, 0, k, probe)}
    notes |= {level: note_parts(parts, level.number, k, probe) for level in probe.models}
    with noted(notes), _listening(probe, passes[1:]):
        for prompt in prompts:
            tick("probing", 0)
            if base is None:
                _run(engine, "none", prompt, params, alone)
            _run(engine, method.spec, prompt, params, passes[0])
            if tail is not method:
                _run(engine, tail.spec, prompt, params, _Passes())
            for _, one in singles.values():
                _run(engine, one.spec, prompt, params, _Passes())
            seen.append(Counts(*copy.deepcopy([dict(table) for table in tables])))
            tick("probing", 1)
    if not parts:
        raise RequestError(
            f"{method.spec} drafted nothing in {len(prompts)} answers of {max_new_tokens} tokens; "
            "give more, or longer ones"
        )
    names = (engine.target.name, *(level.model.name for level in probe.models))
    if probe.lookup is not None:
        names = (*names, type(probe.lookup.drafter).__name__)
    if base is not None:
        seconds = base.ladder.seconds
    else:
        context = sum(len(p) for p in prompts) // len(prompts) + max_new_tokens // 2
        seconds = _costs(_curves(engine, probe, context, tick), context, passes, alone)
    parts_all, alone_all = seen[-1].joined(lookup, None if base is None else (base.parts, base.alone))
    ladder = Ladder(
        models=len(probe.models),
        lookup=probe.lookup is not None,
        seconds=seconds,
        **_shares(parts_all, lookup),
    )
    return Found(
        levels=levels,
        ladder=ladder,
        parts=parts_all,
        names=names,
        alone=alone_all,
        lenience=lenience,
        without=tuple(
            seen[-1].less(before, after).joined(lookup, None if base is None else base.without[i])
            for i, (before, after) in enumerate(pairwise(seen))
        ),
    )


@contextmanager
def _listening(probe: Cascade, passes: Sequence[_Passes]) -> Iterator[None]:
    """Time the passes of every model of a cascade."""
    for level, own in zip(probe.models, passes, strict=True):
        level.machine.listeners = (own.listen,)
    try:
        yield
    finally:
        for level in probe.models:
            level.machine.listeners = ()


def _curves(
    engine: Engine, probe: Cascade, context: int, tick: Callable[[str, int], None]
) -> list[CostCurve]:
    """Passes of every model, timed."""
    curves = []
    for model in (engine.target, *(level.model for level in probe.models)):
        tick(f"timing {model.name}", 0)
        room = model.max_positions - max(_ROWS)
        curves.append(
            cost.measure(model, rows=_ROWS, contexts=(min(context, room),), batches=(1,), repeat=_REPEAT)
        )
    return curves


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """How one drafter did on some prompts. Prompts do not count, nor does the time in which the models
    of a cascade read them: for short answers to long prompts the gain is smaller.
    """

    tokens: int
    spent: float  # seconds
    plain: tuple[int, float]
    """Tokens and seconds of plain decoding."""
    made: tuple[int, ...]
    """Passes of the target, then of every model of the cascade."""

    def __add__(self, other: Measured) -> Measured:
        """As on all prompts of the two."""
        return Measured(
            tokens=self.tokens + other.tokens,
            spent=self.spent + other.spent,
            plain=(self.plain[0] + other.plain[0], self.plain[1] + other.plain[1]),
            made=tuple(a + b for a, b in zip(self.made, other.made, strict=True)),
        )

    @property
    def speedup(self) -> float:
        """Over plain decoding, in seconds."""
        return self.plain[1] / self.plain[0] / self.seconds

    @property
    def emitted(self) -> float:
        """Tokens per pass of the target."""
        return self.tokens / self.made[0]

    @property
    def seconds(self) -> float:
        """Per token."""
        return self.spent / self.tokens

    @property
    def passes(self) -> tuple[float, ...]:
        """Of every model of the cascade, per pass of the target."""
        return tuple(count / self.made[0] for count in self.made[1:])

    def standard(self, costs: Sequence[float]) -> float:
        """The speed-up if a pass of the target costs 1, and one of each model what is said here."""
        spent = sum(cost_ * made for cost_, made in zip(costs, self.passes, strict=False))
        return self.emitted / (1 + spent)


def speedup(
    engine: Engine,
    specs: Sequence[str],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    tick: Callable[[str, int], None] = lambda part, prompts: None,
) -> list[Measured]:
    """Measure drafters against plain decoding; all run in turn on every prompt."""
    params = SamplingParams(
        **NEUTRAL | {"temperature": temperature}, max_new_tokens=max_new_tokens, ignore_eos=True, seed=0
    )
    spent = {spec: _Passes() for spec in ("none", *specs)}
    tokens = dict.fromkeys(spent, 0)
    below: dict[str, list[_Passes]] = {spec: [] for spec in spent}
    for spec in spent:  # the first answers pay for what is set up on the way
        engine.generate(list(prompts[0]), params, drafter=spec, reproducible=False)
        drafter = engine.method(spec).preferred.drafter
        for level in drafter.models if isinstance(drafter, Cascade) else ():
            own = _Passes()
            below[spec].append(own)
            level.machine.listeners = (own.listen,)
    try:
        for prompt in prompts:
            for spec, passes in spent.items():
                tokens[spec] += _run(engine, spec, prompt, params, passes) - 1
            tick("measuring", 1)
    finally:
        for spec in spent:
            drafter = engine.method(spec).preferred.drafter
            for level in drafter.models if isinstance(drafter, Cascade) else ():
                level.machine.listeners = ()
    plain = tokens["none"], spent["none"].whole
    return [
        Measured(
            tokens=tokens[spec],
            spent=spent[spec].whole,
            plain=plain,
            made=(spent[spec].count, *(own.count for own in below[spec])),
        )
        for spec in specs
    ]


def _run(engine: Engine, spec: str, prompt: Sequence[int], params: SamplingParams, passes: _Passes) -> int:
    """Answer a prompt; how many tokens that were."""
    engine.listeners.append(passes.listen)
    try:
        answer = engine.generate(list(prompt), params, drafter=spec, reproducible=False)
        return len(answer.tokens)
    finally:
        engine.listeners.remove(passes.listen)


def _costs(
    curves: Sequence[CostCurve], context: int, passes: Sequence[_Passes], alone: _Passes
) -> list[Callable[[float], float]]:
    """Seconds of a step by rows: a pass as it was among others, and the host's work."""
    inside = sum(own.seconds for own in passes)
    steps = sum(own.count for own in passes)
    host = max(0.0, passes[0].whole - inside) / max(1, steps)

    def step(curve: CostCurve, own: _Passes) -> Callable[[float], float]:
        rows = max(1.0, own.rows / max(1, own.count))
        usual = curve.seconds(rows, context)
        scale = own.seconds / max(1, own.count) / usual if own.count else 1.0
        return lambda n: host + scale * curve.seconds(max(1.0, n), context)

    plain = alone.whole / max(1, alone.count)
    first = step(curves[0], passes[0])
    found: list[Callable[[float], float]] = [lambda n: plain if n <= 1 else first(n)]
    return found + [step(c, own) for c, own in zip(curves[1:], passes[1:], strict=True)]


def as_json(found: Found) -> dict[str, Any]:
    return {
        "levels": found.levels,
        "names": list(found.names),
        "acceptance": [
            {
                "reviewer": found.names[r],
                "level": found.names[i],
                "drafts": part.drafts,
                "kept": list(part.survival[1:]),
                "drafted": list(part.drafted[1:]),
            }
            for (r, i), part in sorted(found.parts.items())
        ],
        "milliseconds": [
            {"model": found.names[r], **{str(n): 1e3 * cost_(n) for n in (1, 4, 8, 16)}}
            for r, cost_ in enumerate(found.ladder.seconds)
        ],
    }
