"""Traversal verification: one decision per leaf, from the bottom of the tree to its root.

Rejection from the top gives up a whole subtree for one refused token. Here a path is judged as a
whole, as `block` does for a chain. Every node v carries a weight w, 1 at the root. With probability w
the walk is to end at v or below it, with the distribution of the target. Its children are tried in draw
order; the next one, x ~ q given those before it, gets the weight

    w_x = min(1, w p(x) / q(x))

and its subtree is judged first. If nothing there is kept, what is missing at v is

    r = [w p - q]_+,   s = sum r,      w <- s / (s + 1 - w),   p <- norm(r).

A node without children left ends the walk with probability w, and the extra token has the distribution p
that is left there. By induction from the leaves: x and what follows it come out with mass
min(q, w p)(x). So nothing is kept below x with probability s + 1 - w in total, and r is missing. A new
weight and distribution that multiply to r / (s + 1 - w) make up for it, whatever x was. On a chain this
is `block`; for one level of draws it is the rule of `tree`. On deeper trees it keeps more than `tree`,
never less on average.

Kinds of draws are those of `tree`, also mixed under one parent. A chosen token is a draw from its
own one-hot distribution. A node that is named again (a repeated IID draw, a chosen token that was drawn) is
tried again as if it had no children. What hangs below it was judged already.

Cost: every node whose path p does not rule out is visited in the worst case. Per drawn sibling refused one
pass over the support of p and q, for chosen ones nothing. Distributions are read at nodes with children,
and at the node where the walk ends.
Paper: Weng et al. 2025, arXiv:2505.12398 (p target, q draft; w is their acceptance rate).
Law: tests/laws/test_laws.py, tests/laws/test_deep_trees.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from outpace.coins import Coins
from outpace.types import ROOT, Draft, Drawn, Law, Verdict
from outpace.verifiers.base import TargetLaws, Verifier
from outpace.verifiers.rules import Rest, ended, excess, probs, trials


@dataclass(slots=True, eq=False)
class Visit:
    node: int
    weight: float
    """Probability with which the walk is to end here or below."""
    rest: Rest | None = None
    """What refusals left of p after the node; None where it has no children to try."""
    trials: Iterator[tuple[int, Law | None]] = field(default_factory=lambda: iter(()))
    token: int = -1
    """Of the child under trial."""
    q: Law | None = None
    """What it was drawn from; None: it was chosen."""

    def share(self, token: int, q: Law | None) -> float:
        """Put a child on trial; its weight."""
        q_x = 0.0 if q is None else probs(q, (token,))[token]
        # q(x) = 0 says that q is not what x came from: then x counts as chosen.
        self.token, self.q = token, q if q_x > 0 else None
        assert self.rest is not None
        p_x = self.rest.prob(token)
        return min(1.0, self.weight * (p_x if q_x == 0 else p_x / q_x))

    def refuse(self) -> None:
        """Nothing was kept below the child under trial."""
        assert self.rest is not None
        if self.q is None:
            self._weigh(self.weight * (1 - self.rest.prob(self.token)))
            self.rest.strike(self.token)
        else:
            mass, law = excess(self.rest.settled(), self.q, self.weight)
            self._weigh(mass)
            if law is not None:
                self.rest.become(law)

    def _weigh(self, mass: float) -> None:
        below = mass + 1 - self.weight
        if below > 0:  # otherwise the refusal was rounding: all was to be kept
            self.weight = mass / below


class Traversal(Verifier):
    """Judges the paths of a tree from its leaves."""

    name = "traversal"
    takes = frozenset(set(Drawn) - {Drawn.COUPLED})
    draws = Drawn.DISTINCT
    visit: ClassVar[type[Visit]] = Visit

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        self.check(draft)
        read: dict[int, Law] = {}
        visits: dict[int, int] = {}

        def law(node: int) -> Law:
            if node not in read:
                read[node] = laws.law(node)
            return read[node]

        def enter(node: int, weight: float) -> Visit:
            visits[node] = visits.get(node, -1) + 1
            groups = draft.groups_of.get(node)
            if groups is None or visits[node]:
                return self.visit(node, weight)
            tokens = [draft.token_N[child] for group in groups for child in group.nodes]
            drawn = (trial for group in groups for trial in trials(draft, group))
            return self.visit(node, weight, Rest(law(node), tokens), drawn)

        path = [enter(ROOT, 1.0)]
        while True:
            here = path[-1]
            child, q = next(here.trials, (None, None))
            if child is not None:
                weight = here.share(draft.token_N[child], q)
                if weight > 0:
                    path.append(enter(child, weight))
                else:
                    here.refuse()
            elif here.node == ROOT or coins.flip(here.weight, here.node, visits[here.node]):
                break
            else:
                path.pop()
                path[-1].refuse()
        end = here.node
        rest = law(end) if here.rest is None else here.rest.settled()
        true = [law(node) for node in (ROOT, *draft.path(end))] if want_laws else None
        return ended(draft, end, coins.choose(rest, end, -1), true)
