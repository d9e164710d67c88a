"""Skipped middle layers and mask tokens: the target guesses several tokens in one short pass.

    rows      pending, and riders M1 ... MK: trained masks at the positions of the next tokens
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

from outpace.clock import PassClock
from outpace.drafters.base import ExpandingDrafter, Request, Traits
from outpace.drafters.shallow import ShallowRows
from outpace.drafters.trained import lender, rounding
from outpace.methods.s3d.files import METHOD, Masks, read_masks
from outpace.models.base import EMBEDDINGS, HEAD, LAYERS, TAPS, Target
from outpace.models.blocks import Form
from outpace.tree.growth import Branch, DraftRow, grow
from outpace.tree.shapes import parse_shape
from outpace.types import NOTHING, ROOT, Draft, Outcome, Riders, Shape

STOCK = "4x2x1"
"""The tree of a drafter whose acceptance nobody measured, and the mark of the one that was."""
_STOCK = parse_shape(STOCK)


@dataclass(frozen=True, kw_only=True, slots=True)
class S3dConfig:
    """Settings of the drafter."""

    model: str | None = None
    """Folder of the masks; without it, the ones trained for the target."""
    quantize: str | None = "int8"
    """Round its weights to int8 or int4, where compiled code multiplies them; none keeps them."""


@dataclass(slots=True, eq=False)
class MaskState:
    """One sequence, while a draft grows."""

    rows: ShallowRows | None = None
    slots: int = 1
    """That the draft may use."""
    logits_SD: Tensor = field(default_factory=lambda: torch.empty(0))


class S3d(ExpandingDrafter[MaskState]):
    """Drafts with the target's outer layers, and masks for what is not there yet.

    Args:
        target: it; every sequence drafts in the slot that it is lent.
    """

    Config = S3dConfig
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
        form = Form(lent.dtype, lent.device, quantize=rounding(quantize, lent))
        self._linears = [form.linear(one) for one in masks.linear_SHH]
        self._mask_KH = masks.mask_KH.to(lent.device)
        self.id_D = None if masks.vocab is None else masks.vocab.to_target_D.to(lent.device)

    @property
    def clock(self) -> PassClock:
        """The target's: whether a pass drafts, the verb tells."""
        return self.target.clock

    @classmethod
    def load(cls, config: S3dConfig, target: Target) -> S3d:
        """Read the masks.

        Raises:
            ModelError: there are none, or they are corrupt, or were made for another target.
        """
        return cls(read_masks(config.model, target), target, config.quantize)

    def begin(self, request: Request) -> MaskState:
        return MaskState()

    def propose(self, rows: Sequence[DraftRow[MaskState]]) -> list[Draft]:
        """Grow drafts in the lent slots; a row without a lease gets an empty one."""
        ready = [self._fitted(row) for row in rows]
        drafts = []
        for row, (draft, numbers) in zip(ready, grow(ready, self.expand), strict=True):
            if row.state.rows is not None:
                draft = row.state.rows.finish(draft, numbers)
            row.state.rows = None  # a lease ends here
            drafts.append(draft)
        return drafts

    def _fitted(self, row: DraftRow[MaskState]) -> DraftRow[MaskState]:
        """The budget of a draft with as many slots as there are masks and room for them."""
        state, budget = row.state, row.budget
        if row.lease is None:
            return replace(row, budget=NOTHING)
        state.rows = ShallowRows(row.lease, self.masks.first)
        room = self.target.max_positions - len(row.tokens) + 1
        state.slots = max(1, min(len(self._linears), budget.max_depth, room))
        shape = budget.shape
        if shape.parent_N == _STOCK.parent_N and self.masks.tree is not None:
            shape = Shape(self.masks.tree[: budget.max_nodes])
        return replace(row, budget=replace(budget, shape=shape, max_depth=min(budget.max_depth, state.slots)))

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
            assert branch.state.rows is not None
            caches.append(branch.state.rows.lease.cache)
            count = branch.state.slots - 1
            after = tuple(range(-1, count - 1))
            riders = Riders((ROOT,) * count, after, embed_RH=self._mask_KH[:count], logits=False)
            feed = branch.state.rows.feed(branch)
            feeds.append(replace(feed, want=(), riders=riders if count else None))
        scored = self.model.score(feeds, caches[0], taps=frozenset({below, "hidden.-1"}))
        slot_of: list[list[Tensor]] = [[] for _ in self._linears]
        for i, branch in enumerate(branches):
            own, state = scored.of(i), branch.state
            assert state.rows is not None
            state.rows.hidden.append(own.taps[below].clone())
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

    def observe(self, states: Sequence[MaskState], outcomes: Sequence[Outcome]) -> None:
        """Nothing grows with a text but the target's own cache."""

    def mark(self, state: MaskState) -> None:
        """There is nothing to come back to."""

    def rewind(self, state: MaskState, mark: None) -> MaskState:
        return MaskState()
