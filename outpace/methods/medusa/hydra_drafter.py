"""Hydra: heads on the target's last hidden state that read the guesses before their own.

    head 1     h, emb(pending)                        guesses x(n+1)
    head 2     h, emb(pending), emb(x(n+1))           guesses x(n+2)
    head 3     h, emb(pending), emb(x(n+1)), ...      guesses x(n+3)

So the law below a node depends on the whole path to it. A level costs one pass of its head over
the open nodes, all sequences together. Nothing of the target is computed again. Without a prefix
layer there is no cache: the hidden state is the only context. A draft is a static tree whose shape
was measured after training; ``tree=`` sets another, ``tree=dynamic`` grows where the heads are
sure.

More of a draft is kept than of `medusa`'s, for as many small passes as it is deep. `eagle3`, which
attends to the whole text, keeps more still and costs more per level.

Hydra++ puts a layer in front of the heads: h is replaced by its output, which has read the states of
the whole text. It runs once per draft, over what was committed since the last one. Files say whether
there is one (``prefix``).

Paper: Ankner et al. 2024, arXiv:2402.05109. Theirs copies the unembedding for every head; here
all share the target's.

Shape letters: B sequences, F nodes of a frontier, H hidden size, I inputs of a head, D draft
vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.base import Request
from outpace.drafters.features import TrainedConfig
from outpace.drafters.last_state import LAST, LastState, unit
from outpace.drafters.one_layer import layer_tensors
from outpace.drafters.prefix_layer import PrefixLayer, PrefixState
from outpace.drafters.trained import rounding
from outpace.methods.medusa.heads import PREFIX, Heads, ResidualDrafter, read_heads
from outpace.models.base import Target
from outpace.tree.growth import Branch, DraftRow
from outpace.types import ROOT, Draft, Outcome

METHOD = "hydra"


@dataclass(slots=True, eq=False)
class _State(LastState):
    """With the sequence's place in the prefix layer's cache, if there is one."""

    prefix: PrefixState | None = None


def _prefix_of(state: LastState) -> PrefixState | None:
    """The sequence's place in the prefix layer; None where there is none."""
    return state.prefix if isinstance(state, _State) else None


class Hydra(ResidualDrafter):
    """Drafts with heads that read the hidden state and the tokens before their guess."""

    Config = TrainedConfig

    def __init__(self, heads: Heads, target: Target, quantize: str | None = None) -> None:
        super().__init__(heads, target, quantize)
        self._hidden_BH = torch.empty(0)
        self.prefix: PrefixLayer | None = None
        if heads.shape.prefix is not None:
            layer = layer_tensors(heads.tensors, PREFIX)
            rounded = rounding(quantize, target)
            self.prefix = PrefixLayer(heads.shape.prefix, layer, target, quantize=rounded)

    @classmethod
    def load(cls, config: TrainedConfig, target: Target) -> Hydra:
        """Read the heads and borrow the target's embedding and unembedding."""
        heads = read_heads(METHOD, config.model, target, conditioned=True)
        return cls(heads, target, config.quantize)

    def expand(self, branches: Sequence[Branch[LastState]]) -> tuple[Tensor, Tensor | None]:
        """One pass of the head of this level over all nodes."""
        if branches[0].nodes == (ROOT,):
            self._hidden_BH = self.hidden(branches)
            if self.prefix is not None:
                held = [one for b in branches if (one := _prefix_of(b.state))]
                with self.clock:
                    self._hidden_BH = self.prefix.newest(held)
        row_F = [b.state.row for b in branches for _ in b.nodes]
        read_F = [[b.tokens[-1], *b.path_tokens(node)] for b in branches for node in b.nodes]
        with self.clock, torch.no_grad():
            return self.logits(self._hidden_BH[row_F], read_F), self.id_D

    def logits(self, hidden_FH: Tensor, read_F: Sequence[Sequence[int]]) -> Tensor:
        """What follows, float32 [F, D].

        Args:
            hidden_FH: of the sequences that the nodes belong to.
            read_F: the pending token and the guesses down to each node; their number says
                which head.
        """
        x_FH = torch.empty(hidden_FH.shape, dtype=torch.float32, device=hidden_FH.device)
        # A grown tree opens one level at a time; whoever else asks may mix them.
        for count in sorted({len(read) for read in read_F}):
            rows = [row for row, read in enumerate(read_F) if len(read) == count]
            ids = [token for row in rows for token in read_F[row]]
            embed_FH = unit(self.target.embed(ids)).view(len(rows), -1)
            u_FI = torch.cat([hidden_FH[rows].float(), embed_FH], -1)
            x_FH[rows] = self.nets[count - 1](u_FI)[:, 0]
        return self.target.head(x_FH, self.heads.vocab)

    def begin(self, request: Request) -> LastState:
        """Nothing is known until the first pass; takes a slot in the prefix layer's cache."""
        return _State() if self.prefix is None else _State(prefix=self.prefix.begin())

    def propose(self, rows: Sequence[DraftRow[LastState]]) -> list[Draft]:
        for row in rows:
            if self.prefix is not None and (held := _prefix_of(row.state)):
                self.prefix.forget(held)
        return super().propose(rows)

    def observe(self, states: Sequence[LastState], outcomes: Sequence[Outcome]) -> None:
        """Keep the hidden state of the last row, and for the prefix layer those of all rows."""
        super().observe(states, outcomes)
        for state, outcome in zip(states, outcomes, strict=True):
            tap = outcome.scored.taps.get(LAST)
            held = _prefix_of(state)
            if self.prefix is not None and held is not None and tap is not None and outcome.fed:
                with self.clock:
                    self.prefix.add(held, tap[list(outcome.row_F)].float(), outcome.start)

    def num_uncached(self, state: LastState, tokens: Sequence[int]) -> int:
        """Those that wait for the prefix layer."""
        held = _prefix_of(state)
        return 0 if held is None else held.count

    def mark(self, state: LastState) -> Any:
        """A copy that shares the tensor, and where the prefix layer stands."""
        held = _prefix_of(state)
        return copy.copy(state), None if held is None or self.prefix is None else self.prefix.mark(held)

    def rewind(self, state: LastState, mark: Any) -> LastState:
        restored: LastState = mark[0]
        if self.prefix is not None and (held := _prefix_of(restored)):
            self.prefix.rewind(held, mark[1])
        return restored

    def end(self, state: LastState) -> None:
        """Give the prefix layer's slot back."""
        if self.prefix is not None and (held := _prefix_of(state)):
            self.prefix.end(held)
