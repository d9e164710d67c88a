"""Layers of the target are left out, chosen anew as the text goes on; nothing is trained.

    x ... x | choose | draft  verify  draft  verify ... | choose | draft  verify ...
                       <---------- every tokens ------->

The layers to leave out are found by dynamic programming over the hidden states of the pending token
(`programme`), for each sequence by itself. The paper takes the states of the last verified token, which its
verification has to keep. Here the programme computes those of the next one in its own rows, so that passes
keep nothing and verification resumes drafts as ever.

A set is found before the first draft, and by the first one that is ``every`` tokens further on. It follows
from the committed text alone, before anything of the draft is drawn: q is the distribution of one part of
the target. It stays with the sequence, also while that waits without memory. Where rows do not feel each
other (`Target.equal_rows`), a batch chooses as its sequences would alone.

Cost: a choice runs all layers once, over one row more than layers are left out, and no head. It counts as
one pass of the drafter. Sequences with different sets run one after the other, level by level: a batch
shares less than with `layer_skip`.

Pays where `layer_skip` does, for models with layers to spare: the paper reports 1.3 to 1.7 for Llama-3 from
8 billion weights on. A model of 135 million weights loses, although these sets guess more than those of a
search: see docs/how/own-layers.md.

Paper: CLaSp, arXiv:2505.24196.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import torch

from outpace.drafters.base import Request, Traits
from outpace.drafters.shallow import SlotState
from outpace.methods.layer_skip.parts import PartDrafter
from outpace.methods.layer_skip.programme import whole_layers
from outpace.methods.layer_skip.skip_sets import SkipSet
from outpace.models.base import LAYERS, TAPS, TREE, Target
from outpace.tree.growth import DraftRow
from outpace.types import Draft


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaspConfig:
    share: float = 0.4
    """Share of the layers to leave out; the paper leaves out half or more."""
    every: int = 64
    """Tokens from one choice of layers to the next, at least; 1 chooses for every draft."""

    def __post_init__(self) -> None:
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"share must be between 0 and 1, got {self.share}")
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")


@dataclass(slots=True, eq=False)
class ClaspState(SlotState):
    """With the part that drafts for it."""

    part: tuple[SkipSet, Target] | None = None
    """None: to be chosen."""
    chosen: int = 0
    """Committed tokens when it was chosen."""


class Clasp(PartDrafter[ClaspState]):
    """Drafts with a part of the target that follows the text."""

    Config = ClaspConfig
    traits = Traits(
        default_nodes=4, needs=frozenset({LAYERS, TAPS, TREE}), samples=True, uses_target_cache=True
    )

    def __init__(self, config: ClaspConfig, target: Target) -> None:
        self._config, self.target = config, target
        self.count = min(max(1, round(config.share * target.num_layers)), target.num_layers - 1)
        """Layers to leave out."""
        self._parts: WeakValueDictionary[SkipSet, Target] = WeakValueDictionary()
        some = frozenset(range(self.count))  # as large as others
        share = target.share(SkipSet(some, some).part(target))
        self.traits = replace(self.traits, level_D=(share,))

    @classmethod
    def load(cls, config: ClaspConfig, target: Target) -> Clasp:
        return cls(config, target)

    def begin(self, request: Request) -> ClaspState:
        return ClaspState()

    def part(self, state: ClaspState) -> tuple[SkipSet, Target]:
        assert state.part is not None
        return state.part

    def propose(self, rows: Sequence[DraftRow[ClaspState]]) -> list[Draft]:
        """Choose layers where it is time; then grow drafts in the lent slots."""
        due = [row for row in rows if row.lease is not None and not self._fresh(row)]
        if due:
            self._choose(due)
        return super().propose(rows)

    def _fresh(self, row: DraftRow[ClaspState]) -> bool:
        state = row.state
        return state.part is not None and 0 <= len(row.tokens) - state.chosen < self._config.every

    def _choose(self, rows: Sequence[DraftRow[ClaspState]]) -> None:
        leases = [row.lease for row in rows if row.lease is not None]
        asked = [(lease.slot, row.tokens[-1]) for lease, row in zip(leases, rows, strict=True)]
        with torch.no_grad():
            tables = whole_layers(self.target, leases[0].cache, asked, self.count)
        for row, table in zip(rows, tables, strict=True):
            layers = frozenset(table.left_out(self.count))
            skip = SkipSet(layers, layers)
            part = self._parts.get(skip)
            if part is None:
                part = self._parts[skip] = skip.part(self.target)
            row.state.part, row.state.chosen = (skip, part), len(row.tokens)

    def mark(self, state: ClaspState) -> tuple[tuple[SkipSet, Target] | None, int]:  # type: ignore[override]
        return state.part, state.chosen

    def rewind(self, state: ClaspState, mark: tuple[tuple[SkipSet, Target] | None, int]) -> ClaspState:  # type: ignore[override]
        state.rows, (state.part, state.chosen) = None, mark
        return state
