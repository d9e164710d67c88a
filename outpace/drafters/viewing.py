"""Drafters that are the target itself, reading a part of its keys and values.

They draft in the slot that the target lends. Rows of the draft are fed with a view, which names the
committed rows that they see. They leave the slot with the draft. No key is copied, and none is kept
twice. Verification feeds without a view, and sees all.

A guess costs the target's weights and the keys seen; a pass of the target costs its weights and all
keys. So such a drafter pays where keys and values are most of what a pass reads: long texts. It
proposes nothing as long as its view leaves nothing out.

Shape letters: F nodes of a frontier, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from outpace.cache.base import Lease
from outpace.clock import PassClock
from outpace.drafters.base import ExpandingDrafter, Request, Traits
from outpace.drafters.feeding import feed_nodes
from outpace.models.base import VIEWS, Target
from outpace.models.views import Choice, KVView, Rule
from outpace.tree.growth import Branch, DraftRow
from outpace.types import NOTHING, ROOT, Draft, Feed, Outcome


class Sighted(Protocol):
    """A target that can VIEWS."""

    def choice(self, rule: Rule) -> Choice:
        """Memory for what the views of one sequence show."""


@dataclass(slots=True, eq=False)
class Seeing:
    """What the views of one sequence show, and when they choose anew."""

    choice: Choice
    every: int
    """Views from one choice to the next."""
    fall: float
    """Share of the guesses kept, over the last drafts, below which the next view chooses anew."""
    age: int = 0
    kept: float = 1.0

    def look(self, base: int) -> KVView | None:
        """The view of the next draft; None where nothing is left out."""
        view = self.choice.view(base, choose=self.age % self.every == 0)
        self.age += 1
        return view

    def learn(self, kept: int, depth: int) -> None:
        """Take in what was kept of a draft."""
        if depth:
            self.kept += 0.5 * (kept / depth - self.kept)
        if self.kept < self.fall:
            self.age, self.kept = 0, 1.0


@dataclass(slots=True, eq=False)
class ViewState:
    seeing: Seeing
    view: KVView | None = None
    """Of the draft under way."""
    lease: Lease | None = None
    row: dict[int, int] = field(default_factory=dict)
    """Node, as growth calls it -> its row in the tail of the slot."""
    draft: Draft | None = None


_SAVES = 6
"""Texts must be so many times as long as their view: over less, a guess costs nearly as much as a token.
Measured on SmolLM2-135M (docs/results/views.md): a view of 512 brings 0.92, 1.02 and 1.17 x at 2, 4 and 8
times. One of 1024 brings 1.10 and 1.34 x at 4 and 8."""


class ViewDrafter(ExpandingDrafter[ViewState]):
    """Drafts with the target's own weights through a view; a method adds the rule of the view.

    Args:
        every: drafts from one choice of rows to the next.
        fall: see `Seeing`.
    """

    traits = Traits(default_nodes=3, needs=frozenset({VIEWS}), samples=True, uses_target_cache=True)

    def __init__(self, target: Target, rule: Rule, every: int = 1, fall: float = 0.0) -> None:
        self.target, self.rule, self.every, self.fall = target, rule, every, fall
        seen = rule.listed + rule.window + rule.run
        self.traits = replace(self.traits, least_context=_SAVES * seen)

    @property
    def clock(self) -> PassClock:
        """The target's: whether a pass drafts, the verb tells."""
        return self.target.clock

    def begin(self, request: Request) -> ViewState:
        return ViewState(seeing(self.target, self.rule, self.every, self.fall))

    def propose(self, rows: Sequence[DraftRow[ViewState]]) -> list[Draft]:
        """Grow drafts in the lent slots; empty ones without a lease, and while all would be seen."""
        asked = []
        for row in rows:
            state, base = row.state, len(row.tokens) - 1
            state.row, state.view, state.lease = {}, None, row.lease
            if row.lease is not None and row.budget.max_nodes and self.rule.narrows(base):
                row.lease.cache.drop(row.lease.slot)
                state.view = state.seeing.look(base)
            asked.append(row if state.view is not None else replace(row, budget=NOTHING))
        drafts = super().propose(asked)
        for row, draft in zip(rows, drafts, strict=True):
            row.state.draft, row.state.view, row.state.lease = draft, None, None
        return drafts

    def expand(self, branches: Sequence[Branch[ViewState]]) -> tuple[Tensor, Tensor | None]:
        """One pass of the target over the new nodes."""
        feeds = []
        for branch in branches:
            state = branch.state
            assert state.lease is not None and state.view is not None
            slot = state.lease.slot
            if branch.nodes == (ROOT,):
                state.row = {ROOT: 0}
                feeds.append(Feed(slot, (branch.tokens[-1],), (-1,), view=state.view))
            else:
                feeds.append(feed_nodes(branch, slot, state.row, len(state.row), state.view))
            state.view = replace(state.view, choice=None)  # chosen once in a draft
        lease = branches[0].state.lease
        assert lease is not None
        return self.target.score(feeds, lease.cache).logits_TV, None

    def observe(self, states: Sequence[ViewState], outcomes: Sequence[Outcome]) -> None:
        """Note how much of the own drafts was kept."""
        for state, outcome in zip(states, outcomes, strict=True):
            if state.draft is not None and state.draft is outcome.draft and not outcome.verdict.censored:
                depth = outcome.draft.levels
                state.seeing.learn(len(outcome.verdict.kept), depth)
            state.draft = None

    def mark(self, state: ViewState) -> Any:
        """How far the present choice has come; rows chosen are not kept, but chosen anew."""
        return state.seeing.age, state.seeing.kept

    def rewind(self, state: ViewState, mark: Any) -> ViewState:
        state.seeing.age, state.seeing.kept = mark
        state.seeing.choice.forget()
        state.draft = None
        return state


def seeing(target: Any, rule: Rule, every: int, fall: float) -> Seeing:
    """A sequence's views; the target can VIEWS."""
    sighted: Sighted = target
    return Seeing(sighted.choice(rule), every, fall)
