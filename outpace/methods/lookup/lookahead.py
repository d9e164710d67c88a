"""Lookahead decoding: the target guesses its own future in rows that ride along.

    position    p    p+1   p+2   p+3        rider "b1" sees the text, the pending token x and a1;
    level 0     x -> a1 -> a2               c2 sees x, a1, a2, b2. The best token after c2 is d2,
                |    |     |                and a2 b2 c2 d2 is an n-gram that the target itself
    level 1     b0   b1    b2               might write: it goes to the pool, keyed by a2.
                |    |     |                Then every column drops its first level and gains
    level 2     c0   c1    c2               the new token (Jacobi iteration).

Column i guesses the tokens from position p + i on. What the pool holds for the pending token is
drafted, several n-grams as a tree, together with the n-grams of the text itself.

The window is a comb of `Riders`. Level 0 is a chain below the pending token, and the other levels
of a column hang from it one by one. That is the paper's attention pattern exactly: a token sees
level 0 up to its column, and its own column. Two things differ. Neither can change the text, since
riders are seen by nobody and drafts are verified whatever they are. Guesses that share their first
tokens share rows here. A window whose text advanced by several tokens moves by as many columns, so
that its columns keep their positions. In the authors' code it moves by one.

Cost: riders are rows: (window - 1) + window * (ngram - 2) of them in every pass, 1 by default. More
pay where a pass has rows to spare; the next tokens of a small or weak target are hard to
guess from guesses. Plus an argmax per column, and some dictionary operations.
Paper: Fu et al. 2024, arXiv:2402.02057. Their W is ``window``, N ``ngram``, G ``guesses``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from outpace.drafters.base import Request, Traits
from outpace.drafters.rowwise import RowwiseDrafter
from outpace.methods.lookup.pool_trees import fill, halving
from outpace.models.base import EMBEDDINGS, TREE, Target
from outpace.rows import argmax_rows
from outpace.tree.growth import DraftRow
from outpace.types import ROOT, Budget, Draft, Outcome, Riders

Trie: TypeAlias = "dict[int, Trie]"


@dataclass(frozen=True, kw_only=True, slots=True)
class LookaheadConfig:
    window: int = 1
    """Columns: positions that are guessed ahead in every pass."""
    ngram: int = 3
    """Tokens of an n-gram, the one it is found by included; a draft is one shorter."""
    guesses: int = 4
    """Most n-grams remembered per first token; the newest stay."""
    pool: int = 20000
    """Most n-grams remembered in all, per sequence."""

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("ngram", 3), ("guesses", 1), ("pool", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


class Pool:
    """n-grams by their first token, the newest of each and the newest of all.

    Args:
        guesses: most n-grams per first token.
        size: most n-grams in all; the first tokens that were longest unused go first.
    """

    def __init__(self, guesses: int, size: int) -> None:
        self._guesses, self._size = guesses, size
        self._rest: OrderedDict[int, dict[tuple[int, ...], None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, ngram: Sequence[int]) -> None:
        first, rest = ngram[0], tuple(ngram[1:])
        known = self._rest.setdefault(first, {})
        self._rest.move_to_end(first)
        self._count += rest not in known
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._guesses:
            del known[next(iter(known))]
            self._count -= 1
        while self._count > self._size:
            _, dropped = self._rest.popitem(last=False)
            self._count -= len(dropped)

    def after(self, first: int) -> list[tuple[int, ...]]:
        return list(reversed(self._rest.get(first, {})))


@dataclass(frozen=True, slots=True)
class _Memo:
    """That a draft carries a window, and how much of it."""

    owner: Lookahead
    """Whose window it is: another one has other columns."""
    width: int
    """Columns."""


@dataclass(slots=True, eq=False)
class _State:
    pool: Pool
    columns: list[list[int]]
    """Column i -> its tokens, level by level; the first of column 0 is the pending token's."""
    tail: list[int] = field(default_factory=list)
    """The last tokens of the text, fewer than an n-gram."""


