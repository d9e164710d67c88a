"""Drafters that follow a sequence by the target's features, in a cache of their own.

What the target computed since the last draft waits, and goes through the drafter's network in the pass
of the next one. Rows made of true features are kept; rows made of guesses are dropped after every draft.

Shape letters: F width of all features side by side.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from outpace.cache.base import KVCache
from outpace.drafters.base import ExpandingDrafter, Request
from outpace.models.taps import Rows, joined
from outpace.tree.growth import DraftRow
from outpace.types import NOTHING, Draft, Outcome

_PIECES = 256
"""Passes whose features are kept as they came, with those of the whole batch, before what was committed is
copied. A copy takes 8 us a pass and sequence, and most answers of a batch where nobody drafts end before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedConfig:
    """Settings of a drafter with a network of its own."""

    model: str | None = None
    """Folder of the network; without it, the one trained for the target."""
    quantize: str | None = "int8"
    """Round its weights to int8 or int4, where compiled code multiplies them; none keeps them."""


@dataclass(slots=True, eq=False)
class Followed:
    """One sequence in the network's cache."""

    slot: int
    start: int | None = None
    """Position of the first row of the slot; None: no features were seen yet."""
    waiting: list[Tensor] = field(default_factory=list)
    """Features [., F] of rows that are not in the cache for good; the last row's is among them."""
    shown: list[tuple[Mapping[str, Tensor], Rows]] = field(default_factory=list)
    """Features of passes, and which rows of them were committed: they wait behind the others."""
    ids: list[int] = field(default_factory=list)
    """The tokens at whose rows all of them were computed."""
    lead: int = 0
    """Tail rows of the slot that a draft made of them: all true, whatever was drafted."""


S = TypeVar("S", bound=Followed)


class FeatureDrafter(ExpandingDrafter[S], Generic[S]):
    """Keeps a cache of rows made of the target's features.

    A subclass has ``traits.taps`` of its own, and ``opened``, ``feature``, ``read`` and ``expand``.
    """

    Config = TrainedConfig
    cache: KVCache
    most_waiting: int
    """Most rows of a sequence that wait for its next draft; more, such as a prompt, are read at once."""

    @abstractmethod
    def opened(self, slot: int) -> S:
        """State of a new sequence."""

    @abstractmethod
    def feature(self, taps: Mapping[str, Tensor]) -> Tensor:
        """Features [., F] of rows of passes of the target, side by side; perhaps the same memory."""

    @abstractmethod
    def read(self, states: Sequence[S]) -> None:
        """Store rows of all that waits but the last feature, and keep that one waiting."""

    def begin(self, request: Request) -> S:
        """Take a slot. A prefix that no pass will show is left out: rows start behind it."""
        return self.opened(self.cache.open())

    def propose(self, rows: Sequence[DraftRow[S]]) -> list[Draft]:
        """Grow drafts; a sequence whose last features were not shown gets an empty one."""
        for row in rows:
            self.forget(row.state)
        return super().propose(
            [
                self.fitted(row) if self.end_of(row.state) == len(row.tokens) - 1 else _silent(row)
                for row in rows
            ]
        )

    def fitted(self, row: DraftRow[S]) -> DraftRow[S]:
        """The row with the budget that the network can use."""
        return row

    def observe(self, states: Sequence[S], outcomes: Sequence[Outcome]) -> None:
        """Keep the rows made of true features, and the features of what was committed."""
        wanted, long = self.traits.taps, []
        for state, outcome in zip(states, outcomes, strict=True):
            if state.lead:
                self.keep(state)
            self.forget(state)
            scored = outcome.scored
            seen = all(name in scored.taps for name in wanted)
            if not seen or self.end_of(state) != outcome.start:
                self.restart(state)
            if seen and outcome.fed:
                state.start = outcome.start if state.start is None else state.start
                state.ids += outcome.fed
                state.shown.append((scored.taps, _rows(outcome)))
                if not scored.lasting or len(state.shown) >= _PIECES:
                    self.settle(state)
                if not scored.lasting:
                    state.waiting[-1] = state.waiting[-1].clone()
            if len(state.ids) > self.most_waiting:
                self.settle(state)
                long.append(state)
        if long:
            self.read(long)

    def keep(self, state: S) -> None:
        """Make rows of true features part of the slot; nothing of them waits any more."""
        self.cache.keep(state.slot, range(state.lead))
        state.waiting, state.shown, state.ids = [], [], []

    def settle(self, state: S) -> None:
        """Take the features of what was committed from those of whole passes."""
        if state.shown:
            state.waiting.append(self.feature(joined(state.shown, self.traits.taps)))
            state.shown = []

    def num_uncached(self, state: S, tokens: Sequence[int]) -> int:
        """Those whose features wait."""
        return len(state.ids)

    def end_of(self, state: S) -> int | None:
        """The first position without features; None if there are none at all."""
        if state.start is None:
            return None
        return state.start + self.cache.length(state.slot) + len(state.ids)

    def forget(self, state: S) -> None:
        """Drop a proposal that is done with, or was never seen."""
        self.cache.drop(state.slot)
        state.lead = 0

    def mark(self, state: S) -> Any:
        """Where the text began, how much of it is in the slot, and what waits."""
        self.settle(state)
        return state.start, self.cache.length(state.slot), [*state.ids], [*state.waiting]

    def rewind(self, state: S, mark: Any) -> S:
        """Forget what was read since. What waited then waits again, but for what has rows by now: these
        are true, and only the last feature is read anew.
        """
        self.forget(state)
        state.start, length, ids, waiting = mark
        held = self.cache.length(state.slot)
        if ids and held >= length + len(ids):
            length, ids, waiting = length + len(ids) - 1, ids[-1:], [torch.cat(waiting)[-1:]]
        self.cache.truncate(state.slot, min(length, held))
        state.ids, state.waiting, state.shown = [*ids], [*waiting], []
        return state

    def restart(self, state: S) -> None:
        """Start anew with the next features that come."""
        self.cache.truncate(state.slot, 0)
        self.forget(state)
        state.start, state.waiting, state.shown, state.ids = None, [], [], []

    def end(self, state: S) -> None:
        """Give the slot back."""
        self.cache.close(state.slot)


def _silent(row: DraftRow[S]) -> DraftRow[S]:
    return replace(row, budget=NOTHING)


def _rows(outcome: Outcome) -> Rows:
    """Which rows of a feed were committed: None, all in order; a slice, the first of them."""
    rows, count = outcome.row_F, len(outcome.row_F)
    if rows != tuple(range(count)):
        return list(rows)
    return None if count == outcome.scored.tap_start_B[-1] else slice(0, count)
