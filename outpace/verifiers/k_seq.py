"""k-seq of SpecTr: all draws below a node are tried against the same p, at a common discount.

Recursive rejection tries the second of k draws against what the first left of p. Here each of
the k draws x ~ q is kept with probability

    min(1, p(x) / (rho q(x)))            so a trial keeps  beta = sum min(q, p / rho)  on average.

If none is kept, the extra token has the distribution norm(p - min(q, p / rho) a / beta). Here
a = 1 - (1 - beta)^k is the chance that one is. That distribution exists where a <= rho beta; the least
such rho, between 1 and k, keeps most. For k = 1 it is 1, and the rule that of `chain`. It keeps at
least 1 - 1/e of what any rule can keep of independent draws, and often more than recursive
rejection. Every node of a tree is a case of its own.

Chosen siblings beside the draws are followed where the extra token meets them.

Cost, per visited node with draws: about a dozen passes over the support of p.
Paper: Sun et al. 2023 (SpecTr), arXiv:2310.15141 (p target, q draft, as here; rho is
theirs).
Law: tests/laws/test_laws.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.coins import Coins
from outpace.types import Draft, Drawn, Group, Law
from outpace.verifiers.rules import OneGroup, on_support, probs

_CLOSE = 1e-9
"""How far rho may lie above the least that is possible."""


def discount(p_S: Tensor, q_S: Tensor, k: int) -> tuple[float, float]:
    """The least rho that leaves a distribution after k refusals, and the beta that it gives.

    Args:
        p_S: target probabilities on the support of p.
        q_S: draft probabilities of the same tokens.

    What a rho asks of p less what p has of it falls as rho grows. Its zero is enclosed (regula
    falsi, Illinois variant), and the upper end returned: every rho from the zero on leaves a distribution.

    Cost: one pass over the support per step, about ten steps.
    """

    def beta(rho: float) -> float:
        return float(torch.minimum(q_S, p_S / rho).sum(dtype=torch.float64))

    def surplus(rho: float, beta: float) -> float:
        return 1 - (1 - min(beta, 1.0)) ** k - rho * beta

    low, high = 1.0, float(k)
    at_low, at_high = beta(low), beta(high)
    over, under = surplus(low, at_low), surplus(high, at_high)
    if over <= 0:
        return low, min(at_low, 1.0)
    moved = ""
    while high - low > _CLOSE:
        middle = (low * under - high * over) / (under - over)
        middle = min(max(middle, low + _CLOSE / 2), high - _CLOSE / 2)
        at_middle = beta(middle)
        value = surplus(middle, at_middle)
        if value > 0:
            low, over = middle, value
            under = under / 2 if moved == "low" else under
            moved = "low"
        else:
            high, at_high, under = middle, at_middle, value
            over = over / 2 if moved == "high" else over
            moved = "high"
    return high, min(at_high, 1.0)


class KSeq(OneGroup):
    """Tries all draws below a visited node against the same discounted distribution."""

    name = "k_seq"
    takes = frozenset({Drawn.IID, Drawn.CHOSEN})
    draws = Drawn.IID
    discount = staticmethod(discount)

    def attempt(self, draft: Draft, coins: Coins, group: Group, q: Law, p: Law) -> tuple[int | None, Law]:
        tokens = [draft.token_N[child] for child in group.nodes]
        q_x, p_x = probs(q, tokens), probs(p, tokens)
        # q(x) = 0 says that q is not what x came from: then x counts as chosen.
        drawn = [child for child, x in zip(group.nodes, tokens, strict=True) if q_x[x] > 0]
        if not drawn:
            return None, p
        q_S = on_support(p, q)
        rho, beta = self.discount(p.prob_S, q_S, len(drawn))
        for trial, child in enumerate(drawn):
            x = draft.token_N[child]
            if coins.flip(p_x[x] / (rho * q_x[x]), group.parent, trial):
                return child, p
        if beta == 0:
            return None, p
        share = (1 - (1 - beta) ** len(drawn)) / beta
        rest_S = (p.prob_S - torch.minimum(q_S, p.prob_S / rho) * share).clamp_min_(0)
        return None, Law.normed(rest_S, p.id_S) or p
