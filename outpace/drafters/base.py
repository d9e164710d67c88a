"""The contract every drafting method signs.

A drafter guesses; it never decides what is kept. Weights live in the drafter and are shared by
all sequences; what changes as one sequence grows lives in its state ``S``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from outpace.clock import PassClock
from outpace.models.base import Target
from outpace.tree.dynamic import Scale
from outpace.tree.growth import Branch, DraftRow, Expand, Growing, Level, grow
from outpace.types import Budget, Draft, Outcome, Scored

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a drafter may know when a sequence begins."""

    prompt: tuple[int, ...]
    """Ids; those after the first ``num_cached`` arrive through ``observe``, ``forced``, in chunks."""
    num_cached: int = 0
    """Leading prompt tokens that the target's cache held already, and no pass will show."""
    reference: tuple[int, ...] | None = None
    """An expected output that the caller supplied, if any."""
    key: str = ""
    """Whose sequence it is. A drafter that remembers what sequences said uses it for sequences of
    the same key alone."""


ONE_PASS = (0.1, 0.01)
"""``Traits.level_D`` of drafters whose one pass makes all levels: further ones look up its rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits(Scale):
    """What a drafter says of itself, for the engine, policies and drafters made of others."""

    default_nodes: int = 0
    """Most guesses per draft where the method spec does not say ``tree_size``."""
    default_tree: str | None = None
    """Shape where the method spec does not say ``tree``; None is a chain."""
    needs: frozenset[str] = frozenset()
    """Abilities wanted from the target (``outpace.models.base``: TREE, LAYERS, TAPS, ...)."""
    taps: frozenset[str] = frozenset()
    """Features wanted in ``observe``, such as ``hidden.-1``. Unread features cost nothing."""
    samples: bool = False
    """Whether it draws where ``DraftRow.drawn`` asks for that; others always choose."""
    previews: bool = False
    """Whether ``promise`` tells a policy what a draft is worth."""
    uses_target_cache: bool = False
    """Whether it drafts in the slot that a row lends it, and little or nothing without one."""
    resumes: bool = False
    """Whether it drafts only where its work may be handed on (``Lease.resumes``)."""
    least_context: int = 0
    """Committed tokens up to which it proposes nothing, and is not asked."""
    lossless: bool = True
    """Whether verification sees all of the text; not if drafts bring a view for it (``Draft.view``)."""
    doubts: Callable[[Scored, Sequence[int]], int] | None = None
    """Told of a pass and the nodes kept, gives how many of its tokens come before the first one that the
    drafter doubts. The text ends with that one; a larger number means none. Not lossless."""
    for_rules: bool = False
    """Whether it takes part only where a grammar, or a budget of thinking, says what may follow."""
    deterministic: bool = True
    """Whether drafts follow from the sequence alone; not where other sequences are remembered."""
    estimates: bool = False
    """Whether it estimates how likely its guesses are accepted, where a budget asks for that."""
    foresees: bool = False
    """Whether it estimates that before it draws them."""


class Drafter(ABC, Generic[S]):
    """Turns a committed prefix into a tree of guesses within a budget."""

    Config: ClassVar[type]
    """Frozen keyword-only dataclass; its fields are the keys of the method spec."""
    traits: Traits = Traits()
    """Of the class; an instance that differs has its own."""

    @cached_property
    def clock(self) -> PassClock:
        """Seconds spent inside passes of the drafter's own model; one that has none counts none.

        Wrap every pass in ``with self.clock:``, so that reports can tell it from host work.
        """
        return PassClock()

    @classmethod
    @abstractmethod
    def load(cls, config: Any, target: Target) -> Drafter[S]:
        """Make a drafter for this target: the one door to borrowed weights.

        Raises:
            ModelError: weights that are missing, corrupt, or made for another target.
        """

    @abstractmethod
    def begin(self, request: Request) -> S:
        """State of a new sequence, before any of its prompt is committed."""

    @abstractmethod
    def propose(self, rows: Sequence[DraftRow[S]]) -> list[Draft]:
        """Guess for a batch. An empty draft is a valid answer.

        A draft may be dropped unseen, so the states keep nothing that the next ``observe``
        or ``propose`` cannot undo. All randomness comes from the rows' coins. Every distribution
        recorded is the one really drawn from.
        """

    def promise(self, state: S, draft: Draft) -> Sequence[float]:
        """What a draft of its own promises, for a policy that picks among drafters.

        Only drafters that choose, and propose for nearly nothing, can tell; they say so in their traits.

        Returns:
            For every guess the chance that it is reached and kept, likeliest first.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot tell what it promises")

    def cut(self, state: S, draft: Draft, budget: Budget) -> Draft | None:
        """Its own draft within another budget, without its last guesses if need be; None: ask again."""
        most = min(budget.max_nodes, budget.max_depth, budget.max_rows)
        return draft if draft.num_rows <= 1 + most else None

    @abstractmethod
    def observe(self, states: Sequence[S], outcomes: Sequence[Outcome]) -> None:
        """Advance past what was committed. Called at every commit, whoever drafted.

        So a draft and its memo may be another drafter's, one of this class with other settings
        among them: a memo says whose it is.
        """

    def num_uncached(self, state: S, tokens: Sequence[int]) -> int:
        """Committed tokens that it reads before its next guess, for policies that price that: many
        where others drafted for a while, or nobody. 0 for those that have nothing to read.

        Args:
            state: of the sequence.
            tokens: its committed ids, the pending token last.
        """
        return 0

    @property
    def language_model(self) -> Target | None:
        """The model, if the drafter is a language model over the target's vocabulary and nothing
        more; else None. A cascade may speed it up.
        """
        return None

    def mark(self, state: S) -> Any:
        """Note where a state stands, to come back to it once: who drafts for a draft reads
        text that may be taken back. Cost, unless overridden: that of a deep copy.
        """
        return copy.deepcopy(state)

    def rewind(self, state: S, mark: Any) -> S:
        """The state as it was when it was marked; the one given is not used again."""
        restored: S = mark
        return restored

    def end(self, state: S) -> None:
        """Give back what ``begin`` took. The state is not used again."""
        return


