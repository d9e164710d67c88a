"""The levels of a cascade: language models that are drafted for, and a lookup below them.

    stages of the target    5 tokens by level 1, then up to 15 by level 2
    stages of level 1       10 tokens by level 2            (one per row of CS Drafting's K)

A `StagedDrafter` makes the draft of one reviewer: its stages take turns, each until the draft has so many
tokens. A level that is a language model makes its part in whole steps (`outpace.step`). Its own staged
drafter drafts, and it verifies. What it emits has exactly its distribution, or that of `lenient` where
``lenience`` says so, and this is recorded as the q of the guess. The number of guesses is a matter of chance
then, and that is right. A lossless rule emits tokens x such that x and their continuation by p have the
distribution p. So of the places that exist,

    P(x_1 x_2, two or more) = p(x_1) p(x_2 | x_1) - P(x_1, one only) p(x_2 | x_1)
                            = P(x_1, two or more) p(x_2 | x_1).

The rule is `tree`, or `coupled` where the target shares its coins.

One sequence has one state for all staged drafters; every level finds its place in a text by ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from outpace.clock import PassClock
from outpace.drafters.ahead import UNSEEN, written
from outpace.drafters.base import Drafter, Request, Traits
from outpace.machine import Machine
from outpace.methods.cascade.ahead import Reader
from outpace.methods.cascade.guesses import BELOW, Guesses, Reading, State
from outpace.methods.cascade.lenient import Lenient, LenientGreedy
from outpace.models.base import Target
from outpace.policies.base import Policy
from outpace.step import step
from outpace.tree.growth import DraftRow
from outpace.types import ROOT, Budget, Draft, Drawn, Outcome
from outpace.verifiers.base import Verifier


class Level(ABC):
    @abstractmethod
    def guess(self, drafts: Sequence[Guesses], total: int) -> None:
        """Go on with drafts until they have ``total`` tokens, or nothing more comes to mind."""


class LookupLevel(Level):
    """The lowest level: any drafter that chooses its guesses and reads no features."""

    def __init__(self, drafter: Drafter[Any]) -> None:
        self.drafter = drafter

    def begin(self, request: Request) -> Reading:
        return Reading(self.drafter.begin(request), request.num_cached)

    def guess(self, drafts: Sequence[Guesses], total: int) -> None:
        sizes = [min(total, g.most) - g.count for g in drafts]
        budgets = [Budget(size, size) for size in sizes]
        for g, draft in zip(drafts, self.propose(drafts, budgets), strict=True):
            node = ROOT
            while (groups := draft.groups_of.get(node)) is not None:
                node = groups[0].nodes[0]
                g.append(draft.token_N[node], None)

    def propose(self, drafts: Sequence[Guesses], budgets: Sequence[Budget]) -> list[Draft]:
        """What the lookup says to the texts of these drafts."""
        rows = []
        for g, budget in zip(drafts, budgets, strict=True):
            reading = g.row.state.reading
            assert reading is not None
            self.follow(reading, g.tokens)
            rows.append(
                DraftRow(
                    reading.state, g.tokens, budget, g.row.coins, g.warp, Drawn.CHOSEN, chain=g.row.chain
                )
            )
        return self.drafter.propose(rows)

    def follow(self, reading: Reading, tokens: Sequence[int]) -> None:
        """Bring it in line with a text that begins with the committed one."""
        wanted = list(tokens[reading.read :])
        if wanted[: len(reading.ahead)] != reading.ahead:
            self.back(reading)
        more = wanted[len(reading.ahead) :]
        if more:
            if not reading.ahead:
                reading.mark = self.drafter.mark(reading.state)
            start = len(tokens) - len(more) - 1
            self.drafter.observe([reading.state], [_given(tokens, start, more)])
            reading.ahead += more

    def back(self, reading: Reading) -> None:
        if reading.ahead:
            reading.state = self.drafter.rewind(reading.state, reading.mark)
            reading.ahead = []

    def observe(self, reading: Reading, outcome: Outcome, ours: bool) -> None:
        """Read what was committed; of drafts that a level judged, learn what that level kept.

        Args:
            ours: whether it judged what this cascade proposed last.
        """
        self.back(reading)
        told, new = [], list(outcome.verdict.emitted)
        done = 0
        for pending, draft, verdict in reading.judged if ours else ():
            agreed = 0
            for mine, real in zip(verdict.emitted, new[done:], strict=False):
                if mine != real:
                    break
                agreed += 1
            if pending != outcome.start + done or not agreed:
                continue
            fed = (outcome.fed[0], *new)[done : done + agreed]
            told.append(Outcome(draft, UNSEEN, verdict.cut(agreed), fed, (), pending))
            done += agreed
        reading.judged = []
        for one in told:
            self.drafter.observe([reading.state], [one])
        if not told:
            self.drafter.observe([reading.state], [outcome])
        elif done < len(new):
            text = [outcome.fed[0], *new]
            rest = _given(text, done, new[done:])
            self.drafter.observe([reading.state], [rest])
        reading.read += len(outcome.appended)


class ModelLevel(Level):
    """A language model, sped up by what its stages draft.

    Args:
        number: from 1, the strongest; names its coins.
        below: drafts for it; None: it decodes plainly.
        coupled: in its place where draft and target share coins.
        lenience: l of `outpace.methods.cascade.lenient`; 1 is strict, as ``coupled`` always is.
    """

    def __init__(
        self,
        number: int,
        model: Target,
        below: StagedDrafter | None,
        *,
        verifier: Verifier,
        coupled: Verifier,
        policy: Policy,
        clock: PassClock,
        lenience: float = 1.0,
    ) -> None:
        self.number, self.model = number, model
        size = model.vocab_size
        self._lenient = (Lenient(lenience, size), LenientGreedy(lenience, size)) if lenience > 1 else None
        self.verifier, self.coupled = verifier, coupled
        self.reader = Reader(model, clock)
        self.cache = self.reader.new_cache()
        self.staged = StagedDrafter(()) if below is None else below
        self.machine = Machine(self.reader, self.cache, {BELOW: self.staged}, policy, want_laws=True)

    def guess(self, drafts: Sequence[Guesses], total: int) -> None:
        """Steps of this level, for all drafts that want more; one pass of the model each."""
        for g in drafts:
            verifier = self.coupled if g.coupled else self.verifier
            if self._lenient is not None and not g.coupled:
                verifier = self._lenient[g.greedy]
            g.enter(self.number, self.model.max_positions, verifier)
        active = [g for g in drafts if g.wants(total)]
        for g in active:
            self.cache.follow(g.slot, g.tokens)
        while active:
            step(self.machine, active)
            active = [g for g in active if g.wants(total)]


class StagedDrafter(Drafter[State]):
    """Makes the draft of one reviewer, stage by stage.

    Args:
        stages: a level, and how many tokens it is meant to add; strong ones first.
        lenient: whether the levels review leniently.
    """

    Config = State  # never made from a spec
    traits = Traits(samples=True)

    def __init__(self, stages: Sequence[tuple[Level, int]], lenient: bool = False) -> None:
        self.stages, self.lenient = tuple(stages), lenient
        self.lookup: tuple[LookupLevel, int] | None = None
        """The only stage, if that is a lookup: its drafts are passed on as they are."""
        for level, quota in stages if len(stages) == 1 else ():
            if isinstance(level, LookupLevel):
                self.lookup = level, quota

    @classmethod
    def load(cls, config: Any, target: Target) -> StagedDrafter:
        return cls(())

    def begin(self, request: Request) -> State:
        return State([], None)

    def run(self, drafts: Sequence[Guesses]) -> None:
        total = 0
        for level, quota in self.stages:
            total += quota
            open_ = [g for g in drafts if not g.stopped and g.count < min(total, g.most)]
            if open_:
                level.guess(open_, total)

    def propose(self, rows: Sequence[DraftRow[State]]) -> list[Draft]:
        drafts = [
            Guesses(row, min(row.budget.max_nodes, row.budget.max_depth), lenient=self.lenient)
            for row in rows
        ]
        if self.lookup is not None:
            level, quota = self.lookup
            sizes = [min(quota, g.most) for g in drafts]
            return level.propose(drafts, [Budget(size, size) for size in sizes])
        self.run(drafts)
        return [g.draft() for g in drafts]

    def observe(self, states: Sequence[State], outcomes: Sequence[Outcome]) -> None:
        """Note what a level said to a lookup's draft; all else is found again by ids."""
        for state, outcome in zip(states, outcomes, strict=True):
            if state.reading is not None and self.lookup is not None and outcome.draft.memo:
                state.reading.judged.append((outcome.start, outcome.draft, outcome.verdict))


def _given(tokens: Sequence[int], start: int, new: Sequence[int]) -> Outcome:
    """Tokens that were emitted without a draft; ``tokens[start]`` was pending before them."""
    return written(tokens[start : start + len(new)], new, start)
