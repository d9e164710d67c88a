"""The exact verifier of greedy drafts with one random sibling.

Below a node hang q's k - 1 most probable tokens, and one token x drawn from q without them, call
that distribution r. It is plain speculative sampling of x, with a bonus:

    keep x with probability min(1, p(x) / r(x))
    otherwise draw the extra token from norm([p - r]_+); if one of the greedy tokens comes, it is
    kept as well.

r is 0 on the greedy tokens, so the residual holds all of p there. A position is kept with
probability p(greedy) + sum over the others of min(p, r). That is the most that any lossless rule
can keep of these drafts. `tree` keeps as much of them, with one coin more per greedy token.

The same move serves chosen siblings, with nothing drawn: the extra token comes from p.

Cost, per visited node: two gathers, one pass over q; one over p and q if x is refused.
Paper: Hu et al. 2025, arXiv:2502.18779 (p target, q draft).
Law: tests/laws/test_laws.py
"""

from __future__ import annotations

from outpace.coins import Coins
from outpace.types import Draft, Drawn, Group, Law
from outpace.verifiers.rules import OneGroup, probs, residual, trials


class GreedyPlusOne(OneGroup):
    """Tries the random sibling, then lets the target's own draw meet the greedy ones."""

    name = "greedy_plus_one"
    takes = frozenset({Drawn.GREEDY_PLUS_ONE, Drawn.CHOSEN})
    draws = Drawn.GREEDY_PLUS_ONE

    def attempt(self, draft: Draft, coins: Coins, group: Group, q: Law, p: Law) -> tuple[int | None, Law]:
        child, rest = next(trials(draft, group))
        x = draft.token_N[child]
        rest_x = 0.0 if rest is None else probs(rest, (x,))[x]
        if rest is None or rest_x == 0:
            return None, p  # q has nothing but the greedy tokens: then x counts as chosen
        if coins.flip(probs(p, (x,))[x] / rest_x, group.parent, 0):
            return child, p
        return None, residual(p, rest)
