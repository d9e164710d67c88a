"""Cascades that answer prompts so that acceptance between all their levels is seen.

One cascade with a generous K answers; a tally behind every verifier counts, for each level of every
reviewed draft, how far it was kept. Another one, with a token of every model, does so for the lookup
at the target. Behind five tokens of a model it is hardly ever reached. Then every lower level drafts
alone, so that a cascade can be compared with the best of its members.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from outpace.engine.engine import Engine
from outpace.engine.method import Method
from outpace.methods.cascade.drafter import Cascade
from outpace.methods.cascade.tally import Counts, Note, Part, note_parts, noted
from outpace.params import SamplingParams
from outpace.types import StepRecord

K = list[list[int]]
"""How many tokens each reviewer takes of each level."""
MODEL_QUOTA, LOOKUP_QUOTA, INNER_QUOTA = 5, 8, 3
"""K of the probes: of models and of the lookup for the target, and of models for models."""


@dataclass(slots=True)
class Passes:
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


def probe_k(models: int, lookup: bool) -> K:
    """A K that shows every level to every reviewer."""
    return [
        [MODEL_QUOTA if row == 0 else INNER_QUOTA] * (models - row) + [LOOKUP_QUOTA] * lookup
        for row in range(models + 1)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probes:
    """The cascades that answer, each with its K."""

    whole: tuple[K, Method]
    tails: Sequence[tuple[K, Method]]
    """One with a token of every model, for the lookup at the target; none without a lookup."""
    singles: Sequence[tuple[K, Method]]
    """Every lower level alone."""

    @property
    def cascade(self) -> Cascade:
        drafter = self.whole[1].preferred.drafter
        assert isinstance(drafter, Cascade)
        return drafter


def load_probes(engine: Engine, levels: str, lenience: float, *, anew: bool) -> Probes:
    """Load them; not ``anew``: the whole cascade alone."""
    loaded = engine.method(f"cascade[levels={levels}]").preferred.drafter
    assert isinstance(loaded, Cascade)
    models, has_lookup = len(loaded.models), loaded.lookup is not None
    lookup = models + 1

    def made(k: K) -> tuple[K, Method]:
        return k, engine.method(spec_of(levels, k, lenience))

    return Probes(
        whole=made(probe_k(models, has_lookup)),
        tails=[made([[1] * models + [LOOKUP_QUOTA]])] if has_lookup and anew else (),
        singles=[
            made([[0] * (number - 1) + [LOOKUP_QUOTA if number == lookup else MODEL_QUOTA]])
            for number in (range(2, lookup + has_lookup) if anew else ())
        ],
    )


def watched(
    engine: Engine,
    probes: Probes,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    passes: Sequence[Passes],
    alone: Passes | None,
    tick: Callable[[str, int], None],
) -> list[Counts]:
    """Answer prompts by every probe.

    Args:
        passes: added to, of the target and of every model of the cascade.
        alone: added to, of plain decoding; None: there is none.

    Returns:
        What was kept after so many prompts, beginning with none.
    """
    (k, whole), probe = probes.whole, probes.cascade
    tables: list[dict[tuple[int, int], Part]] = [defaultdict(Part) for _ in range(3)]
    parts, tails, lone = tables
    for spec in ("none", whole.spec):  # the first answers pay for what is set up on the way
        engine.generate(list(prompts[0]), params, drafter=spec, reproducible=False)
    notes: dict[Any, Note] = {one: note_parts(lone, 0, own, probe) for own, one in probes.singles}
    notes |= {one: note_parts(tails, 0, own, probe) for own, one in probes.tails}
    notes[whole] = note_parts(parts, 0, k, probe)
    notes |= {level: note_parts(parts, level.number, k, probe) for level in probe.models}
    seen = [Counts({}, {}, {})]
    with noted(notes), listening(probe, passes[1:]):
        for prompt in prompts:
            tick("probing", 0)
            if alone is not None:
                run(engine, "none", prompt, params, alone)
            run(engine, whole.spec, prompt, params, passes[0])
            for _, other in (*probes.tails, *probes.singles):
                run(engine, other.spec, prompt, params, Passes())
            seen.append(Counts(*copy.deepcopy([dict(table) for table in tables])))
            tick("probing", 1)
    return seen


@contextmanager
def listening(cascade: Cascade, passes: Sequence[Passes]) -> Iterator[None]:
    """Time the passes of every model of a cascade."""
    for level, own in zip(cascade.models, passes, strict=True):
        level.machine.listeners = (own.listen,)
    try:
        yield
    finally:
        for level in cascade.models:
            level.machine.listeners = ()


def run(engine: Engine, spec: str, prompt: Sequence[int], params: SamplingParams, passes: Passes) -> int:
    """Answer a prompt; how many tokens that were."""
    with engine.listening(passes.listen):
        return len(engine.generate(list(prompt), params, drafter=spec, reproducible=False).tokens)
