"""Typical acceptance of Medusa: keep what the target finds plausible. Not lossless.

A drafted token x is plausible after a node where p(x) exceeds

    min(epsilon, delta exp(-H(p)))        H the entropy of p, in nats:

likely in itself, or not unlikely where much is possible. The longest path of plausible tokens is
kept, of equally long ones the likelier; the extra token is drawn from p. How the tokens were
drafted does not matter, so drafters are asked for their best ones.

The output does not have the distribution p: improbable tokens never come out of a draft, probable ones too
often. At temperature 0 only the argmax is plausible, and the text is the target's own.

Cost: one pass over the support of p per kept or plausible node with children.
Paper: Cai et al. 2024 (Medusa), arXiv:2401.10774 (p target; defaults theirs).
Law: none; how far it is off is tested in tests/verifiers/test_typical.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from outpace.coins import Coins
from outpace.types import ROOT, Draft, Drawn, Law, Verdict
from outpace.verifiers.base import TargetLaws, Verifier
from outpace.verifiers.rules import ended, probs


@dataclass(frozen=True, kw_only=True, slots=True)
class TypicalConfig:
    epsilon: float = 0.09
    """A token with a larger probability is always kept."""
    delta: float = 0.3
    """A smaller one is kept if it exceeds ``delta * exp(-entropy)``."""

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon must be in (0, 1), got {self.epsilon}")
        if not self.delta > 0:
            raise ValueError(f"delta must be above 0, got {self.delta}")


class Typical(Verifier):
    """Keeps the longest path of tokens that the target finds plausible. Changes the distribution."""

    Config = TypicalConfig
    config: TypicalConfig
    name = "typical"
    takes = frozenset(set(Drawn) - {Drawn.COUPLED})
    draws = Drawn.CHOSEN
    lossless = False

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        self.check(draft)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(draft.parent_N):
            children.setdefault(parent, []).append(node)
        read: dict[int, Law] = {}
        best, length = ROOT, (0, 0.0)
        open_nodes = [(ROOT, 0, 0.0)]
        for node, depth, score in open_nodes:  # grows while it is read
            if (depth, score) > length:
                best, length = node, (depth, score)
            below = children.get(node)
            if below is None:
                continue
            p = read[node] = laws.law(node)
            least = self.threshold(p)
            prob = probs(p, [draft.token_N[child] for child in below])
            open_nodes += [
                (child, depth + 1, score + math.log(prob[draft.token_N[child]]))
                for child in below
                if prob[draft.token_N[child]] > least
            ]
        if best not in read:
            read[best] = laws.law(best)
        true = [read[node] for node in (ROOT, *draft.path(best))] if want_laws else None
        return ended(draft, best, coins.choose(read[best], best, -1), true)

    def threshold(self, p: Law) -> float:
        entropy = float(torch.special.entr(p.prob_S).sum())
        return min(self.config.epsilon, self.config.delta * math.exp(-entropy))
