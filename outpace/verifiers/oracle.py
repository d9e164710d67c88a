"""The verifiers again, slow and obvious: dense float64 vectors, one rule, no bookkeeping.

The younger half of them is in `outpace.analysis.oracles`.

With the same coins the fast verifiers give the same verdicts. Two things are convention and not
distribution, and are shared with them. They are the keys of the coins, and that a draw lays the tokens
along the uniform in the order of p's support.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from outpace.coins import Coins
from outpace.types import ROOT, Draft, Drawn, Group, Law, Verdict
from outpace.verifiers.base import TargetLaws

Oracle = Callable[[Draft, TargetLaws, Coins, int], Verdict]
"""(draft, target distributions, coins, vocabulary size) -> verdict, with distributions."""


def rejection(draft: Draft, laws: TargetLaws, coins: Coins, size: int) -> Verdict:
    """Oracle of `chain` and `tree`: every draw is one from some q, a chosen one from a one-hot."""
    node = ROOT
    kept: list[int] = []
    read: list[Law] = []
    while True:
        law = laws.law(node)
        read.append(law)
        p_V = vector(law, size)
        found, trial = None, 0
        for group in draft.groups:
            if group.parent != node:
                continue
            for child, q_V in draws_of(draft, group, size):
                x = draft.token_N[child]
                if coins.flip(float(p_V[x] / q_V[x]), node, trial):
                    found = child
                    break
                left_V = (p_V - q_V).clamp(min=0)
                if left_V.sum() > 0:
                    p_V = left_V / left_V.sum()
                trial += 1
            if found is not None:
                break
        if found is None:
            extra = coins.choose(Law(p_V[law.ids], law.ids), node, -1)
            emitted = (*(draft.token_N[i] for i in kept), extra)
            return Verdict(tuple(kept), emitted, tuple(read))
        kept.append(found)
        node = found


def draws_of(draft: Draft, group: Group, size: int) -> Iterator[tuple[int, Tensor]]:
    """The draws of a group as they are tried, and the distribution of each given those before it."""
    q_V = torch.zeros(size, dtype=torch.float64)
    if group.law is not None:
        q_V = vector(draft.laws[group.law], size)
    nodes = group.nodes
    if group.drawn is Drawn.GREEDY_PLUS_ONE:
        nodes = (nodes[-1], *nodes[:-1])
        q_V[[draft.token_N[i] for i in nodes[1:]]] = 0
    hub = -1 if group.law is None else draft.laws[group.law].top(1)[0]
    for number, child in enumerate(nodes):
        x = draft.token_N[child]
        law_V = q_V
        chosen = group.drawn is Drawn.CHOSEN or (group.drawn is Drawn.GREEDY_PLUS_ONE and number > 0)
        if group.drawn is Drawn.HUB and number > 0:
            chosen, q_V[hub] = number > 1 or draft.token_N[nodes[0]] != hub, 0
        if chosen or q_V[x] == 0:
            law_V = torch.zeros(size, dtype=torch.float64)
            law_V[x] = 1
        yield child, law_V / law_V.sum()
        if group.drawn is Drawn.DISTINCT:
            q_V[x] = 0


def matching(draft: Draft, laws: TargetLaws, coins: Coins, size: int) -> Verdict:
    return _walk(draft, laws, size, lambda law, node, depth: coins.choose(law, node, -1))


def racing(draft: Draft, laws: TargetLaws, coins: Coins, size: int) -> Verdict:
    return _walk(draft, laws, size, lambda law, node, depth: coins.race(law, depth)[0])


def _walk(draft: Draft, laws: TargetLaws, size: int, pick: Callable[[Law, int, int], int]) -> Verdict:
    node = ROOT
    kept: list[int] = []
    emitted: list[int] = []
    read: list[Law] = []
    while True:
        law = laws.law(node)
        read.append(law)
        token = pick(Law(vector(law, size)[law.ids], law.ids), node, len(kept) + 1)
        emitted.append(token)
        below = [i for i in range(len(draft)) if draft.parent_N[i] == node and draft.token_N[i] == token]
        if not below:
            return Verdict(tuple(kept), tuple(emitted), tuple(read))
        node = below[0]
        kept.append(node)


def vector(law: Law, size: int) -> Tensor:
    """float64 [V], a copy."""
    out_V = torch.zeros(size, dtype=torch.float64)
    out_V[law.ids] = law.prob_S.double()
    return out_V


ORACLES: dict[str, Oracle] = {"match": matching, "chain": rejection, "tree": rejection, "coupled": racing}
"""Verifier name -> its oracle."""
