"""An adapter on disk, and its keys, kept in step with the texts of sequences.

    slot of the adapter    x0 .. x6 | x7 x8   x9    a     b        one row per token, as in the text
                           for good | lead  pending  draft         the tail, while a draft grows

A row is made of the target's state after layer e and of nothing else. That state is the same
whether a token was drafted or committed. So the rows of accepted guesses stay, and those of others
go. Tokens that the target fed without a draft wait until there is one, or until they are many.

Shape letters: T rows of a pass, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.clock import PassClock
from outpace.drafters.shallow import ShallowRows
from outpace.drafters.trained import (
    CONFIG,
    decoder_from_json,
    lender,
    read_config,
    read_tensors,
    rounding,
    vocab_map,
)
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.methods.early_exit.adapter import Adapter, adapter_shapes
from outpace.models.base import Target
from outpace.models.passes import PassRows
from outpace.tree.growth import Branch
from outpace.types import ROOT, Draft, Feed, Outcome

WAITING = 32
"""Most rows that wait for the next draft: more, such as a prompt, are read at once."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterFile:
    """What an adapter's folder holds."""

    layer: int
    """e: layers of the target that run before it."""
    adapter: Adapter
    vocab: VocabMap | None
    """The part of the target's vocabulary that it drafts; None: all of it."""


def read_adapter(folder: Path, target: Target, method: str, quantize: str | None = None) -> AdapterFile:
    """Read a folder that ``outpace train`` wrote.

    Raises:
        ModelError: corrupt, made for another target, or of shapes that do not fit.
    """
    config, tensors = read_config(folder, target, method), read_tensors(folder)
    lender(target, method)
    layer = exit_layer(folder, config, target)
    adapter = made_adapter(folder, config, tensors, target, quantize=quantize)
    return AdapterFile(layer, adapter, vocab_map(tensors, target.vocab_size))


def exit_layer(folder: Path, config: Mapping[str, Any], target: Target) -> int:
    """How many layers of the target run before what a folder holds: e.

    Raises:
        ModelError: none, all of them, or the config does not say.
    """
    layer = config.get("layer")
    if not isinstance(layer, int) or not 0 < layer < target.num_layers:
        raise ModelError(f"{folder / CONFIG}: layer is {layer!r}, need 1 to {target.num_layers - 1}")
    return layer


def made_adapter(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: Target,
    mlp: bool = False,
    quantize: str | None = None,
) -> Adapter:
    """What a folder holds, ready to run: an adapter, or with an MLP a whole layer.

    Raises:
        ModelError: its shapes do not fit.
    """
    shape = decoder_from_json(config.get("decoder", {}), folder / CONFIG)
    wanted, found = adapter_shapes(shape, mlp), weight_shapes(tensors)
    if found != wanted or shape.hidden_size != target.hidden_size:
        wrong = sorted(name for name in {**found, **wanted} if found.get(name) != wanted.get(name))
        raise ModelError(
            f"{folder} is no {'layer' if mlp else 'adapter'} of width {target.hidden_size}; "
            f"look at {', '.join(wrong) or 'hidden_size'}"
        )
    return Adapter(shape, tensors, target, quantize=rounding(quantize, target))


def weight_shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors but the vocabulary's."""
    return {name: tuple(one.shape) for name, one in tensors.items() if name not in ("d2t", "t2d")}


@dataclass(slots=True, eq=False)
class AdapterState:
    """One sequence in the adapter's cache."""

    slot: int
    start: int | None = None
    """Position of the first row of the slot; None: nothing was seen yet."""
    ids: list[int] = field(default_factory=list)
    """Committed tokens that are not in the slot for good."""
    waiting: list[Tensor] = field(default_factory=list)
    """Their states after layer e, [., H]."""
    lead: int = 0
    """Tail rows of the slot that are these tokens'; the next is the pending token's."""
    rows: ShallowRows | None = None
    """Of the target, while a draft grows."""
    draft: Draft | None = None
    """The last proposal, until it is observed: its first rows are in the tail of the slot."""


