"""Sample and match: draw the target's token, and follow the branch that already holds it.

        p -> y = "mat"
    the --+-- cat
          +-- mat   <- kept; draw again from the distribution after "mat"

Whatever the draft holds, the token at each visited node is one fresh draw from p. So the output
has the distribution p, and the draft decides only how many such draws one pass can serve. A group
S of siblings is thus kept with probability p(S). That is the most that any rule can reach for
tokens that were chosen without chance.

Cost: one draw per visited node, O(support of p) each; nothing per drafted node.
Paper: Miao et al. 2023 (SpecInfer), arXiv:2305.09781, "naive sampling"; the same acceptance as
the sequential rule for chosen tokens that `tree` uses.
Law: tests/laws/test_laws.py
"""

from __future__ import annotations

from outpace.coins import Coins
from outpace.types import Draft, Drawn, Verdict
from outpace.verifiers.base import TargetLaws, Verifier
from outpace.verifiers.rules import follow


class Match(Verifier):
    """Follows, at every node, the child that carries the target's own draw."""

    name = "match"
    takes = frozenset({Drawn.CHOSEN})
    draws = Drawn.CHOSEN

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        self.check(draft)
        return follow(draft, laws, lambda law, node: coins.choose(law, node, -1), want_laws)
