"""EAGLE: one layer on the target's own features guesses, chain or tree, greedy or sampled.

    text        x0  x1  x2  x3 | x4 pending        draft: x5 x6 ...
    features    f0  f1  f2  f3                     of the passes that fed x0 to x3
    rows        f0+x1  f1+x2  f2+x3  f3+x4   ->    guesses x5 and gives a
                                     a+x5    ->    guesses x6, and so on

Row t has position t, as in `outpace.train.align`. What the target has computed since the last
draft goes through the head in the pass of the draft's first level, so a draft of depth D costs D
passes of the head. Keys made from its own outputs are dropped after each draft and made anew
from the target's features.

Reads heads that ``outpace train eagle3`` made, EAGLE-3 heads in the speculators format, and the
EAGLE-1, EAGLE-2 and EAGLE-3 checkpoints of the method's authors. Pays wherever such a head is
trained for the target; a head for another target drafts noise, and is refused where that shows.

Papers: Li et al. 2024, arXiv:2401.15077 and arXiv:2406.16858; Li et al. 2025, arXiv:2503.01840.

Shape letters: T rows of a pass, F nodes of a frontier, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.drafters.base import Traits
from outpace.drafters.features import FeatureDrafter, Followed, TrainedConfig
from outpace.drafters.trained import rounding
from outpace.methods.eagle3.files import find_head, read_head
from outpace.methods.eagle3.net import EagleNet
from outpace.models.base import HEAD, TAPS, Target
from outpace.models.passes import PassRows
from outpace.tree.growth import Branch
from outpace.types import ROOT, Feed

_WAITING = 2048
"""Most rows of a sequence that wait for its next draft; more go through the head at once. In a full
batch where nobody drafts, most answers end before that, and nothing was read in vain. A row that
waits takes about a sixth of what the target keeps of it."""


@dataclass(slots=True, eq=False)
class _State(Followed):
    row: dict[int, int] = field(default_factory=dict)
    """Draft node -> its row in the tail of the slot."""
    out: dict[int, int] = field(default_factory=dict)
    """Draft node -> its row among the outputs of this draft's passes."""


class Eagle3(FeatureDrafter[_State]):
    """Drafts with an EAGLE head.

    Args:
        net: the head; owns the cache of this drafter.
        id_D: target ids of the columns of its logits; None: they are the ids.
    """

    cache: DenseCache
    most_waiting = _WAITING
    traits = Traits(default_nodes=5, default_tree="dynamic", needs=frozenset({TAPS, HEAD}), samples=True)

    def __init__(self, net: EagleNet, id_D: Tensor | None, temper_D: tuple[float, ...] = ()) -> None:
        self.net, self._id_D = net, id_D
        self.traits = replace(self.traits, taps=frozenset(net.shape.taps), temper_D=temper_D)
        self.cache = net.new_cache()
        self._out_TH = torch.empty(0)

    @classmethod
    def load(cls, config: TrainedConfig, target: Target) -> Eagle3:
        """Read the head and borrow the target's embedding.

        Raises:
            ModelError: no head, a corrupt one, or one that was made for another target.
        """
        head = read_head(find_head(target, config.model), target)
        rounded = rounding(config.quantize, target)
        net = EagleNet(head.shape, head.tensors, target, head.embed_VH, head.id_D, quantize=rounded)
        id_D = None if head.id_D is None else head.id_D.to(target.device)
        return cls(net, id_D, head.temper_D)

    def opened(self, slot: int) -> _State:
        return _State(slot)

    def feature(self, taps: dict[str, Tensor]) -> Tensor:
        return self.net.feature(taps)

    def expand(self, branches: Sequence[Branch[_State]]) -> tuple[Tensor, Tensor | None]:
        """One pass of the head: features of the target first, then its own outputs."""
        first = branches[0].nodes == (ROOT,)
        feeds = [self._feed_waiting(b) if first else self._feed_nodes(b) for b in branches]
        if first:
            self._out_TH = self._out_TH[:0]
        seen = len(self._out_TH)
        for branch in branches:
            branch.state.out |= {node: seen + i for i, node in enumerate(branch.nodes)}
            seen += len(branch.nodes)
        rows = PassRows(feeds, self.cache, 1)
        with self.clock:
            if first:
                given_TF = torch.cat([part for b in branches for part in b.state.waiting])
            else:
                parents = [b.state.out[b.parent_N[node]] for b in branches for node in b.nodes]
                given_TF = self._out_TH.index_select(0, torch.tensor(parents, device=self.net.device))
            out_FH, logits_FD = self.net.run(rows, self.cache, _starts(branches), given_TF, first)
        self._out_TH = out_FH if first else torch.cat([self._out_TH, out_FH])
        return logits_FD, self._id_D

    def _feed_waiting(self, branch: Branch[_State]) -> Feed:
        """What the target computed since the last draft, the row of the pending token last."""
        state = branch.state
        state.lead = len(state.ids)
        state.row = {ROOT: state.lead - 1}
        tokens = (*state.ids[1:], branch.tokens[-1])
        return Feed.chain(state.slot, tokens, want=(state.lead - 1,))

    def _feed_nodes(self, branch: Branch[_State]) -> Feed:
        state = branch.state
        start = len(state.row) - 1 + state.lead
        tokens = tuple(branch.token_N[node] for node in branch.nodes)
        parents = tuple(state.row[branch.parent_N[node]] for node in branch.nodes)
        state.row |= {node: start + i for i, node in enumerate(branch.nodes)}
        return Feed(state.slot, tokens, parents)

    def read(self, states: Sequence[_State]) -> None:
        """Put all features but the last through the head, whose next token is not known yet."""
        features, feeds = [], []
        for state in states:
            feature_TF = torch.cat(state.waiting)
            features.append(feature_TF[:-1])
            feeds.append(Feed.chain(state.slot, state.ids[1:], want=()))
            state.waiting, state.ids = [feature_TF[-1:].clone()], state.ids[-1:]
        starts = [state.start or 0 for state in states]
        rows = PassRows(feeds, self.cache, 1)
        with self.clock:
            self.net.run(rows, self.cache, starts, torch.cat(features), features=True)
        for feed in feeds:
            self.cache.keep(feed.slot, range(len(feed.token_J)))

    def forget(self, state: _State) -> None:
        super().forget(state)
        state.row, state.out = {}, {}


def _starts(branches: Sequence[Branch[_State]]) -> list[int]:
    return [branch.state.start or 0 for branch in branches]
