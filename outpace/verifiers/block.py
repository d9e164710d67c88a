"""Block verification: one decision about how much of a drafted chain is kept.

Speculative sampling decides token by token and stops at the first refusal. Here a token that p
likes better than q pays for one before it that p likes less. With x_i drafted from q_i, and

    w_0 = 1,   w_i = min(1, w_{i-1} p(x_i) / q_i(x_i)),
    s_i = sum [w_i p(. | x_1..i) - q_{i+1}]_+,   h_i = s_i / (s_i + 1 - w_i),   h_n = w_n,

the longest prefix i whose coin falls below h_i is kept; the coins are independent. If all is kept
the extra token has the distribution p, otherwise norm([w_i p - q_{i+1}]_+). The prefix x_1..i is kept at
least that far with probability w_i times that of drafting it, which makes the distribution of the output
p. On average never fewer tokens are kept than by `chain`, and of a single one as many. A chosen
token is a draw from its own one-hot distribution.

Cost: two gathers per position until p(x) is 0; then, from the end, one O(V) pass per position
until one is kept. The distribution after a whole draft is read only where all of it is kept.
Paper: Sun et al. 2024, arXiv:2403.10444 (p target, q draft, as here; w is their p_i).
Law: tests/laws/test_laws.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outpace.coins import Coins
from outpace.types import Draft, Drawn, Law, Verdict
from outpace.verifiers.base import TargetLaws, Verifier
from outpace.verifiers.rules import ended, excess, probs


@dataclass(frozen=True, slots=True)
class Place:
    """A position of the chain, before the draw that fills it."""

    p: Law
    token: int
    p_x: float
    q: Law | None
    """None: the token was chosen."""
    q_x: float

    def excess(self, weight: float) -> tuple[float, Law]:
        """Mass and distribution of [weight * p - q]_+; where nothing is left, p."""
        if self.q is None:
            left = self.p.without((self.token,)) if self.p_x > 0 else self.p
            return (0.0, self.p) if left is None else (weight * (1 - self.p_x), left)
        mass, law = excess(self.p, self.q, weight)
        return mass, law or self.p


class Block(Verifier):
    """Keeps a prefix of a chain, decided from its end."""

    name = "block"
    takes = frozenset({Drawn.IID, Drawn.DISTINCT, Drawn.CHOSEN})
    chains_only = True
    draws = Drawn.IID
    place: ClassVar[type[Place]] = Place

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        self.check(draft)
        places: list[Place] = []
        weight = [1.0]
        while len(places) < len(draft) and weight[-1] > 0:
            node = len(places) - 1
            place = self._read(draft, node, laws.law(node))
            weight.append(min(1.0, weight[-1] * place.p_x / place.q_x))
            places.append(place)
        read = [place.p for place in places]
        kept = len(places)
        while True:
            if kept == len(draft):
                if kept == 0 or coins.flip(weight[kept], kept - 1, 0):
                    rest = laws.law(kept - 1)
                    read.append(rest)
                    break
            elif weight[kept] > 0:
                mass, rest = places[kept].excess(weight[kept])
                below = mass + 1 - weight[kept]
                if kept == 0 or coins.flip(mass / below if below > 0 else 1.0, kept - 1, 0):
                    break
            kept -= 1
        last = kept - 1
        return ended(draft, last, coins.choose(rest, last, -1), read[: kept + 1] if want_laws else None)

    def _read(self, draft: Draft, node: int, p: Law) -> Place:
        """The position after ``node`` (ROOT, which is -1, for the first)."""
        token = draft.token_N[node + 1]
        (group,) = draft.groups_of[node]
        q = None if group.law is None else draft.laws[group.law]
        q_x = 0.0 if q is None else probs(q, (token,))[token]
        if q_x == 0:  # chosen; or q is not what the token came from, which counts as chosen
            q, q_x = None, 1.0
        return self.place(p, token, probs(p, (token,))[token], q, q_x)