class AdapterRows:
    """The keys of an adapter, for many sequences.

    Args:
        adapter: whose keys they are.
        tap: name of the states that it reads.
        clock: counts its passes.
    """

    def __init__(self, adapter: Adapter, tap: str, clock: PassClock) -> None:
        self.adapter, self.tap, self.clock = adapter, tap, clock
        self.cache = adapter.new_cache()

    def ready(self, state: AdapterState, position: int) -> None:
        """Drop what was tried; the next row is that of the pending token, at ``position``.

        Effects: forgets all rows if some before it were never seen.
        """
        self.forget(state)
        if self._end(state) != position:
            self.begin_at(state, position)

    def run(self, branches: Sequence[Branch[AdapterState]], fed: Sequence[Feed], hidden_TH: Tensor) -> Tensor:
        """Outputs of the adapter for nodes whose states are known; what waits goes before them.

        Args:
            branches: the nodes, as growth gives them.
            fed: what the target was fed for them, in the slots lent.
            hidden_TH: the states that it gave.
        """
        feeds, parts, start = [], [], 0
        for branch, feed in zip(branches, fed, strict=True):
            state, tokens, stop = branch.state, feed.token_J, start + len(feed.token_J)
            if branch.nodes == (ROOT,):
                state.lead = len(state.ids)
                parts += state.waiting
                feeds.append(Feed.chain(state.slot, (*state.ids, *tokens), want=(state.lead,)))
            else:  # the tail here is the tail of the lent slot, behind the lead
                parents = tuple(state.lead + parent for parent in feed.parent_J)
                feeds.append(Feed(state.slot, tokens, parents))
            parts.append(hidden_TH[start:stop])
            start = stop
        starts = [branch.state.start or 0 for branch in branches]
        return self.adapter.run(PassRows(feeds, self.cache, 1), self.cache, starts, torch.cat(parts))

    def finish(self, state: AdapterState, draft: Draft, numbers: Sequence[int] | None) -> Draft:
        """The draft that is proposed, with the target's work below layer e handed on.

        Args:
            state: whose draft it is.
            draft: as it grew.
            numbers: what growth called its nodes; None: as the draft does.
        """
        assert state.rows is not None
        row, names = state.rows.row, range(len(draft)) if numbers is None else numbers
        state.draft = state.rows.finish(draft, numbers)
        state.rows = None  # a lease ends here
        if row:
            own = [0, *sorted(row[name] for name in names if name in row)]
            self.cache.prune(state.slot, [*range(state.lead), *(state.lead + one for one in own)])
        return state.draft

    def observe(self, states: Sequence[AdapterState], outcomes: Sequence[Outcome]) -> None:
        """Keep the rows of what was committed, and the states of what has none yet."""
        long = []
        for state, outcome in zip(states, outcomes, strict=True):
            taps = outcome.scored.taps
            if self.tap not in taps or self._end(state) != outcome.start:
                self.begin_at(state, None)
            known = self._keep(state, outcome)
            if self.tap not in taps:
                continue
            state.start = outcome.start if state.start is None else state.start
            if known < len(outcome.fed):
                # A list of rows makes a copy: the pass's own memory is used again.
                state.waiting.append(taps[self.tap][list(outcome.row_F[known:])])
                state.ids += outcome.fed[known:]
            if len(state.ids) > WAITING:
                long.append(state)
        if long:
            self._read(long)

    def _keep(self, state: AdapterState, outcome: Outcome) -> int:
        """Commit tail rows of the slot; tells how many of the fed tokens are among them."""
        kept: list[int] = []
        resume = outcome.draft.resume
        if state.draft is outcome.draft and resume is not None:
            kept = [row for row in outcome.row_F if row < len(resume.row_K)]
        if state.lead or kept:
            self.cache.keep(state.slot, [*range(state.lead), *(state.lead + one for one in kept)])
            state.ids, state.waiting = [], []
        self.forget(state)
        return len(kept)

    def _read(self, states: Sequence[AdapterState]) -> None:
        """Put all that waits through the adapter, for its keys alone."""
        feeds = [Feed.chain(state.slot, state.ids, want=()) for state in states]
        x_TH = torch.cat([part for state in states for part in state.waiting])
        rows = PassRows(feeds, self.cache, 1)
        with self.clock:
            self.adapter.run(rows, self.cache, [state.start or 0 for state in states], x_TH)
        for state, feed in zip(states, feeds, strict=True):
            self.cache.keep(feed.slot, range(len(feed.token_J)))
            state.ids, state.waiting = [], []

    def _end(self, state: AdapterState) -> int | None:
        """The first position that was not seen; None if none was."""
        if state.start is None:
            return None
        return state.start + self.cache.length(state.slot) + len(state.ids)

    def forget(self, state: AdapterState) -> None:
        """Drop a proposal that is done with, or was never seen."""
        self.cache.drop(state.slot)
        state.lead, state.rows, state.draft = 0, None, None

    def begin_at(self, state: AdapterState, position: int | None) -> None:
        """Forget all rows; the next one has this position, or that of what comes next."""
        self.cache.truncate(state.slot, 0)
        self.forget(state)
        state.start, state.ids, state.waiting = position, [], []

    def mark(self, state: AdapterState) -> Any:
        """Where the text began, how much of it is in the slot, and what waits."""
        return state.start, self.cache.length(state.slot), [*state.ids], [*state.waiting]

    def rewind(self, state: AdapterState, mark: Any) -> AdapterState:
        """Forget what was read since; what waited then waits again.

        Effects: forgets all rows if those of the mark have gone meanwhile.
        """
        start, length, ids, waiting = mark
        if state.start != start or self.cache.length(state.slot) < length:
            self.begin_at(state, None)
            return state
        self.cache.truncate(state.slot, length)
        self.forget(state)
        state.ids, state.waiting = [*ids], [*waiting]
        return state
