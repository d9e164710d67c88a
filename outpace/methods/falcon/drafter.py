"""Falcon: every pass guesses a block of k tokens, and blocks hang from the ends of blocks.

    k = 2      rows of a pass                             guesses
    pass 1     f(n-2)+x(n-1), f(n-1)+xn                   x(n+1), x(n+2)
    pass 2     f'(n)+x(n+1), f'(n+1)+x(n+2)               x(n+3), x(n+4), below every x(n+2) that grows on

The root is k rows wide. Where fewer than k tokens were committed since the last draft, rows before
them are fed again, so that the root is whole: the last k - 1 rows always wait. All guesses of a depth
within a block have the same distribution, and are drawn below each node by itself. A block's rows
see all rows of their block and of the blocks above, and every block has an LSTM state of its own,
from the block above: branches do not mix. A draft of depth D costs D / k passes.

Pays where a pass is dear and guesses of two tokens at once are nearly as good as one by one.

Paper: Gao et al. 2024 (Falcon), arXiv:2412.12639.

Shape letters: F nodes, k rows of a block, T rows of a pass, H hidden size, S numbers of an LSTM state, D
draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.base import Request, Traits
from outpace.drafters.blocks import BlockDrafter, root_of
from outpace.drafters.features import TrainedConfig
from outpace.drafters.last_state import LAST, STOCK, fitted_budget
from outpace.drafters.trained import find, rounding
from outpace.methods.falcon.files import METHOD, FalconFile, read_falcon
from outpace.methods.falcon.net import FalconNet
from outpace.models.base import HEAD, TAPS, Target
from outpace.models.passes import PassRows
from outpace.tree.growth import Branch, DraftRow
from outpace.types import NOTHING, ROOT, Draft, Feed, Outcome

_WAITING = 64
"""Most rows of a sequence that wait for its next draft; more are read at once."""


@dataclass(slots=True, eq=False)
class _State:
    """One sequence in the network's cache. Tensors are never changed, only replaced."""

    slot: int
    lstm_S: Tensor
    """Behind the last row that is in the slot for good."""
    start: int | None = None
    """Position of the first row of the slot; None: no features were seen yet."""
    waiting: list[Tensor] = field(default_factory=list)
    """Features [., H] of rows that are not in the slot for good."""
    ids: list[int] = field(default_factory=list)
    """The tokens at whose rows they were computed; each row embeds the one after it."""
    lead: int = 0
    """Tail rows of the slot that are made of these features: all true, whatever was drafted."""
    lstm_TS: Tensor | None = None
    """The LSTM's state behind each of them."""
    tail: dict[int, int] = field(default_factory=dict)
    """Node at which a block begins -> the tail row that ends the block's rows."""


class Falcon(BlockDrafter[_State]):
    """Drafts blocks behind blocks.

    Args:
        file: the network as it was read.
        target: embeds and unembeds.
        quantize: how to round the weights, where compiled code multiplies them.
    """

    Config = TrainedConfig
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

    def begin(self, request: Request) -> _State:
        """Take a slot. A prefix that no pass will show is left out: rows start behind it."""
        return _State(self.cache.open(), self.net.start)

    def propose(self, rows: Sequence[DraftRow[_State]]) -> list[Draft]:
        """Grow drafts; a sequence with less than a block of features gets an empty one."""
        for row in rows:
            self._forget(row.state)
        return super().propose([self._fitted(row) for row in rows])

    def _fitted(self, row: DraftRow[_State]) -> DraftRow[_State]:
        if self._end(row.state) != len(row.tokens) - 1 or len(row.state.ids) < self.block:
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
        size, feeds, above, paths = self.block, [], list[int](), list[Sequence[int]]()
        for branch in branches:
            state, tokens, parents = branch.state, list[int](), list[int]()
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

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        """Keep the rows made of true features, and the features of what was committed."""
        long = []
        for state, outcome in zip(states, outcomes, strict=True):
            self._keep(state)
            tap = outcome.scored.taps.get(LAST)
            if tap is None or self._end(state) != outcome.start:
                self._restart(state)
            if tap is not None and outcome.fed:
                state.start = outcome.start if state.start is None else state.start
                state.waiting.append(tap[list(outcome.row_F)].float())
                state.ids += outcome.fed
                if len(state.ids) > _WAITING:
                    long.append(state)
        if long:
            self._read(long)

    def _keep(self, state: _State) -> None:
        """Make true rows part of the slot, all but the k - 1 that the next root needs again."""
        kept = state.lead - (self.block - 1)
        if kept > 0 and state.lstm_TS is not None:
            self.cache.keep(state.slot, range(kept))
            state.lstm_S = state.lstm_TS[kept - 1].clone()
            state.waiting = [torch.cat(state.waiting)[kept:]]
            state.ids = state.ids[kept:]
        self._forget(state)

    def _read(self, states: Sequence[_State]) -> None:
        """Read all that waits but the last row, whose next token is not known yet."""
        feeds = [Feed.chain(state.slot, state.ids[1:], want=()) for state in states]
        with self.clock, torch.no_grad():
            x_TH = self._through(states, feeds)
            rows = PassRows(feeds, self.cache, 1)
            self.net.run(rows, self.cache, [state.start or 0 for state in states], x_TH, ())
        for state, feed in zip(states, feeds, strict=True):
            state.lead = len(feed.token_J)
            self._keep(state)

    def _end(self, state: _State) -> int | None:
        """The first position without features; None if there are none at all."""
        if state.start is None:
            return None
        return state.start + self.cache.length(state.slot) + len(state.ids)

    def num_uncached(self, state: _State, tokens: Sequence[int]) -> int:
        """Those whose features wait."""
        return len(state.ids)

    def mark(self, state: _State) -> Any:
        """How much of the text is in the slot, the LSTM's state there, and what waits."""
        return (state.start, self.cache.length(state.slot), state.lstm_S, [*state.ids], [*state.waiting])

    def rewind(self, state: _State, mark: Any) -> _State:
        """Forget what was read since; what waited then waits again."""
        self._forget(state)
        state.start, length, state.lstm_S, ids, waiting = mark
        self.cache.truncate(state.slot, min(length, self.cache.length(state.slot)))
        state.ids, state.waiting = [*ids], [*waiting]
        return state

    def _forget(self, state: _State) -> None:
        """Drop a proposal that is done with, or was never seen."""
        self.cache.drop(state.slot)
        state.lead, state.lstm_TS, state.tail = 0, None, {}

    def _restart(self, state: _State) -> None:
        """Start anew with the next features that come."""
        self.cache.truncate(state.slot, 0)
        self._forget(state)
        state.start, state.waiting, state.ids, state.lstm_S = None, [], [], self.net.start

    def end(self, state: _State) -> None:
        """Give the slot back."""
        self.cache.close(state.slot)