class ExpandingDrafter(Drafter[S]):
    """A drafter that can say what may follow each node of a growing tree.

    It implements ``expand`` alone; `outpace.tree.growth` turns that into drafts of every
    shape, drawn by every rule.
    """

    traits = Traits(samples=True)
    between: Expand | None = None
    """Asked in the place of ``expand`` while trees grow: a drafter made of this one, which asks it
    for less."""

    @abstractmethod
    def expand(self, branches: Sequence[Branch[S]]) -> tuple[Tensor, Tensor | None]:
        """Score the given nodes of the drafts under way, all in one pass.

        Args:
            branches: one per sequence that still grows. The first call of a ``propose`` has
                the root alone; later ones only nodes whose parents were expanded before.

        Returns:
            ``logits_FD`` for the nodes, branch by branch in order, before any sampling
            setting, and ``id_D``, the target ids of the columns (None: they are the ids).
        """

    def descend(
        self, rows: Sequence[DraftRow[S]], branches: Sequence[Branch[S]], levels: int
    ) -> Sequence[Level]:
        """Go down several levels with one guess each, as ``expand`` and the draws would, in one call.

        Args:
            branches: as of ``expand``, of one node each.

        Returns:
            As many levels as it went down; none where it cannot.
        """
        return ()

    def spread(self, trees: Sequence[Growing], branches: Sequence[Branch[S]]) -> Sequence[Draft] | None:
        """Grow trees whole, as ``expand`` and their own rule would; None where it cannot."""
        return None

    def estimate(self, branches: Sequence[Branch[S]]) -> Tensor:
        """How likely the nodes that were just expanded are accepted, given all above them.

        Only drafters whose traits say so make estimates. Called after ``expand``, with its branches, so
        that it may read what that pass left.

        Returns:
            float32 [F], in [0, 1], in the order of ``expand``'s rows.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no estimates")

    def foresee(self, branches: Sequence[Branch[S]]) -> Tensor:
        """How likely a draw below the nodes that were just expanded is accepted, if they are.

        Only drafters whose traits say so foresee. Called after ``expand``, with its branches, before
        anything is drawn below them. It reads tokens that are drawn, and stay in the draft.

        Returns:
            float32 [F], in [0, 1], in the order of ``expand``'s rows.
        """
        raise NotImplementedError(f"{type(self).__name__} foresees nothing")

    def propose(self, rows: Sequence[DraftRow[S]]) -> list[Draft]:
        """Grow one tree per row; one ``expand`` per level for the whole batch."""
        drafts = []
        traits, alone = self.traits, self.between is None
        told = self.estimate if traits.estimates and alone else None
        ahead = self.foresee if traits.foresees and alone else None
        at_once = (self.descend, self.spread) if alone else (None, None)
        grown = grow(rows, self.between or self.expand, traits, told, ahead, *at_once)
        for row, (draft, numbers) in zip(rows, grown, strict=True):
            if numbers is not None:
                self.renumber(row.state, numbers)
            drafts.append(draft)
        return drafts

    def renumber(self, state: S, numbers: Sequence[int]) -> None:
        """Node i of the draft is the one that ``expand`` knew as ``numbers[i]``.

        Called after growth where candidates were left out; for states that refer to nodes.
        """
        return
