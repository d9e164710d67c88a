"""Speculative sampling along one drafted chain.

The drafted token x ~ q is kept with probability min(1, p(x) / q(x)). At the first refusal the
token in its place comes from the residual, norm([p - q]_+), and the walk ends; if all are kept,
one more comes from the law after the last. What comes out at a position is

    min(p, q) + (1 - sum min(p, q)) * norm([p - q]_+) = min(p, q) + [p - q]_+ = p.

A token that was chosen without chance is a draw from its own one-hot law: kept with
probability p(x), and refused it leaves p without x. No rule keeps a single token more often.

Cost: two gathers per visited node; one O(V) pass at the first refusal and one for the last draw.
Paper: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318
(p target, q draft, as here).
Law: tests/laws/test_laws.py

Shape letters: S support of a law, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.coins import Coins
from outpace.errors import SpecError
from outpace.types import ROOT, Draft, Drawn, Law, Verdict
from outpace.verifiers.base import TargetLaws, Verifier

_FEW = 64
"""Supports up to this size are read as Python numbers: two copies instead of four small ops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainConfig:
    """Nothing to set."""


class Chain(Verifier):
    """Keeps a prefix of a chain, token by token."""

    Config: ClassVar[type] = ChainConfig
    name = "chain"
    takes = frozenset({Drawn.IID, Drawn.DISTINCT, Drawn.CHOSEN})
    chains_only = True
    draws = Drawn.IID

    def __init__(self, config: ChainConfig) -> None:
        self.config = config

    def check(self, draft: Draft) -> None:
        super().check(draft)
        if len(draft.groups) > len(draft) or any(len(g.nodes) != 1 for g in draft.groups):
            raise SpecError(
                f"verifier 'chain' takes one draw per position, got {len(draft.groups)} groups "
                f"of up to {max(len(g.nodes) for g in draft.groups)} draws for {len(draft)} "
                "nodes; use verifier=tree"
            )

    def judge(
        self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False
    ) -> Verdict:
        self.check(draft)
        node = ROOT
        read: list[Law] = []
        while True:
            rest = laws.law(node)
            read.append(rest)
            if node + 1 == len(draft):
                break
            token = draft.token_N[node + 1]
            (group,) = draft.groups_of[node]
            q = None if group.law is None else draft.laws[group.law]
            p_x = probs(rest, (token,))[token]
            q_x = 0.0 if q is None else probs(q, (token,))[token]
            # q(x) = 0 says that q is not what x came from: then x counts as chosen.
            if not coins.flip(p_x / q_x if q_x > 0 else p_x, node, 0):
                if q is None or q_x == 0:
                    rest = without(rest, (token,)) or rest
                else:
                    rest = residual(rest, q)
                break
            node += 1
        kept = tuple(range(node + 1))
        emitted = (*draft.token_N[: node + 1], coins.choose(rest, node, -1))
        return Verdict(kept, emitted, tuple(read) if want_laws else None)


def residual(p: Law, q: Law) -> Law:
    """The law of the next token once a draw from q was refused: norm([p - q]_+).

    Where nothing is left, p equals q up to rounding: a refusal has probability about 0, and p
    itself is returned.

    Cost: O(support of p); no V-sized work unless p or q is that large. One host sync.
    """
    if p.id_S is not None:
        q_S = q.at(p.id_S)
    elif q.id_S is not None:
        q_S = q.dense(len(p.prob_S))
    elif len(q.prob_S) == len(p.prob_S):
        q_S = q.prob_S
    else:  # two dense laws over vocabularies that were padded differently
        q_S = q.at(p.ids)
    return _normed((p.prob_S - q_S).clamp_min_(0), p.id_S) or p


def without(law: Law, tokens: Sequence[int]) -> Law | None:
    """The law given that none of ``tokens`` comes; None if it has no other.

    Cost: O(support). One host sync.
    """
    token_K = torch.tensor(tokens, device=law.prob_S.device)
    if law.id_S is None:
        return _normed(law.prob_S.index_fill(0, token_K, 0.0), None)
    return _normed(law.prob_S.masked_fill(torch.isin(law.id_S, token_K), 0.0), law.id_S)


def probs(law: Law, tokens: Sequence[int]) -> dict[int, float]:
    """Token -> its probability. One host sync, two for a small support."""
    if law.id_S is not None and len(law.id_S) <= _FEW:
        table = dict(zip(law.id_S.tolist(), law.prob_S.tolist(), strict=True))
        return {token: table.get(token, 0.0) for token in tokens}
    token_K = torch.tensor(tokens, device=law.prob_S.device)
    return dict(zip(tokens, law.at(token_K).tolist(), strict=True))


def _normed(weight_S: Tensor, id_S: Tensor | None) -> Law | None:
    """A law from weights, in place; None if they are all 0."""
    mass = float(weight_S.sum())
    return Law(weight_S.div_(mass), id_S) if mass > 0 else None
