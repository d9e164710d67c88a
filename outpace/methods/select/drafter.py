"""Select: several drafters at once, and of their guesses the likeliest, in one tree.

    suffix      sat on the mat .
    recycling   sat down            ->   sat -+- on - the - mat - .
                slept                         +- down

All members that choose their guesses are asked at every step. A lookup says how likely each guess is from
the length of its match. For the others, `select` counts how often their first guess was right. The guesses
are merged by common prefixes, and as many are checked as pay. A member that samples, such as a draft
model, is picked before it draws, or its distribution would not be that of its tokens. It drafts where it
promises more than the forest does, and then alone.

    select[members=suffix+recycling]
    select[members=suffix+draft_model[model=M]]

Every member sees every step, with its own guesses and what became of them. Where chains alone can
be checked, or with ``merge=false``, the likeliest path is taken.

Pays where the kind of text changes: each member alone is silent, or wrong, on some of it.

Cost: that of all members that choose. Sources: SAM-Decoding, arXiv:2411.10666 (retrieval where
the match is long, a model elsewhere); merging by prefixes, SpecInfer, arXiv:2305.09781.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outpace.drafters.base import Drafter, Request, Traits
from outpace.drafters.parts import load_part, split_parts
from outpace.drafters.worth import as_own
from outpace.drafters.wrapping import WrappingDrafter
from outpace.errors import SpecError
from outpace.methods.select.forest import merge
from outpace.models.base import Target
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import CHAIN, budget
from outpace.types import Draft, Outcome, Verdict

RATE = 0.1
"""How fast records follow what happens."""
KEPT, DRAFTED = 2.0, 4.0
"""What is assumed of a member that samples: guesses kept, and made, per draft."""
FORGET = 0.02
"""Share of the way back to that, per step in which it was not picked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectConfig:
    members: str = "suffix+recycling"
    """Specs of the drafters, joined by ``+``."""
    merge: bool = True
    """Whether guesses of several members may stand side by side, in a tree."""
    cost: float = 0.15
    """What a guess of a member that samples costs, in passes of the target over one row."""

    def __post_init__(self) -> None:
        if not self.cost >= 0:
            raise ValueError(f"cost must be at least 0, got {self.cost}")


@dataclass(slots=True)
class _Record:
    """How a member served in one sequence."""

    rate: float = 0.4
    """How often its first guess was right."""
    kept: float = KEPT
    drafted: float = DRAFTED


@dataclass(slots=True, eq=False)
class _State:
    members: list[Any]
    records: list[_Record]
    drafts: list[Draft] = field(default_factory=list)
    """What each member said last; an empty draft where it was not asked."""
    given: Draft | None = None
    picked: int | None = None
    """The member that drafted alone, because it samples."""


