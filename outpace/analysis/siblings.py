"""How often the first, second, ... sibling of a node is the one accepted, and the best tree for it.

These are the numbers that the best template follows from (``outpace.analysis.best_tree``). They are
counted below the pending token, where every pass of a real run looks. The drafter draws siblings
as it would in any tree, and the verifier judges them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.analysis.best_tree import best_size, expected, optimal
from outpace.analysis.cost import ROWS, curve_for, draft_cost_for
from outpace.analysis.watch import watched
from outpace.config import MethodSpec
from outpace.engine.engine import Engine
from outpace.errors import RequestError
from outpace.params import SamplingParams
from outpace.tree.shapes import MAX_NODES
from outpace.tree.shapes import depth as levels_of
from outpace.types import ROOT, Outcome, Shape

MOST = 8
"""Siblings that are looked at."""

LARGEST = ROWS[-2] - 1
"""Most guesses of a tree whose size is chosen by costs: they are measured up to twice that."""
CONTEXT = 256
"""Committed tokens for which costs are looked up."""

Tick = Callable[[str, int], None]
Note = Callable[[str], None]


@dataclass(slots=True)
class Siblings:
    spec: str
    """Normalised method spec that was run."""
    count_B: list[int] = field(default_factory=lambda: [0] * MOST)
    """How often each rank was the first accepted."""
    positions: int = 0
    """Passes that drafted, and whose outcome no stop hid."""
    widest: int = 0
    """Most siblings that a draft had."""

    def add(self, outcome: Outcome) -> None:
        draft, verdict = outcome.draft, outcome.verdict
        if outcome.forced or len(draft) == 0 or (verdict.censored and not verdict.kept):
            return
        drawn = [node for group in draft.groups_of[ROOT] for node in group.nodes]
        ranked = list(dict.fromkeys(drawn))[:MOST]  # a repeated draw has the first one's rank
        self.positions += 1
        self.widest = max(self.widest, len(ranked))
        if verdict.kept and verdict.kept[0] in ranked:
            self.count_B[ranked.index(verdict.kept[0])] += 1

    @property
    def acceptance(self) -> list[float]:
        """a[1], a[2], ...: a share of all positions each."""
        return [count / max(1, self.positions) for count in self.count_B]


def measure(
    engine: Engine,
    drafter: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    tick: Tick = lambda part, prompts: None,
) -> Siblings:
    """Generate text from drafts one level deep and MOST siblings wide, and count.

    Args:
        drafter: method spec; its ``tree`` and ``tree_size`` do not matter, ``verifier`` does.
        params: of every answer; the text is the one that ``generate`` gives with
            ``reproducible=False``.
        tick: told the drafter and how many prompts were finished since the last call.

    Raises:
        RequestError: the drafter never drafted, or never two siblings.

    Cost: one answer per prompt.
    """
    spec = str(bare(drafter).planned(tree=str(MOST), tree_size=MOST))
    found = Siblings(spec)
    with watched(engine.method(spec), found.add):
        for prompt in prompts:
            tick(spec, 0)
            engine.generate(list(prompt), params, drafter=spec, reproducible=False)
            tick(spec, 1)
    if found.widest < 2:
        raise RequestError(
            f"drafter {drafter} drafted no two siblings, so no tree can be measured; name one "
            "that follows tree=SHAPE, such as draft_model[model=...]"
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best template, and what it is expected and was seen to bring."""

    model: str
    drafter: str
    """Normalised method spec, without a tree."""
    temperature: float
    positions: int
    acceptance: tuple[float, ...]
    parents: tuple[int, ...]
    """Empty where no tree pays."""
    expected_emitted: float
    mean_emitted: float
    """Measured with that tree on the same prompts."""
    expected_tokens_per_second: float | None
    """Where the size was chosen by costs."""

    @property
    def spec(self) -> str:
        return str(MethodSpec.parse(self.drafter).planned(tree=written(self.parents)))

    @property
    def levels(self) -> int:
        return levels_of(self.parents)

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``tree=FILE.json`` reads ``parents``."""
        out = {name: getattr(self, name) for name in self.__slots__}
        return {**out, "acceptance": list(self.acceptance), "parents": list(self.parents)}


def find(
    engine: Engine,
    drafter: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    depth: int,
    nodes: int | None = None,
    tick: Tick = lambda part, prompts: None,
    note: Note | None = None,
) -> Best:
    """Measure siblings, make the best template, and try it on the same prompts.

    Args:
        depth: most levels.
        nodes: guesses; None: as many as pay on this machine, by the measured costs of a pass and
            of a level of drafts. Costs that are not known are measured.
        note: told, in one line, of costs that cannot be read or kept.

    Raises:
        RequestError: as ``measure``; a size out of range.

    Cost: two answers per prompt.
    """
    if (nodes is not None and not 1 <= nodes <= MAX_NODES) or depth < 1:
        raise RequestError(f"need 1 to {MAX_NODES} nodes and 1 level or more, got {nodes} and {depth}")
    found = measure(engine, drafter, prompts, params, tick)
    rate: float | None = None
    if nodes is None:
        shape, rate = _that_pays(engine, drafter, found.acceptance, depth, note)
    else:
        shape = optimal(found.acceptance, nodes, depth)
    parents = shape.parent_N or ()
    spec = str(bare(drafter).planned(tree=written(parents)))
    return Best(
        model=engine.target.name,
        drafter=str(bare(drafter)),
        temperature=params.temperature or 0.0,
        positions=found.positions,
        acceptance=tuple(found.acceptance),
        parents=parents,
        expected_emitted=expected(shape, found.acceptance),
        mean_emitted=_tried(engine, spec, prompts, params, tick) if parents else 1.0,
        expected_tokens_per_second=rate,
    )


def _that_pays(
    engine: Engine, drafter: str, acceptance: Sequence[float], depth: int, note: Note | None
) -> tuple[Shape, float]:
    """The size that pays on this machine."""
    curve = curve_for(engine.target, measure_if_missing=True, note=note)
    method = engine.method(str(bare(drafter).planned(tree="chain", tree_size=depth)))
    draft = draft_cost_for(method, engine.target, measure_if_missing=True, note=note)
    assert curve is not None and draft is not None
    return best_size(acceptance, curve, draft.per_level, CONTEXT, LARGEST, depth)


def _tried(
    engine: Engine, spec: str, prompts: Sequence[Sequence[int]], params: SamplingParams, tick: Tick
) -> float:
    passes = tokens = 0
    for prompt in prompts:
        tick(spec, 0)
        answer = engine.generate(list(prompt), params, drafter=spec, reproducible=False)
        counters = answer.counters
        passes, tokens = passes + counters.passes, tokens + counters.new_tokens - 1
        tick(spec, 1)
    return tokens / passes if passes else 1.0


def written(parents: Sequence[int]) -> str:
    """A table of parents as a method spec holds it."""
    return json.dumps(list(parents), separators=(",", ":"))


def bare(drafter: str) -> MethodSpec:
    spec = MethodSpec.parse(drafter)
    rest = tuple(pair for pair in spec.options if pair[0] not in ("tree", "tree_size"))
    return MethodSpec(spec.name, rest)
