"""Drafters that go on from features of the target with features of their own, row by row.

    text        x0  x1  x2  x3 | x4 pending        draft: x5 x6 ...
    features    f0  f1  f2  f3                     of the passes that fed x0 to x3
    rows        f0+x1  f1+x2  f2+x3  f3+x4   ->    guesses x5 and gives a
                                     a+x5    ->    guesses x6, and so on

Row t has position t, as in `outpace.train.align`. What the target has computed since the last
draft goes through the network in the pass of the draft's first level. So a draft of depth D costs D
passes of it. Keys made from its own outputs are dropped after each draft and made anew from the
target's features.

Of a prefix that the target's cache held already no pass shows features. Its rows come from earlier sequences
that read it, piece by piece. In the second turn of a conversation `eagle3` then emits 3.27 tokens per pass,
and 1.81 without them.

Papers: Li et al. 2024 (EAGLE), arXiv:2401.15077.

Shape letters: T rows of a pass, F width of the features of a row, R rows wanted, H hidden size, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.drafters.base import Request, Traits
from outpace.drafters.branching import drafts_of, ruled
from outpace.drafters.descent import chained, chains_of, levels_of, note, picked, start_of
from outpace.drafters.features import FeatureDrafter, Followed
from outpace.drafters.feeding import feed_nodes
from outpace.models.base import HEAD, TAPS
from outpace.models.levels import Answer, Asked, Start
from outpace.models.passes import PassRows
from outpace.models.prefix import PIECE, PrefixStore
from outpace.models.room import Strip
from outpace.models.taps import side_by_side
from outpace.tree.growth import Branch, DraftRow, Growing, Level
from outpace.types import ROOT, Draft, Feed

_WAITING = 2048
"""Most rows of a sequence that wait for its next draft; more go through the head at once. In a full
batch where nobody drafts, most answers end before that, and nothing was read in vain. A row that
waits takes a sixth to a third of what the target keeps of it."""

_APART = 32
"""Rows that a compiled pass reads apart from a draft: without queries it takes a third less, and 0.1 ms more
to call. Of prompts with 450 tokens a first draft of `eagle3` takes 7 ms, else 9."""

_PIECES = 2048
"""Pieces of prefixes whose rows are kept: 50 MB for the embedded model, half in bfloat16."""


class FeatureNet(Protocol):
    """What a network has to give."""

    device: torch.device

    @property
    def taps(self) -> Sequence[str]:
        """Features of the target, in the order in which they stand side by side."""

    def new_cache(self) -> DenseCache:
        """An empty cache for its layer."""

    def feature(self, taps: Mapping[str, Tensor]) -> Tensor:
        """Features [T, F] of rows of a pass of the target, side by side."""

    def run(
        self, rows: PassRows, cache: DenseCache, offsets: Sequence[int], given_TF: Tensor, features: bool
    ) -> tuple[Tensor, Tensor]:
        """One pass.

        Args:
            rows: made from feeds whose ids are the tokens that the rows embed; no riders. Keys
                and values are written for all of them.
            cache: from ``new_cache``; the one that ``rows`` was made with.
            offsets: per feed, the position of the first row of its slot.
            given_TF: features of the target, as ``feature`` gives them, or outputs of earlier
                rows [T, H].
            features: which of the two.

        Returns:
            For the rows wanted, the feature that the next row reads [R, H], float32, and logits
            [R, D], float32.
        """

    @property
    def descends(self) -> bool:
        """Whether several passes run in one call here."""

    def descend(
        self,
        start: Start,
        asked: Asked[Answer],
        given_TF: Tensor | Strip,
        id_D: Tensor | None,
        first: PassRows | None,
    ) -> tuple[Answer, Strip]:
        """Several passes, whose rows are made from what those of the one before gave.

        Args:
            given_TF: outputs of the rows before the first ones; with ``first``, features of the target.
            id_D: target ids of the columns of logits; None: they are the ids.
            first: rows of a pass that is the first level; one of them is wanted per sequence.

        Returns:
            What was found, and the outputs of the rows of all levels; there may be room for more, and they
            are valid until the next call.
        """


@dataclass(slots=True, eq=False)
class RowState(Followed):
    text: tuple[str, tuple[int, ...]] = ("", ())
    """Whose text it is, and its first token, which no row embeds."""
    row: dict[int, int] = field(default_factory=dict)
    """Draft node -> its row in the tail of the slot."""
    out: dict[int, int] = field(default_factory=dict)
    """Draft node -> its row among the outputs of this draft's passes."""


