"""The losslessness report: what this model on this machine keeps of what is promised.

    1 distributions  what is emitted has that of the target, by enumeration    analysis/law.py
    2 code           fast verifiers decide as their oracles do                 analysis/agreement.py
    3 tokens         greedy text equals plain decoding, token for token        here
    4 hardware       where it does not, by how much the two tokens differ      here

Level 3 is a promise of targets whose rows do not depend on the pass they are in
(``Target.equal_rows``). The own decoder gives it on a CPU, in every dtype. Elsewhere rounding differs
between a pass over one row and a pass over many, in float32 too; then level 4 measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from outpace import registry
from outpace.analysis.agreement import check_oracle
from outpace.analysis.law import check_laws
from outpace.analysis.lossless import Difference, Report, Tally
from outpace.config import MethodSpec, needs_settings
from outpace.drafters.base import ExpandingDrafter
from outpace.engine.engine import Engine
from outpace.models.base import LAYERS, TREE, Target
from outpace.models.measured import dtype_name
from outpace.params import SamplingParams
from outpace.types import Feed

BATCHES = (1, 4)
"""Sequences per call in which every drafter is tried."""
_TREE = "4x2x1"


@dataclass(frozen=True, slots=True)
class Case:
    id: str
    ids: tuple[int, ...]


def standard_specs(target: Target, model: str) -> list[str]:
    """Every lossless drafter that works without a setting, and the target drafting for itself.

    Args:
        model: how a method spec names it.
    """
    specs = [
        row.name
        for row in registry.entries("drafter")
        if row.lossless
        and not row.trained
        and row.name != "none"
        and (cls := registry.load("drafter", row.name)).traits.needs <= target.can
        and not needs_settings(cls.Config)
    ]
    for row in registry.able("drafter", registry.RUNS_MODEL):
        if LAYERS in target.can:
            specs.append(f"{row.name}[layers={max(1, target.num_layers // 2)} model={model}]")
        specs.append(f"{row.name}[model={model}]")
    return with_trees(specs, target)


def with_trees(specs: Sequence[str], target: Target) -> list[str]:
    """The specs, normalised, and as a tree those whose drafter can grow one and names none."""
    out = []
    for text in specs:
        spec = MethodSpec.parse(text)
        out.append(str(spec))
        grows = issubclass(registry.load("drafter", spec.name), ExpandingDrafter)
        if grows and TREE in target.can and "tree" not in dict(spec.options):
            out.append(str(MethodSpec(spec.name, tuple(sorted([*spec.options, ("tree", _TREE)])))))
    return out


def check(
    engine: Engine,
    cases: Sequence[Case],
    specs: Sequence[str],
    *,
    max_new_tokens: int,
    tick: Callable[[str, int], None] = lambda part, sequences: None,
    done: Callable[[str, Tally], None] = lambda spec, tally: None,
) -> Report:
    """Run all four levels.

    Args:
        specs: normalised method specs of the drafters to check.
        tick: told what is under way and how many sequences were finished since the last call;
            ``sequences_of`` says how many there will be.
        done: told what came of each drafter as soon as it is known.

    Cost: enumeration takes seconds, then ``sequences_of(...)`` answers of the model.
    """
    tick("distributions", 0)
    laws, oracles = check_laws(), check_oracle()
    params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens)
    target = engine.target
    plain: list[tuple[int, ...]] = []
    for case in cases:
        tick("none", 0)
        plain.append(engine.generate([case.ids], params, drafter="none")[0].tokens)
        tick("none", 1)
    tallies: dict[str, Tally] = {}
    for spec in dict.fromkeys(("none", *specs)):
        tally = tallies[spec] = Tally()
        tick(spec, 0)
        for batch in BATCHES[1:] if spec == "none" else BATCHES:
            for start in range(0, len(cases), batch):
                part = cases[start : start + batch]
                results = engine.generate([case.ids for case in part], params, drafter=spec)
                for case, want, result in zip(part, plain[start:], results, strict=False):
                    _count(tally, target, case, batch, want, result)
                tick(spec, len(part))
        done(spec, tally)
    return Report(
        model=target.name,
        dtype=dtype_name(target.dtype),
        device=target.device.type,
        promised=target.equal_rows,
        prompts=len(cases),
        max_new_tokens=max_new_tokens,
        laws=laws,
        oracles=oracles,
        plain=tallies["none"],
        drafters={spec: tallies[spec] for spec in specs},
    )


def sequences_of(cases: int, specs: int) -> int:
    """How many answers ``check`` generates."""
    return cases * (2 + specs * len(BATCHES))


def _count(tally: Tally, target: Target, case: Case, batch: int, want: tuple[int, ...], result: Any) -> None:
    tally.sequences += 1
    tally.drafted += result.counters.drafted
    tally.accepted += result.counters.accepted
    if result.tokens == want:
        tally.equal += 1
        return
    pairs = zip_longest(want, result.tokens)
    at, (a, b) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    gap = None
    if a is not None and b is not None:
        gap = _gap(target, (*case.ids, *want[:at]), a, b)
    tally.differences.append(Difference(case.id, batch, at, a, b, gap))


def _gap(target: Target, ids: tuple[int, ...], a: int, b: int) -> float:
    """Logit of ``a`` less that of ``b`` after the given text."""
    cache = target.new_cache()
    feed = Feed.chain(cache.open(), ids, want=(len(ids) - 1,))
    with torch.inference_mode():
        logits_V = target.score([feed], cache).logits_TV[0]
        return float(logits_V[a].float() - logits_V[b].float())
