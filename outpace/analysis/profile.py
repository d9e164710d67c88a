"""What drafters are worth on this machine: where `auto` and the policies start.

    profile = measure(engine, asked, specs, curve, max_new_tokens=64)
    save(engine.target, profile)

Drafters answer the same prompts in turns, each with its own budget. From their steps come what a
draft costs and what is kept of it by depth. So does the speed-up to expect if drafts were cut at depth d:

    tokens(d)  = sum over steps of 1 + min(accepted, d)
    seconds(d) = sum over steps of a pass over 1 + nodes(d) rows, d levels of drafting, and the rest

Passes are priced by the cost curve, times one factor by which plain steps differed from it. A draft
that is cut is taken to keep what the whole one kept so far. That it would have been followed by
other drafts is left out.

Files lie beside those of the cost curves, and like them are replaced as a whole.

Shape letters: D depths of a draft, from 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import torch

from outpace import registry
from outpace.engine.engine import Engine
from outpace.engine.method import Method
from outpace.errors import OutpaceError, RequestError
from outpace.models.base import Target
from outpace.models.measured import dtype_name, machine, store
from outpace.params import NEUTRAL, SamplingParams
from outpace.types import CostCurve, KnownDrafter, StepRecord

PLAIN = "none"
SHORTEST = 8
"""Fewest new tokens that tell anything."""
STALL = 4.0
"""Times the median step of an answer beyond which a step's time is the machine's."""
_DEEPEST = 32  # policies weigh no deeper
_WARM_UP = 8  # tokens
_NOISE = 0.03
"""Share of a speed-up that timing may add to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    spec: str
    speedup: float
    """Decode tokens per second over those of plain decoding, mean over prompts, as measured. What
    steps took beyond STALL times their answer's median step is left out on both sides."""
    mean_emitted: float
    drafted: int
    accepted: int
    previewed: bool
    """Whether it says what it would propose; policies then go by that."""
    known: KnownDrafter
    expected_D: tuple[float, ...]
    """Speed-up expected of drafts of at most 1, 2, ... levels, mean over prompts; empty if it never
    drafted."""
    disturbed: int = 0
    """Answers left out of ``speedup``. They gained more than tokens per pass allow, also when repeated:
    something else slowed the plain ones."""

    @property
    def best(self) -> tuple[int, float]:
        """Depth at which drafts are best cut, and the speed-up expected; (0, 1.0): no drafts."""
        depth = max(range(len(self.expected_D)), key=lambda d: self.expected_D[d], default=None)
        if depth is None or self.expected_D[depth] <= 1.0:
            return 0, 1.0
        return depth + 1, self.expected_D[depth]


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What was learned of all drafters, and on what."""

    model: str
    digest: str
    dtype: str
    threads: int
    device: str
    workload: str
    prompts: int
    max_new_tokens: int
    plain_tokens_per_second: float
    """Of decoding without a drafter."""
    pass_factor: float
    """Seconds of plain passes, in those of the cost curve."""
    drafters: tuple[Learned, ...]
    """Fastest first."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Drafter -> why it took no part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    ids: tuple[int, ...]
    reference: tuple[int, ...] | None = None


def available(engine: Engine) -> tuple[list[str], dict[str, str]]:
    """Drafters that this model can run without settings, and why the others cannot.

    Those made of other drafters are left out without a word: what they choose from is measured.
    """
    specs: list[str] = []
    left_out: dict[str, str] = {}
    for row in registry.entries("drafter"):
        if row.name == PLAIN or row.family == "compose":
            continue
        try:
            specs.append(engine.method(row.name).spec)
        except OutpaceError as error:
            left_out[row.name] = str(error)
    return specs, left_out


