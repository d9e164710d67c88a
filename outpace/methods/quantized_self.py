"""The target with its weights rounded to 8 or 4 bits guesses, over the target's own keys and values.

    draft     x0 -> all layers, rounded -> x1 -> ... -> x2     rows in the tail of the target's slot
    verify    x0, x1 and x2 run through the true layers, and write their true keys and values

Its guesses are nearly always right, and cost what reading the rounded weights costs. That is about half a
pass in int8 where the target runs in bfloat16, less in int4. So it gains where a pass over one row is bound
by memory, at most about 1.5 times. Memory grows by the rounded copy of the weights.

As in QSpec both precisions share one cache. The committed text is read once, by the target. What the
rounded weights left of a draft goes with the draft. ``shared=false`` gives the copy a cache of its own, for
drafters that run it in their own way.

Paper: Zhao et al. 2024 (QSpec), arXiv:2410.11305.

Shape letters: F nodes of a frontier, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from outpace.cache.base import Lease
from outpace.clock import PassClock
from outpace.drafters.base import ExpandingDrafter, Request, Traits
from outpace.drafters.model_rows import ModelDrafter
from outpace.drafters.shallow import ShallowRows, SlotDrafter, SlotState, rows_of
from outpace.drafters.trained import lender
from outpace.errors import ModelError
from outpace.models.base import Target
from outpace.models.load import shared
from outpace.tree.growth import Branch, DraftRow


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedSelfConfig:
    kind: str = "int8"
    """``int8`` or ``int4``."""
    shared: bool = True
    """Read the target's keys and values; else it reads every text itself and keeps its own."""


class QuantizedSelf(SlotDrafter[SlotState]):
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
        made = cls(rounded) if config.shared else Apart(rounded, target.vocab_size)
        made.traits = replace(made.traits, level_D=(target.share(rounded),))
        return made

    @property
    def language_model(self) -> Target | None:
        """The copy, for whoever runs it in the drafter's place with a cache of its own."""
        return self.model

    def begin(self, request: Request) -> SlotState:
        return SlotState()

    def leased(self, row: DraftRow[SlotState], lease: Lease) -> DraftRow[SlotState]:
        row.state.rows = ShallowRows(lease, 0)
        return row

    def expand(self, branches: Sequence[Branch[SlotState]]) -> tuple[Tensor, Tensor | None]:
        """One pass of the copy over the new nodes, logits [F, V]."""
        rows = [rows_of(branch) for branch in branches]
        feeds = [one.feed(branch) for one, branch in zip(rows, branches, strict=True)]
        return self.model.score(feeds, rows[0].lease.cache).logits_TV, None


class Apart(ModelDrafter):
    """Drafts with a rounded copy of the target that keeps a cache of its own; see `ModelDrafter`."""

    Config = QuantizedSelfConfig
    traits = Traits(default_nodes=4, samples=True)
    load = QuantizedSelf.load
