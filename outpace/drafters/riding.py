"""What drafters share whose guesses come from riders in the target's last pass (`Riders`).

Shape letters: K guesses of a sequence, R riders, T guesses of all sequences, H hidden size, D draft
vocabulary.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from outpace.drafters.base import ExpandingDrafter, Request
from outpace.law import VocabMap
from outpace.models.base import Target
from outpace.tree.growth import Branch, DraftRow
from outpace.types import NOTHING, ROOT, Outcome, Shape


@dataclass(slots=True, eq=False)
class RidingState:
    """What is known of one sequence. Its tensor is never changed, only replaced."""

    hidden_KH: Tensor | None = None
    """Of the riders of the newest committed row."""
    end: int = -1
    """The position after that row's."""
    row: int = 0
    """The sequence's first guess among those of the drafts under way."""

    def fits(self, row: DraftRow[RidingState]) -> bool:
        """Whether the riders were in the sequence's last pass."""
        return self.hidden_KH is not None and self.end == len(row.tokens) - 1


@dataclass(frozen=True, slots=True)
class RidersMemo:
    """Where the riders of a draft are."""

    owner: RidingDrafter
    """Whose riders they are: another's are as many as its settings say."""
    start: tuple[int, ...]
    """The first one below the pending token and below each node; -1: none."""
    count: tuple[int, ...]
    """Of one chain below each."""


class RidingDrafter(ExpandingDrafter[RidingState]):
    """Drafts what the riders of the last pass guessed: the same distribution below all nodes of a level.

    Args:
        vocab: of the guesses; None: the target's.
    """

    stock: ClassVar[Shape]
    """Stands for the best tree."""

    def __init__(self, target: Target, vocab: VocabMap | None) -> None:
        self.target, self.vocab = target, vocab
        self.id_D = None if vocab is None else vocab.to_target_D.to(target.device)
        self._logits_TD = torch.empty(0)

    def begin(self, request: Request) -> RidingState:
        """Nothing is known until riders were in a pass."""
        return RidingState()

    def fitted(self, row: DraftRow[RidingState]) -> DraftRow[RidingState]:
        """The row with a budget of as many levels as there are guesses, the best tree for the stock one."""
        hidden_KH, budget = row.state.hidden_KH, row.budget
        if hidden_KH is None or not row.state.fits(row):
            return replace(row, budget=NOTHING)
        nodes, shape = min(budget.max_nodes, budget.max_rows), budget.shape
        tree = self.tree(len(hidden_KH)) if shape.parent_N == self.stock.parent_N else None
        if tree is not None:
            shape = Shape(tree[:nodes])
        depth = min(budget.max_depth, len(hidden_KH))
        return replace(row, budget=replace(budget, max_nodes=nodes, max_depth=depth, shape=shape))

    @abstractmethod
    def tree(self, levels: int) -> tuple[int, ...] | None:
        """Parents of the best tree of so many levels; None: nothing was measured."""

    def expand(self, branches: Sequence[Branch[RidingState]]) -> tuple[Tensor, Tensor | None]:
        """Unembed all guesses of all sequences at the first level; later levels look theirs up."""
        if branches[0].nodes == (ROOT,):
            parts, row = [], 0
            for branch in branches:
                assert branch.state.hidden_KH is not None
                parts.append(branch.state.hidden_KH)
                branch.state.row = row
                row += len(parts[-1])
            with self.clock, torch.no_grad():
                self._logits_TD = self.target.head(torch.cat(parts), self.vocab)
        row_F = [b.state.row + len(b.path(node)) for b in branches for node in b.nodes]
        return self._logits_TD[row_F], self.id_D

    def observe(self, states: Sequence[RidingState], outcomes: Sequence[Outcome]) -> None:
        """Keep what the riders of the last committed row say; others are forgotten."""
        for state, outcome in zip(states, outcomes, strict=True):
            state.hidden_KH = None
            memo, hidden_RH = outcome.draft.memo, outcome.scored.rider_hidden_RH
            if not isinstance(memo, RidersMemo) or memo.owner is not self or hidden_RH is None:
                continue
            place = outcome.row_F[-1]  # row 0 is the pending token's, row i + 1 that of node i
            if memo.count[place]:
                state.hidden_KH = self.guesses(hidden_RH[memo.start[place] :], memo.count[place])
                state.end = outcome.start + len(outcome.fed)

    @abstractmethod
    def guesses(self, hidden_RH: Tensor, count: int) -> Tensor:
        """What the head reads, [K, H] float32, of ``count`` riders (of each chain) at the beginning."""

    def mark(self, state: RidingState) -> RidingState:
        """A copy that shares the tensor."""
        return copy.copy(state)
