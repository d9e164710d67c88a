"""A draft model's distribution, restricted to the tokens that its vocabulary shares with the target's.

    q'(x) = q(x) 1[x shared] / sum of q over shared tokens,  after the sequence's own settings

The inner drafter works in the draft model's ids: it is given settings and coins that look like the
sequence's and speak its ids. What it draws is then put into the target's ids, with the distributions that
it was drawn from, entry by entry.

Shape letters: D columns of the model's logits, V target vocabulary, F rows, S support, K shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outpace.coins import Coins
from outpace.errors import SpecError
from outpace.law import Law
from outpace.methods.cross_vocabulary.spelling import Shared
from outpace.sampling import Warp
from outpace.types import ROOT, Draft, Drawn, Group


class SharedWarp(Warp):
    """The sampling settings of a sequence, for logits over the draft vocabulary.

    Args:
        base: of the sequence, over the target's ids; only read.
        common: the tokens that a distribution may give.
    """

    def __init__(self, base: Warp, common: Shared) -> None:
        self.params, self.vocab_size = base.params, len(common.target_of)
        self.generated, self.greedy = base.generated, base.greedy
        self._base, self._common = base, common

    @property
    def raw(self) -> bool:
        return False

    @property
    def plain(self) -> bool:
        """Never: the likeliest token of all may not be a shared one."""
        return False

    def law(self, logits_V: Tensor, path: Sequence[int] = (), id_V: Tensor | None = None) -> Law:
        """The distribution over shared tokens, in draft ids. Cost: that of the base, and a gather."""
        column_K, id_K = self._columns(len(logits_V), id_V)
        if not len(column_K):
            return Law.one_hot(int(self._common.draft_K[0]), logits_V.dtype)
        law = self._base.law(logits_V[column_K], self._in_target(path), id_K)
        id_S = self._common.to_draft_V[law.ids]
        inside_S = id_S >= 0
        if bool(inside_S.all()):
            return Law(law.prob_S, id_S)
        # Settings that allow only some tokens list them all; those that are not shared have probability 0.
        return Law(law.prob_S[inside_S], id_S[inside_S])

    def ranking(
        self, logits_FV: Tensor, paths: Sequence[Sequence[int]], k: int, id_V: Tensor | None = None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The k likeliest shared tokens of each row, in draft ids."""
        column_K, id_K = self._columns(logits_FV.shape[-1], id_V)
        if not len(column_K):
            return [[] for _ in logits_FV], [[] for _ in logits_FV]
        tokens, probs = self._base.ranking(
            logits_FV[:, column_K], [self._in_target(path) for path in paths], k, id_K
        )
        return [[self._common.draft_of[token] for token in row] for row in tokens], probs

    def _columns(self, count: int, id_V: Tensor | None) -> tuple[Tensor, Tensor]:
        """Columns [K] of shared tokens, and their target ids [K]."""
        common = self._common
        if id_V is None:
            column_K = common.draft_K
            if count < len(common.target_of):
                column_K = column_K[column_K < count]
            return column_K, common.to_target_D[column_K]
        id_D = common.to_target_D[id_V]
        column_K = (id_D >= 0).nonzero()[:, 0]
        return column_K, id_D[column_K]

    def _in_target(self, path: Sequence[int]) -> list[int]:
        known = (self._common.target_of[token] for token in path)
        return [token for token in known if token >= 0]


@dataclass(frozen=True, slots=True, eq=False)
class SharedCoins(Coins):
    """Coins for distributions over draft ids; a race is run under the target's names of the tokens."""

    outer: Coins
    common: Shared

    def flip(self, prob: float, *key: int) -> bool:
        return self.outer.flip(prob, *key)

    def choose(self, law: Law, *key: int) -> int:
        return self.outer.choose(law, *key)

    def race(self, law: Law, depth: int, count: int = 1) -> list[int]:
        winners = self.outer.race(renamed(law, self.common), depth, count)
        return [self.common.draft_of[token] for token in winners]


def renamed(law: Law, common: Shared) -> Law:
    """A distribution over draft ids as one over target ids: the same entries under other names."""
    return Law(law.prob_S, common.to_target_D[law.ids])


def in_target_ids(draft: Draft, common: Shared, who: str) -> Draft:
    """Put a draft over draft ids into the target's.

    A guess that was chosen and has no counterpart is left out, with all below it. One that was
    drawn cannot be: who drew it would have drawn it too often.

    Raises:
        SpecError: a token that is not shared was drawn: the drafter made its distribution without the
            settings that it was given.
    """
    number: dict[int, int] = {ROOT: ROOT}
    tokens: list[int] = []
    parents: list[int] = []
    for node, (token, parent) in enumerate(zip(draft.token_N, draft.parent_N, strict=True)):
        target = common.target_of[token]
        if parent in number and target >= 0:
            number[node] = len(tokens)
            tokens.append(target)
            parents.append(number[parent])
    groups, laws = [], dict[int, int]()
    for group in draft.groups:
        if group.parent not in number:
            continue
        nodes = tuple(number[node] for node in group.nodes if node in number)
        if group.drawn is not Drawn.CHOSEN:
            law = -1 if group.law is None else group.law
            lost = len(nodes) < len(group.nodes)
            if lost or bool((common.to_target_D[draft.laws[law].ids] < 0).any()):
                raise SpecError(
                    f"{who} draws tokens that the target does not have, so that their distribution is not "
                    "known over its tokens; use by=text"
                )
            laws.setdefault(law, len(laws))
            groups.append(Group(number[group.parent], group.drawn, nodes, laws[law]))
        elif nodes:
            groups.append(Group(number[group.parent], group.drawn, nodes))
    return Draft(
        tuple(tokens), tuple(parents), tuple(groups), tuple(renamed(draft.laws[law], common) for law in laws)
    )
