"""What verifiers have in common: walks down a tree, and what refusals leave of a distribution.

Shape letters: S support of a distribution, K tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from outpace.coins import Coins
from outpace.kernels import draws
from outpace.types import ROOT, Draft, Drawn, Group, Law, Verdict
from outpace.verifiers.base import TargetLaws, Verifier

Pick = Callable[[Law, int], int]
"""(target distribution after a node, the node) -> the token that follows it."""

_LITTLE = 2.0**-12
"""Mass below which subtraction from 1 has lost too many digits: it is summed again. A walk gets
there with about this probability, so the pass costs nothing on average."""


def certain(draft: Draft, laws: TargetLaws, want_laws: bool) -> Verdict | None:
    """The one verdict there can be where all distributions are one-hot; None where they may not be.

    A draw that is the certain token is kept by every rule that keeps the law, and another one is not.
    """
    token = None if want_laws else laws.certain(ROOT)
    if token is None:
        return None
    node = ROOT
    for child, parent in enumerate(draft.parent_N):  # children stand behind their parents
        if parent == node and draft.token_N[child] == token:
            token = laws.certain(child)
            if token is None:  # this guess has no distribution
                return None
            node = child
    return ended(draft, node, token)


def ended(draft: Draft, node: int, extra: int, read: Sequence[Law] | None = None) -> Verdict:
    """The verdict of a walk that ended at a node and drew one more token there.

    Args:
        read: distributions along the walk, ROOT's first; None: the caller wants none.
    """
    emitted = (*draft.path_tokens(node), extra)
    return Verdict(draft.path(node), emitted, None if read is None else tuple(read))


def follow(draft: Draft, laws: TargetLaws, pick: Pick, want_laws: bool) -> Verdict:
    """Walk down the children that carry the tokens picked, until there is none.

    Args:
        draft: groups do not matter here, only tokens and parents.
        want_laws: whether the verdict carries the distributions read.
    """
    if (found := certain(draft, laws, want_laws)) is not None:
        return found
    child_of = {branch: node for node, branch in enumerate(zip(draft.parent_N, draft.token_N, strict=True))}
    read: list[Law] = []
    node = ROOT
    while True:
        law = laws.law(node)
        read.append(law)
        token = pick(law, node)
        child = child_of.get((node, token))
        if child is None:
            return ended(draft, node, token, read if want_laws else None)
        node = child


class OneGroup(Verifier):
    """Walks down: tries what was drawn, then draws what is left of p and follows its child, if any.

    The token drawn is emitted whether a child carries it or not. So following that child costs
    nothing and changes no distribution. Chosen siblings are kept with all the mass that they hold.
    """

    one_law = True

    @abstractmethod
    def attempt(self, draft: Draft, coins: Coins, group: Group, q: Law, p: Law) -> tuple[int | None, Law]:
        """The child of a drawn group that is kept, or None and what the refusals left of p.

        Args:
            coins: key (node, -1) is used otherwise.
            q: what the group was drawn from.
        """

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        self.check(draft)

        def token(p: Law, node: int) -> int:
            child, rest = None, p
            for group in draft.groups_of.get(node, ()):
                if group.law is not None:
                    child, rest = self.attempt(draft, coins, group, draft.laws[group.law], p)
            return coins.choose(rest, node, -1) if child is None else draft.token_N[child]

        return follow(draft, laws, token, want_laws)


def trials(draft: Draft, group: Group) -> Iterator[tuple[int, Law | None]]:
    """Draws of a group in the order they are tried, each with its distribution given those before.

    None stands for a one-hot distribution. Lazy: what is never tried costs nothing.
    """
    token = draft.token_N
    q = None if group.law is None else draft.laws[group.law]
    if group.drawn is Drawn.DISTINCT:
        for child in group.nodes:
            yield child, q
            q = None if q is None else q.without((token[child],))
    elif group.drawn is Drawn.GREEDY_PLUS_ONE:
        assert q is not None
        *greedy, sampled = group.nodes
        yield sampled, q.without([token[i] for i in greedy]) if greedy else q
        for child in greedy:
            yield child, None
    elif group.drawn is Drawn.HUB:
        assert q is not None
        first, *others = group.nodes
        yield first, q
        hub = q.top(1)
        for place, child in enumerate(others):
            yield child, q.without(hub) if place == 0 and token[first] in hub else None
    else:
        for child in group.nodes:
            yield child, q


def residual(p: Law, q: Law) -> Law:
    """The distribution of the next token once a draw from q was refused: norm([p - q]_+).

    Where nothing is left, p equals q up to rounding: a refusal has probability about 0, and p
    itself is returned.

    Cost: O(support of p); no V-sized work unless p or q is that large. One host sync.
    """
    return excess(p, q)[1] or p


def excess(p: Law, q: Law, weight: float = 1.0) -> tuple[float, Law | None]:
    """Mass of [weight * p - q]_+, and its distribution; None where nothing is left. Cost: as `residual`."""
    if p.id_S is None and (found := draws.excess(p.prob_S, q.prob_S, q.id_S, weight)) is not None:
        return found[0], None if found[1] is None else Law(found[1])
    over_S = (weight * p.prob_S - on_support(p, q)).clamp_min_(0)
    mass = float(over_S.sum())
    return mass, Law(over_S.div_(mass), p.id_S) if mass > 0 else None


def on_support(p: Law, q: Law) -> Tensor:
    """Probabilities [S] that q gives to the support of p, entry by entry. Not to be changed."""
    if p.id_S is not None:
        return q.at(p.id_S)
    if q.id_S is not None:
        return q.dense(len(p.prob_S))
    if len(q.prob_S) == len(p.prob_S):
        return q.prob_S
    return q.at(p.ids)  # two dense distributions over vocabularies that were padded differently


def probs(law: Law, tokens: Sequence[int]) -> dict[int, float]:
    """Token -> its probability. One host sync."""
    if law.prob_S.is_cpu:
        return {token: law.prob(token) for token in tokens}
    token_K = torch.tensor(tokens, device=law.prob_S.device)
    return dict(zip(tokens, law.at(token_K).tolist(), strict=True))


class Rest:
    """The distribution of the next token, given that every draw so far was refused."""

    __slots__ = ("_law", "_left", "_prob", "_struck", "_tokens")

    def __init__(self, law: Law, tokens: Sequence[int]) -> None:
        """Begin with a distribution; tokens are those whose probabilities will be asked for."""
        self._tokens = tokens
        self.become(law)

    def become(self, law: Law) -> None:
        """Take another distribution for what is left; nothing is struck from it yet."""
        self._law = law
        self._prob = probs(law, self._tokens)
        self._struck: list[int] = []
        """Tokens that the distribution still holds but that were refused."""
        self._left = 1.0
        """Mass of the distribution without them."""

    def prob(self, token: int) -> float:
        """Probability of a token that was named at the start."""
        return self._prob[token] / self._left

    def strike(self, token: int) -> None:
        """A chosen token was refused: it does not come."""
        mass = self._prob[token]
        if mass == 0:
            return
        before = self._struck
        self._struck = [*before, token]
        self._prob[token] = 0.0
        self._left -= mass
        if self._left < _LITTLE:
            # Nothing left at all: the refusal itself was rounding, so it is taken back.
            self.become(self._law.without(self._struck) or self._law.without(before) or self._law)

    def subtract(self, q: Law) -> None:
        """A token drawn from q was refused."""
        self.become(residual(self.settled(), q))

    def settled(self) -> Law:
        """What is left, without the tokens that were struck."""
        if not self._struck:
            return self._law
        law = self._law.without(self._struck)
        assert law is not None, (self._struck, self._left)
        return law
