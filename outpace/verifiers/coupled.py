"""Coupled sampling: draft and target race the same distribution against the same noise.

The token at absolute position t is the winner of a Gumbel race: argmax over tokens of
log p + noise(seed, t, token). It is a function of the prefix, p and the seed. So the text is the same
with any drafter and with none, wherever logits are bit-equal. Noise of different positions is
independent, so the text has the distribution p. A drafter that races its own q against the same noise
wins with the same token with probability at least (1 - TV) / (1 + TV). Here TV is the distance of p
and q. Nobody has to compare distributions or draw from a residual.

Cost: one race per visited node, O(support of p) each; nothing per drafted node.
Paper: Daliri et al. 2024, arXiv:2408.07978 (drafter-invariant speculative decoding: their
Gumbel sampling, bound on the acceptance as above).
Law: tests/laws/test_laws.py
"""

from __future__ import annotations

from outpace.coins import Coins
from outpace.types import ROOT, Draft, Drawn, Law, Verdict
from outpace.verifiers.base import TargetLaws, Verifier
from outpace.verifiers.rules import follow


class Coupled(Verifier):
    """Follows, at every node, the child that carries the winner of the race at its position."""

    name = "coupled"
    reproduces = True
    takes = frozenset({Drawn.COUPLED, Drawn.CHOSEN})
    draws = Drawn.COUPLED

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        self.check(draft)

        def winner(law: Law, node: int) -> int:
            # The depth of the children: their drafter raced at pending position + depth too.
            return coins.race(law, 1 if node == ROOT else draft.depth_N[node] + 1)[0]

        return follow(draft, laws, winner, want_laws)
