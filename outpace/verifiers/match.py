"""Sample and match: draw the target's token, and follow the branch that already holds it.

        p -> y = "mat"
    the --+-- cat
          +-- mat   <- kept; draw again from the law after "mat"

Whatever the draft holds, the token at each visited node is one fresh draw from p, so the output
has the law p; the draft decides only how many such draws one pass can serve. A group S of
siblings is thus kept with probability p(S), which is the most that any rule can reach for
tokens that were chosen without chance.

Cost: one draw per visited node, O(support of p) each; nothing per drafted node.
Paper: Miao et al. 2023 (SpecInfer), arXiv:2305.09781, "naive sampling"; the same acceptance as
the sequential rule for chosen tokens that `tree` uses.
Law: tests/laws/test_laws.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from outpace.coins import Coins
from outpace.types import ROOT, Draft, Drawn, Law, Verdict
from outpace.verifiers.base import TargetLaws, Verifier


Pick = Callable[[Law, int], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchConfig:
    """Nothing to set."""


class Match(Verifier):
    """Follows, at every node, the child that carries the target's own draw."""

    Config: ClassVar[type] = MatchConfig
    name = "match"
    takes = frozenset({Drawn.CHOSEN})
    draws = Drawn.CHOSEN

    def __init__(self, config: MatchConfig) -> None:
        self.config = config

    def judge(
        self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False
    ) -> Verdict:
        self.check(draft)
        return follow(draft, laws, lambda law, node: coins.choose(law, node, -1), want_laws)


def follow(draft: Draft, laws: TargetLaws, pick: Pick, want_laws: bool) -> Verdict:
    """Walk down the children that carry the tokens picked, until there is none.

    Args:
        draft: groups do not matter here, only tokens and parents.
        laws: read at every visited node.
        pick: (target law after a node, the node) -> the token that follows it.
        want_laws: whether the verdict carries the laws read.
    """
    child_of = {
        branch: node
        for node, branch in enumerate(zip(draft.parent_N, draft.token_N, strict=True))
    }
    kept: list[int] = []
    emitted: list[int] = []
    read: list[Law] = []
    node: int | None = ROOT
    while node is not None:
        law = laws.law(node)
        read.append(law)
        token = pick(law, node)
        emitted.append(token)
        node = child_of.get((node, token))
        if node is not None:
            kept.append(node)
    return Verdict(tuple(kept), tuple(emitted), tuple(read) if want_laws else None)