class RowDrafter(FeatureDrafter[RowState]):
    """Drafts with one network and its cache.

    Args:
        net: the network.
        id_D: target ids of the columns of its logits; None: they are the ids.
        temper_D: as in ``Traits``.
    """

    most_waiting = _WAITING
    traits = Traits(
        default_nodes=5,
        default_tree="dynamic",
        needs=frozenset({TAPS, HEAD}),
        samples=True,
        # All that stands around a draft is in its first level. 0.1 for each: `eagle3` emits 2.31 for 2.38.
        level_D=(0.1, 0.03),
    )

    def __init__(self, net: FeatureNet, id_D: Tensor | None, temper_D: tuple[float, ...] = ()) -> None:
        self.net, self._id_D = net, id_D
        self.traits = replace(self.traits, taps=frozenset(net.taps), temper_D=temper_D)
        self.cache: DenseCache = net.new_cache()
        self._prefixes = PrefixStore(self.cache, _PIECES, size=PIECE)
        self._outs: list[Tensor] = []
        """Outputs of the passes of this draft [., H]."""
        self._ends = [0]
        """How many rows they are: at first, and up to each."""

    def opened(self, slot: int) -> RowState:
        return RowState(slot)

    def begin(self, request: Request) -> RowState:
        """Take a slot, with the rows of a prefix that are known; rows go on behind the prefix in any case."""
        state, known = super().begin(request), request.num_cached
        state.text = request.key, request.prompt[:1]
        held = self._prefixes.load(state.slot, state.text, request.prompt[1 : known + 1]) if known else 0
        state.start = known - held if held else None
        return state

    def end(self, state: RowState) -> None:
        """Keep the rows of a text that is there from its first token on."""
        if state.start == 0:
            self._prefixes.save(state.slot, state.text)
        super().end(state)

    def propose(self, rows: Sequence[DraftRow[RowState]]) -> list[Draft]:
        """Read long texts first; see ``_APART``."""
        long = [row.state for row in rows if len(row.state.ids) > _APART and row.budget.max_nodes]
        if long and self.net.descends:
            for state in long:
                self.forget(state)
                self.settle(state)
            self.read(long)
        return super().propose(rows)

    def feature(self, taps: Mapping[str, Tensor]) -> Tensor:
        return self.net.feature(taps)

    def expand(self, branches: Sequence[Branch[RowState]]) -> tuple[Tensor, Tensor | None]:
        """One pass of the head: features of the target first, then its own outputs."""
        first = branches[0].nodes == (ROOT,)
        feeds = [self._feed_waiting(b) if first else self._feed_nodes(b) for b in branches]
        if first:
            self._outs, self._ends = [], [0]
        seen = self._ends[-1]
        for branch in branches:
            branch.state.out |= {node: seen + i for i, node in enumerate(branch.nodes)}
            seen += len(branch.nodes)
        rows = PassRows(feeds, self.cache, 1)
        with self.clock:
            given_TF = self._before(branches)
            out_FH, logits_FD = self.net.run(rows, self.cache, _starts(branches), given_TF, first)
        self._took(out_FH, seen - self._ends[-1])
        return logits_FD, self._id_D

    def descend(
        self, rows: Sequence[DraftRow[RowState]], branches: Sequence[Branch[RowState]], levels: int
    ) -> Sequence[Level]:
        """Several passes of the head in one call."""
        picks = picked(rows, branches, levels) if self.net.descends else None
        if picks is None:
            return ()
        fed = None
        if branches[0].nodes == (ROOT,):
            fed = PassRows([self._feed_waiting(b) for b in branches], self.cache, 1)
            self._outs, self._ends = [], [0]
        start = start_of(self.cache, branches, levels, _starts(branches))
        with self.clock:
            found, out = self.net.descend(start, picks, self._before(branches), self._id_D, fed)
        self.clock.count += found.levels - 1
        note(self.cache, branches, found)
        seen, count = self._ends[-1], len(branches)
        for i, branch in enumerate(branches):
            node = branch.nodes[0]
            branch.state.out |= {node + level: seen + level * count + i for level in range(found.levels)}
        self._took(out.between(0, found.levels * count).tensor.clone(), found.levels * count)
        return levels_of(found, rows, self._id_D)

    def spread(
        self, trees: Sequence[Growing], branches: Sequence[Branch[RowState]]
    ) -> Sequence[Draft] | None:
        """All passes of the head in one call, where the rule of the trees is compiled too."""
        if not self.net.descends:
            return None
        picks = chained(trees, branches)
        if picks is not None:
            chains = self._all_levels(branches, picks)
            made = chains_of(chains, trees, self._id_D) if chains.levels == picks.levels else None
        elif (rules := ruled(trees)) is not None:
            made = drafts_of(self._all_levels(branches, rules), trees, self._id_D)
        else:
            return None
        for branch in branches if made is None else ():
            self.cache.drop(branch.state.slot)
        return made

    def _all_levels(self, branches: Sequence[Branch[RowState]], asked: Asked[Answer]) -> Answer:
        """Passes from the first one on, in one call."""
        fed = PassRows([self._feed_waiting(b) for b in branches], self.cache, 1)
        self._outs, self._ends = [], [0]
        start = start_of(self.cache, branches, asked.seats, _starts(branches))
        state, given = branches[0].state, None
        if len(branches) == 1 and not state.waiting and len(state.shown) == 1:
            given = side_by_side(*state.shown[0], self.net.taps)
        with self.clock:
            lent = self._before(branches) if given is None else given
            found, _ = self.net.descend(start, asked, lent, self._id_D, fed)
        self.clock.count += found.levels - 1
        return found

    def outputs(self, branches: Sequence[Branch[RowState]]) -> Tensor:
        """What the passes of this draft gave of the nodes [F, H]."""
        return self._given([b.state.out[node] for b in branches for node in b.nodes])

    def _before(self, branches: Sequence[Branch[RowState]]) -> Tensor:
        """What the rows of these nodes are made from: features that wait, or outputs of their parents."""
        if branches[0].nodes == (ROOT,):
            for branch in branches:
                self.settle(branch.state)
            parts = [part for b in branches for part in b.state.waiting]
            return _whole(parts)
        return self._given([b.state.out[b.parent_N[node]] for b in branches for node in b.nodes])

    def _given(self, rows: Sequence[int]) -> Tensor:
        """Rows of the outputs of this draft; a copy, or the latest ones as they are."""
        last, (start, end) = self._outs[-1], self._ends[-2:]
        if list(rows) == list(range(start, end)):
            return last
        if min(rows) < start:
            last, start = torch.cat(self._outs), 0
            self._outs, self._ends = [last], [0, end]
        return last.index_select(0, torch.tensor([row - start for row in rows], device=self.net.device))

    def _took(self, out_TH: Tensor, count: int) -> None:
        """Take the outputs of a pass."""
        self._outs.append(out_TH)
        self._ends.append(self._ends[-1] + count)

    def _feed_waiting(self, branch: Branch[RowState]) -> Feed:
        """What the target computed since the last draft, the row of the pending token last."""
        state = branch.state
        state.lead = len(state.ids)
        state.row = {ROOT: state.lead - 1}
        tokens = (*state.ids[1:], branch.tokens[-1])
        return Feed.chain(state.slot, tokens, want=(state.lead - 1,))

    def _feed_nodes(self, branch: Branch[RowState]) -> Feed:
        state = branch.state
        return feed_nodes(branch, state.slot, state.row, len(state.row) - 1 + state.lead)

    def read(self, states: Sequence[RowState]) -> None:
        """Put all features but the last through the head, whose next token is not known yet."""
        features, feeds = [], []
        for state in states:
            feature_TF = _whole(state.waiting)
            features.append(feature_TF[:-1])
            feeds.append(Feed.chain(state.slot, state.ids[1:], want=()))
            state.waiting, state.ids = [feature_TF[-1:].clone()], state.ids[-1:]
        starts = [state.start or 0 for state in states]
        rows = PassRows(feeds, self.cache, 1)
        with self.clock:
            self.net.run(rows, self.cache, starts, _whole(features), features=True)
        for feed in feeds:
            self.cache.keep(feed.slot, range(len(feed.token_J)))

    def forget(self, state: RowState) -> None:
        super().forget(state)
        state.row, state.out = {}, {}


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Parts one behind the other; no copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _starts(branches: Sequence[Branch[RowState]]) -> list[int]:
    return [branch.state.start or 0 for branch in branches]
