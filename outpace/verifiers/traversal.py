"""Traversal verification: one decision per leaf, from the bottom of the tree to its root.

Rejection from the top gives up a whole subtree for one refused token. Here a path is judged as a
whole, as `block` does for a chain. Every node v carries a weight w, 1 at the root: with
probability w the walk is to end at v or below it, with the distribution of the target. Its children are
tried in draw order; the next one, x ~ q given those before it, gets the weight

    w_x = min(1, w p(x) / q(x))

and its subtree is judged first. If nothing there is kept, what is missing at v is

    r = [w p - q]_+,   s = sum r,      w <- s / (s + 1 - w),   p <- norm(r).

A node without children left ends the walk with probability w, and the extra token has the distribution p
that is left there. By induction from the leaves: x and what follows it come out with mass
min(q, w p)(x), so nothing is kept below x with probability s + 1 - w in total, and r is missing;
a new weight and distribution that multiply to r / (s + 1 - w) make up for it, whatever x was. On a chain
this is `block`; for one level of draws it is the rule of `tree`; on deeper trees it keeps more
than `tree`, never less on average.

Kinds of draws are those of `tree`, also mixed under one parent. A chosen token is a draw from its
own one-hot distribution. A node that is named again (a repeated IID draw, a chosen token that was drawn) is
tried again as if it had no children: what hangs below it was judged already.

Cost: every node whose path p does not rule out is visited in the worst case; per drawn sibling
refused one pass over the support of p and q, for chosen ones nothing. Distributions are read at nodes with
children, and at the node where the walk ends.
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
from outpace.verifiers.rules import excess, probs, trials


@dataclass(slots=True, eq=False)
class Visit:
    node: int
    weight: float
    """Probability with which the walk is to end here or below."""
    law: Law | None = None
    """p after the node, before the tokens struck; None at a leaf."""
    prob: dict[int, float] = field(default_factory=dict)
    """Of the children's tokens under ``law``, 0 once struck."""
    trials: Iterator[tuple[int, Law | None]] = field(default_factory=lambda: iter(()))
    struck: list[int] = field(default_factory=list)
    left: float = 1.0
    """Mass of ``law`` without the tokens struck."""
    token: int = -1
    """Of the child under trial."""
    q: Law | None = None
    """What it was drawn from; None: it was chosen."""

    def share(self, token: int, q: Law | None) -> float:
        """Put a child on trial; its weight."""
        q_x = 0.0 if q is None else probs(q, (token,))[token]
        # q(x) = 0 says that q is not what x came from: then x counts as chosen.
        self.token, self.q = token, q if q_x > 0 else None
        p_x = self.prob[token] / self.left
        return min(1.0, self.weight * (p_x if q_x == 0 else p_x / q_x))

    def refuse(self) -> None:
        """Nothing was kept below the child under trial."""
        if self.q is None:
            mass = self.prob[self.token]
            self._weigh(self.weight * (1 - mass / self.left))
            if mass > 0:
                self.prob[self.token] = 0.0
                self.struck.append(self.token)
                self.left = max(self.left - mass, 0.0)
                if self.left < _LITTLE:
                    self._set(self.rest())
        else:
            mass, law = excess(self.rest(), self.q, self.weight)
            self._weigh(mass)
            if law is not None:
                self._set(law)

    def _weigh(self, mass: float) -> None:
        below = mass + 1 - self.weight
        if below > 0:  # otherwise the refusal was rounding: all was to be kept
            self.weight = mass / below

    def _set(self, law: Law) -> None:
        self.law, self.struck, self.left = law, [], 1.0
        self.prob = probs(law, list(self.prob))

    def rest(self) -> Law:
        """What is left of p; the last token struck stays in if nothing else does."""
        assert self.law is not None
        if not self.struck:
            return self.law
        return self.law.without(self.struck) or self.law.without(self.struck[:-1]) or self.law


_LITTLE = 2.0**-12
"""Mass below which subtraction from 1 has lost too many digits: it is summed again."""


class Traversal(Verifier):
    """Judges the paths of a tree from its leaves."""

    name = "traversal"
    takes = frozenset({Drawn.CHOSEN, Drawn.IID, Drawn.DISTINCT, Drawn.GREEDY_PLUS_ONE})
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
            p = law(node)
            tokens = [draft.token_N[child] for group in groups for child in group.nodes]
            drawn = (trial for group in groups for trial in trials(draft, group))
            return self.visit(node, weight, p, probs(p, tokens), drawn)

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
        end = path[-1]
        rest = law(end.node) if end.law is None else end.rest()
        kept = draft.path(end.node)
        emitted = (*(draft.token_N[i] for i in kept), coins.choose(rest, end.node, -1))
        true = tuple(law(node) for node in (ROOT, *kept)) if want_laws else None
        return Verdict(kept, emitted, true)
