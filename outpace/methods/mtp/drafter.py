"""Multi-token prediction: whole decoder layers guess, on states of the target.

    chained     module 1 reads the target's state before a token, and the token; module k reads what
                module k - 1 made of the token before, and the token. Depth d is module d's, and
                behind the last module that one's again.
    parallel    module k reads the target's state alone and guesses k tokens further: one pass of all
                modules per draft, as for `medusa`.

    text        x0  x1 ... x(n-1) | xn pending          draft: x(n+1) ...
    module 1    f0+x1 ... f(n-1)+xn                     guesses x(n+1), gives s1 of xn
    module 2    ...  s1 of x(n-1) + xn, s1 of xn + x(n+1)       guesses x(n+2)

Every module keeps keys and values of its own. All its rows for committed tokens are made of the target's
states through the modules before, as in training. What a draft leaves behind is dropped, and made anew
when the tokens are committed. Level d costs one pass of module d, over what was committed since its last
pass and the open nodes with those above them.

Reads what ``outpace train mtp`` made, and modules that stand in the target's own checkpoint. Made for
models that came with modules: there nothing has to be trained.

Papers: Gloeckle et al. 2024, arXiv:2404.19737; DeepSeek-V3, arXiv:2412.19437.

Shape letters: F nodes of a frontier, K modules, R rows, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.base import ONE_PASS, Request, Traits
from outpace.drafters.blocks import BlockDrafter
from outpace.drafters.features import TrainedConfig
from outpace.drafters.last_state import STOCK, fitted_budget
from outpace.drafters.trained import rounding
from outpace.methods.mtp.files import MtpFile, read_mtp
from outpace.methods.mtp.net import PARALLEL, Module
from outpace.methods.mtp.tracks import State, Tracks
from outpace.models.base import HEAD, TAPS, Target
from outpace.tree.growth import Branch, DraftRow
from outpace.types import NOTHING, ROOT, Draft, Feed, Outcome

_WAITING = 256
"""Most states of a sequence that wait for its next draft; more are read at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpConfig(TrainedConfig):
    model: str | None = None
    """Folder of the modules; without it, those trained for the target, or those in its checkpoint."""
    base: str | None = None
    """State of the target that modules of its checkpoint read: normed or raw; tried out by default."""


