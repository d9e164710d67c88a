"""Cascade: a draft model that is itself drafted for, and cheaper drafters for the tail.

    vertical     target <- small model <- lookup      the small model writes five tokens in two
                                                      passes instead of five
    horizontal   the cat sat on | the mat .           first tokens by the model, later ones, which
                 small model    | lookup              are reached less often, by the lookup

    cascade[levels=draft_model[model=M]+max_gram k=5,10/10]

``levels`` go from strong to cheap, any number; all but the last are language models, the last may
be one or a lookup. ``k`` has a row for the target and one for each model, parted by ``/``. A row
says how many tokens each level below adds to the draft that this reviewer checks. ``5,10/10``:
five by the model and ten by the lookup for the target; ten by the lookup for the model. (A few
more than five, since a step of a model ends when it ends.) What is left out is 0, so ``5/10`` is
purely vertical and ``5,10`` purely horizontal. ``outpace analyze cascade`` names a good ``k``.

Without ``k`` the text decides at every step (`outpace.methods.cascade.choice`). Where the lookup has a long
match, it drafts and the models rest. Where matches are short, a model begins. What does not pay is left out.

Every guess of a model has exactly that model's distribution, whatever drafted for it. It is handed up as q,
so any verifier works. With a tree (``tree=4x1x1x1``) the candidates for the first token are the model's best,
or drawn from that distribution. One goes on as the chain, others with the lookup's words.

With ``lenience`` above 1 a model takes guesses of the level below that it finds nearly as likely as
its own (`outpace.methods.cascade.lenient`). The target gets the distribution that its tokens then have, so
nothing is lost but acceptance.

Pays where the model is several times cheaper than the target, and the text repeats itself.
Cost: passes of the models, a few hundred microseconds of host work per inner step.
Paper: Chen et al. 2023, Cascade Speculative Drafting, arXiv:2312.11462 (K as here, row by row;
greedy). Sampling is ours, with distributions as in Spector and Re 2023, arXiv:2308.04623.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outpace import registry
from outpace.cache.base import shared_prefix
from outpace.clock import PassClock
from outpace.drafters.base import Drafter, Request, Traits
from outpace.drafters.parts import load_part, split_parts
from outpace.drafters.wrapping import WrappingDrafter
from outpace.errors import SpecError
from outpace.methods.cascade.choice import DEAR, LEAST_SHARE, TAIL, Belief, choose
from outpace.methods.cascade.guesses import Guesses, State
from outpace.methods.cascade.leaders import split, with_tails
from outpace.methods.cascade.levels import Level, LookupLevel, ModelLevel, StagedDrafter
from outpace.models.base import Target
from outpace.tree.growth import DraftRow
from outpace.types import Draft, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeConfig:
    levels: str = "draft_model+max_gram"
    """Specs of the drafters, strongest first, joined by ``+``: draft_model[model=M]+max_gram."""
    k: str | None = None
    """Tokens per level, a row per reviewer: 5,10/10. By default the text decides, step by step, which levels
    draft and how far. A long match goes before a model, and a level that does not pay is skipped."""

    lenience: float = 1.0
    """How many times less likely than the level below said a model may find a guess and still take
    it. 1 is strict. The target is always strict, and so is everybody if ``reproducible``."""
    cost: float | None = None
    """Without ``k``: of a pass of the lowest model, in passes of the target; others by their weights."""

    def __post_init__(self) -> None:
        if self.k is not None:
            read_k(self.k)
        if not 1 <= self.lenience < float("inf"):
            raise ValueError(f"lenience must be a number from 1, got {self.lenience:g}")
        if self.cost is not None and not 0 <= self.cost < float("inf"):
            raise ValueError(f"cost must be a number from 0, got {self.cost:g}")


def read_k(text: str) -> list[list[int]]:
    """Read the rows of K from its diagonal on.

    Raises:
        ValueError: not rows of whole numbers from 0, or nothing for the target to check.
    """
    try:
        rows = [[int(part) for part in row.split(",")] for row in text.split("/")]
    except ValueError:
        rows = [[-1]]
    if min(min(row) for row in rows) < 0 or not any(rows[0]):
        raise ValueError(f"k must be rows of whole numbers such as 5,10/10, the first not all 0, got {text}")
    return rows


class Cascade(WrappingDrafter[State]):
    """Levels of drafters, each sped up by those below it.

    Args:
        models: strongest first, at least one.
        lookup: below them all; None: the last model decodes plainly.
        k: row r, entry i: tokens that level r + 1 + i adds to the draft for reviewer r. Missing
            ones are 0. None: chosen at every step.
        lenience: of the reviews by models.
        shares: what a pass of each model costs, in passes of the target; of use without ``k``.
    """

    Config = CascadeConfig
    traits = Traits(default_nodes=32, samples=True)  # k says how many nodes; 32 is a bound

    def __init__(
        self,
        models: Sequence[Target],
        lookup: Drafter[None] | None,
        k: Sequence[Sequence[int]] | None,
        lenience: float = 1.0,
        shares: Sequence[float] = (),
    ) -> None:
        super().__init__([] if lookup is None else [lookup])
        self.lenient, self.chosen = lenience > 1, k is None
        self.shares = tuple(shares) or (LEAST_SHARE,) * len(models)
        if k is None:
            k = [
                [1] * len(models) + [TAIL],
                *(
                    [0] * (len(models) - 1 - i) + [TAIL * (share >= DEAR)]
                    for i, share in enumerate(self.shares)
                ),
            ]
        self.lookup = None if lookup is None else LookupLevel(lookup)
        lowest: list[Level] = [] if self.lookup is None else [self.lookup]
        self.models: list[ModelLevel] = []
        below: list[Level] = lowest
        for number in range(len(models), 0, -1):
            level = ModelLevel(
                number,
                models[number - 1],
                _staged(below, k, number, self.lenient),
                verifier=registry.make("verifier", "tree"),
                coupled=registry.make("verifier", "coupled"),
                policy=registry.make("policy", "fixed"),
                clock=self.clock,
                lenience=lenience,
            )
            self.models.insert(0, level)
            below = [level, *below]
        self.below = below
        self.staged = _staged(below, k, 0, self.lenient)
        used = _used(self.staged)
        self.idle = frozenset(level.number for level in self.models if level not in used)
        """Numbers of the models that ``k`` leaves out: they read nothing."""

    @cached_property
    def clock(self) -> PassClock:
        return PassClock()

    @classmethod
    def load(cls, config: CascadeConfig, target: Target) -> Cascade:
        """Load every level.

        Raises:
            SpecError: levels that cannot be read or do not fit together, or a ``k`` of another
                size.
            ModelError: as the levels raise it.
        """
        who = "drafter 'cascade'"
        parts = split_parts(config.levels, who)
        drafters = [load_part(spec, target) for spec in parts]
        models = [d.language_model for d in drafters]
        speaking = [model for model in models if model is not None]
        lookup = drafters[-1] if models[-1] is None else None
        wrong = next((s for s, m in zip(parts[:-1], models, strict=False) if m is None), None)
        if wrong is not None or not speaking:
            raise no_model(wrong or parts[0])
        if lookup is not None and (lookup.traits.samples or lookup.traits.taps):
            raise SpecError(
                f"{who}: {parts[-1]} reads features of the target, or samples; the last level "
                "must be a language model or a lookup, such as max_gram"
            )
        k = None if config.k is None else read_k(config.k)
        for row, quotas in enumerate(k or ()):
            if row > len(speaking) or len(quotas) > len(parts) - row:
                raise SpecError(
                    f"{who}: k={config.k} has too many {'rows' if row > len(speaking) else 'numbers'} in "
                    f"row {row + 1} for {len(parts)} levels, {len(speaking)} of them models"
                )
        if config.cost is None:
            shares = [max(LEAST_SHARE, target.share(model)) for model in speaking]
        else:
            shares = [config.cost * speaking[-1].share(model) for model in speaking]
        return cls(speaking, lookup, k, config.lenience, shares)

    def inner(self, state: State) -> list[tuple[Drafter[Any], Any]]:
        """The lookup below the models, if there is one."""
        if self.lookup is None or state.reading is None:
            return []
        return [(self.lookup.drafter, state.reading.state)]

    def begin(self, request: Request) -> State:
        """Open slots and begin the lookup."""
        slots = [level.cache.real.open() for level in self.models]
        reading = None if self.lookup is None else self.lookup.begin(request)
        return State(slots, reading, belief=Belief() if self.chosen else None)

    def propose(self, rows: Sequence[DraftRow[State]]) -> list[Draft]:
        """A chain each, or candidates for the first token with a chain each."""
        drafts, tails = [], []
        for row in rows:
            if row.state.reading is not None:
                row.state.reading.judged = []
            most, others = split(row)
            drafts.append(Guesses(row, most, 1 + len(others), lenient=self.lenient))
            tails.append(others)
        alone = self._run(drafts)
        out = []
        for g, others in zip(drafts, tails, strict=True):
            if (draft := alone.get(g)) is None:
                draft = g.draft() if not g.rivals else with_tails(g, others, self.lookup)
            g.row.state.draft = draft
            out.append(draft)
        return out

    def _run(self, drafts: Sequence[Guesses]) -> dict[Guesses, Draft]:
        """Let the levels make these drafts; those that the lookup makes alone are given back."""
        if not self.chosen:
            self.staged.run(drafts)
            return {}
        alone: dict[Guesses, Draft] = {}
        offers = [Draft()] * len(drafts)
        if self.lookup is not None:
            offers = self.lookup.propose(drafts, [g.row.budget for g in drafts])
        together: dict[tuple[int, ...], list[Guesses]] = {}
        for g, offer in zip(drafts, offers, strict=True):
            assert g.row.state.belief is not None
            counts = choose(offer, g.row.state.belief, self.shares, self.lookup is not None, g.most)
            if counts is None:
                alone[g] = offer
            else:
                together.setdefault(counts, []).append(g)
        for counts, some in together.items():
            _staged(self.below, [counts], 0, self.lenient).run(some)
        return alone

    def observe(self, states: Sequence[State], outcomes: Sequence[Outcome]) -> None:
        """Read prompts along; tell the lookup what was committed. Models catch up by ids."""
        for state, outcome in zip(states, outcomes, strict=True):
            if state.belief is not None and outcome.draft is state.draft:
                state.belief.learn(outcome)
            if self.lookup is not None and state.reading is not None:
                self.lookup.observe(state.reading, outcome, outcome.draft is state.draft)
            state.draft = None
        for at, level in enumerate(self.models):
            if level.number in self.idle:
                continue
            prompts = {}
            for state, outcome in zip(states, outcomes, strict=True):
                slot, end = state.slots[at], outcome.start + len(outcome.fed)
                fits = end <= level.model.max_positions
                if outcome.forced and fits and level.cache.length(slot) == outcome.start:
                    prompts[slot] = outcome.fed
            if prompts:
                level.reader.read(prompts, level.cache)
        self.follow()

    def num_uncached(self, state: State, tokens: Sequence[int]) -> int:
        return super().num_uncached(state, tokens) + sum(
            len(tokens) - shared_prefix(level.cache.slot(slot).ids, tokens)
            for level, slot in zip(self.models, state.slots, strict=True)
            if level.number not in self.idle
        )

    def end(self, state: State) -> None:
        for level, slot in zip(self.models, state.slots, strict=True):
            level.cache.real.close(slot)
        if self.lookup is not None and state.reading is not None:
            self.lookup.back(state.reading)
        super().end(state)


def no_model(level: object) -> SpecError:
    """Why a level that has others below it cannot be what it is."""
    return SpecError(
        f"drafter 'cascade': {level} is no language model; every level but the last must be one, "
        "such as draft_model[model=M] or layer_skip[skip=4+7]"
    )


def _used(staged: StagedDrafter) -> list[Level]:
    """The levels that a staged drafter asks, and those that they ask."""
    found: list[Level] = []
    for level, _ in staged.stages:
        found.append(level)
        if isinstance(level, ModelLevel):
            found += _used(level.staged)
    return found


def _staged(below: Sequence[Level], k: Sequence[Sequence[int]], row: int, lenient: bool) -> StagedDrafter:
    quotas = k[row] if row < len(k) else ()
    return StagedDrafter([(level, n) for level, n in zip(below, quotas, strict=False) if n > 0], lenient)
