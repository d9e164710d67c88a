"""The target with its weights rounded to 8 or 4 bits guesses, over the target's own keys and values.

    draft     x0 -> all layers, rounded -> x1 -> ... -> x2     rows in the tail of the target's slot
    verify    x0, x1 and x2 run through the true layers, and write their true keys and values

Its guesses are nearly always right, and cost what reading the rounded weights costs: about half
a pass in int8 where the target runs in bfloat16, less in int4. So it gains where a pass over one
row is bound by memory, at most about 1.5 times; memory grows by the rounded copy of the weights.

As in QSpec both precisions share one cache: the committed text is read once, by the target, and what
the rounded weights left of a draft goes with the draft. ``shared=false`` gives the copy a cache of its own,
for drafters that run it in their own way.

Paper: Zhao et al. 2024 (QSpec), arXiv:2410.11305.

Shape letters: F nodes of a frontier, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from outpace.clock import PassClock
from outpace.drafters.base import ExpandingDrafter, Request, Traits
from outpace.drafters.model_rows import ModelDrafter
from outpace.drafters.shallow import ShallowRows
from outpace.drafters.trained import lender
from outpace.errors import ModelError
from outpace.models.base import Target
from outpace.models.load import shared
from outpace.tree.growth import Branch, DraftRow
from outpace.types import NOTHING, Draft, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedSelfConfig:
    kind: str = "int8"
    """``int8`` or ``int4``."""
    shared: bool = True
    """Read the target's keys and values; else it reads every text itself and keeps its own."""


@dataclass(slots=True, eq=False)
class RoundedState:
    """The rows of a draft under way; nothing is kept from one to the next."""

    rows: ShallowRows | None = None


class QuantizedSelf(ExpandingDrafter[RoundedState]):
    """Drafts with a rounded copy of the target in the target's own slots.

    Args:
        model: the copy.
    """

    Config = QuantizedSelfConfig
    traits = Traits(default_nodes=4, samples=True, uses_target_cache=True)

    def __init__(self, model: Target) -> None:
        self.model = model

    @property
    def clock(self) -> PassClock:
        """The copy's own."""
        return self.model.clock

    @classmethod
    def load(cls, config: QuantizedSelfConfig, target: Target) -> ExpandingDrafter[Any]:
        """Read the weights anew, and round them.

        Raises:
            ModelError: a target that is rounded itself, or not of the own decoder.
        """
        model = lender(target, "quantized_self")
        if model.quantize is not None:
            raise ModelError(
                f"quantized_self: {target.name} is rounded to {model.quantize} itself, and a "
                "rounded copy is no cheaper; load it without quantize="
            )
        rounded = shared(target, ("quantized", config.kind), lambda: model.quantized(config.kind))
        return cls(rounded) if config.shared else Apart(rounded, target.vocab_size)

    @property
    def language_model(self) -> Target | None:
        """The copy, for whoever runs it in the drafter's place with a cache of its own."""
        return self.model

    def begin(self, request: Request) -> RoundedState:
        return RoundedState()

    def propose(self, rows: Sequence[DraftRow[RoundedState]]) -> list[Draft]:
        """Grow drafts in the lent slots; empty ones without a lease."""
        ready = []
        for row in rows:
            row.state.rows = None if row.lease is None else ShallowRows(row.lease, 0)
            ready.append(row if row.lease is not None else replace(row, budget=NOTHING))
        drafts = super().propose(ready)
        for row in rows:
            row.state.rows = None  # a lease ends here
        return drafts

    def expand(self, branches: Sequence[Branch[RoundedState]]) -> tuple[Tensor, Tensor | None]:
        """One pass of the copy over the new nodes, logits [F, V]."""
        feeds, caches = [], []
        for branch in branches:
            assert branch.state.rows is not None
            feeds.append(branch.state.rows.feed(branch))
            caches.append(branch.state.rows.lease.cache)
        return self.model.score(feeds, caches[0]).logits_TV, None

    def observe(self, states: Sequence[RoundedState], outcomes: Sequence[Outcome]) -> None:
        """Nothing grows with a text but the target's own cache."""

    def mark(self, state: RoundedState) -> None:
        """There is nothing to come back to."""

    def rewind(self, state: RoundedState, mark: None) -> RoundedState:
        state.rows = None
        return state


class Apart(ModelDrafter):
    """Drafts with a rounded copy of the target that keeps a cache of its own; see `ModelDrafter`."""

    Config = QuantizedSelfConfig
    traits = Traits(default_nodes=4, samples=True)
    load = QuantizedSelf.load
