"""Drafts whose rows run through the first layers of the target, in the target's own cache.

    tail of the slot    pending  a  b  c        fed by the drafter, layers below e only
    verification        pending  a  b  c  d     a, b, c enter at layer e; d runs all layers

What is done below layer e is not done again. The draft carries the residual stream of the rows fed
(``Draft.resume``), and their keys and values stay where they are. For every drafter that works on
shallow states of the target, whatever it makes of them.

Shape letters: K rows fed, H hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from outpace.cache.base import Lease
from outpace.clock import PassClock
from outpace.drafters.base import ExpandingDrafter
from outpace.drafters.feeding import feed_nodes
from outpace.drafters.trained import lender
from outpace.law import VocabMap
from outpace.models.base import Target
from outpace.tree.growth import Branch, DraftRow, grow
from outpace.types import NOTHING, ROOT, Draft, Feed, Outcome, Resume, Signals, StopRule


@dataclass(slots=True, eq=False)
class ShallowRows:
    """The rows of one draft under way."""

    lease: Lease
    layer: int
    """e: layers that the rows run through as the target does; 0: none, nothing is handed on."""
    row: dict[int, int] = field(default_factory=dict)
    """Node, as growth calls it -> its row in the tail of the slot."""
    hidden: list[Tensor] = field(default_factory=list)
    """Residual stream after these layers, pass by pass; K rows in all."""

    def __post_init__(self) -> None:
        self.lease.cache.drop(self.lease.slot)  # of a draft that was dropped unseen

    def feed(self, branch: Branch[Any]) -> Feed:
        """What to run for the nodes that are to be expanded: the pending token first of all."""
        if branch.nodes == (ROOT,):
            self.row = {ROOT: 0}
            return Feed(self.lease.slot, (branch.tokens[-1],), (-1,))
        return feed_nodes(branch, self.lease.slot, self.row, len(self.row))

    def finish(self, draft: Draft, numbers: Sequence[int] | None) -> Draft:
        """The draft, its fed nodes first as they were fed, with the work below the layer handed on.

        Args:
            numbers: what growth called its nodes; None: as the draft does.

        Effects: rows whose nodes were left out of the draft leave the tail.
        """
        if not self.row or not self.layer or not self.lease.resumes:
            return draft
        names = range(len(draft)) if numbers is None else numbers
        # Not always in the order of their numbers: nodes that were there before may be fed late.
        order = sorted(range(len(draft)), key=lambda node: self.row.get(names[node], len(self.row)))
        rows = [0, *(self.row[name] for node in order if (name := names[node]) in self.row)]
        hidden_KH = torch.cat(self.hidden)
        if len(rows) < len(hidden_KH):
            self.lease.cache.prune(self.lease.slot, rows)
            hidden_KH = hidden_KH[torch.tensor(rows, device=hidden_KH.device)]
        resume = Resume(self.layer, tuple(range(len(rows))), hidden_KH)
        return replace(reordered(draft, order), resume=resume)


@dataclass(slots=True, eq=False)
class SlotState:
    """One sequence that drafts in the slot that the target lends."""

    rows: ShallowRows | None = None
    """Of the draft under way; a lease ends with it."""


S = TypeVar("S", bound=SlotState)


class SlotDrafter(ExpandingDrafter[S], Generic[S]):
    """Drafts in the target's own slots, with layers of it or a copy: nothing else grows with a text."""

    target: Target

    @property
    def clock(self) -> PassClock:
        """The target's: whether a pass drafts, the verb tells."""
        return self.target.clock

    @abstractmethod
    def leased(self, row: DraftRow[S], lease: Lease) -> DraftRow[S]:
        """Put the rows of a draft into the state; the row with the budget that the drafter can use."""

    def propose(self, rows: Sequence[DraftRow[S]]) -> list[Draft]:
        """Grow drafts in the lent slots; a row without a lease gets an empty one."""
        ready = [
            replace(row, budget=NOTHING) if row.lease is None else self.leased(row, row.lease) for row in rows
        ]
        drafts, ahead = [], self.foresee if self.traits.foresees else None
        grown = grow(ready, self.expand, self.traits, foresee=ahead)
        for row, (draft, numbers) in zip(ready, grown, strict=True):
            drafts.append(draft if row.state.rows is None else row.state.rows.finish(draft, numbers))
            row.state.rows = None
        return drafts

    def observe(self, states: Sequence[S], outcomes: Sequence[Outcome]) -> None:
        """Nothing to note: what was committed is in the target's cache."""

    def mark(self, state: S) -> None:
        """There is nothing to come back to."""

    def rewind(self, state: S, mark: None) -> S:
        state.rows = None
        return state


def shares(target: Target, layers: Sequence[int], vocab: VocabMap | None = None) -> tuple[float, ...]:
    """What a guess behind so many of the first layers costs, in passes of the target, by weights read.

    Args:
        vocab: of guesses; None: the whole head is read.
    """
    saved = 0
    if vocab is not None:
        lent = lender(target, "a part of its head")
        saved = lent.unembedding(None).nbytes - lent.unembedding(vocab).nbytes
    read = [target.variant(layers=range(count)).weight_bytes - saved for count in layers]
    return tuple(one / max(1, target.weight_bytes) for one in read)


def rows_of(branch: Branch[Any]) -> ShallowRows:
    """The rows of a draft that grows."""
    rows: ShallowRows | None = branch.state.rows
    assert rows is not None
    return rows


@dataclass(frozen=True, slots=True)
class Doubt:
    """Stop rule: a branch ends after a token below a threshold, or where another rule ends it."""

    threshold: float
    other: StopRule | None = None

    def more(self, signals: Signals) -> Tensor:
        """Bool [F]. It reads kept tokens alone, so nothing drawn is lost."""
        sure_F = signals.q_F >= self.threshold
        return sure_F if self.other is None else sure_F & self.other.more(signals)


def pruned(draft: Draft, keep: Sequence[int]) -> Draft:
    """The same draft without some nodes; only for drafts that were chosen, and not drawn.

    Args:
        keep: nodes that stay, ascending; the parent of each stays.
    """
    assert draft.riders is None and all(group.law is None for group in draft.groups)
    return Draft.chosen(
        [draft.token_N[node] for node in keep],
        [ROOT if draft.parent_N[node] == ROOT else keep.index(draft.parent_N[node]) for node in keep],
    )


def reordered(draft: Draft, order: Sequence[int]) -> Draft:
    """The same draft with its nodes in another order.

    Args:
        order: the old numbers in their new order, parents before children.
    """
    if list(order) == list(range(len(order))):
        return draft
    assert draft.riders is None
    place = {ROOT: ROOT, **{old: new for new, old in enumerate(order)}}
    groups = tuple(
        replace(group, parent=place[group.parent], nodes=tuple(place[node] for node in group.nodes))
        for group in draft.groups
    )
    return replace(
        draft,
        token_N=tuple(draft.token_N[node] for node in order),
        parent_N=tuple(place[draft.parent_N[node]] for node in order),
        groups=groups,
    )
