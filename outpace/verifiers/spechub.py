"""SpecHub: the exact verifier of two drafts, one of which is q's most probable token, the hub.

The first draft x is a draw from q. The second is the hub a; if x was the hub, it is a draw from q
without it, a distribution r. So only pairs with the hub occur, and every other token is in two of them:

    (x, a)  with probability q(x)                (a, x)  with probability q(a) r(x)

The linear program of what is kept is then solved token by token, all for x other than a:

    from (x, a) keep x      min(p, q)                         sums, over x, to all but E1 of those pairs
    from (a, x) keep x      min([p - q]_+, q(a) r)            to all but E2
    from (a, x) keep a      min(p(a), E2)                     the hub takes what is left
    from (x, a) keep a      what p(a) still lacks             E1 + E2 >= p(a), so there is enough
    nothing is kept         [p - q - q(a) r]_+                the residual

The rows add up to p, for x and for a. A position is kept with probability p(a) + sum over x of
min(p, q + q(a) r). That is the most that any lossless rule can keep of these pairs. Since q + q(a) r is r,
it is what `greedy_plus_one` keeps of two drafts, at every p and q: never more, never less. What differs is
the order. The hub is first there; here the first draft is a draw from q, and it is kept first, nearly as
often as by `chain`. So more is kept where the first sibling has more below it than the second, such as in
a chain with one sibling per level. Less is kept where the hub should have it, since p is sure of it.
`tree` keeps its first draft a little more often, and one of two less often, unless q is flat.

Wider shapes get two siblings per node. A single draft is one draw from q, and the rule that of `chain`.

Cost, per visited node: two gathers and two passes over q; some over both if the token beside the hub is
refused.
Paper: Sun et al. 2024 (SpecHub), arXiv:2411.05289 (p target, q draft). The closed form is derived here.
Pairs with the hub first serve it before the others: as many drafts are kept either way, more of them first.
Law: tests/laws/test_laws.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outpace.coins import Coins
from outpace.types import Draft, Drawn, Group, Law
from outpace.verifiers.rules import OneGroup, on_support, probs, residual


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done with a pair whose token beside the hub was refused."""

    spill: float
    """Chance that the hub is kept of a pair that it is second of."""
    take: float
    """Chance that the hub is kept of a pair that it is first of."""
    rest: Law
    """What the extra token is drawn from if it is not."""


class SpecHub(OneGroup):
    """Tries the token beside the hub, then gives the hub what is left."""

    name = "spechub"
    takes = frozenset({Drawn.HUB, Drawn.CHOSEN})
    draws = Drawn.HUB

    def attempt(self, draft: Draft, coins: Coins, group: Group, q: Law, p: Law) -> tuple[int | None, Law]:
        node = group.parent
        tokens = [draft.token_N[child] for child in group.nodes[:2]]  # any more count as chosen
        p_x, q_x = probs(p, tokens), probs(q, tokens)
        first = tokens[0]
        if q_x[first] == 0:
            return None, p  # q is not what it came from: then it counts as chosen
        if len(tokens) == 1:
            if coins.flip(p_x[first] / q_x[first], node, 0):
                return group.nodes[0], p
            return None, residual(p, q)
        (hub,) = q.top(1)
        rest = q.without((hub,))
        if hub not in tokens or rest is None:
            return None, p  # no pair that q gives
        if first != hub:
            beside, at_hub = group.nodes[:2]
            keep = p_x[first] / q_x[first]
        else:
            at_hub, beside = group.nodes[:2]
            x = tokens[1]
            r_x = probs(rest, (x,))[x]
            if r_x == 0:
                return None, p
            keep = self.second(p_x[x], q_x[x], q_x[hub] * r_x)
        if coins.flip(keep, node, 0):
            return beside, p
        plan = self.plan(p, q, rest, hub)
        if coins.flip(plan.take if first == hub else plan.spill, node, 1):
            return at_hub, p
        return None, plan.rest

    @staticmethod
    def second(p_x: float, q_x: float, pair: float) -> float:
        """Chance that the token behind the hub is kept; ``pair`` is the probability of the two."""
        return (p_x - q_x) / pair

    @staticmethod
    def plan(p: Law, q: Law, rest: Law, hub: int) -> Plan:
        """How the hub is served.

        Args:
            rest: q without the hub.
        """
        p_a, q_a = probs(p, (hub,))[hub], probs(q, (hub,))[hub]
        p_S = p.prob_S.clone()
        if (at := p.place(hub)) >= 0:
            p_S[at] = 0
        q_S = on_support(p, q)
        kept_S = torch.minimum(p_S, q_S)
        p_S -= kept_S  # what the other pairs may give
        second_S = torch.minimum(p_S, q_a * on_support(p, rest))
        others = float(q.prob_S.sum(dtype=torch.float64)) - q_a
        left_first = max(0.0, others - float(kept_S.sum(dtype=torch.float64)))
        left_second = max(0.0, q_a - float(second_S.sum(dtype=torch.float64)))
        take = min(p_a, left_second)
        return Plan(
            spill=(p_a - take) / left_first if left_first > 0 else 1.0,
            take=take / left_second if left_second > 0 else 1.0,
            rest=Law.normed(p_S - second_S, p.id_S) or p,
        )
