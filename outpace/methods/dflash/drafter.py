"""Dflash: one pass of a small network on the target's features guesses a whole block.

    text        x0 ... x(n-1) | xn pending      block: row i guesses x(n+1+i), all rows at once
    features    f0 ... f(n-1)                   keys and values of every layer of the network

Given the features and the pending token the guesses of a block are independent, so a tree is made
of the product of the rows' laws: all nodes of a depth have the same children. At T > 0 the law
recorded for a group is its row's own, the one drawn from. The network runs once per draft,
however deep the tree; what the target computed since the last draft goes through it in that pass.

A tree is static unless told otherwise. With the weights are stored the accuracies of the rows, and
the tree takes the likeliest paths; it stands in for ``STOCK``, the tree of a drafter that nobody
gave another.

The network and its arithmetic: `outpace.methods.dflash.net`. Pays wherever it is trained for
the target; a network for another target is refused.

Paper: DFlash, arXiv:2602.06036; block drafters: PARD, arXiv:2504.18583.

Shape letters: B sequences, S rows of a block, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.base import Request, Traits
from outpace.drafters.blocks import BlockDrafter
from outpace.drafters.trained import find, rounding
from outpace.methods.dflash.files import METHOD, BlockFile, read_block_drafter
from outpace.methods.dflash.net import BlockNet, Part
from outpace.models.base import HEAD, TAPS, Target
from outpace.tree.growth import Branch, DraftRow
from outpace.tree.shapes import parse_shape
from outpace.types import NOTHING, Draft, Outcome, Shape

STOCK = "[-1,0,1,-1,0]"
"""The tree where neither the user nor a calibration says better; its first nodes are deep, so that
a smaller one may be."""
_STOCK = parse_shape(STOCK)
_WAITING = 32
"""Most rows that wait for the next draft: more, such as a prompt, are read at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DflashConfig:
    """Settings of the drafter."""

    model: str | None = None
    """Folder of the network; without it, the one trained for the target."""
    quantize: str | None = "int8"
    """Round its weights to int8 or int4, where compiled code multiplies them; none keeps them."""


@dataclass(slots=True, eq=False)
class _State:
    """One sequence in the network's cache."""

    slot: int
    start: int | None = None
    """Position of the first row of the slot; None: no features were seen yet."""
    waiting: list[Tensor] = field(default_factory=list)
    """Features [., F] of rows that are not in the cache for good; the last row's is among them."""
    ids: list[int] = field(default_factory=list)
    """The tokens at whose rows they were computed."""
    lead: int = 0
    """Tail rows of the slot that a draft made of them: all true, whatever was drafted."""