class Lookahead(RowwiseDrafter[_State]):
    """Drafts n-grams that the target wrote, or guessed in a window of riders.

    Args:
        max_positions: of the target; no rider goes beyond.
    """

    Config = LookaheadConfig
    traits = Traits(default_nodes=4, needs=frozenset({TREE, EMBEDDINGS}))
    # EMBEDDINGS is the ability that says riders are served; the window branches like a tree.

    def __init__(self, config: LookaheadConfig, max_positions: int = 1 << 30) -> None:
        self.config = config
        self._levels = config.ngram - 1
        self._max_positions = max_positions

    @classmethod
    def load(cls, config: LookaheadConfig, target: Target) -> Lookahead:
        return cls(config, target.max_positions)

    def begin(self, request: Request) -> _State:
        """A window made of tokens of the prompt, and the n-grams of what is held already."""
        text = request.prompt or (0,)  # in the tokens of another model a prompt may be empty
        columns = [
            [text[(i + level - self._levels) % len(text)] for level in range(self._levels)]
            for i in range(self.config.window)
        ]
        state = _State(Pool(self.config.guesses, self.config.pool), columns)
        self._read(state, request.prompt[: request.num_cached])
        return state

    def propose_one(self, row: DraftRow[_State]) -> Draft:
        """Guesses from the pool, CHOSEN, and the window as riders behind them."""
        if min(row.budget.max_nodes, row.budget.max_depth) < 1:
            return Draft()
        trie: Trie = {}
        for rest in row.state.pool.after(row.tokens[-1]):
            below = trie
            for token in rest:
                below = below.setdefault(token, {})
        draft = fill(row.budget, trie, lambda below: halving(below.items()))
        width = self._width(row.budget, len(draft), self._max_positions - len(row.tokens))
        if width < 1:
            return draft
        return replace(draft, riders=comb(row.state.columns[:width]), memo=_Memo(self, width))

    def _width(self, budget: Budget, nodes: int, depth: int) -> int:
        """Columns that rows (W - 1 + W * (levels - 1)) and the context have room for."""
        rows = (budget.max_rows - nodes + 1) // self._levels
        return min(self.config.window, rows, depth - self._levels + 2)

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        """Read the text; harvest the window if it rode along. Cost: then one host sync each."""
        for state, outcome in zip(states, outcomes, strict=True):
            self._read(state, outcome.appended)
            logits_RV, memo = outcome.scored.rider_logits_RV, outcome.draft.memo
            ours = isinstance(memo, _Memo) and memo.owner is self
            if ours and logits_RV is not None:
                new = argmax_rows(logits_RV[-memo.width :]).tolist()
                state.columns[0][0] = outcome.fed[0]
                for column, token in zip(state.columns, new, strict=False):
                    state.pool.add((*column, token))
                self._advance(state, new, len(outcome.verdict.emitted))

    def _advance(self, state: _State, new: Sequence[int], emitted: int) -> None:
        """Move the window to the new pending token; what it lacks then, its last column knows."""
        ends = [*new, *(self._guess(state, c[-1]) for c in state.columns[len(new) :])]
        moved = [[*c[1:], end] for c, end in zip(state.columns, ends, strict=True)]
        columns = moved[emitted - 1 :] or moved[-1:]
        while len(columns) < self.config.window:
            last = columns[-1]
            columns.append([*last[1:], self._guess(state, last[-1])])
        state.columns = columns

    def _guess(self, state: _State, token: int) -> int:
        """What followed a token last, or itself: only a start for the iteration."""
        known = state.pool.after(token)
        return known[0][0] if known else token

    def _read(self, state: _State, tokens: Iterable[int]) -> None:
        """The n-grams of the text belong to the pool as well."""
        for token in tokens:
            state.tail.append(token)
            if len(state.tail) == self.config.ngram:
                state.pool.add(state.tail)
                del state.tail[0]


def comb(columns: Sequence[Sequence[int]]) -> Riders:
    """A window as riders, level by level, the deepest level last.

    Level 0 is a chain below the pending token, which stands in for the first of column 0. Every
    other token follows the one above it in its column.
    """
    token_R = [column[0] for column in columns[1:]]
    after_R = [i - 1 for i in range(len(token_R))]
    above = [-1, *range(len(token_R))]
    for level in range(1, len(columns[0])):
        after_R += above
        above = list(range(len(token_R), len(token_R) + len(columns)))
        token_R += [column[level] for column in columns]
    return Riders((ROOT,) * len(token_R), tuple(after_R), tuple(token_R))