def measure(
    engine: Engine,
    asked: Sequence[Asked],
    specs: Sequence[str],
    curve: CostCurve,
    *,
    max_new_tokens: int,
    workload: str = "",
    left_out: Mapping[str, str] | None = None,
    tick: Callable[[str, int], None] = lambda part, answers: None,
) -> Profile:
    """Answer prompts with every drafter and with none, in turns, and learn from all steps.

    Args:
        asked: prompts that leave room for the answers.
        max_new_tokens: length of every answer; an end of sequence does not end it.
        workload: where the prompts are from, for the record.
        left_out: drafters that take no part, and why, for the record.
        tick: told who answers, and how many answers were finished since the last call.

    Raises:
        RequestError: no prompt, no drafter, or answers too short to tell anything.

    Cost: an answer of every drafter to every prompt, after a short one that does not count. What was
    disturbed is answered once more, and then left out of the speed-up.
    """
    if not asked or not specs:
        raise RequestError(f"need a prompt and a drafter, got {len(asked)} and {len(specs)}")
    if max_new_tokens < SHORTEST:
        raise RequestError(f"max_new_tokens must be at least {SHORTEST}, got {max_new_tokens}")
    answers = _in_turns(engine, asked, [PLAIN, *dict.fromkeys(specs)], max_new_tokens, tick)
    plain = answers.pop(PLAIN)
    left_out = dict(left_out or {})
    for name, own in [*answers.items()]:
        if all(_disturbed(one, other) for one, other in zip(own, plain, strict=True)):
            left_out[name] = "something else used the machine during each of its answers; tune again"
            del answers[name]
    factor = _pass_factor(plain, curve)
    learned = [
        learn(engine.method(name), own, plain, curve, factor, max_new_tokens) for name, own in answers.items()
    ]
    target = engine.target
    return Profile(
        model=target.name,
        digest=target.digest,
        dtype=dtype_name(target.dtype),
        threads=torch.get_num_threads(),
        device=machine(target.device),
        workload=workload,
        prompts=len(asked),
        max_new_tokens=max_new_tokens,
        plain_tokens_per_second=mean(answer.rate for answer in plain),
        pass_factor=factor,
        drafters=tuple(sorted(learned, key=lambda one: -one.speedup)),
        left_out=left_out,
    )


def _in_turns(
    engine: Engine,
    asked: Sequence[Asked],
    names: Sequence[str],
    max_new_tokens: int,
    tick: Callable[[str, int], None],
) -> dict[str, list[_Answer]]:
    """Answers of all drafters to every prompt, each beginning in turn; disturbed ones once more."""
    answers: dict[str, list[_Answer]] = {name: [] for name in names}
    for name in names:
        tick(f"warm-up: {name}", 0)
        _answer(engine, name, asked[0], _WARM_UP)
    for turn, one in enumerate(asked):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            tick(name, 0)
            answers[name].append(_answer(engine, name, one, max_new_tokens))
            tick(name, 1)
        for name in (name for name in names if _disturbed(answers[name][-1], answers[PLAIN][-1])):
            for again in (PLAIN, name):
                answers[again][-1] = _answer(engine, again, one, max_new_tokens)
    return answers


@dataclass(frozen=True, slots=True)
class _Answer:
    """The steps of one answer, prompts apart, and decode tokens per second less stalls."""

    steps: Sequence[StepRecord]
    rate: float

    @property
    def emitted(self) -> float:
        return mean(len(step.rows[0].emitted) for step in self.steps) if self.steps else 1.0


def _pass_factor(plain: Sequence[_Answer], curve: CostCurve) -> float:
    """Seconds of plain passes, in those of the curve."""
    return median(
        step.seconds["score"] / curve.seconds(step.passed_rows, step.context)
        for answer in plain
        for step in answer.steps
    )


def _disturbed(own: _Answer, plain: _Answer) -> bool:
    """Whether an answer gained more over the plain one than its tokens per pass allow."""
    return own is not plain and own.rate > plain.rate * own.emitted * (1 + _NOISE)


def _answer(engine: Engine, spec: str, one: Asked, max_new_tokens: int) -> _Answer:
    steps: list[StepRecord] = []

    def listen(record: StepRecord) -> None:
        if not record.prompt:
            steps.append(record)

    # Neutral, whatever the model recommends: acceptance is that of its own likeliest tokens.
    params = SamplingParams(**NEUTRAL, max_new_tokens=max_new_tokens, ignore_eos=True)
    with engine.listening(listen):
        result = engine.generate(list(one.ids), params, drafter=spec, reference=one.reference)
    spent = [sum(step.seconds.values()) for step in steps]
    most = STALL * median(spent) if spent else 0.0  # what steps took beyond was the machine's own
    between = result.seconds - result.prefill_seconds - sum(spent)
    seconds = sum(min(most, one) for one in spent) + max(0.0, between)
    return _Answer(steps, (len(result.tokens) - 1) / seconds if steps else 0.0)


