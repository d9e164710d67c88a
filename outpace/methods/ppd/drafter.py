"""Parallel prompt decoding: trained prompt tokens ride in the target's pass and guess ahead.

    rows of a pass    pending, a, b (below a); riders P1 P2 P3 below pending, P1 P2 below a, ...
    rider Pk          sees the text, its node's path and P1 ... P(k-1) of its own chain; guesses
                      the token k places after the one that the node itself gives
    next draft        the riders of the node at which verification ended: one guess per level

So verifying and guessing are one pass of the target; besides it there is only the unembedding of
a few rows. Riders are seen by nobody, so guesses are scored as if they were alone. The distribution of a
level is the same below all nodes of the level before, as for `medusa`.

How many levels a draft can have is the number of riders that its node had: the drafter is in one
of K + 1 states. Each has its tree, and each node its riders. Those follow from what was accepted in training,
and from what passes over more rows cost here (`trees`). Passes are timed once, when the drafter is loaded.
The first step of a text has no guesses: riders come with a step, not with the prompt.

An ensemble has E vectors for each prompt token, in chains of their own at the same positions. The
guess is the mean of their logits, here the unembedding of the mean hidden state.

Pays where a pass has rows to spare: riders cost as much as guesses. A few KB of weights.

Paper: Chen et al. 2024, arXiv:2405.18628; similar: BiTA, arXiv:2401.12522.

Shape letters: K prompt tokens, E vectors of each, H hidden size, R riders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from outpace.drafters.base import ONE_PASS, Traits
from outpace.drafters.riding import RidersMemo, RidingDrafter, RidingState
from outpace.methods.ppd.files import Prompts, read_prompts
from outpace.methods.ppd.trees import Rates, StateMachine, pass_seconds, solve
from outpace.models.base import EMBEDDINGS, TREE, Target
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import parse_shape
from outpace.types import ROOT, Draft, Riders

STOCK = "[-1,-1,0,-1,1,0,2,-1,3,1,0,4,5,2,-1,0,7,3,1,6,8,4,2,9]"
"""Stands for the trees of the state machine; its size is their limit."""
_STOCK = parse_shape(STOCK)
_GUESSED: Rates = tuple(tuple(0.45 * 0.75**k * 0.4**rank for rank in range(8)) for k in range(16))
_GUESSED_ROWS = 24
"""Rates and rows of a drafter whose acceptance nobody measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PpdConfig:
    model: str | None = None
    """Folder of the prompt tokens; without it, the ones trained for the target."""
    rows: int | None = None
    """Most rows of a pass: the pending token, guesses and riders, all taken to cost the same. By
    default as many as pay, by passes that are timed when the drafter is loaded."""

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 3:
            raise ValueError(f"rows must be at least 3, got {self.rows}")


class Ppd(RidingDrafter):
    """Drafts what the riders of the last pass guessed, and sends new ones along.

    Args:
        machine: trees and riders; None: by the prompts' rates, every row at the same cost.
    """

    Config = PpdConfig
    stock = _STOCK
    traits = Traits(
        default_nodes=24,
        default_tree=STOCK,
        needs=frozenset({TREE, EMBEDDINGS}),
        samples=True,
        level_D=ONE_PASS,
    )

    def __init__(self, prompts: Prompts, target: Target, machine: StateMachine | None = None) -> None:
        super().__init__(target, prompts.vocab)
        self.prompts = prompts
        self.riders, self.chains = prompts.embed_KEH.shape[:2]
        self.machine = machine or _flat(prompts, _GUESSED_ROWS)
        self._embed_XH = prompts.embed_KEH.to(target.device, torch.float32).flatten(0, 1)
        self._allot = lru_cache(maxsize=256)(self.machine.riders)
        self._hang = lru_cache(maxsize=64)(self._make_riders)

    @classmethod
    def load(cls, config: PpdConfig, target: Target) -> Ppd:
        """Read the prompt tokens and, where their acceptance is known, time passes of the target."""
        prompts = read_prompts(config.model, target)
        if config.rows is not None:
            return cls(prompts, target, _flat(prompts, config.rows))
        if not prompts.rate_KB:
            return cls(prompts, target)
        chains = prompts.embed_KEH.shape[1]
        nodes = len(_STOCK.parent_N or ())
        seconds_R = pass_seconds(target)
        machine = solve(prompts.rate_KB, seconds_R, chains=chains, most_nodes=nodes)
        made = cls(prompts, target, machine)
        # Another load may measure other costs and draft other trees.
        made.traits = replace(made.traits, deterministic=False)
        return made

    def propose(self, rows: Sequence[DraftRow[RidingState]]) -> list[Draft]:
        """Grow drafts from the guesses that are there, if any, and hang riders below all."""
        drafts = super().propose([self.fitted(row) for row in rows])
        return [self._ridden(row, draft) for row, draft in zip(rows, drafts, strict=True)]

    def tree(self, levels: int) -> tuple[int, ...]:
        return self.machine.tree_S[levels]

    def _ridden(self, row: DraftRow[RidingState], draft: Draft) -> Draft:
        room = (row.budget.max_rows - len(draft)) // self.chains
        count = self._allot(draft.parent_N, room)
        # A rider has the position of the token that it stands for.
        last = self.target.max_positions - len(row.tokens)
        longest = max((n + d for n, d in zip(count, (0, *draft.depth_N), strict=True)), default=0)
        if longest > last:
            count = tuple(max(0, min(n, last - d)) for n, d in zip(count, (0, *draft.depth_N), strict=True))
        if not any(count):
            return draft
        riders, start = self._hang(count)
        return replace(draft, riders=riders, memo=RidersMemo(self, start, count))

    def _make_riders(self, count: tuple[int, ...]) -> tuple[Riders, tuple[int, ...]]:
        """Chains of riders below the pending token and every node, and where those begin."""
        node_R: list[int] = []
        after_R: list[int] = []
        which_R: list[int] = []
        start = []
        for node, riders in enumerate(count, start=ROOT):
            start.append(len(node_R))
            for chain in range(self.chains):
                for k in range(riders):
                    after_R.append(len(node_R) - 1 if k else -1)
                    node_R.append(node)
                    which_R.append(k * self.chains + chain)
        embed_RH = self._embed_XH[torch.tensor(which_R, device=self._embed_XH.device)]
        made = Riders(tuple(node_R), tuple(after_R), embed_RH=embed_RH, logits=False)
        return made, tuple(start)

    def guesses(self, hidden_RH: Tensor, count: int) -> Tensor:
        own_XH = hidden_RH[: count * self.chains].float()
        return own_XH.view(self.chains, count, -1).mean(0)


def _flat(prompts: Prompts, rows: int) -> StateMachine:
    """The most tokens per pass of so many rows."""
    riders, chains = prompts.embed_KEH.shape[:2]
    rates = prompts.rate_KB or (_GUESSED * riders)[:riders]
    nodes = len(_STOCK.parent_N or ())
    return solve(rates, [1.0] * rows, chains=chains, most_nodes=nodes)