class Select(WrappingDrafter[_State]):
    """Asks several drafters and checks what is likeliest.

    Args:
        members: at least two.
    """

    Config = SelectConfig
    traits = Traits(default_nodes=24)

    def __init__(self, config: SelectConfig, members: Sequence[Drafter[Any]]) -> None:
        self.config, self.members = config, tuple(members)
        # A pass that one member resumes has no features of the layers below for the others.
        tapped = [i for i, member in enumerate(self.members) if member.traits.taps]
        self._resume = [set(tapped) <= {i} for i in range(len(self.members))]
        self._lent = [may or not m.traits.resumes for may, m in zip(self._resume, self.members, strict=True)]
        self.traits = replace(self.traits, samples=any(member.traits.samples for member in members))
        super().__init__(members)
        self._budgets = [
            budget(m.traits.default_tree, m.traits.default_nodes, m.traits.default_nodes) for m in members
        ]

    @classmethod
    def load(cls, config: SelectConfig, target: Target) -> Select:
        """Load every member.

        Raises:
            SpecError: fewer than two, one twice, or one that cannot be read.
            ModelError: as the members raise it.
        """
        who = "drafter 'select'"
        specs = split_parts(config.members, who)
        names = [str(spec) for spec in specs]
        if len(set(names)) < max(2, len(names)):
            raise SpecError(f"{who}: members must be two or more different drafters, got {config.members}")
        return cls(config, [load_part(spec, target) for spec in specs])

    def follow(self) -> None:
        """Take over the members' traits; one that is lent no slot does not need it."""
        super().follow()
        lent = [m for m, lent in zip(self.members, self._lent, strict=True) if lent]
        uses = any(member.traits.uses_target_cache for member in lent)
        self.traits = replace(self.traits, uses_target_cache=uses)

    def inner(self, state: _State) -> list[tuple[Drafter[Any], Any]]:
        return list(zip(self.members, state.members, strict=True))

    def begin(self, request: Request) -> _State:
        states = [member.begin(request) for member in self.members]
        return _State(states, [_Record() for _ in states])

    def propose(self, rows: Sequence[DraftRow[_State]]) -> list[Draft]:
        """A forest of what was chosen, or the draft of a member that samples."""
        said = [[Draft()] * len(self.members) for _ in rows]
        for i, member in enumerate(self.members):
            if not member.traits.samples:
                answers = member.propose([self._ask(row, i) for row in rows])
                for one, answer in zip(said, answers, strict=True):
                    one[i] = answer
        out: list[Draft] = []
        alone: dict[int, list[int]] = {}
        for at, (row, drafts) in enumerate(zip(rows, said, strict=True)):
            rates = [record.rate for record in row.state.records]
            forest = merge(drafts, rates, row.budget, self._may_branch(row))
            row.state.picked = self._picked(row.state, forest.worth)
            if row.state.picked is not None:
                alone.setdefault(row.state.picked, []).append(at)
            out.append(forest.draft)
        for i, places in alone.items():
            answers = self.members[i].propose([self._ask(rows[at], i) for at in places])
            for at, answer in zip(places, answers, strict=True):
                out[at] = said[at][i] = answer
        for row, drafts, draft in zip(rows, said, out, strict=True):
            row.state.drafts, row.state.given = drafts, draft
        return out

    def _ask(self, row: DraftRow[_State], i: int) -> DraftRow[Any]:
        """What a member is asked: a draft of its own size, within the budget."""
        own, asked = self._budgets[i], row.budget
        free = self._may_branch(row) and asked.shape == CHAIN
        shape = own.shape if free else asked.shape
        lease = row.lease if self._lent[i] else None
        if lease is not None:
            lease = replace(lease, resumes=lease.resumes and self._resume[i])
        return replace(
            row,
            state=row.state.members[i],
            lease=lease,
            budget=replace(
                asked,
                max_nodes=min(own.max_nodes, asked.max_nodes),
                max_depth=min(own.max_depth, asked.max_depth),
                shape=shape,
            ),
        )

    def _may_branch(self, row: DraftRow[_State]) -> bool:
        return self.config.merge and not row.chain

    def _picked(self, state: _State, worth: float) -> int | None:
        """The sampling member that promises more than the forest, if any."""
        best = None
        for i, (member, record) in enumerate(zip(self.members, state.records, strict=True)):
            if member.traits.samples:
                promised = (1 + record.kept) / (1 + self.config.cost * record.drafted)
                if promised > worth:
                    best, worth = i, promised
        return best

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        """Tell every member what became of its own guesses."""
        for i, member in enumerate(self.members):
            member.observe(
                [state.members[i] for state in states],
                [self._own(state, i, outcome) for state, outcome in zip(states, outcomes, strict=True)],
            )
        for state, outcome in zip(states, outcomes, strict=True):
            if state.given is outcome.draft and not outcome.forced:
                self._learn(state, outcome.verdict)
            state.drafts, state.given, state.picked = [], None, None
        self.follow()

    def _own(self, state: _State, i: int, outcome: Outcome) -> Outcome:
        """The outcome with a member's own draft, if it left a memo to learn by."""
        if outcome.forced or i == state.picked or not state.drafts:
            return outcome
        return as_own(state.drafts[i], state.given, outcome)

    def _learn(self, state: _State, verdict: Verdict) -> None:
        for i, (member, record) in enumerate(zip(self.members, state.records, strict=True)):
            draft = state.drafts[i]
            kept = draft.path_of(verdict.emitted)
            if member.traits.samples and i != state.picked:
                record.kept += FORGET * (KEPT - record.kept)
                record.drafted += FORGET * (DRAFTED - record.drafted)
            elif len(draft) or i == state.picked:  # one that was picked and is silent brought nothing
                record.rate += RATE * (bool(kept) - record.rate)
                if not verdict.censored:
                    record.kept += RATE * (len(kept) - record.kept)
                    record.drafted += RATE * (draft.levels - record.drafted)

    def mark(self, state: _State) -> list[Any]:
        marks = [m.mark(own) for m, own in zip(self.members, state.members, strict=True)]
        return [*marks, [replace(record) for record in state.records]]

    def rewind(self, state: _State, mark: list[Any]) -> _State:
        pairs = zip(self.members, state.members, mark, strict=False)
        return _State([m.rewind(own, its) for m, own, its in pairs], mark[-1])
