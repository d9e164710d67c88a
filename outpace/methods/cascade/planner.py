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

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outpace.analysis import cost
from outpace.analysis.theory import Ladder, Prediction, best_alone, best_k, predict
from outpace.analysis.theory import break_even as break_even
from outpace.analysis.theory import closed as closed
from outpace.coins import Coins
from outpace.engine.engine import Engine
from outpace.errors import RequestError
from outpace.methods.cascade.check import check_levels as check_levels
from outpace.methods.cascade.drafter import Cascade
from outpace.methods.cascade.drafter import read_k as read_k
from outpace.methods.cascade.guesses import Origin
from outpace.params import SamplingParams
from outpace.types import ROOT, CostCurve, Draft, StepRecord, Verdict
from outpace.verifiers.base import TargetLaws, Verifier

MODEL_QUOTA, LOOKUP_QUOTA, INNER_QUOTA = 5, 8, 3
"""K of the probes: of models and of the lookup for the target, and of models for models."""
_ROWS = (1, 2, 4, 8, 16, 32)
_REPEAT = 7


@dataclass(slots=True)
class Part:
    """How one level's part of the drafts for one reviewer was kept, by place from 1."""

    asked: list[int] = field(default_factory=lambda: [0])
    """Drafts whose place was reached, and for which the level was to have a guess."""
    kept: list[int] = field(default_factory=lambda: [0])
    drafts: int = 0
    long: list[int] = field(default_factory=lambda: [0])
    """Drafts with a guess there, reached or not."""

    def add(self, size: int, length: int, kept: int | None) -> None:
        """Count a draft.

        Args:
            kept: of them; None if what stood before them was not kept whole.
        """
        for table in (self.asked, self.kept, self.long):
            table.extend([0] * (size + 1 - len(table)))
        self.drafts += 1
        for place in range(1, length + 1):
            self.long[place] += 1
        if kept is not None:
            for place in range(1, min(size, kept + 1) + 1):
                self.asked[place] += 1
                self.kept[place] += place <= kept

    @property
    def survival(self) -> tuple[float, ...]:
        """S[j], as far as any draft came."""
        out = [1.0]
        for asked, kept in zip(self.asked[1:], self.kept[1:], strict=True):
            if asked == 0:
                break
            out.append(out[-1] * kept / asked)
        return tuple(out) if len(out) > 1 else (1.0, 0.0)

    @property
    def drafted(self) -> tuple[float, ...]:
        return (1.0, *(n / max(1, self.drafts) for n in self.long[1:]))


