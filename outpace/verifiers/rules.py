"""What verifiers have in common: the walk that follows tokens, and what refusals leave of a law.

Shape letters: S support of a law, K tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outpace.types import ROOT, Draft, Law, Verdict
from outpace.verifiers.base import TargetLaws

Pick = Callable[[Law, int], int]
"""(target law after a node, the node) -> the token that follows it."""

_FEW = 64
"""Supports up to this size are read as Python numbers: two copies instead of four small ops."""


def follow(draft: Draft, laws: TargetLaws, pick: Pick, want_laws: bool) -> Verdict:
    """Walk down the children that carry the tokens picked, until there is none.

    Args:
        draft: groups do not matter here, only tokens and parents.
        laws: read at every visited node.
        pick: called once per visited node.
        want_laws: whether the verdict carries the laws read.
    """
    child_of = {
        branch: node
        for node, branch in enumerate(zip(draft.parent_N, draft.token_N, strict=True))
    }
    kept: list[int] = []
    emitted: list[int] = []
    read: list[Law] = []
    node: int | None = ROOT
    while node is not None:
        law = laws.law(node)
        read.append(law)
        token = pick(law, node)
        emitted.append(token)
        node = child_of.get((node, token))
        if node is not None:
            kept.append(node)
    return Verdict(tuple(kept), tuple(emitted), tuple(read) if want_laws else None)


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
    return Law.normed((p.prob_S - q_S).clamp_min_(0), p.id_S) or p


def probs(law: Law, tokens: Sequence[int]) -> dict[int, float]:
    """Token -> its probability. One host sync, two for a small support."""
    if len(law.prob_S) <= _FEW:
        prob_S = law.prob_S.tolist()
        ids = range(len(prob_S)) if law.id_S is None else law.id_S.tolist()
        table = dict(zip(ids, prob_S, strict=True))
        return {token: table.get(token, 0.0) for token in tokens}
    token_K = torch.tensor(tokens, device=law.prob_S.device)
    return dict(zip(tokens, law.at(token_K).tolist(), strict=True))
