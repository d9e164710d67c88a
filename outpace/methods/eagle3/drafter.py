"""EAGLE: one layer on the target's own features guesses, chain or tree, greedy or sampled.

    text        x0  x1  x2  x3 | x4 pending        draft: x5 x6 ...
    features    f0  f1  f2  f3                     of the passes that fed x0 to x3
    rows        f0+x1  f1+x2  f2+x3  f3+x4   ->    guesses x5 and gives a
                                     a+x5    ->    guesses x6, and so on

Row t has position t, as in `outpace.train.align`. What the target has computed since the last
draft goes through the head in the pass of the draft's first level, so a draft of depth D costs D
passes of the head. Keys made from its own outputs are dropped after each draft and made anew
from the target's features.

Reads heads that ``outpace train eagle3`` made, EAGLE-3 heads in the speculators format, and the
EAGLE-1, EAGLE-2 and EAGLE-3 checkpoints of the method's authors. Pays wherever such a head is
trained for the target; a head for another target drafts noise, and is refused where that shows.

Papers: Li et al. 2024, arXiv:2401.15077 and arXiv:2406.16858; Li et al. 2025, arXiv:2503.01840.

Shape letters: T rows of a pass, F nodes of a frontier, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.base import ExpandingDrafter, Request, Traits
from outpace.drafters.trained import rounding
from outpace.methods.eagle3.files import find_head, read_head
from outpace.methods.eagle3.net import EagleNet
from outpace.models.base import HEAD, TAPS, Target
from outpace.models.passes import PassRows
from outpace.tree.growth import Branch, DraftRow
from outpace.types import NOTHING, ROOT, Draft, Feed, Outcome

_WAITING = 2048
"""Most rows of a sequence that wait for its next draft; more go through the head at once. In a full
batch where nobody drafts, most answers end before that, and nothing was read in vain. A row that
waits takes about a sixth of what the target keeps of it."""

_PIECES = 32
"""Most parts of a sequence's features, each of which holds the memory of a whole pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Config:
    """Settings of the drafter."""

    model: str | None = None
    """Folder of the head; without it, the one trained for the target."""
    quantize: str | None = "int8"
    """Round its weights to int8 or int4, where compiled code multiplies them; none keeps them."""


@dataclass(slots=True, eq=False)
class _State:
    """One sequence in the head's cache."""

    slot: int
    start: int | None = None
    """Position of the first row of the slot; None: no features were seen yet."""
    waiting: list[Tensor] = field(default_factory=list)
    """Features [., F] that have not been through the head for good."""
    ids: list[int] = field(default_factory=list)
    """The tokens at whose rows they were computed; each row embeds the one after it."""
    lead: int = 0
    """Tail rows of the slot that are made of these features: all true, whatever was drafted."""
    row: dict[int, int] = field(default_factory=dict)
    """Draft node -> its row in the tail of the slot."""
    out: dict[int, int] = field(default_factory=dict)
    """Draft node -> its row among the outputs of this draft's passes."""


