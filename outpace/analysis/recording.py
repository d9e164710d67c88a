"""Recorded answers: at every position what each drafter would have drafted, and what of it was right.

    texts = record(engine, asked, specs, max_new_tokens=96)
    write(path, texts)
    outpace.analysis.replay runs any policy against them

The target answers one token at a time, and every drafter is asked at every position, with several
numbers of nodes. So a policy that asks another drafter, or for less, still finds what it would have got.
A file holds numbers and no text.

Drafters that learn from refusals see the draft of one of them at each position, cut after one token.
A draft cut at a depth is taken to be the first levels of the deeper one.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outpace.cache.base import Lease
from outpace.coins import Stream
from outpace.curve import KnownDrafter
from outpace.drafters.trained import taught
from outpace.engine.engine import Engine
from outpace.engine.method import SingleMethod
from outpace.engine.portfolio import largest, supposed
from outpace.engine.requests import GenerationRequest
from outpace.engine.scheduler import Scheduler
from outpace.engine.sequence import ActiveSequence
from outpace.errors import RequestError
from outpace.files import parse_json, write_whole
from outpace.machine import Machine, Member
from outpace.models.base import TREE
from outpace.params import NEUTRAL, SamplingParams
from outpace.policies.acceptance import sizes_to_weigh
from outpace.policies.base import Policy, PolicyRow, within
from outpace.policies.tuning import TUNING
from outpace.tree.growth import DraftRow
from outpace.types import NOTHING, Budget, Draft, Drawn, Load, Plan, Shape, Verdict

FORMAT = 3
"""Of the files."""


@dataclass(frozen=True, slots=True)
class Guess:
    """One draft that would have been made."""

    nodes_D: tuple[int, ...]
    """Nodes down to depth 1, 2, ...; empty if nothing was drafted."""
    accepted: int
    levels: int
    """Passes of its drafter's model; fewer than depths where a part is looked up."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one drafter would have drafted along one text.

    Shape letters: P positions, D depths.
    """

    budget: Budget
    """That a policy which prices rows may ask for."""
    passes: bool
    """Whether a level is a pass of a model of its own."""
    previews_P: tuple[tuple[float, ...], ...] | None
    """Chances that it told beforehand; None if it tells none."""
    guesses: Mapping[int, tuple[Guess, ...]]
    """Most nodes asked for -> the draft at every position."""
    known: KnownDrafter | None
    """What an engine tells `auto` of it beforehand."""
    level_D: tuple[float, ...]
    """And of its levels, in passes over one row."""

    def draft(self, position: int, asked: Budget) -> tuple[int, int, int, int]:
        """Nodes, depth, accepted tokens and levels of a draft within a budget."""
        sizes = [nodes for nodes in self.guesses if nodes >= asked.max_nodes]
        guess = self.guesses[min(sizes) if sizes else max(self.guesses)][position]
        depth = min(len(guess.nodes_D), asked.max_depth)
        if self.budget.shape.beam == 0:
            depth = min(depth, asked.max_nodes)
        if not depth:
            return 0, 0, 0, min(guess.levels, asked.max_depth)
        nodes = min(guess.nodes_D[depth - 1], asked.max_nodes)
        return nodes, depth, min(guess.accepted, depth), min(guess.levels, depth)


@dataclass(frozen=True, slots=True)
class Text:
    """One recorded answer."""

    name: str
    kind: str
    start: int
    """Tokens before its first recorded position."""
    drafters: Mapping[str, Recorded]

    @property
    def positions(self) -> int:
        """How many tokens of it are recorded."""
        return len(next(iter(next(iter(self.drafters.values())).guesses.values())))


class _Teach(Policy):
    """Has one drafter draft, so that it learns from what is refused."""

    reads_previews = False

    def __init__(self, spec: str | None) -> None:
        super().__init__(None)
        self._spec = spec

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """Its own budget for the one, nothing for all others."""
        if self._spec is None:
            return [Plan("none", NOTHING)] * len(rows)
        return [Plan(self._spec, within(row.drafters[self._spec], row.limit)) for row in rows]


def record(
    engine: Engine,
    asked: Sequence[tuple[str, str, tuple[int, ...]]],
    specs: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    tick: Callable[[str, int], None] = lambda part, done: None,
) -> list[Text]:
    """Answer prompts plainly, and ask every drafter at every position.

    Args:
        engine: of the target.
        asked: name, kind and token ids of every prompt.
        specs: method specs of single drafters.
        max_new_tokens: length of every answer.
        temperature: above 0 texts are keyed to the seed, so that they do not depend on drafts.
        seed: of all texts.
        tick: told of every answer.

    Raises:
        RequestError: no prompts or no drafters.

    Cost: per token a pass of the target, and for every drafter a draft of each size.
    """
    methods = {str(engine.method(spec).spec): engine.method(spec).preferred for spec in specs}
    if not asked or not methods:
        raise RequestError(f"need a prompt and a drafter, got {len(asked)} and {len(methods)}")
    params = SamplingParams(
        **NEUTRAL | {"temperature": temperature}, max_new_tokens=max_new_tokens, ignore_eos=True
    )
    texts = []
    for name, kind, ids in asked:
        tick(name, 0)
        request = GenerationRequest(prompt=ids, params=params.resolved(None), seed=seed)
        texts.append(_one(engine, methods, request, name, kind))
        tick(name, 1)
    return texts


Timed = Callable[[str, int, float], None]
"""Told of every whole draft: its drafter, passes of the drafter's model, seconds."""


