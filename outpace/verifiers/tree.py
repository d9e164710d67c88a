"""Recursive rejection over all groups of a token tree.

At each visited node the children are tried in turn. Each is a draw x from some distribution q. It is
kept, and the walk moves to it, with probability min(1, p(x) / q(x)); refused, it leaves

    p <- norm([p - q]_+)

for the next. If none is kept, the extra token is drawn from what is left. One trial does not
change the distribution of the token at its position (`chain` has the two lines of proof). After a refusal
the rest is the same problem, with the p that it left. So the distribution is p for any number of draws,
also of mixed kinds under one parent. Each q has to be the distribution of its draw given the draws before it:

    CHOSEN           q one-hot at x: kept with p(x), else x is struck from p
    IID              the same q every time; a repeated draw tries the same node again
    DISTINCT         q without the draws before it in its group
    GREEDY_PLUS_ONE  first the sampled token, from q without the group's greedy ones; these are
                     then CHOSEN (the residual keeps all their mass, so nothing is lost)
    HUB              q; then CHOSEN, or q without the hub if the first was the hub

Once nothing of q is left (DISTINCT drawn past its support), or q(x) is 0, x cannot have come from
q. It came from some rule that reads no coin of the target, which is what CHOSEN means. So it is
tried as CHOSEN, and so is everything after it in the group that q has no mass for.

Cost, per visited node: one gather of p at its children. Per sampled draw that is refused, one pass
over the support of p and q. For chosen draws nothing, since struck mass is only counted until a
distribution is needed.
Papers: Miao et al. 2023 (SpecInfer), arXiv:2305.09781 (with replacement); Chen et al. 2024
(Sequoia), arXiv:2402.12374 (without). Hu et al. 2025, arXiv:2502.18779 (greedy plus one; its
acceptance is optimal). p target, q draft.
Law: tests/laws/test_laws.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.coins import Coins
from outpace.types import ROOT, Draft, Drawn, Group, Law, Verdict
from outpace.verifiers.base import TargetLaws, Verifier
from outpace.verifiers.rules import Rest, certain, ended, probs, trials


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeConfig:
    replacement: bool = False
    """Whether drafters shall draw siblings with replacement, as in SpecInfer. Without, every
    sibling is a new token, and more is accepted at low temperatures."""


class Tree(Verifier):
    """Tries the children of every visited node, in the order in which they were drawn."""

    Config = TreeConfig
    config: TreeConfig
    name = "tree"
    takes = frozenset(set(Drawn) - {Drawn.COUPLED})
    draws = Drawn.DISTINCT

    def __init__(self, config: TreeConfig | None = None) -> None:
        super().__init__(config)
        if self.config.replacement:
            self.draws = Drawn.IID

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        self.check(draft)
        if (found := certain(draft, laws, want_laws)) is not None:
            return found
        read: list[Law] = []
        node = ROOT
        while True:
            p = laws.law(node)
            read.append(p)
            groups = draft.groups_of.get(node)
            if groups is None:
                rest = p
                break
            child, rest = self._pick(draft, groups, p, coins)
            if child is None:
                break
            node = child
        return ended(draft, node, coins.choose(rest, node, -1), read if want_laws else None)

    def _pick(self, draft: Draft, groups: Sequence[Group], p: Law, coins: Coins) -> tuple[int | None, Law]:
        """The child kept, or None and what the refusals left of p."""
        parent = groups[0].parent
        rest = Rest(p, [draft.token_N[i] for group in groups for i in group.nodes])
        trial = 0
        for group in groups:
            for child, q in trials(draft, group):
                token = draft.token_N[child]
                p_x = rest.prob(token)
                q_x = 0.0 if q is None else probs(q, (token,))[token]
                if coins.flip(p_x / q_x if q_x > 0 else p_x, parent, trial):
                    return child, p
                if q is None or q_x == 0:
                    rest.strike(token)
                else:
                    rest.subtract(q)
                trial += 1
        return None, rest.settled()
