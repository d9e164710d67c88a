"""Streams in the target's own pass guess ahead: they enter at a middle layer, with weights of their own.

    rows      pending, a, b (below a); below each of them streams S1 ... SK, from layer m on
    stream    enters with the state of its node before layer m, k positions further on; guesses the token
              k places after the one that the node itself gives
    next      the streams of the node at which verification ended: one guess per level

The target's rows do not see streams and run through weights that nothing changes, so its distributions
stay as they are. Streams run through the upper layers once more, with low-rank weights added, after the
target's rows: they attend to the keys and values of those. So verifying and guessing are one pass.

    streaming   a few upper layers; a stream sees the streams before it in its chain
    coral       the last layer alone; queries of several positions ahead that do not see each other, so every
                guess of a block is made in any order. The next pass verifies the block and makes a new one.

Only nodes that are likely to be reached carry streams: ``rows`` of a pass at most. First children go before
second ones, so which nodes follows from the order of drawing, and nothing that was drawn is dropped.

Before verification an early exit prunes the tree. One pass of the first layers says how likely each
guess is reached. Unlikely ones leave, and verification goes on from there. Guesses that were drawn stay.

Papers: Speculative Streaming, arXiv:2402.11131 (there the target is tuned as well, and pruning is inside of
the pass). COrAL, arXiv:2410.09675 (there the block is refined and not verified).

Shape letters: K streams, R riders, T guesses of all sequences, F nodes of a frontier, H hidden size, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from outpace.drafters.base import ONE_PASS, Traits
from outpace.drafters.riding import RidersMemo, RidingDrafter, RidingState
from outpace.drafters.shallow import pruned
from outpace.drafters.trained import lender
from outpace.methods.streaming.files import Streams, read_streams
from outpace.models.base import EMBEDDINGS, HEAD, LAYERS, TAPS, TREE, Target
from outpace.models.blocks import Form
from outpace.models.rowwise import Norm
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import parse_shape
from outpace.types import ROOT, Budget, Draft, Drawn, Feed, Resume, Riders

STOCK = "3x2x1"
"""The tree of a drafter whose acceptance nobody measured, and the mark of the one that was."""
_STOCK = parse_shape(STOCK)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingConfig:
    """Settings of the drafter."""

    model: str | None = None
    """Folder of the streams; without it, the ones trained for the target."""
    rows: int = 24
    """Most rows of a pass: the pending token, guesses and streams."""
    prune: float = 0.02
    """Leave out guesses that the early exit holds for less likely than this to be reached; 0 keeps all.
    Only where guesses are chosen, not drawn, and while no other drafter reads features."""

    def __post_init__(self) -> None:
        if not 0 <= self.prune < 1:
            raise ValueError(f"prune must be at least 0 and below 1, got {self.prune}")
        if self.rows < 2:
            raise ValueError(f"rows must be at least 2, got {self.rows}")


class Streaming(RidingDrafter):
    """Drafts what the streams of the last pass guessed, and sends new ones along."""

    Config = StreamingConfig
    method: ClassVar[str] = "streaming"
    chained: ClassVar[bool] = True
    """Whether a stream sees those before it."""
    stock = _STOCK
    traits = Traits(
        default_nodes=9,
        default_tree=STOCK,
        needs=frozenset({TREE, EMBEDDINGS, LAYERS, TAPS, HEAD}),
        samples=True,
        level_D=ONE_PASS,
    )

    def __init__(self, streams: Streams, target: Target, config: StreamingConfig) -> None:
        lent = lender(target, self.method)
        super().__init__(lent, streams.vocab)
        self.streams, self._rows, self._prune = streams, config.rows, config.prune
        self._norm = Norm(streams.exit_norm_H.to(lent.device), lent.config)
        self._exit = Form(lent.dtype, lent.device).linear(streams.exit_HH)
        self.through = streams.through(lent)
        self.count = len(streams.stream_KH)
        self._feed_V = None if streams.vocab is None else streams.vocab.feed_V
        self._enter_HH = streams.enter_HH.to(lent.device)
        self._stream_KH = streams.stream_KH.to(lent.device)
        self._hang = lru_cache(maxsize=64)(self._make_riders)

    @classmethod
    def load(cls, config: StreamingConfig, target: Target) -> Streaming:
        return cls(read_streams(cls.method, config.model, target), target, config)

    def propose(self, rows: Sequence[DraftRow[RidingState]]) -> list[Draft]:
        """Grow drafts from the guesses that are there, if any, and hang streams below likely nodes."""
        rows = [replace(row, budget=self._within(row.budget)) for row in rows]
        drafts = self._pruned(rows, super().propose([self.fitted(row) for row in rows]))
        return [self._ridden(row, draft) for row, draft in zip(rows, drafts, strict=True)]

    def _within(self, budget: Budget) -> Budget:
        return replace(budget, max_rows=min(budget.max_rows, self._rows - 1))

    def tree(self, levels: int) -> tuple[int, ...] | None:
        return self.streams.tree

    def _pruned(self, rows: Sequence[DraftRow[RidingState]], drafts: list[Draft]) -> list[Draft]:
        """Drafts without unlikely guesses, by one pass of the first layers, which hands on its work."""
        asked = [
            (i, row.lease)
            for i, (row, draft) in enumerate(zip(rows, drafts, strict=True))
            if self._prune and len(draft) > 1 and row.lease is not None and row.lease.resumes
            if row.drawn is Drawn.CHOSEN
        ]
        if not asked:
            return drafts
        name, layer = f"hidden.{self.streams.exit}", self.streams.exit
        feeds = []
        for i, lease in asked:
            lease.cache.drop(lease.slot)
            feeds.append(replace(Feed.tree(lease.slot, rows[i].tokens[-1], drafts[i]), want=()))
        scored = self.target.score(feeds, asked[0][1].cache, taps=frozenset({name}), layers=layer)
        hidden_TH = scored.taps[name].clone()
        with self.clock, torch.no_grad():
            n_TH = self._norm(hidden_TH)
            y_TH = n_TH + self._exit(n_TH.to(self.target.dtype)).float()
            prob_TD = self.target.head(y_TH, self.streams.vocab).softmax(-1)
        for (i, lease), start in zip(asked, scored.tap_start_B, strict=False):
            draft, reach = drafts[i], [1.0]
            columns = draft.token_N if self._feed_V is None else self._feed_V[list(draft.token_N)].tolist()
            for column, parent in zip(columns, draft.parent_N, strict=True):
                reach.append(reach[parent + 1] * float(prob_TD[start + parent + 1, column]))
            keep = [node for node in range(len(draft)) if reach[node + 1] >= self._prune]
            kept = [0, *(node + 1 for node in keep)]
            lease.cache.prune(lease.slot, kept)
            resume = Resume(layer, tuple(range(len(kept))), hidden_TH[[start + row for row in kept]])
            drafts[i] = replace(pruned(draft, keep), resume=resume)
        return drafts

    def _ridden(self, row: DraftRow[RidingState], draft: Draft) -> Draft:
        """The draft with streams below the nodes that verification most likely ends at."""
        room = row.budget.max_rows - len(draft)
        last = self.target.max_positions - len(row.tokens)
        depths = (0, *draft.depth_N)
        fits = [node for node, depth in enumerate(depths) if depth + self.count <= last]
        # Nodes stand by level, and in draw order below a parent: earlier ones are likelier.
        chosen = sorted(sorted(fits, key=lambda node: (self._late(draft, node), node))[: room // self.count])
        if not chosen:
            return draft
        riders, start = self._hang(tuple(chosen), len(depths))
        return replace(
            draft,
            riders=riders,
            memo=RidersMemo(self, start, tuple(0 if at < 0 else self.count for at in start)),
        )

    @staticmethod
    def _late(draft: Draft, row: int) -> int:
        """How often the way down to a row takes another than the first child."""
        late = 0
        for node in draft.path(row - 1):
            group = next(g for g in draft.groups if node in g.nodes)
            late += list(dict.fromkeys(group.nodes)).index(node)
        return late

    def _make_riders(self, rows: tuple[int, ...], count: int) -> tuple[Riders, tuple[int, ...]]:
        """Streams below some rows of a draft, and where those of each row begin."""
        start, streams = [-1] * count, self.count
        for number, row in enumerate(rows):
            start[row] = number * streams
        node_R = tuple(row + ROOT for row in rows for _ in range(streams))
        order = range(len(node_R))
        after = tuple(i - 1 if self.chained and i % streams else -1 for i in order)
        ahead = None if self.chained else tuple(i % streams + 1 for i in order)
        which_RH = self._stream_KH.repeat(len(rows), 1)

        def enter(node_RH: Tensor) -> Tensor:
            own_RH = node_RH[::streams]  # the streams of a node begin alike
            return (own_RH + own_RH @ self._enter_HH.T).repeat_interleave(streams, 0) + which_RH

        made = Riders(
            node_R,
            after,
            logits=False,
            layer=self.streams.layer,
            enter=enter,
            ahead_R=ahead,
            through=self.through,
        )
        return made, tuple(start)

    def guesses(self, hidden_RH: Tensor, count: int) -> Tensor:
        return hidden_RH[:count].float().clone()


class Coral(Streaming):
    """Drafts blocks with the target's last layer, whose guesses do not wait for each other."""

    method: ClassVar[str] = "coral"
    chained: ClassVar[bool] = False
