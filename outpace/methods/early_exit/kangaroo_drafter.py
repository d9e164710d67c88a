"""Kangaroo: the target's first layers and a trained adapter guess; verification goes on from there.

    draft     x0 -> layers 0 to e-1 -> adapter -> head -> x1 -> layers 0 to e-1 -> adapter -> ...
    verify    x0, x1 enter at layer e, the last guesses at layer 0; all leave at the top

The adapter is one attention layer with a cache of its own. The head is the target's, or its rows
for a part of the vocabulary, and is in no file. A draft leaves early twice:

- at layer e. What the target did below it is handed to verification and never done again
  (`outpace.drafters.shallow`);
- where the drafter doubts: no branch grows on behind a token to which it gave less than
  ``threshold``. That token is kept and verified, so the text keeps its law.

Pays with adapters that ``outpace train kangaroo`` made for the target. While another drafter of
the same batch reads features no slot is lent, and it drafts nothing.

Paper: Liu et al. 2024, arXiv:2404.18911 (e is l there, ``threshold`` is eta).

Shape letters: T rows of a pass, F nodes of a frontier, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outpace.cache.base import KVCache
from outpace.clock import PassClock
from outpace.drafters.base import ExpandingDrafter, Request, Traits
from outpace.drafters.features import TrainedConfig
from outpace.drafters.shallow import Doubt, ShallowRows, shares
from outpace.drafters.trained import find
from outpace.methods.early_exit.adapter_rows import AdapterFile, AdapterRows, AdapterState, read_adapter
from outpace.models.base import HEAD, LAYERS, TAPS, Target
from outpace.tree.growth import Branch, DraftRow, grow
from outpace.types import NOTHING, Draft, Outcome, Shape

_CHAIN, _TREE = 0.6, 0.4
"""Thresholds of the paper."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KangarooConfig(TrainedConfig):
    threshold: float | None = None
    """A branch ends after a token less likely than this; 0 never ends one. Without it, 0.6 in
    chains and 0.4 in trees."""

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}")


class Kangaroo(ExpandingDrafter[AdapterState]):
    """Drafts with the first layers of the target and an adapter.

    Args:
        target: it; every sequence drafts in the slot that it is lent.
        file: the adapter.
        threshold: as in the config.
    """

    Config = KangarooConfig
    traits = Traits(
        default_nodes=6,
        needs=frozenset({LAYERS, TAPS, HEAD}),
        samples=True,
        uses_target_cache=True,
        resumes=True,
    )

    def __init__(self, target: Target, file: AdapterFile, threshold: float | None = None) -> None:
        self.target, self.layer, self.threshold = target, file.layer, threshold
        self.tap = f"hidden.{file.layer}"
        level_D = shares(target, (file.layer,), file.vocab)
        self.traits = replace(self.traits, taps=frozenset({self.tap}), level_D=level_D)
        self.rows = AdapterRows(file.adapter, self.tap, self.clock)
        self._vocab = file.vocab
        self._id_D = None if file.vocab is None else file.vocab.to_target_D.to(target.device)

    @property
    def clock(self) -> PassClock:
        """The target's: whether a pass drafts, the verb tells."""
        return self.target.clock

    @classmethod
    def load(cls, config: KangarooConfig, target: Target) -> Kangaroo:
        """Read the adapter.

        Raises:
            ModelError: there is none, or it is corrupt, or was made for another target.
        """
        folder = find("kangaroo", target, config.model)
        file = read_adapter(folder, target, "kangaroo", config.quantize)
        return cls(target, file, config.threshold)

    @property
    def cache(self) -> KVCache:
        """The adapter's."""
        return self.rows.cache

    def begin(self, request: Request) -> AdapterState:
        """Take a slot. A prefix that no pass will show is left out: rows start behind it."""
        return AdapterState(self.cache.open())

    def propose(self, rows: Sequence[DraftRow[AdapterState]]) -> list[Draft]:
        """Grow drafts in the lent slots; a row without a lease gets an empty one."""
        ready = []
        for row in rows:
            state, budget = row.state, row.budget
            self.rows.ready(state, len(row.tokens) - 1)
            state.rows = None
            if row.lease is None or not row.lease.resumes:
                ready.append(replace(row, budget=NOTHING))
                continue
            state.rows = ShallowRows(row.lease, self.layer)
            doubt = Doubt(self._threshold(budget.shape), budget.stop)
            ready.append(replace(row, budget=replace(budget, stop=doubt)))
        drafts = []
        for row, (draft, numbers) in zip(ready, grow(ready, self.expand, self.traits), strict=True):
            if row.state.rows is not None:
                draft = self.rows.finish(row.state, draft, numbers)
            drafts.append(draft)
        return drafts

    def _threshold(self, shape: Shape) -> float:
        if self.threshold is not None:
            return self.threshold
        return _CHAIN if shape.parent_N is None and not shape.beam else _TREE

    def expand(self, branches: Sequence[Branch[AdapterState]]) -> tuple[Tensor, Tensor | None]:
        """One pass over the new nodes: the layers below the exit, the adapter, the head."""
        rows = [self._shallow(branch) for branch in branches]
        feeds = [replace(one.feed(branch), want=()) for one, branch in zip(rows, branches, strict=True)]
        scored = self.target.score(feeds, rows[0].lease.cache, taps=self.traits.taps, layers=self.layer)
        hidden_TH, start_B = scored.taps[self.tap], scored.tap_start_B
        for i, one in enumerate(rows):
            one.hidden.append(hidden_TH[start_B[i] : start_B[i + 1]].clone())
        with self.clock:
            y_FH = self.rows.run(branches, feeds, hidden_TH)
            with torch.no_grad():
                logits_FD = self.target.head(y_FH, self._vocab)
        self.clock.count -= 1  # the layers below and the adapter are one pass of this drafter
        return logits_FD, self._id_D

    @staticmethod
    def _shallow(branch: Branch[AdapterState]) -> ShallowRows:
        assert branch.state.rows is not None
        return branch.state.rows

    def observe(self, states: Sequence[AdapterState], outcomes: Sequence[Outcome]) -> None:
        """Follow what was committed."""
        self.rows.observe(states, outcomes)

    def num_uncached(self, state: AdapterState, tokens: Sequence[int]) -> int:
        """Those whose features wait."""
        return len(state.ids)

    def mark(self, state: AdapterState) -> Any:
        """How much of the text has been read."""
        return self.rows.mark(state)

    def rewind(self, state: AdapterState, mark: Any) -> AdapterState:
        """Forget what was read since."""
        return self.rows.rewind(state, mark)

    def end(self, state: AdapterState) -> None:
        """Give the slot back."""
        self.cache.close(state.slot)