def learn(
    method: Method,
    answers: Sequence[_Answer],
    plain: Sequence[_Answer],
    curve: CostCurve,
    factor: float,
    max_new_tokens: int,
) -> Learned:
    """What the answers of a drafter tell about it.

    Args:
        factor: seconds of passes here, in those of the curve.
        max_new_tokens: of every answer; near its end drafts are cut, which is nobody's fault.
    """
    pairs = [*zip(answers, plain, strict=True)]
    sure = [pair for pair in pairs if not _disturbed(*pair)]
    steps = [step for answer in answers for step in answer.steps]
    rows = [step.rows[0] for step in steps]
    asked = min(method.preferred.budget.max_depth, method.preferred.budget.max_nodes, _DEEPEST)
    previewed = method.preferred.drafter.traits.previews
    kept_D, tried_D = _by_depth(answers, asked, max_new_tokens, previewed)
    known = KnownDrafter(kept_D=kept_D, tried_D=tried_D, **_prices(steps))
    deepest = min(_DEEPEST, max((row.depth for row in rows), default=0))
    rest = median(map(_rest, steps))
    plain_rest = median(_rest(step) for answer in plain for step in answer.steps)

    def expected(answer: _Answer, depth: int) -> float:
        """Speed-up of one answer, were drafts cut at a depth."""
        tokens = sum(1 + min(step.rows[0].accepted, depth) for step in answer.steps)
        alone = mean(factor * curve.seconds(1, step.context) for step in answer.steps)
        seconds = _seconds(answer.steps, curve, factor, known, rest, depth)
        return tokens * (alone + plain_rest) / seconds

    return Learned(
        spec=method.spec,
        speedup=mean(own.rate / other.rate for own, other in sure or pairs),
        disturbed=len(pairs) - len(sure),
        mean_emitted=sum(len(row.emitted) for row in rows) / len(rows),
        drafted=sum(row.drafted for row in rows),
        accepted=sum(row.accepted for row in rows),
        previewed=previewed,
        known=known,
        expected_D=tuple(
            mean(expected(answer, depth) for answer in answers) for depth in range(1, deepest + 1)
        ),
    )


def _by_depth(
    answers: Sequence[_Answer], asked: int, max_new_tokens: int, previewed: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Drafts that kept a token at each depth, and those that were tried there.

    Silence where a level was asked for is a level that was not kept, unless the drafter says
    beforehand when it is silent (``previewed``). What a stop cut off, and levels for which the answer
    had no room left, teach nothing.
    """
    kept, tried = [0.0] * asked, [0.0] * asked
    for answer in answers:
        new_tokens = 1  # the prompt's own
        for step in answer.steps:
            row = step.rows[0]
            room = min(asked, max_new_tokens - new_tokens - 1)
            for level in range(min(row.accepted, asked)):
                kept[level] += 1.0
                tried[level] += 1.0
            if row.accepted < (row.depth if previewed else room) and not row.censored:
                tried[row.accepted] += 1.0
            new_tokens += len(row.emitted)
    known = next((level for level in range(asked) if not tried[level]), asked)
    return tuple(kept[:known]), tuple(tried[:known])


def _prices(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Seconds of a draft: of the call, where no model runs, else of each level."""
    levels = [step.seconds["draft"] / step.draft_levels for step in steps if step.draft_levels]
    if levels:
        return {"call": 0.0, "level": median(levels)}
    return {"call": median(step.seconds["draft"] for step in steps), "level": 0.0}


def _rest(step: StepRecord) -> float:
    return sum(step.seconds[verb] for verb in ("plan", "judge", "commit"))


def _seconds(
    steps: Sequence[StepRecord], curve: CostCurve, factor: float, known: KnownDrafter, rest: float, depth: int
) -> float:
    """Of the steps, were drafts cut at a depth; the nodes of a tree are spread over its levels."""
    total = 0.0
    for step in steps:
        row = step.rows[0]
        riders = step.passed_rows - 1 - row.drafted
        nodes = math.ceil(row.drafted * min(depth, row.depth) / row.depth) if row.depth else 0
        total += factor * curve.seconds(1 + nodes + riders, step.context)
        total += rest + known.call + known.level * min(step.draft_levels, depth)
    return total


def save(target: Target, profile: Profile, note: Callable[[str], None] | None = None) -> Path:
    """Keep a profile for ``engine.recall``. Returns its file, which a note says cannot be written."""
    return store("profile", target, "", profile, note)
