"""Falcon: every pass guesses a block of k tokens, and blocks hang from the ends of blocks.

    k = 2      rows of a pass                             guesses
    pass 1     f(n-2)+x(n-1), f(n-1)+xn                   x(n+1), x(n+2)
    pass 2     f'(n)+x(n+1), f'(n+1)+x(n+2)               x(n+3), x(n+4), below every x(n+2) that grows on

The root is k rows wide. Where fewer than k tokens were committed since the last draft, rows before
them are fed again, so that the root is whole. The last k - 1 rows always wait. All guesses of a depth
within a block have the same distribution, and are drawn below each node by itself. A block's rows see
all rows of their block and of the blocks above. Every block has an LSTM state of its own, from the
block above. So branches do not mix. A draft of depth D costs D / k passes.

Pays where a pass is dear and guesses of two tokens at once are nearly as good as one by one.

Paper: Gao et al. 2024 (Falcon), arXiv:2412.12639.

Shape letters: F nodes, k rows of a block, T rows of a pass, H hidden size, S numbers of an LSTM state, D
draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.drafters.base import Traits
from outpace.drafters.blocks import BlockDrafter, root_of
from outpace.drafters.features import FeatureDrafter, Followed, TrainedConfig
from outpace.drafters.last_state import LAST, STOCK, fitted_budget
from outpace.drafters.trained import find, rounding
from outpace.methods.falcon.files import METHOD, FalconFile, read_falcon
from outpace.methods.falcon.net import FalconNet
from outpace.models.base import HEAD, TAPS, Target
from outpace.models.passes import PassRows
from outpace.tree.growth import Branch, DraftRow
from outpace.types import NOTHING, ROOT, Feed

_WAITING = 64
"""Most rows of a sequence that wait for its next draft; more are read at once."""


@dataclass(slots=True, eq=False)
class _State(Followed):
    """One sequence in the network's cache. Tensors are never changed, only replaced."""

    lstm_S: Tensor = field(default_factory=lambda: torch.empty(0))
    """The LSTM's state behind the last row that is in the slot for good."""
    lstm_TS: Tensor | None = None
    """That behind each row which a draft made of true features."""
    tail: dict[int, int] = field(default_factory=dict)
    """Node at which a block begins -> the tail row that ends the block's rows."""


