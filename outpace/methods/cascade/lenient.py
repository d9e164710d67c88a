"""How an inner level reviews a draft leniently, and what distribution its tokens then have.

With lenience l >= 1 a level with distribution p takes a guess x that was drawn from q with probability
min(1, l p(x) / q(x)). Refused, it draws from r, the normed rest of p - min(q, l p). What it emits
has the distribution

    q_eff = min(q, l p) + (1 - sum min(q, l p)) r,

which is p for l = 1. Whoever reviews next is told q_eff and not p: so the target's distribution comes
out exactly, whatever l is. Each guess, drawn or chosen, is judged by itself. Given what came before,
the next token has the recorded distribution. Whether there is a next one is known before it is drawn.
That is all that a chain of rejections needs.

At temperature 0 no distribution is handed up. A guess is taken if it is the likeliest token, or if
p(x) > q(x) / l. For a lookup, q(x) is 1; otherwise it is what the level below gave its token.

Pays where reviews are dear and the two distributions are near each other. When sampling, q_eff is further
from the target's distribution than p is, so the target may keep fewer.

Paper: Chen et al. 2023, Cascade Speculative Drafting, arXiv:2312.11462 (greedy; l is its letter).
Sampling follows Leviathan et al. 2023, arXiv:2211.17192, appendix A.5, with the law written down.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from outpace.coins import Coins
from outpace.methods.cascade.guesses import Origin
from outpace.types import ROOT, Draft, Drawn, Law, Verdict
from outpace.verifiers.base import TargetLaws, Verifier


def review(p: Law, q: Law | None, token: int, lenience: float, size: int) -> tuple[float, Law, Law]:
    """Review one guess.

    Args:
        q: what it was drawn from; None, or a distribution that cannot give it: it was chosen.
        size: of the vocabulary.

    Returns:
        Probability of keeping it, what a refusal draws from, and the distribution of the outcome.

    Cost: three sums over the vocabulary.
    """
    p_V = p.dense(size)
    if q is None or q.prob(token) <= 0:
        q_V = torch.zeros_like(p_V)
        q_V[token] = 1.0
    else:
        q_V = q.dense(size).to(p_V.dtype)
    both_V = torch.minimum(q_V, lenience * p_V)
    rest = Law.normed((p_V - both_V).clamp_min(0.0), None) or p
    whole = Law.normed(both_V + (1 - both_V.sum()).clamp_min(0.0) * rest.dense(size), None)
    assert whole is not None
    return min(1.0, float(both_V[token] / q_V[token])), rest, whole


class _Chain(Verifier):
    """Follows a chain; of siblings the first alone."""

    takes = frozenset({Drawn.CHOSEN, Drawn.IID, Drawn.DISTINCT})
    lossless: ClassVar[bool] = False  # the level's distribution is not p; the target's rule is

    def __init__(self, lenience: float, vocab_size: int) -> None:
        self.lenience, self.vocab_size = lenience, vocab_size


class Lenient(_Chain):
    """Reviews what was sampled; its verdicts carry q_eff."""

    name = "lenient"
    draws = Drawn.DISTINCT

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        self.check(draft)
        true: list[Law] = []
        node = ROOT
        while True:
            p = laws.law(node)
            groups = draft.groups_of.get(node)
            if groups is None:
                last, whole = p, p
            else:
                child = groups[0].nodes[0]
                row = groups[0].law
                q = None if row is None else draft.laws[row]
                chance, last, whole = review(p, q, draft.token_N[child], self.lenience, self.vocab_size)
                if coins.flip(chance, node, 0):
                    true.append(whole)
                    node = child
                    continue
            true.append(whole)
            emitted = (*draft.path_tokens(node), coins.choose(last, node, -1))
            return Verdict(draft.path(node), emitted, tuple(true) if want_laws else None)


class LenientGreedy(_Chain):
    """Reviews what was chosen, by the level's probabilities at temperature 1; nothing is drawn."""

    name = "lenient_greedy"
    draws = Drawn.CHOSEN

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        own_N = draft.memo.prob_N if isinstance(draft.memo, Origin) else (1.0,) * len(draft)
        read: list[Law] = []
        node = ROOT
        while True:
            p = laws.law(node)
            read.append(p)
            (likeliest,) = p.top(1)
            groups = draft.groups_of.get(node)
            child = None if groups is None else groups[0].nodes[0]
            if child is not None:
                token = draft.token_N[child]
                if token == likeliest or p.prob(token) > own_N[child] / self.lenience:
                    node = child
                    continue
            emitted = (*draft.path_tokens(node), likeliest)
            return Verdict(draft.path(node), emitted, tuple(read) if want_laws else None)