def record_given(
    engine: Engine,
    methods: Mapping[str, SingleMethod],
    request: GenerationRequest,
    answer: Sequence[int],
    timed: Timed | None = None,
) -> Text:
    """Ask every drafter at every position of an answer that is known.

    Args:
        request: of the answer; its settings shape what drafters draw from.
        answer: at least two tokens; the first one belongs to the prompt's pass, and is not recorded.
        timed: told what drafts take.

    Cost: as ``record``.
    """
    params = replace(
        request.params,
        max_new_tokens=len(answer),
        min_tokens=0,
        stop=(),
        stop_token_ids=frozenset(),
        stop_when=None,
        logprobs=None,
        ignore_eos=True,
    )
    return _one(engine, methods, replace(request, params=params), "answer", "", answer, timed)


def _one(
    engine: Engine,
    methods: Mapping[str, SingleMethod],
    request: GenerationRequest,
    name: str,
    kind: str,
    answer: Sequence[int] | None = None,
    timed: Timed | None = None,
) -> Text:
    """Record one answer, which the target gives or which is known."""
    teachers = [spec for spec, one in methods.items() if one.drafter.traits.previews]
    previews: dict[str, list[tuple[float, ...]]] = {spec: [] for spec in teachers}
    made: dict[str, dict[int, list[tuple[Draft, int]]]] = {spec: {} for spec in methods}
    passes = {spec: one.drafter.clock.count for spec, one in methods.items()}
    places: list[int] = []
    with contextlib.ExitStack() as stack:
        row, scheduler = _begun(engine, methods, request, stack)
        whole = row.cut
        if answer is None:
            row.cut = lambda verdict: whole(_first(verdict))  # type: ignore[method-assign]
        else:
            row.cut = lambda verdict: whole(_given(verdict, answer[row.new_tokens]))  # type: ignore[method-assign]
        while row.reading and not row.finished:
            scheduler.advance()
        while not row.finished:
            places.append(len(row.tokens))
            for spec, one in methods.items():
                _ask(scheduler.machine, row, spec, one, made[spec], previews.get(spec), timed)
            with torch.inference_mode():
                scheduler.advance()
    recorded = {
        spec: Recorded(
            row.members[spec].budget,
            one.drafter.clock.count > passes[spec],
            tuple(previews[spec]) if spec in previews else None,
            {
                nodes: tuple(
                    _guess(draft, levels, row.tokens[at:])
                    for (draft, levels), at in zip(drafts, places, strict=True)
                )
                for nodes, drafts in made[spec].items()
            },
            taught(spec, engine.target, TUNING.text / 2).get(spec),
            tuple(supposed(one)),
        )
        for spec, one in methods.items()
    }
    return Text(name, kind, len(request.prompt), recorded)


def _begun(
    engine: Engine,
    methods: Mapping[str, SingleMethod],
    request: GenerationRequest,
    stack: contextlib.ExitStack,
) -> tuple[ActiveSequence, Scheduler]:
    """A sequence that every drafter follows, and what runs it; the stack ends what was begun."""
    plain, slot = engine.method("none"), engine.cache.open()
    stack.callback(engine.cache.close, slot)
    row = engine.start_sequence(
        request, slot, plain, engine.verifier(plain, request.params.temperature != 0.0)
    )
    members: dict[str, Member] = {}
    for spec, one in methods.items():
        state = engine.start_sequence(request, slot, one, one.verifier).all_members[spec].state
        stack.callback(one.drafter.end, state)
        members[spec] = Member(state, largest(one), row.verifier)
    row.members = row.all_members = members
    drafters = {spec: one.drafter for spec, one in methods.items()}
    teacher = next((spec for spec, one in methods.items() if one.drafter.traits.previews), None)
    scheduler = Scheduler(Machine(engine.target, engine.cache, drafters, _Teach(teacher)))
    scheduler.join(row)
    return row, scheduler


