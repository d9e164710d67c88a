"""Drafters that guess with a part of the target, in the target's own slots.

    draft     x0 -> all layers but for some sub-layers -> head -> x1 -> ... -> x2
    verify    x0 and x1 enter at the first layer that missed something, x2 at layer 0

Every guess attends to the keys and values that the target itself left for the committed text. Drafted
positions alone have entries of their own, and verification writes over them.

Shape letters: F nodes of a frontier.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from outpace.cache.base import Lease
from outpace.drafters.shallow import ShallowRows, SlotDrafter, SlotState, rows_of
from outpace.methods.layer_skip.skip_sets import SkipSet
from outpace.models.base import Target
from outpace.tree.growth import Branch, DraftRow

S = TypeVar("S", bound=SlotState)


class PartDrafter(SlotDrafter[S]):
    """Drafts with the target without a set of sub-layers, which may differ from sequence to sequence."""

    @abstractmethod
    def part(self, state: S) -> tuple[SkipSet, Target]:
        """What is left out for a sequence, and what is left."""

    def leased(self, row: DraftRow[S], lease: Lease) -> DraftRow[S]:
        skip, _ = self.part(row.state)
        row.state.rows = ShallowRows(lease, skip.first)
        return row

    def expand(self, branches: Sequence[Branch[S]]) -> tuple[Tensor, Tensor | None]:
        """One pass over the new nodes for every set in use."""
        at: dict[SkipSet, list[int]] = {}
        for i, branch in enumerate(branches):
            at.setdefault(self.part(branch.state)[0], []).append(i)
        if len(at) == 1:
            return self._pass(branches), None
        logits: dict[int, Tensor] = {}
        for members in at.values():
            asked = [branches[i] for i in members]
            each = torch.split(self._pass(asked).clone(), [len(branch.nodes) for branch in asked])
            logits |= dict(zip(members, each, strict=True))
        return torch.cat([logits[i] for i in range(len(branches))]), None

    def _pass(self, branches: Sequence[Branch[S]]) -> Tensor:
        """One pass of one part; gives its logits [F, V], and leaves hidden states with the rows."""
        skip, model = self.part(branches[0].state)
        rows = [rows_of(branch) for branch in branches]
        feeds = [one.feed(branch) for one, branch in zip(rows, branches, strict=True)]
        below = f"hidden.{skip.first}"
        taps = frozenset({below} if skip.first else ())
        scored = model.score(feeds, rows[0].lease.cache, taps=taps)
        for i, one in enumerate(rows if taps else ()):
            one.hidden.append(scored.taps[below][scored.tap_start_B[i] : scored.tap_start_B[i + 1]].clone())
        return scored.logits_TV
