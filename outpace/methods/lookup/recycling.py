"""Token recycling: what the target thought of after a token, it may think of again.

    pass     row of "the":  cat 0.4, dog 0.3, mat 0.1, ...    the successors of "the" are now
             row of "on":   the 0.7, a 0.2, ...               cat, dog, mat, ...
    draft    on -> the, a;  the -> cat, dog;  a -> ...        breadth first, along the template

Every pass ranks the whole vocabulary for every row, the refused guesses included, and all but one
token of it is thrown away. This drafter keeps the first few of each row, one list per token, and
a later guess follows the lists from token to token. Works on any text from the first steps on;
where the text repeats itself, a lookup of longer n-grams guesses better. A chain uses the first
successor only, so give it a tree of as many rows as a pass has to spare: ``tree=3x1`` or
``tree=4x2x1``.

By default the lists belong to one sequence. Shared ones would make a text depend on what else was
generated. In distribution it would not, but the same seed would no longer give the same text.

Cost: ranking the rows of a pass (16 rows of 49152: 0.2 ms), some dictionary reads per draft. A
list per distinct token takes at most 100 bytes.
Paper: Luo et al. 2024 (Token Recycling), arXiv:2408.08696. Theirs is one matrix for all
requests, of zeros at the start. Here a list is empty until it is known, and the prompt fills some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from outpace.drafters.base import Request, Traits
from outpace.drafters.per_key import PerKey
from outpace.drafters.rowwise import RowwiseDrafter
from outpace.files import expanded
from outpace.methods.lookup.datastore import Datastore
from outpace.methods.lookup.pool_trees import fill, halving
from outpace.models.base import Target
from outpace.rows import rank
from outpace.tree.growth import DraftRow
from outpace.types import Draft, Outcome

_KEYS = 16
"""Keys whose shared lists are remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclingConfig:
    successors: int = 8
    """Successors kept per token; a node of a tree has at most as many children."""
    table: str | None = None
    """A datastore (``outpace build datastore``) whose commonest successors stand in for tokens
    that the sequence has not met."""
    shared: bool = False
    """One set of lists for all sequences of a key. Guesses improve from request to request, and
    the same seed no longer gives the same sampled text."""

    def __post_init__(self) -> None:
        if self.successors < 1:
            raise ValueError(f"successors must be at least 1, got {self.successors}")


@dataclass(slots=True, eq=False)
class _State:
    after: dict[int, tuple[int, ...]]
    """Token -> its successors, best first."""
    last: int | None = field(default=None)
    """Newest token of the prompt read so far."""


class Recycling(RowwiseDrafter[_State]):
    """Follows, from token to token, what the target ranked highest when it last read them.

    Args:
        table_VK: int32 successors to begin with, -1 where there are fewer; None: none.
    """

    Config = RecyclingConfig
    traits = Traits(default_nodes=6, default_tree="3x1")

    def __init__(self, config: RecyclingConfig, table_VK: NDArray[np.int32] | None = None) -> None:
        self.config = config
        self.traits = replace(self.traits, deterministic=not config.shared)
        self._table_VK = table_VK
        self._shared = PerKey(dict[int, tuple[int, ...]], _KEYS)

    @classmethod
    def load(cls, config: RecyclingConfig, target: Target) -> Recycling:
        """Read the table, if there is one.

        Raises:
            ModelError: no datastore, a corrupt one, or one of another vocabulary.
        """
        if config.table is None:
            return cls(config)
        store = Datastore.open(expanded(config.table))
        store.check_fits(target)
        return cls(config, store.successors(config.successors))

    def begin(self, request: Request) -> _State:
        """Lists of the text that is held already; the rest arrives through ``observe``."""
        state = _State(self._shared.of(request.key) if self.config.shared else {})
        self._read(state, request.prompt[: request.num_cached])
        return state

    def propose_one(self, row: DraftRow[_State]) -> Draft:
        """The template filled breadth first; CHOSEN, empty where the pending token is new."""
        after, table_VK = row.state.after, self._table_VK

        def ranked(token: int) -> Iterator[tuple[int, float, int]]:
            found = after.get(token)
            if found is None and table_VK is not None:
                found = tuple(t for t in table_VK[token].tolist() if t >= 0)
            return halving((t, t) for t in found or ())

        return fill(row.budget, row.tokens[-1], ranked)

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        """Keep the best of every row of logits. Cost: one host sync per sequence."""
        for state, outcome in zip(states, outcomes, strict=True):
            if outcome.forced:
                self._read(state, outcome.fed)
                tokens, kept = outcome.fed[-1:], [0]
            else:
                tokens = (outcome.fed[0], *outcome.draft.token_N)
                kept = [0, *(node + 1 for node in outcome.verdict.kept)]
            logits_JV = outcome.scored.logits_TV
            if len(logits_JV):  # a piece of a prompt that goes on has none
                best = rank(logits_JV, None, self.config.successors, logits_JV)
                self._learn(
                    state, tokens, [[t for t, _ in row] for row in best], kept, outcome.verdict.emitted
                )

    def _learn(
        self,
        state: _State,
        tokens: Sequence[int],
        best: Sequence[list[int]],
        kept: Sequence[int],
        emitted: Sequence[int],
    ) -> None:
        """Store the best of every row, by the row's token."""
        follows = dict(zip(kept, emitted, strict=False))
        # Of rows of the same token the deepest kept one is stored last: its context is the text.
        for i in (*(i for i in range(len(tokens)) if i not in follows), *follows):
            row, then = best[i], follows.get(i)
            if then is not None and then not in row:
                row = [then, *row[:-1]]  # settings forbade what the model ranked highest
            state.after[tokens[i]] = tuple(row)

    def _read(self, state: _State, tokens: Sequence[int]) -> None:
        """What follows a token in a given text is its best successor, until the target says."""
        before = () if state.last is None else (state.last,)
        for token, then in pairwise((*before, *tokens)):
            known = (t for t in state.after.get(token, ()) if t != then)
            state.after[token] = (then, *known)[: self.config.successors]
        state.last = tokens[-1] if tokens else state.last