def _first(verdict: Verdict) -> Verdict:
    return verdict.cut(1) if verdict.emitted else verdict


def _given(verdict: Verdict, token: int) -> Verdict:
    """What the verdict is where the text is known: one token, whatever was decided."""
    if not verdict.emitted:
        return verdict
    return verdict.cut(1) if verdict.emitted[0] == token else Verdict((), (token,), censored=True)


def _ask(
    machine: Machine,
    row: ActiveSequence,
    spec: str,
    one: SingleMethod,
    made: dict[int, list[tuple[Draft, int]]],
    previews: list[tuple[float, ...]] | None,
    timed: Timed | None = None,
) -> None:
    """Have a drafter draft what nobody will use."""
    budget = row.members[spec].budget
    sizes = {budget.max_nodes}
    if budget.shape.beam:  # a chain that is cut is the first part of the whole one; a tree is another one
        sizes |= {one.budget.max_nodes, *(nodes for nodes, _ in sizes_to_weigh(budget))}
    chain = row.verifier.chains_only or TREE not in machine.target.can
    drawn = Drawn.CHOSEN if row.warp.greedy else row.verifier.draws
    lease = Lease(machine.cache, row.slot, resumes=machine.tapped([row]) <= {spec})
    for nodes in sorted(sizes):
        asked = Budget(nodes, min(nodes, budget.max_depth), shape=budget.shape)
        wanted: DraftRow[Any] = DraftRow(
            row.members[spec].state,
            row.tokens,
            asked,
            row.coins(Stream.DRAFT),
            row.warp,
            drawn,
            lease,
            chain=chain,
        )
        with torch.inference_mode():
            start, before = time.perf_counter(), one.drafter.clock.count
            (draft,) = one.drafter.propose([wanted])
            levels = one.drafter.clock.count - before
            if timed is not None and nodes == budget.max_nodes:
                timed(spec, levels, time.perf_counter() - start)
            machine.cache.drop(row.slot)
            if previews is not None and nodes == budget.max_nodes:
                previews.append(tuple(round(p, 3) for p in one.drafter.promise(wanted.state, draft)))
        made.setdefault(nodes, []).append((draft, levels))


def _guess(draft: Draft, levels: int, after: Sequence[int]) -> Guess:
    """What of a draft the text says."""
    deepest = draft.levels
    nodes_D = tuple(sum(depth <= level for depth in draft.depth_N) for level in range(1, deepest + 1))
    return Guess(nodes_D, len(draft.path_of(after)), levels)


def write(path: Path, texts: Sequence[Text], about: Mapping[str, Any] | None = None) -> None:
    """Write recorded texts as one file."""
    data = {"format": FORMAT, "about": dict(about or {}), "texts": [_packed(text) for text in texts]}
    write_whole(path, gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0))


def read(path: Path) -> list[Text]:
    """Read what ``write`` wrote.

    Raises:
        RequestError: the file cannot be read, or holds something else.
    """
    try:
        data = parse_json(gzip.decompress(path.read_bytes()))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}")
        return [_unpacked(one) for one in data["texts"]]
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise RequestError(f"{path} holds no recorded texts of format {FORMAT}: {error}") from error


def _packed(text: Text) -> dict[str, Any]:
    drafters = {
        spec: {
            "nodes": one.budget.max_nodes,
            "depth": one.budget.max_depth,
            "beam": one.budget.shape.beam,
            "passes": one.passes,
            "known": None if one.known is None else asdict(one.known),
            "levels": one.level_D,
            "previews": one.previews_P,
            "guesses": {
                str(nodes): [[*guess.nodes_D, guess.accepted, guess.levels] for guess in guesses]
                for nodes, guesses in one.guesses.items()
            },
        }
        for spec, one in text.drafters.items()
    }
    return {"name": text.name, "kind": text.kind, "start": text.start, "drafters": drafters}


def _unpacked(data: Mapping[str, Any]) -> Text:
    drafters = {
        spec: Recorded(
            Budget(one["nodes"], one["depth"], shape=Shape(beam=one["beam"])),
            one["passes"],
            None if one["previews"] is None else tuple(map(tuple, one["previews"])),
            {
                int(nodes): tuple(Guess(tuple(line[:-2]), *line[-2:]) for line in lines)
                for nodes, lines in one["guesses"].items()
            },
            KnownDrafter.from_json(one["known"]) if one["known"] else None,
            tuple(one["levels"]),
        )
        for spec, one in data["drafters"].items()
    }
    return Text(data["name"], data["kind"], data["start"], drafters)
