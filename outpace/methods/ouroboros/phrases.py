"""Phrases: what came after a token before, remembered, and hung behind a draft.

    pool     the -> cat sat on, mat . And        newest last; at most so many per token
    draft    and the --+-- cat - sat - on        behind the last drafted token, chosen
                       +-- mat - .

Shape letters: J rows of a pass (the pending token first).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from outpace.drafters.base import Drafter, Request, Traits
from outpace.drafters.per_key import PerKey
from outpace.models.base import Target
from outpace.tree.growth import DraftRow
from outpace.types import ROOT, Draft, Drawn, Group, Outcome

Phrase = tuple[int, ...]

_KEYS = 64
"""Keys whose shared pools are remembered."""


class Pool:
    """Phrases by the token before them, and by the one before that.

    Args:
        tokens: most tokens of a phrase.
        per_token: most phrases behind one token; the newest stay.
        size: most phrases in all; those of the tokens that were longest unused go first.
    """

    def __init__(self, tokens: int, per_token: int, size: int = 1 << 16) -> None:
        self.tokens, self._per_token, self._size = tokens, per_token, size
        self._behind: OrderedDict[int, dict[Phrase, int]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, before: int, token: int, phrase: Sequence[int]) -> None:
        """Remember that a phrase came, or might come, behind two tokens."""
        known = self._behind.setdefault(token, {})
        self._behind.move_to_end(token)
        new = tuple(phrase[: self.tokens])
        self._count += known.pop(new, None) is None
        known[new] = before
        if len(known) > self._per_token:
            del known[next(iter(known))]
            self._count -= 1
        while self._count > self._size:
            _, gone = self._behind.popitem(last=False)
            self._count -= len(gone)

    def behind(self, before: int | None, token: int, most: int) -> list[Phrase]:
        """Phrases behind two tokens, newest first; then those behind the second alone."""
        newest = list(reversed(self._behind.get(token, {}).items()))
        newest.sort(key=lambda entry: entry[1] != before)
        return [phrase for phrase, _ in newest[:most]]

    def read(self, tail: list[int], tokens: Sequence[int]) -> None:
        """Remember the phrases of a text.

        Args:
            tail: its last tokens so far, which make up no whole phrase; brought up to date.
        """
        for token in tokens:
            tail.append(token)
            if len(tail) == self.tokens + 2:
                self.add(tail[0], tail[1], tail[2:])
                del tail[0]


class Phrases(Drafter[Pool]):
    """Drafts from a pool that somebody else fills: as the lookup below a draft model.

    Args:
        tokens: of a phrase, at most.
        shared: whether all sequences of a key have one pool.
    """

    Config = Pool  # never made from a spec

    def __init__(self, tokens: int, per_token: int, most: int, shared: bool = False) -> None:
        self._tokens, self._per_token, self.most = tokens, per_token, most
        self._shared = shared
        self.traits = Traits(deterministic=not shared)
        self._pools = PerKey(lambda: Pool(tokens, per_token), _KEYS)

    @classmethod
    def load(cls, config: Any, target: Target) -> Phrases:
        return cls(3, 16, 3)

    def begin(self, request: Request) -> Pool:
        """An empty pool, or the one of all sequences of the same key."""
        if self._shared:
            return self._pools.of(request.key)
        return Pool(self._tokens, self._per_token)

    def propose(self, rows: Sequence[DraftRow[Pool]]) -> list[Draft]:
        return [
            self.lengthened(
                Draft(),
                ROOT,
                row.tokens,
                row.state,
                min(row.budget.max_nodes, row.budget.max_rows),
                row.budget.max_depth,
                row.chain,
            )
            for row in rows
        ]

    def lengthened(
        self,
        draft: Draft,
        node: int,
        text: Sequence[int],
        pool: Pool,
        room: int,
        depth: int,
        chain: bool = False,
    ) -> Draft:
        """A draft with phrases behind one of its leaves.

        Args:
            node: the leaf; ROOT in an empty draft.
            text: the last two tokens before ``node``, at least, and its own.
            depth: most of them behind each other.
            chain: whether only one may go on.

        Returns:
            The same nodes and then the phrases, common beginnings once, CHOSEN; the very same
            draft if there are none.
        """
        before = text[-2] if len(text) > 1 else None
        tokens, parents = list(draft.token_N), list(draft.parent_N)
        size = len(draft) + room
        below: dict[int, dict[int, int]] = {}
        for phrase in pool.behind(before, text[-1], 1 if chain else self.most) if room > 0 else ():
            end = node
            for token in phrase[: max(depth, 0)]:
                known = below.get(end, {}).get(token)
                if known is None:
                    if len(tokens) == size:
                        break
                    known = below.setdefault(end, {})[token] = len(tokens)
                    tokens.append(token)
                    parents.append(end)
                end = known
        if not below:
            return draft
        groups = (Group(parent, Drawn.CHOSEN, tuple(kids.values())) for parent, kids in below.items())
        return replace(draft, token_N=tuple(tokens), parent_N=tuple(parents), groups=(*draft.groups, *groups))

    def observe(self, states: Sequence[Pool], outcomes: Sequence[Outcome]) -> None:
        """Nothing: whoever fills the pool reads the text, and guesses do not belong to it."""

    def mark(self, state: Pool) -> None:
        """Nothing to note, since nothing is read."""

    def rewind(self, state: Pool, mark: None) -> Pool:
        return state


def discarded(
    draft: Draft, best_J: Sequence[int], kept: Collection[int], pending: int, most: int
) -> Iterator[tuple[int, int, Phrase]]:
    """Phrases that the target would have written behind tokens that it refused.

    The target's best token behind a refused node, then its best behind that guess if the draft
    holds it, and so on. The predictions of such a run agree with the tokens they were made after.

    Args:
        best_J: the target's best token behind every row.

    Yields:
        The token before the refused one, the refused one, and a phrase of two tokens or more.
    """
    child = {branch: node for node, branch in enumerate(zip(draft.parent_N, draft.token_N, strict=True))}
    for node, parent in enumerate(draft.parent_N):
        if node in kept:
            continue
        phrase: list[int] = []
        at: int | None = node
        while at is not None and len(phrase) < most:
            phrase.append(best_J[at + 1])
            at = child.get((at, phrase[-1]))
        if len(phrase) > 1:
            before = pending if parent == ROOT else draft.token_N[parent]
            yield before, draft.token_N[node], tuple(phrase)