class Eagle3(ExpandingDrafter[_State]):
    """Drafts with an EAGLE head.

    Args:
        net: the head; owns the cache of this drafter.
        id_D: target ids of the columns of its logits; None: they are the ids.
    """

    Config = Eagle3Config
    traits = Traits(default_nodes=5, default_tree="dynamic", needs=frozenset({TAPS, HEAD}), samples=True)

    def __init__(self, net: EagleNet, id_D: Tensor | None) -> None:
        self.net, self._id_D = net, id_D
        self.traits = replace(self.traits, taps=frozenset(net.shape.taps))
        self.cache = net.new_cache()
        self._out_TH = torch.empty(0)

    @classmethod
    def load(cls, config: Eagle3Config, target: Target) -> Eagle3:
        """Read the head and borrow the target's embedding.

        Raises:
            ModelError: no head, a corrupt one, or one that was made for another target.
        """
        head = read_head(find_head(target, config.model), target)
        rounded = rounding(config.quantize, target)
        net = EagleNet(head.shape, head.tensors, target, head.embed_VH, head.id_D, quantize=rounded)
        return cls(net, None if head.id_D is None else head.id_D.to(target.device))

    def begin(self, request: Request) -> _State:
        """Take a slot. A prefix that no pass will show is left out: rows start behind it."""
        return _State(self.cache.open())

    def propose(self, rows: Sequence[DraftRow[_State]]) -> list[Draft]:
        """Grow drafts; a sequence whose last features were not shown gets an empty one."""
        for row in rows:
            self._forget(row.state)
        known = [
            row if self._end(row.state) == len(row.tokens) - 1 else replace(row, budget=NOTHING)
            for row in rows
        ]
        return super().propose(known)

    def expand(self, branches: Sequence[Branch[_State]]) -> tuple[Tensor, Tensor | None]:
        """One pass of the head: features of the target first, then its own outputs."""
        first = branches[0].nodes == (ROOT,)
        feeds = [self._feed_waiting(b) if first else self._feed_nodes(b) for b in branches]
        if first:
            self._out_TH = self._out_TH[:0]
        seen = len(self._out_TH)
        for branch in branches:
            branch.state.out |= {node: seen + i for i, node in enumerate(branch.nodes)}
            seen += len(branch.nodes)
        rows = PassRows(feeds, self.cache, 1)
        with self.clock:
            if first:
                given_TF = torch.cat([part for b in branches for part in b.state.waiting])
            else:
                parents = [b.state.out[b.parent_N[node]] for b in branches for node in b.nodes]
                given_TF = self._out_TH.index_select(0, torch.tensor(parents, device=self.net.device))
            out_FH, logits_FD = self.net.run(rows, self.cache, _starts(branches), given_TF, first)
        self._out_TH = out_FH if first else torch.cat([self._out_TH, out_FH])
        return logits_FD, self._id_D

    def _feed_waiting(self, branch: Branch[_State]) -> Feed:
        """What the target computed since the last draft, the row of the pending token last."""
        state = branch.state
        state.lead = len(state.ids)
        state.row = {ROOT: state.lead - 1}
        tokens = (*state.ids[1:], branch.tokens[-1])
        return Feed.chain(state.slot, tokens, want=(state.lead - 1,))

    def _feed_nodes(self, branch: Branch[_State]) -> Feed:
        state = branch.state
        start = len(state.row) - 1 + state.lead
        tokens = tuple(branch.token_N[node] for node in branch.nodes)
        parents = tuple(state.row[branch.parent_N[node]] for node in branch.nodes)
        state.row |= {node: start + i for i, node in enumerate(branch.nodes)}
        return Feed(state.slot, tokens, parents)

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        """Keep the rows made of true features, and the features of what was committed."""
        new: list[tuple[_State, Outcome]] = []
        for state, outcome in zip(states, outcomes, strict=True):
            if state.lead:
                self.cache.keep(state.slot, range(state.lead))
                state.waiting, state.ids = [], []
            self._forget(state)
            taps = outcome.scored.taps
            if not taps.keys() >= self.traits.taps or self._end(state) != outcome.start:
                self._restart(state)
            if taps.keys() >= self.traits.taps and outcome.fed:
                state.start = outcome.start if state.start is None else state.start
                state.ids += outcome.fed
                new.append((state, outcome))
        if new:
            self._copy(new)
        long = [state for state, _ in new if len(state.ids) > _WAITING]
        if long:
            self._read(long)

    def _copy(self, new: Sequence[tuple[_State, Outcome]]) -> None:
        """Keep the features of what was committed: one copy, of which every sequence has its part,
        for a copy of each takes four times as long in a batch of 64.
        """
        rows = [_rows(outcome) for _, outcome in new]
        together = {
            name: torch.cat(
                [
                    taps[name] if at is None else taps[name][at]
                    for taps, at in zip((o.scored.taps for _, o in new), rows, strict=True)
                ]
            )
            for name in self.net.shape.taps
        }
        sizes = [len(outcome.fed) for _, outcome in new]
        parts = torch.split(self.net.feature(together), sizes)
        for (state, _), part in zip(new, parts, strict=True):
            state.waiting.append(part)
            if len(state.waiting) > _PIECES:
                state.waiting = [torch.cat(state.waiting)]

    def _read(self, states: Sequence[_State]) -> None:
        """Put all features but the last through the head, whose next token is not known yet."""
        features, feeds = [], []
        for state in states:
            feature_TF = torch.cat(state.waiting)
            features.append(feature_TF[:-1])
            feeds.append(Feed.chain(state.slot, state.ids[1:], want=()))
            state.waiting, state.ids = [feature_TF[-1:].clone()], state.ids[-1:]
        starts = [state.start or 0 for state in states]
        rows = PassRows(feeds, self.cache, 1)
        with self.clock:
            self.net.run(rows, self.cache, starts, torch.cat(features), features=True)
        for feed in feeds:
            self.cache.keep(feed.slot, range(len(feed.token_J)))

    def num_uncached(self, state: _State, tokens: Sequence[int]) -> int:
        """Those whose features wait."""
        return len(state.ids)

    def mark(self, state: _State) -> Any:
        """How much of the text the head has read, and the features that wait."""
        return self.cache.length(state.slot), state.start, list(state.waiting), list(state.ids)

    def rewind(self, state: _State, mark: Any) -> _State:
        """Go back; rows that were made since then of the features that waited stay, but for the last,
        which the next draft begins with.
        """
        length, state.start, waiting, ids = mark
        held = self.cache.length(state.slot)
        if held < length:
            self._restart(state)
            return state
        self._forget(state)
        if ids and held >= length + len(ids):
            length += len(ids) - 1
            waiting, ids = [torch.cat(waiting)[-1:]], ids[-1:]
        self.cache.truncate(state.slot, length)
        state.waiting, state.ids = waiting, ids
        return state

    def _end(self, state: _State) -> int | None:
        """The first position without features; None if there are none at all."""
        if state.start is None:
            return None
        return state.start + self.cache.length(state.slot) + len(state.ids)

    def _forget(self, state: _State) -> None:
        """Drop a proposal that is done with, or was never seen."""
        self.cache.drop(state.slot)
        state.lead, state.row, state.out = 0, {}, {}

    def _restart(self, state: _State) -> None:
        """Start anew with the next features that come."""
        self.cache.truncate(state.slot, 0)
        self._forget(state)
        state.start, state.waiting, state.ids = None, [], []

    def end(self, state: _State) -> None:
        """Give the slot back."""
        self.cache.close(state.slot)


def _starts(branches: Sequence[Branch[_State]]) -> list[int]:
    return [branch.state.start or 0 for branch in branches]


def _rows(outcome: Outcome) -> slice | list[int] | None:
    """Which rows of a feed were committed: None, all in order; a slice, the first of them."""
    rows, count = outcome.row_F, len(outcome.row_F)
    if rows != tuple(range(count)):
        return list(rows)
    return None if count == outcome.scored.tap_start_B[-1] else slice(0, count)
