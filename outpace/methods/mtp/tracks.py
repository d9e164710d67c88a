"""What the modules of `mtp` keep of every sequence: their caches, and states that wait to be read.

All rows that stay are made of committed tokens and of the target's states through the modules before,
as in training. A module's row of a token reads the state that the module before made of the token
before. So what one module gives waits for the next one, until that one is run.

Shape letters: T rows of a pass, R rows wanted, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.methods.mtp.net import PARALLEL, Module
from outpace.models.passes import PassRows
from outpace.types import Feed


@dataclass(slots=True, eq=False)
class Track:
    """One sequence in one module's cache."""

    slot: int
    first: int = 0
    """The token whose state is the first that waits."""
    waiting: list[Tensor] = field(default_factory=list)
    """States [., H] of tokens in a row that no row has read for good."""
    lead: int = 0
    """Tail rows of the slot that are made of committed tokens: all true, whatever was drafted."""
    fresh: Tensor | None = None
    """States of the tokens of those rows, for the next module; kept if the draft is seen."""
    row: dict[int, int] = field(default_factory=dict)
    """Draft node -> its row in the tail of the slot; -1: the committed text ends there."""
    out: dict[int, int] = field(default_factory=dict)
    """Draft node -> its row among the outputs of this draft's passes."""

    def states(self) -> Tensor:
        """All that wait, one behind the other."""
        if len(self.waiting) > 1:
            self.waiting = [torch.cat(self.waiting)]
        return self.waiting[0]

    @property
    def count(self) -> int:
        return sum(len(part) for part in self.waiting)

    def forget(self) -> None:
        """Drop what the draft under way left, except what the cache holds of it."""
        self.lead, self.fresh, self.row, self.out = 0, None, {}, {}


@dataclass(slots=True, eq=False)
class State:
    """One sequence."""

    tracks: list[Track]
    start: int | None = None
    """Position of the first token whose state was seen; None: there was none yet."""
    tokens: list[int] = field(default_factory=list)
    """Those fed since, with their states."""

    @property
    def end(self) -> int | None:
        """The first position without a state."""
        return None if self.start is None else self.start + len(self.tokens)


class Tracks:
    """The modules with their caches.

    Args:
        nets: the modules, in order.
        kind: ``chained`` or ``parallel``.
    """

    def __init__(self, nets: Sequence[Module], kind: str) -> None:
        self.nets, self._side_by_side = nets, kind == PARALLEL
        self.caches = [net.new_cache() for net in nets]

    def begin(self) -> State:
        """Take slots."""
        return State([Track(cache.open()) for cache in self.caches])

    def run(
        self, number: int, feeds: Sequence[Feed], states: Sequence[State], given_TH: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A pass of one module; what it gives."""
        cache = self.caches[number]
        offsets = [(state.start or 0) + number for state in states]
        return self.nets[number].run(PassRows(feeds, cache, 1), cache, offsets, given_TH)

    def add(self, state: State, fed: Sequence[int], state_TH: Tensor) -> None:
        """Take in the states of tokens that were committed."""
        assert state.start is not None
        for number, track in enumerate(state.tracks):
            if not state.tokens:
                track.first = state.start + (0 if self._side_by_side else number)
            if self._side_by_side or number == 0:
                track.waiting.append(state_TH)
        state.tokens += fed

    def keep(self, state: State) -> None:
        """Make the true rows of a draft part of the caches, and pass on what they gave."""
        fresh = None
        for cache, track in zip(self.caches, state.tracks, strict=True):
            if fresh is not None and len(fresh):
                track.waiting.append(fresh)
            if track.lead:
                cache.keep(track.slot, range(track.lead))
                track.waiting = [track.states()[track.lead :]]
                track.first += track.lead
            else:
                cache.drop(track.slot)
            fresh = None if self._side_by_side else track.fresh
            track.forget()

    def read(self, states: Sequence[State]) -> None:
        """Read all that is known: rows whose token, and whose state, is committed."""
        for number in range(len(self.nets)):
            feeds, given, reading = [], [], []
            for state in states:
                track, start = state.tracks[number], state.start
                if start is None or not track.waiting:
                    continue
                last = start + len(state.tokens) - 1
                # The last state waits: the pending token is its next, or it is where guesses start.
                track.lead = last - track.first
                if track.lead < 1:
                    track.lead = 0
                    continue
                ahead = track.first + (0 if self._side_by_side else 1) - start
                feeds.append(Feed.chain(track.slot, state.tokens[ahead : ahead + track.lead]))
                given.append(track.states()[: track.lead])
                reading.append(state)
            if not feeds:
                continue
            out_RH, _ = self.run(number, feeds, reading, torch.cat(given))
            at = 0
            for state in reading:
                track = state.tracks[number]
                self.caches[number].keep(track.slot, range(track.lead))
                if not self._side_by_side and number + 1 < len(self.nets):
                    state.tracks[number + 1].waiting.append(out_RH[at : at + track.lead])
                at += track.lead
                track.waiting = [track.states()[track.lead :].clone()]
                track.first += track.lead
                track.lead = 0

    def mark(self, state: State) -> Any:
        """How much was read, and what waits."""
        tracks = zip(self.caches, state.tracks, strict=True)
        held = [(cache.length(one.slot), one.first, [*one.waiting]) for cache, one in tracks]
        return state.start, [*state.tokens], held

    def rewind(self, state: State, mark: Any) -> State:
        self.forget(state)
        state.start, tokens, held = mark
        state.tokens = [*tokens]
        for cache, track, (length, first, waiting) in zip(self.caches, state.tracks, held, strict=True):
            cache.truncate(track.slot, min(length, cache.length(track.slot)))
            track.first, track.waiting = first, [*waiting]
        return state

    def forget(self, state: State) -> None:
        """Drop a proposal that is done with, or was never seen."""
        for cache, track in zip(self.caches, state.tracks, strict=True):
            cache.drop(track.slot)
            track.forget()

    def restart(self, state: State) -> None:
        """Start anew with the next states that come."""
        self.forget(state)
        for cache, track in zip(self.caches, state.tracks, strict=True):
            cache.truncate(track.slot, 0)
            track.waiting = []
        state.start, state.tokens = None, []

    def end(self, state: State) -> None:
        for cache, track in zip(self.caches, state.tracks, strict=True):
            cache.close(track.slot)
