"""Skipped middle layers and mask tokens: the target guesses several tokens in one short pass.

    rows      pending, and riders M1 ... MK, trained masks at the positions of the next tokens
    layers    those below the gap, then those behind it; all see the target's own keys and values
    slots     pending gives the first guess, Mk the (k + 1)-th

So a draft costs one pass over a part of the target, whatever its depth. Masks are riders: nobody sees
them, and nothing of them is kept. The pending token enters verification at the gap; below it all is the
target's. Between the last norm and the head every slot has a square matrix of its own.

The law of a slot is the same below all nodes of the level before, as for `medusa`. A draft is the static
tree that held-out rows ask for; ``tree=`` sets another.

Paper: S3D, Zhong and Bharadwaj 2024, arXiv:2405.20314 (there the kept layers are trained, too; here the
target stays as it is).

Shape letters: K masks, S = K + 1 slots, T rows, F nodes of a frontier, H hidden size, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outpace.cache.base import Lease
from outpace.drafters.base import Request, Traits
from outpace.drafters.features import TrainedConfig
from outpace.drafters.last_state import fitted_budget
from outpace.drafters.shallow import ShallowRows, SlotDrafter, SlotState, rows_of
from outpace.drafters.trained import lender, rounding
from outpace.methods.s3d.files import METHOD, Masks, read_masks
from outpace.models.base import EMBEDDINGS, HEAD, LAYERS, TAPS, Target
from outpace.models.blocks import Form
from outpace.tree.growth import Branch, DraftRow
from outpace.tree.shapes import parse_shape
from outpace.types import ROOT, Riders, Shape

STOCK = "4x2x1"
"""The tree of a drafter whose acceptance nobody measured, and the mark of the one that was."""
_STOCK = parse_shape(STOCK)


@dataclass(slots=True, eq=False)
class MaskState(SlotState):
    """One sequence, while a draft grows."""

    slots: int = 1
    """That the draft may use."""
    logits_SD: Tensor = field(default_factory=lambda: torch.empty(0))


class S3d(SlotDrafter[MaskState]):
    """Drafts with the target's outer layers, and masks for what is not there yet.

    Args:
        target: it; every sequence drafts in the slot that it is lent.
    """

    Config = TrainedConfig
    traits = Traits(
        default_nodes=12,
        default_tree=STOCK,
        needs=frozenset({LAYERS, TAPS, HEAD, EMBEDDINGS}),
        samples=True,
        uses_target_cache=True,
    )

    def __init__(self, masks: Masks, target: Target, quantize: str | None = None) -> None:
        lent = lender(target, METHOD)
        self.masks, self.target = masks, lent
        gap = range(masks.first, masks.stop)
        self.model = lent.without(attentions=gap, mlps=gap)
        share = lent.share(self.model)
        self.traits = replace(self.traits, level_D=(share, 0.0))  # further levels look up its rows
        form = Form(lent.dtype, lent.device, quantize=rounding(quantize, lent))
        self._linears = [form.linear(one) for one in masks.linear_SHH]
        self._mask_KH = masks.mask_KH.to(lent.device)
        self.id_D = None if masks.vocab is None else masks.vocab.to_target_D.to(lent.device)

    @classmethod
    def load(cls, config: TrainedConfig, target: Target) -> S3d:
        return cls(read_masks(config.model, target), target, config.quantize)

    def begin(self, request: Request) -> MaskState:
        return MaskState()

    def leased(self, row: DraftRow[MaskState], lease: Lease) -> DraftRow[MaskState]:
        """The budget of a draft with as many slots as there are masks and room for them."""
        state, budget = row.state, row.budget
        state.rows = ShallowRows(lease, self.masks.first)
        room = self.target.max_positions - len(row.tokens) + 1
        state.slots = max(1, min(len(self._linears), budget.max_depth, room))
        tree = None if self.masks.tree is None else Shape(self.masks.tree)
        return replace(row, budget=fitted_budget(budget, state.slots, tree, _STOCK))

    def expand(self, branches: Sequence[Branch[MaskState]]) -> tuple[Tensor, Tensor | None]:
        """All slots of all sequences at the first level; later levels look theirs up."""
        if branches[0].nodes == (ROOT,):
            self._guess(branches)
        parts = [b.state.logits_SD[[len(b.path(node)) for node in b.nodes]] for b in branches]
        return torch.cat(parts), self.id_D

    def _guess(self, branches: Sequence[Branch[MaskState]]) -> None:
        """One pass over pending tokens and masks, and one of the head."""
        below, feeds, caches = f"hidden.{self.masks.first}", [], []
        for branch in branches:
            caches.append(rows_of(branch).lease.cache)
            count = branch.state.slots - 1
            after = tuple(range(-1, count - 1))
            riders = Riders((ROOT,) * count, after, embed_RH=self._mask_KH[:count], logits=False)
            feed = rows_of(branch).feed(branch)
            feeds.append(replace(feed, want=(), riders=riders if count else None))
        scored = self.model.score(feeds, caches[0], taps=frozenset({below, "hidden.-1"}))
        slot_of: list[list[Tensor]] = [[] for _ in self._linears]
        for i, branch in enumerate(branches):
            own, state = scored.of(i), branch.state
            rows_of(branch).hidden.append(own.taps[below].clone())
            slot_of[0].append(own.taps["hidden.-1"])
            for k in range(1, state.slots):
                assert own.rider_hidden_RH is not None
                slot_of[k].append(own.rider_hidden_RH[k - 1 : k])
        with self.clock, torch.no_grad():
            used = [torch.cat(parts).float() for parts in slot_of if parts]
            y_TH = torch.cat([n_TH + self._bent(k, n_TH) for k, n_TH in enumerate(used)])
            logits_TD = self.target.head(y_TH, self.masks.vocab)
        self.clock.count -= 1  # the layers and this are one pass of the drafter
        turn, start = [0] * len(used), [0]
        for n_TH in used[:-1]:
            start.append(start[-1] + len(n_TH))
        for branch in branches:
            slots = range(branch.state.slots)
            branch.state.logits_SD = logits_TD[[start[k] + turn[k] for k in slots]]
            for k in slots:
                turn[k] += 1

    def _bent(self, slot: int, n_TH: Tensor) -> Tensor:
        return self._linears[slot](n_TH.to(self.target.dtype)).float()