class Falcon(BlockDrafter[_State], FeatureDrafter[_State]):
    """Drafts blocks behind blocks.

    Args:
        file: the network as it was read.
        target: embeds and unembeds.
        quantize: how to round the weights, where compiled code multiplies them.
    """

    cache: DenseCache
    most_waiting = _WAITING
    traits = Traits(
        default_nodes=4,
        default_tree=STOCK,
        needs=frozenset({TAPS, HEAD}),
        taps=frozenset({LAST}),
        samples=True,
    )

    def __init__(self, file: FalconFile, target: Target, quantize: str | None = None) -> None:
        self.file, self.target, self.block = file, target, file.shape.block
        self.net = FalconNet(file.shape, file.tensors, target, quantize=rounding(quantize, target))
        self.cache = self.net.new_cache()
        self.id_D = None if file.vocab is None else file.vocab.to_target_D.to(target.device)
        self._given_NkH = self._lstm_NS = torch.empty(0)

    @classmethod
    def load(cls, config: TrainedConfig, target: Target) -> Falcon:
        """Read the network; embedding and unembedding are the target's."""
        return cls(read_falcon(find(METHOD, target, config.model), target), target, config.quantize)

    def opened(self, slot: int) -> _State:
        return _State(slot, lstm_S=self.net.start)

    def feature(self, taps: Mapping[str, Tensor]) -> Tensor:
        return taps[LAST].float()

    def fitted(self, row: DraftRow[_State]) -> DraftRow[_State]:
        """A sequence with less than a block of features gets an empty draft."""
        if len(row.state.ids) < self.block:
            return replace(row, budget=NOTHING)
        depths = self.file.shape.passes * self.block
        return replace(row, budget=fitted_budget(row.budget, depths, self.file.tree))

    def blocks(self, branches: Sequence[Branch[_State]]) -> Tensor:
        """One pass over the root's rows and those that wait, or over the blocks of nodes."""
        first = branches[0].nodes == (ROOT,)
        with self.clock, torch.no_grad():
            if first:
                feeds, x_TH, lstm_FS = self._feed_waiting(branches)
            else:
                feeds, x_TH, lstm_FS = self._feed_nodes(branches)
            rows = PassRows(feeds, self.cache, 1)
            size = self.block
            ends = [rows.wanted[i // size * size + size - 1] for i in range(len(rows.wanted))]
            offsets = [b.state.start or 0 for b in branches]
            given_RH = self.net.run(rows, self.cache, offsets, x_TH, ends)
            logits_RD = self.target.head(given_RH, self.file.vocab).float()
        given_FkH = given_RH.view(-1, self.block, given_RH.shape[-1])
        self._given_NkH = given_FkH if first else torch.cat([self._given_NkH, given_FkH])
        self._lstm_NS = lstm_FS if first else torch.cat([self._lstm_NS, lstm_FS])
        return logits_RD.view(*given_FkH.shape[:2], -1)

    def _feed_waiting(self, branches: Sequence[Branch[_State]]) -> tuple[list[Feed], Tensor, Tensor]:
        """All rows that wait, of which the last k are the root's; their x, and the LSTM's last states."""
        feeds = []
        for branch in branches:
            state = branch.state
            self.settle(state)
            state.lead = len(state.ids)
            state.tail = {ROOT: state.lead - 1}
            want = tuple(range(state.lead - self.block, state.lead))
            feeds.append(Feed.chain(state.slot, (*state.ids[1:], branch.tokens[-1]), want=want))
        x_TH = self._through([branch.state for branch in branches], feeds)
        last = [state.lstm_TS[-1] for b in branches if (state := b.state).lstm_TS is not None]
        return feeds, x_TH, torch.stack(last)

    def _through(self, states: Sequence[_State], feeds: Sequence[Feed]) -> Tensor:
        """The rows of feeds through the LSTM, all sequences together; notes the states behind each."""
        given = [torch.cat(state.waiting) for state in states]
        lstm_BS = torch.stack([state.lstm_S for state in states])
        outs: list[list[Tensor]] = [[] for _ in states]
        behind: list[list[Tensor]] = [[] for _ in states]
        for step in range(max(len(feed.token_J) for feed in feeds)):
            on = [i for i, feed in enumerate(feeds) if step < len(feed.token_J)]
            ids = [feeds[i].token_J[step] for i in on]
            given_FH = torch.stack([given[i][step] for i in on])
            x_FH, lstm_FS = self.net.read(ids, given_FH, lstm_BS[on])
            lstm_BS[on] = lstm_FS
            for row, i in enumerate(on):
                outs[i].append(x_FH[row])
                behind[i].append(lstm_FS[row])
        for state, some in zip(states, behind, strict=True):
            state.lstm_TS = torch.stack(some)
        return torch.stack([x for some in outs for x in some])

    def _feed_nodes(self, branches: Sequence[Branch[_State]]) -> tuple[list[Feed], Tensor, Tensor]:
        """A block of rows for every node: the tokens down to it, and what stands for their features."""
        size, feeds = self.block, []
        above: list[int] = []
        paths: list[Sequence[int]] = []
        for branch in branches:
            state = branch.state
            tokens: list[int] = []
            parents: list[int] = []
            begin = len(self.cache.slot(state.slot).tail_ids)
            for node in branch.nodes:
                path = branch.path(node)
                root = root_of(path[:-1], size)
                above.append(self.rows.of(branch, root))
                paths.append(branch.path_tokens(node)[-size:])
                at = begin + len(tokens)
                parents += [state.tail[root], *range(at, at + size - 1)]
                tokens += paths[-1]
                state.tail[node] = at + size - 1
            feeds.append(Feed(state.slot, tuple(tokens), tuple(parents)))
        given_FkH, lstm_FS, outs = self._given_NkH[above], self._lstm_NS[above], []
        for step in range(size):
            x_FH, lstm_FS = self.net.read([path[step] for path in paths], given_FkH[:, step], lstm_FS)
            outs.append(x_FH)
        return feeds, torch.stack(outs, 1).flatten(0, 1), lstm_FS

    def keep(self, state: _State) -> None:
        """Make true rows part of the slot, all but the k - 1 that the next root needs again."""
        kept = state.lead - (self.block - 1)
        if kept > 0 and state.lstm_TS is not None:
            self.cache.keep(state.slot, range(kept))
            state.lstm_S = state.lstm_TS[kept - 1].clone()
            state.waiting = [torch.cat(state.waiting)[kept:]]
            state.ids = state.ids[kept:]

    def read(self, states: Sequence[_State]) -> None:
        """Read all that waits but the last row, whose next token is not known yet."""
        feeds = [Feed.chain(state.slot, state.ids[1:], want=()) for state in states]
        with self.clock, torch.no_grad():
            x_TH = self._through(states, feeds)
            rows = PassRows(feeds, self.cache, 1)
            self.net.run(rows, self.cache, [state.start or 0 for state in states], x_TH, ())
        for state, feed in zip(states, feeds, strict=True):
            state.lead = len(feed.token_J)
            self.keep(state)
            self.forget(state)

    def mark(self, state: _State) -> Any:
        """With the LSTM's state."""
        return super().mark(state), state.lstm_S

    def rewind(self, state: _State, mark: Any) -> _State:
        self.forget(state)
        (state.start, length, ids, waiting), state.lstm_S = mark
        self.cache.truncate(state.slot, min(length, self.cache.length(state.slot)))
        state.ids, state.waiting, state.shown = [*ids], [*waiting], []
        return state

    def forget(self, state: _State) -> None:
        super().forget(state)
        state.lstm_TS, state.tail = None, {}

    def restart(self, state: _State) -> None:
        super().restart(state)
        state.lstm_S = self.net.start
