"""Speculative sampling along one drafted chain.

The drafted token x ~ q is kept with probability min(1, p(x) / q(x)). At the first refusal the
token in its place comes from the residual, norm([p - q]_+), and the walk ends. If all are kept,
one more comes from the distribution after the last. What comes out at a position is

    min(p, q) + (1 - sum min(p, q)) * norm([p - q]_+) = min(p, q) + [p - q]_+ = p.

A token that was chosen without chance is a draw from its own one-hot distribution. It is kept with
probability p(x); refused, it leaves p without x. No rule keeps a single token more often.

Cost: two gathers per visited node; one O(V) pass at the first refusal and one for the last draw.
Paper: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318
(p target, q draft, as here).
Law: tests/laws/test_laws.py
"""

from __future__ import annotations

from outpace.coins import Coins
from outpace.types import ROOT, Draft, Drawn, Law, Verdict
from outpace.verifiers.base import TargetLaws, Verifier
from outpace.verifiers.rules import ended, probs, residual


class Chain(Verifier):
    """Keeps a prefix of a chain, token by token."""

    name = "chain"
    takes = frozenset({Drawn.IID, Drawn.DISTINCT, Drawn.CHOSEN})
    chains_only = True
    draws = Drawn.IID

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
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
                if q is not None and q_x > 0:
                    rest = residual(rest, q)
                elif p_x > 0:
                    rest = rest.without((token,)) or rest
                break
            node += 1
        return ended(draft, node, coins.choose(rest, node, -1), read if want_laws else None)