class Tally(Verifier):
    """Another verifier, and a note of what it decided."""

    def __init__(self, real: Verifier, note: Callable[[Draft, Verdict], None]) -> None:
        self._real, self._note = real, note
        self.draws = real.draws

    def check(self, draft: Draft) -> None:
        self._real.check(draft)

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        return self._real.lossless

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        verdict = self._real.judge(draft, laws, coins, want_laws=want_laws)
        self._note(draft, verdict)
        return verdict


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
        return replace(self.ladder, survival={(0, level): part.survival}, drafted={0: part.drafted})


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
    tick: Callable[[str, int], None] = lambda part, prompts: None,
) -> Found:
    """Answer prompts plainly and with a probing cascade, and time passes of every model.

    Args:
        max_new_tokens: per prompt, at least 2.
        tick: told what runs, and how many prompts were finished since the last call.

    Raises:
        RequestError: nothing was drafted.
    """
    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, ignore_eos=True, seed=0)
    loaded = engine.method(f"cascade[levels={levels}]").preferred.drafter
    assert isinstance(loaded, Cascade)
    k = probe_k(len(loaded.models), loaded.lookup is not None)
    method = engine.method(spec_of(levels, k, lenience))
    probe = method.preferred.drafter
    assert isinstance(probe, Cascade)
    lookup = len(probe.models) + 1
    tail_k = [[1] * len(probe.models) + [LOOKUP_QUOTA]]
    tail = engine.method(spec_of(levels, tail_k, lenience)) if probe.lookup is not None else method
    singles = {}
    for number in range(2, lookup + (probe.lookup is not None)):
        row = [0] * (number - 1) + [LOOKUP_QUOTA if number == lookup else MODEL_QUOTA]
        singles[number] = ([row], engine.method(spec_of(levels, [row], lenience)))
    lone: dict[tuple[int, int], Part] = defaultdict(Part)
    parts: dict[tuple[int, int], Part] = defaultdict(Part)
    tails: dict[tuple[int, int], Part] = defaultdict(Part)
    passes = [_Passes() for _ in range(len(probe.models) + 1)]
    alone = _Passes()

    for spec in ("none", method.spec):  # the first answers pay for what is set up on the way
        engine.generate(list(prompts[0]), params, drafter=spec, reproducible=False)
    usual = {one: one.verifier for one in (tail, method, *(one for _, one in singles.values()))}
    for own_k, one in singles.values():
        one.verifier = Tally(usual[one], _note(lone, 0, own_k, probe))
    tail.verifier = Tally(tail.verifier, _note(tails, 0, tail_k, probe))
    method.verifier = Tally(usual[method], _note(parts, 0, k, probe))
    for level, own in zip(probe.models, passes[1:], strict=True):
        level.verifier = Tally(level.verifier, _note(parts, level.number, k, probe))
        level.machine.listeners = (own.listen,)
    try:
        for prompt in prompts:
            tick("probing", 0)
            _run(engine, "none", prompt, params, alone)
            _run(engine, method.spec, prompt, params, passes[0])
            if tail is not method:
                _run(engine, tail.spec, prompt, params, _Passes())
            for _, one in singles.values():
                _run(engine, one.spec, prompt, params, _Passes())
            tick("probing", 1)
    finally:
        for one, verifier in usual.items():
            one.verifier = verifier
        for level in probe.models:
            assert isinstance(level.verifier, Tally)
            level.verifier = level.verifier._real
            level.machine.listeners = ()
    if not parts:
        raise RequestError(
            f"{method.spec} drafted nothing in {len(prompts)} answers of {max_new_tokens} tokens; "
            "give more, or longer ones"
        )
    if (0, lookup) in tails:
        parts[0, lookup] = tails[0, lookup]
    context = sum(len(p) for p in prompts) // len(prompts) + max_new_tokens // 2
    curves = []
    for model in (engine.target, *(level.model for level in probe.models)):
        tick(f"timing {model.name}", 0)
        room = model.max_positions - max(_ROWS)
        curves.append(
            cost.measure(model, rows=_ROWS, contexts=(min(context, room),), batches=(1,), repeat=_REPEAT)
        )
    ladder = Ladder(
        survival={pair: part.survival for pair, part in parts.items()},
        models=len(probe.models),
        lookup=probe.lookup is not None,
        seconds=_costs(curves, context, passes, alone),
        drafted={pair[0]: part.drafted for pair, part in parts.items() if pair[1] == lookup},
    )
    names = (engine.target.name, *(level.model.name for level in probe.models))
    if probe.lookup is not None:
        names = (*names, type(probe.lookup.drafter).__name__)
    alone_parts = {number: lone[0, number] for number in singles if (0, number) in lone}
    return Found(
        levels=levels, ladder=ladder, parts=dict(parts), names=names, alone=alone_parts, lenience=lenience
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """How one drafter did on some prompts. Prompts do not count, nor does the time in which the models
    of a cascade read them: for short answers to long prompts the gain is smaller.
    """

    speedup: float
    """Over plain decoding, in seconds."""
    emitted: float
    """Tokens per pass of the target."""
    seconds: float
    """Per token."""
    passes: tuple[float, ...]
    """Of every model of the cascade, per pass of the target."""

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
    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, ignore_eos=True, seed=0)
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
    seconds = {spec: passes.whole / tokens[spec] for spec, passes in spent.items()}
    return [
        Measured(
            speedup=seconds["none"] / seconds[spec],
            emitted=tokens[spec] / spent[spec].count,
            seconds=seconds[spec],
            passes=tuple(own.count / spent[spec].count for own in below[spec]),
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


def _note(
    parts: dict[tuple[int, int], Part], reviewer: int, k: Sequence[Sequence[int]], probe: Cascade
) -> Callable[[Draft, Verdict], None]:
    """Count one reviewer's verdicts, level by level."""
    lowest = len(probe.models) + 1
    totals = [sum(k[reviewer][: i + 1]) for i in range(len(k[reviewer]))]

    def note(draft: Draft, verdict: Verdict) -> None:
        if not len(draft) and not (probe.lookup and reviewer == lowest - 1):
            return
        chain = _chain(draft)
        memo = draft.memo
        made = memo.level_N if isinstance(memo, Origin) else (0,) * len(chain)
        kept = len(verdict.kept)
        before = 0
        for offset, total in enumerate(totals):
            level = reviewer + 1 + offset
            name = 0 if probe.lookup is not None and level == lowest else level
            length = sum(who == name for who in made)
            size = max(total - before, length) if name == 0 else length
            if size:
                got = min(length, kept - before) if kept >= before else None
                parts[reviewer, level].add(size, length, got)
            before += length

    return note


def _chain(draft: Draft) -> list[int]:
    nodes, node = [], ROOT
    while (groups := draft.groups_of.get(node)) is not None:
        node = groups[0].nodes[0]
        nodes.append(node)
    return nodes


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
