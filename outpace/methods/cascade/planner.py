"""A cascade on a model: acceptance between its levels, its costs, and what they promise.

    found = measure(engine, "draft_model[model=M]+max_gram", prompts, max_new_tokens=64)
    found.predicted()      the best K of every kind, and its speed-up

Cascades answer the prompts (probes.py). Passes are timed by rows (`cost.measure`) and scaled to what
they took among the others; the host's share is what else a step took.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from outpace.analysis import cost
from outpace.analysis.theory import Ladder, Prediction, best_alone, best_k, predict
from outpace.analysis.theory import break_even as break_even
from outpace.analysis.theory import closed as closed
from outpace.drafters.parts import split_parts
from outpace.engine.engine import Engine
from outpace.errors import RequestError
from outpace.methods.cascade.check import check_levels as check_levels
from outpace.methods.cascade.drafter import Cascade
from outpace.methods.cascade.drafter import read_k as read_k
from outpace.methods.cascade.probes import Passes, listening, load_probes, run, watched
from outpace.methods.cascade.probes import spec_of as spec_of
from outpace.methods.cascade.probes import text_of as text_of
from outpace.methods.cascade.tally import Part
from outpace.params import NEUTRAL, SamplingParams
from outpace.types import CostCurve

LENIENCES = (1.0, 2.0, 4.0)
"""Those that are tried where none is given."""
_ROWS = (1, 2, 4, 8, 16, 32)
_REPEAT = 7


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
    params = _params(max_new_tokens, temperature)
    probes = load_probes(engine, levels, lenience, anew=base is None)
    probe = probes.cascade
    passes, alone = [Passes() for _ in range(len(probe.models) + 1)], Passes()
    seen = watched(engine, probes, prompts, params, passes, alone if base is None else None, tick)
    if not seen[-1].parts:
        raise RequestError(
            f"{probes.whole[1].spec} drafted nothing in {len(prompts)} answers of {max_new_tokens} tokens; "
            "give more, or longer ones"
        )
    names = (engine.target.name, *(level.model.name for level in probe.models))
    if probe.lookup is not None:
        names = (*names, split_parts(levels, "a cascade")[-1].name)
    if base is not None:
        seconds = base.ladder.seconds
    else:
        context = sum(len(p) for p in prompts) // len(prompts) + max_new_tokens // 2
        seconds = _costs(_curves(engine, probe, context, tick), context, passes, alone)
    lookup = len(probe.models) + 1
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


def _params(max_new_tokens: int, temperature: float) -> SamplingParams:
    """How every answer is drawn here: all equally long, the same ones each time."""
    return SamplingParams(
        **NEUTRAL | {"temperature": temperature}, max_new_tokens=max_new_tokens, ignore_eos=True, seed=0
    )


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
    of a cascade read them. For short answers to long prompts the gain is smaller.
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
    params = _params(max_new_tokens, temperature)
    spent = {spec: Passes() for spec in ("none", *specs)}
    tokens = dict.fromkeys(spent, 0)
    below: dict[str, list[Passes]] = {spec: [] for spec in spent}
    with ExitStack() as stack:
        for spec in spent:  # the first answers pay for what is set up on the way
            engine.generate(list(prompts[0]), params, drafter=spec, reproducible=False)
            drafter = engine.method(spec).preferred.drafter
            if isinstance(drafter, Cascade):
                below[spec] = [Passes() for _ in drafter.models]
                stack.enter_context(listening(drafter, below[spec]))
        for prompt in prompts:
            for spec, passes in spent.items():
                tokens[spec] += run(engine, spec, prompt, params, passes) - 1
            tick("measuring", 1)
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


def _costs(
    curves: Sequence[CostCurve], context: int, passes: Sequence[Passes], alone: Passes
) -> list[Callable[[float], float]]:
    """Seconds of a step by rows: a pass as it was among others, and the host's work."""
    inside = sum(own.seconds for own in passes)
    steps = sum(own.count for own in passes)
    host = max(0.0, passes[0].whole - inside) / max(1, steps)

    def step(curve: CostCurve, own: Passes) -> Callable[[float], float]:
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
