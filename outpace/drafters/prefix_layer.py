"""A decoder layer along the target's states of a text, of which the newest output is wanted.

    states     f0 ... f(n-1)      of the passes that fed x0 to x(n-1)
    output     layer(f)(n-1)      which has read the whole text, where f(n-1) stood alone

What was committed since the last draft goes through the layer in one pass when the next draft begins.
Keys and values of a row are made of the target's states alone, so a draft leaves nothing behind.

Shape letters: B sequences, T rows of a pass, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.one_layer import OneLayer
from outpace.models.base import Target
from outpace.models.blocks import Form
from outpace.models.families import DecoderConfig
from outpace.models.passes import PassRows
from outpace.models.seen import Seen
from outpace.types import Feed

_WAITING = 256
"""Most rows of a sequence that wait for its next draft; more are read at once."""


@dataclass(slots=True, eq=False)
class PrefixState:
    """One sequence in the layer's cache. Tensors are never changed, only replaced."""

    slot: int
    start: int | None = None
    """Position of the first row of the slot; None: no states were seen yet."""
    waiting: list[Tensor] = field(default_factory=list)
    """States [., H] of rows that are not in the slot for good."""
    lead: int = 0
    """Tail rows of the slot that are made of them."""

    @property
    def count(self) -> int:
        """Rows that wait."""
        return sum(len(part) for part in self.waiting)


class PrefixLayer:
    """The layer and its cache, shared by all sequences.

    Args:
        config: of the one layer.
        tensors: named as those of layer 0 of a decoder.
        target: its dtype and device are used.
        quantize: round them, see ``outpace.drafters.trained.rounding``.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, Tensor],
        target: Target,
        quantize: str | None = None,
    ) -> None:
        self._dtype = target.dtype
        self._layer = OneLayer(config, tensors, Form(target.dtype, target.device, quantize=quantize))
        self.cache = self._layer.new_cache()
        self._plan = self._layer.plan()
        stream, block = self._plan.lent(config.hidden_size), self._layer.block
        normed = self._plan.norm(block.attn_norm, stream)
        self._plan.give(self._plan.layer(block, self._layer.activation, stream, normed))

    def begin(self) -> PrefixState:
        """Take a slot."""
        return PrefixState(self.cache.open())

    def add(self, state: PrefixState, state_TH: Tensor, start: int) -> None:
        """Keep what a draft read, and take in the states of what was committed.

        Args:
            state_TH: copied by whoever calls.
            start: position of the first of them; where rows before it are missing, it begins anew.
        """
        if state.lead:
            self.cache.keep(state.slot, range(state.lead))
            state.waiting, state.lead = [], 0
        end = None if state.start is None else state.start + self.cache.length(state.slot) + state.count
        if end != start:
            self.cache.truncate(state.slot, 0)
            state.start, state.waiting = start, []
        state.waiting.append(state_TH)
        if state.count > _WAITING:
            rows_TH = torch.cat(state.waiting)
            self._run([state], [rows_TH[:-1]], wanted=False)
            self.cache.keep(state.slot, range(len(rows_TH) - 1))
            state.waiting = [rows_TH[-1:].clone()]

    def newest(self, states: Sequence[PrefixState]) -> Tensor:
        """The layer's outputs at the last rows, float32 [B, H]; all rows that wait are in the tails."""
        given = [torch.cat(state.waiting) for state in states]
        for state, rows_TH in zip(states, given, strict=True):
            state.lead = len(rows_TH)
        return self._run(states, given, wanted=True)

    def _run(self, states: Sequence[PrefixState], given: Sequence[Tensor], wanted: bool) -> Tensor:
        feeds = []
        for state, rows_TH in zip(states, given, strict=True):
            count = len(rows_TH)
            feeds.append(Feed.chain(state.slot, [0] * count, want=(count - 1,) if wanted else ()))
        rows, x_TH = PassRows(feeds, self.cache, 1), torch.cat(list(given)).float()
        offsets = [state.start or 0 for state in states]
        counts = len(rows.ids), len(rows.wanted)
        if self._plan.ready:
            return self._plan.run(counts, (x_TH,), rows.wanted, Seen.of(rows, self.cache, offsets))[0]
        layer = self._layer
        with torch.no_grad():
            filled_TH = x_TH.new_zeros(max(len(x_TH), layer.min_rows), x_TH.shape[1])
            filled_TH[: len(x_TH)] = x_TH
            u_TH = layer.block.attn_norm(filled_TH).to(self._dtype)
            return layer.run(rows, self.cache, offsets, filled_TH, u_TH)[: counts[1]]

    def forget(self, state: PrefixState) -> None:
        """Drop a proposal that is done with, or was never seen."""
        self.cache.drop(state.slot)
        state.lead = 0

    def mark(self, state: PrefixState) -> Any:
        """How much of the text is in the slot, and what waits."""
        return state.start, self.cache.length(state.slot), [*state.waiting]

    def rewind(self, state: PrefixState, mark: Any) -> None:
        """Forget what was read since; what waited then waits again."""
        self.forget(state)
        state.start, length, waiting = mark
        self.cache.truncate(state.slot, min(length, self.cache.length(state.slot)))
        state.waiting = [*waiting]

    def end(self, state: PrefixState) -> None:
        """Give the slot back."""
        self.cache.close(state.slot)
