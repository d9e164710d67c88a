"""What drafters share that read nothing of a text but the target's newest hidden state.

    text      x0  x1 ... x(n-1) | xn pending        draft: x(n+1) x(n+2) ...
    hidden    h, of the row that fed x(n-1), behind the final norm

They keep no cache: one state per sequence, replaced at every commit. A tree is static unless told
otherwise. The accuracies a[k][i] are stored with the weights. They say how often the i-th likeliest
token at depth k was the target's, given that the path before was. The tree takes the paths with the
largest products. It stands in for ``STOCK``, the tree of a drafter that nobody gave another. Its
first four nodes are checked where nobody says how many: on CPUs further rows cost what they bring.

Shape letters: B sequences, F nodes of a frontier, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.drafters.base import ExpandingDrafter, Request, Traits
from outpace.models.base import HEAD, TAPS
from outpace.tree.growth import Branch, DraftRow
from outpace.tree.shapes import parse_shape
from outpace.types import NOTHING, Budget, Draft, Outcome, Shape

LAST = "hidden.-1"
"""The feature that they read."""
STOCK = "[-1,0,1,2,3,-1,0,-1,5,1,0,-1,5,7,6]"
"""The tree where neither the user nor a calibration says better. Its chain comes first: whoever
cuts a budget to its first nodes, and to their depth, leaves a calibrated tree its depth too."""
_STOCK = parse_shape(STOCK)
_EPS = 1e-6


def unit(embed: Tensor) -> Tensor:
    """Vectors [..., H] with mean square 1, whatever the scale of the target's; float32."""
    return F.rms_norm(embed.float(), (embed.shape[-1],), eps=_EPS)


@dataclass(slots=True, eq=False)
class LastState:
    """What is known of one sequence. Its tensor is never changed, only replaced."""

    hidden_H: Tensor | None = None
    """Of the newest row that a pass showed."""
    end: int = -1
    """The position after that row's."""
    row: int = 0
    """The sequence's place in the drafts under way."""


class LastStateDrafter(ExpandingDrafter[LastState]):
    """Drafts from one hidden state per sequence.

    Args:
        depths: levels that can be drafted.
        tree: the calibrated tree, likeliest nodes first; None: nothing was measured.
    """

    traits = Traits(
        default_nodes=4,
        default_tree=STOCK,
        needs=frozenset({TAPS, HEAD}),
        taps=frozenset({LAST}),
        samples=True,
    )

    def __init__(self, depths: int, tree: Shape | None) -> None:
        self.depths, self.tree = depths, tree

    @abstractmethod
    def expand(self, branches: Sequence[Branch[LastState]]) -> tuple[Tensor, Tensor | None]:
        """Logits of the nodes' children; see the contract."""

    def begin(self, request: Request) -> LastState:
        """Nothing is known until the first pass."""
        return LastState()

    def propose(self, rows: Sequence[DraftRow[LastState]]) -> list[Draft]:
        """Grow drafts; a sequence whose last features were not shown gets an empty one."""
        return super().propose([self._fitted(row) for row in rows])

    def _fitted(self, row: DraftRow[LastState]) -> DraftRow[LastState]:
        if row.state.hidden_H is None or row.state.end != len(row.tokens) - 1:
            return replace(row, budget=NOTHING)
        return replace(row, budget=fitted_budget(row.budget, self.depths, self.tree))

    def hidden(self, branches: Sequence[Branch[LastState]]) -> Tensor:
        """The hidden states of the sequences, [B, H]; numbers them."""
        parts = []
        for number, branch in enumerate(branches):
            branch.state.row = number
            assert branch.state.hidden_H is not None
            parts.append(branch.state.hidden_H)
        return torch.stack(parts)

    def observe(self, states: Sequence[LastState], outcomes: Sequence[Outcome]) -> None:
        """Keep the hidden state of the last row that was committed."""
        for state, outcome in zip(states, outcomes, strict=True):
            taps = outcome.scored.taps
            if LAST in taps and outcome.fed:
                state.hidden_H = taps[LAST][outcome.row_F[-1]].clone()
                state.end = outcome.start + len(outcome.fed)

    def mark(self, state: LastState) -> LastState:
        """A copy that shares the tensor."""
        return copy.copy(state)


def fitted_budget(budget: Budget, depths: int, tree: Shape | None, stock: Shape = _STOCK) -> Budget:
    """A budget no deeper than a drafter, whose calibrated tree stands in for the stock one."""
    shape = budget.shape
    if shape.parent_N == stock.parent_N:
        parents = (tree or stock).parent_N
        assert parents is not None
        shape = Shape(parents[: budget.max_nodes])  # the likeliest, not the first levels
    return replace(budget, max_depth=min(budget.max_depth, depths), shape=shape)