class Dflash(BlockDrafter[_State]):
    """Drafts a block at a time.

    Args:
        file: the network as it was read.
        target: embeds and unembeds.
        quantize: how to round its weights, where compiled code multiplies them.
    """

    Config = DflashConfig
    traits = Traits(default_nodes=4, default_tree=STOCK, needs=frozenset({TAPS, HEAD}), samples=True)

    def __init__(self, file: BlockFile, target: Target, quantize: str | None = None) -> None:
        self.file, self.target = file, target
        self.net = BlockNet(file.shape, file.tensors, target, quantize=rounding(quantize, target))
        self.cache = self.net.new_cache()
        self.traits = replace(self.traits, taps=frozenset(file.shape.taps))
        self.id_D = None if file.vocab is None else file.vocab.to_target_D.to(target.device)
        self.block = file.shape.slots

    @classmethod
    def load(cls, config: DflashConfig, target: Target) -> Dflash:
        """Read the network; embedding and unembedding are the target's.

        Raises:
            ModelError: no network, a corrupt one, or one that was made for another target.
        """
        file = read_block_drafter(find(METHOD, target, config.model), target)
        return cls(file, target, config.quantize)

    def begin(self, request: Request) -> _State:
        """Take a slot. A prefix that no pass will show is left out: rows start behind it."""
        return _State(self.cache.open())

    def propose(self, rows: Sequence[DraftRow[_State]]) -> list[Draft]:
        """Grow drafts; a sequence whose last features were not shown gets an empty one."""
        for row in rows:
            self._forget(row.state)
        return super().propose([self._fitted(row) for row in rows])

    def _fitted(self, row: DraftRow[_State]) -> DraftRow[_State]:
        if self._end(row.state) != len(row.tokens) - 1:
            return replace(row, budget=NOTHING)
        budget = row.budget
        shape = budget.shape
        tree = self.file.tree
        if tree is not None and tree.parent_N and shape.parent_N == _STOCK.parent_N:
            # Growth fills a template level by level, so it gets no more than it may fill.
            shape = Shape(tree.parent_N[: budget.max_nodes])
        depth = min(budget.max_depth, self.file.shape.slots)
        return replace(row, budget=replace(budget, max_depth=depth, shape=shape))

    def blocks(self, branches: Sequence[Branch[_State]]) -> Tensor:
        """What every row of every block says, float32 [B, S, D].

        Effects: the context rows that waited are in the tails of their slots.
        """
        slots, parts = self.file.shape.slots, []
        for branch in branches:
            state = branch.state
            state.lead = len(state.ids)
            parts.append(self._part(state, state.ids, branch.tokens[-1]))
            self.cache.scratch(state.slot, slots)
        with self.clock, torch.no_grad():
            y_YH = self.net.run(parts, self.cache)
            return self.target.head(y_YH, self.file.vocab).view(len(branches), slots, -1)

    def _part(self, state: _State, ids: Sequence[int], pending: int | None = None) -> Part:
        """Rows for the tokens given, which are the first of those that wait."""
        feature_TF = torch.cat(state.waiting)[: len(ids)]
        stored = self.cache.append(state.slot, ids, range(-1, len(ids) - 1))
        return Part(
            slot=state.slot,
            first=stored.start,
            offset=state.start or 0,
            feature_TF=feature_TF,
            pending=pending,
        )

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        """Keep the rows made of true features, and the features of what was committed."""
        long = []
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
                state.waiting.append(self.net.feature(taps, list(outcome.row_F)))
                state.ids += outcome.fed
                if len(state.ids) > _WAITING:
                    long.append(state)
        if long:
            self._read(long)

    def _read(self, states: Sequence[_State]) -> None:
        """Store keys and values of all that waits but the last row, from which a block starts."""
        parts = [self._part(state, state.ids[:-1]) for state in states]
        with self.clock:
            self.net.run(parts, self.cache)
        for state in states:
            self.cache.keep(state.slot, range(len(state.ids) - 1))
            state.waiting, state.ids = [state.waiting[-1][-1:].clone()], state.ids[-1:]

    def _end(self, state: _State) -> int | None:
        """The first position without features; None if there are none at all."""
        if state.start is None:
            return None
        return state.start + self.cache.length(state.slot) + len(state.ids)

    def _forget(self, state: _State) -> None:
        """Drop a proposal that is done with, or was never seen."""
        self.cache.drop(state.slot)
        state.lead = 0

    def num_uncached(self, state: _State, tokens: Sequence[int]) -> int:
        """Those whose features wait."""
        return len(state.ids)

    def mark(self, state: _State) -> Any:
        """Where the text began, how much of it is in the slot, and what waits."""
        return state.start, self.cache.length(state.slot), [*state.ids], [*state.waiting]

    def rewind(self, state: _State, mark: Any) -> _State:
        """Forget what was read since; what waited then waits again."""
        self._forget(state)
        state.start, length, ids, waiting = mark
        self.cache.truncate(state.slot, min(length, self.cache.length(state.slot)))
        state.ids, state.waiting = [*ids], [*waiting]
        return state

    def _restart(self, state: _State) -> None:
        """Start anew with the next features that come."""
        self.cache.truncate(state.slot, 0)
        self._forget(state)
        state.start, state.waiting, state.ids = None, [], []

    def end(self, state: _State) -> None:
        """Give the slot back."""
        self.cache.close(state.slot)