class Mtp(BlockDrafter[State]):
    """Drafts with modules of one layer.

    Args:
        file: the modules as they were read.
        target: embeds and unembeds.
        quantize: how to round the weights, where compiled code multiplies them.
    """

    Config = MtpConfig
    traits = Traits(default_nodes=4, default_tree=STOCK, needs=frozenset({TAPS, HEAD}), samples=True)

    def __init__(self, file: MtpFile, target: Target, quantize: str | None = None) -> None:
        self.file, self.target, shape = file, target, file.shape
        rounded = rounding(quantize, target)
        self.nets = [Module(shape, i, file.tensors, target, quantize=rounded) for i in range(shape.modules)]
        self.tracks = Tracks(self.nets, shape.kind)
        self.traits = replace(self.traits, taps=frozenset({shape.base}))
        self.block = 1
        if shape.kind == PARALLEL:
            self.block = shape.steps
            self.traits = replace(self.traits, level_D=ONE_PASS)
        self.id_D = None if file.vocab is None else file.vocab.to_target_D.to(target.device)
        self._out_KRH: list[Tensor] = []

    @classmethod
    def load(cls, config: MtpConfig, target: Target) -> Mtp:
        """Read the modules; embedding and unembedding are the target's."""
        return cls(read_mtp(config.model, config.base, target), target, config.quantize)

    def begin(self, request: Request) -> State:
        """Take slots. A prefix that no pass will show is left out: rows start behind it."""
        return self.tracks.begin()

    def propose(self, rows: Sequence[DraftRow[State]]) -> list[Draft]:
        """Grow drafts; a sequence whose last states were not shown gets an empty one."""
        for row in rows:
            self.tracks.forget(row.state)
        return super().propose([self._fitted(row) for row in rows])

    def _fitted(self, row: DraftRow[State]) -> DraftRow[State]:
        if row.state.end != len(row.tokens) - 1:
            return replace(row, budget=NOTHING)
        return replace(row, budget=fitted_budget(row.budget, self.file.shape.steps, self.file.tree))

    def blocks(self, branches: Sequence[Branch[State]]) -> Tensor:
        """A chain: one pass of the module of this depth. Side by side: all of them."""
        with self.clock, torch.no_grad():
            if self.file.shape.kind == PARALLEL:
                said_FKH = torch.stack([self._parallel(branches, i) for i in range(len(self.nets))], 1)
                logits_ND = self.target.head(said_FKH.flatten(0, 1), self.file.vocab)
                return logits_ND.view(*said_FKH.shape[:2], -1).float()
            if branches[0].nodes == (ROOT,):
                self._out_KRH = [torch.empty(0)] * len(self.nets)
            depth_F = [len(b.path(node)) for b in branches for node in b.nodes]
            parts, order = [], []
            # A grown tree opens one level at a time; whoever else asks may mix them.
            for depth in sorted(set(depth_F)):
                order += [row for row, one in enumerate(depth_F) if one == depth]
                parts.append(self._level(branches, depth))
            said_FH = torch.cat(parts)[torch.tensor(order).argsort()]
            return self.target.head(said_FH, self.file.vocab).float()[:, None]

    def _parallel(self, branches: Sequence[Branch[State]], number: int) -> Tensor:
        """What the unembedding reads of the last committed rows; the rows that waited are in the tail."""
        feeds, given = [], []
        for branch in branches:
            track = branch.state.tracks[number]
            given.append(track.states())
            track.lead = len(given[-1])
            feeds.append(Feed.chain(track.slot, [0] * track.lead, want=(track.lead - 1,)))
        return self.tracks.run(number, feeds, [b.state for b in branches], torch.cat(given))[1]

    def _level(self, branches: Sequence[Branch[State]], depth: int) -> Tensor:
        """What the unembedding reads of the nodes at one depth."""
        number = min(depth, len(self.nets) - 1)
        feeds, given, states, asked = [], [], [], []
        seen = start = len(self._out_KRH[number])
        for branch in branches:
            nodes = [node for node in branch.nodes if len(branch.path(node)) == depth]
            if not nodes:
                continue
            track = branch.state.tracks[number]
            before = len(track.out)
            feed, states_TH, added = self._feed(branch, nodes, number)
            lead = len(feed.token_J) - len(added)
            if ROOT not in track.out:
                track.out[ROOT] = seen + lead - 1
            track.out |= {node: seen + lead + i for i, node in enumerate(added)}
            assert before == 0 or lead == 0, "committed rows come first"
            asked += [track.out[node] - start for node in nodes]
            feeds.append(feed)
            given.append(states_TH)
            states.append(branch.state)
            seen += len(feed.token_J)
        out_RH, normed_RH = self.tracks.run(number, feeds, states, torch.cat(given))
        self._out_KRH[number] = torch.cat([self._out_KRH[number], out_RH]) if start else out_RH
        at = 0
        for feed, state in zip(feeds, states, strict=True):
            track = state.tracks[number]
            if track.fresh is None:
                track.fresh = out_RH[at : at + track.lead]
            at += len(feed.token_J)
        return normed_RH[asked]

    def _feed(
        self, branch: Branch[State], nodes: Sequence[int], number: int
    ) -> tuple[Feed, Tensor, list[int]]:
        """The rows of one sequence, the states that they read, and the nodes that the last of them belong to.
        Those are the ones asked for, and all above them that this module has not read yet.
        """
        state, track = branch.state, branch.state.tracks[number]
        assert state.start is not None
        pending = len(branch.tokens) - 1
        tokens: list[int] = []
        given: list[Tensor] = []
        parents: list[int] = []
        if ROOT not in track.row:
            track.lead = max(0, pending - track.first)
            tokens += branch.tokens[track.first + 1 : track.first + 1 + track.lead]
            parents += range(-1, track.lead - 1)
            track.row[ROOT] = track.lead - 1
            waiting = [*track.waiting]
            if number and (fresh := state.tracks[number - 1].fresh) is not None:
                waiting.append(fresh)
            if track.lead:
                given.append(torch.cat(waiting)[: track.lead])
        added: list[int] = []
        tail = len(self.tracks.caches[number].slot(track.slot).tail_ids) + len(tokens)
        # The module's first rows are of token ``number + 1``: shorter texts have none further up.
        least = number + 1 - (pending - state.start)
        for node in sorted({one for asked in nodes for one in branch.path(asked)} - track.row.keys()):
            depth, parent = len(branch.path(node)), branch.parent_N[node]
            if depth < least:
                track.row[node] = -1
                continue
            source = number - 1 if depth <= number else number
            row = state.tracks[source].out[parent]
            given.append(self._out_KRH[source][row : row + 1])
            tokens.append(branch.token_N[node])
            parents.append(track.row[parent])
            track.row[node] = tail + len(added)
            added.append(node)
        return Feed(track.slot, tuple(tokens), tuple(parents)), torch.cat(given), added

    def observe(self, states: Sequence[State], outcomes: Sequence[Outcome]) -> None:
        """Keep the rows made of committed tokens, and the states of what was committed."""
        long = []
        for state, outcome in zip(states, outcomes, strict=True):
            self.tracks.keep(state)
            tap = outcome.scored.taps.get(self.file.shape.base)
            if tap is None or state.end != outcome.start:
                self.tracks.restart(state)
            if tap is not None and outcome.fed:
                state.start = outcome.start if state.start is None else state.start
                self.tracks.add(state, outcome.fed, tap[list(outcome.row_F)].float())
                if state.tracks[0].count > _WAITING:
                    long.append(state)
        if long:
            with self.clock:
                self.tracks.read(long)

    def num_uncached(self, state: State, tokens: Sequence[int]) -> int:
        return state.tracks[0].count

    def mark(self, state: State) -> Any:
        """How much was read, and what waits."""
        return self.tracks.mark(state)

    def rewind(self, state: State, mark: Any) -> State:
        return self.tracks.rewind(state, mark)

    def end(self, state: State) -> None:
        self.tracks.end(state)
