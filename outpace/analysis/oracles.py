"""Oracles of the verifiers that came after `outpace.verifiers.oracle`, in its manner.

Slow and obvious: dense float64 vectors, whole sums, no laziness. Shared with the fast ones by
convention: the keys of the coins, and the order of p's support along a uniform.

Shape letters: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.coins import Coins
from outpace.types import ROOT, Draft, Drawn, Law, Verdict
from outpace.verifiers import oracle
from outpace.verifiers.base import TargetLaws
from outpace.verifiers.oracle import Oracle, draws_of, vector
from outpace.verifiers.typical import TypicalConfig

Attempt = Callable[[int, Tensor], tuple["int | None", Tensor]]
"""(node, p) -> the drawn child kept, or None and what is left of p."""


def block(draft: Draft, laws: TargetLaws, coins: Coins, size: int) -> Verdict:
    """Oracle of `block`: all weights, all thresholds, then the longest prefix below its own."""
    count = len(draft)
    read = [laws.law(node) for node in range(-1, count)]
    p = [vector(law, size) for law in read]
    q = [q_V for group in draft.groups for _, q_V in draws_of(draft, group, size)]
    weight = [1.0]
    for x, p_V, q_V in zip(draft.token_N, p, q, strict=False):
        weight.append(min(1.0, weight[-1] * float(p_V[x] / q_V[x])))
    left = [(weight[i] * p[i] - q[i]).clamp(min=0) for i in range(count)]
    keep = []
    for w, rest_V in zip(weight, left, strict=False):
        below = float(rest_V.sum()) + 1 - w
        keep.append(float(rest_V.sum()) / below if below > 0 else 1.0)
    keep.append(weight[count])
    kept = max((i for i in range(1, count + 1) if coins.flip(keep[i], i - 1, 0)), default=0)
    rest_V = p[count] if kept == count or left[kept].sum() == 0 else left[kept]
    if kept < count and left[kept].sum() == 0:
        rest_V = p[kept]
    extra = coins.choose(_law(rest_V, read[kept]), kept - 1, -1)
    return Verdict(tuple(range(kept)), (*draft.token_N[:kept], extra), tuple(read[: kept + 1]))


def k_seq(draft: Draft, laws: TargetLaws, coins: Coins, size: int) -> Verdict:
    """Oracle of `k_seq`: the discount by bisection over the whole vocabulary."""

    def attempt(node: int, p_V: Tensor) -> tuple[int | None, Tensor]:
        for group in draft.groups:
            if group.parent != node or group.drawn is Drawn.CHOSEN or group.law is None:
                continue
            q_V = vector(draft.laws[group.law], size)
            drawn = [child for child in group.nodes if q_V[draft.token_N[child]] > 0]
            if not drawn:
                continue
            low, high = 1.0, float(len(drawn))
            for _ in range(100):
                rho = (low + high) / 2
                beta = float(torch.minimum(q_V, p_V / rho).sum())
                if 1 - (1 - beta) ** len(drawn) > rho * beta:
                    low = rho
                else:
                    high = rho
            kept_V = torch.minimum(q_V, p_V / high)
            for trial, child in enumerate(drawn):
                x = draft.token_N[child]
                if coins.flip(float(p_V[x] / (high * q_V[x])), node, trial):
                    return child, p_V
            if kept_V.sum() > 0:
                beta = float(kept_V.sum())
                left_V = (p_V - kept_V * (1 - (1 - beta) ** len(drawn)) / beta).clamp(min=0)
                p_V = left_V if left_V.sum() > 0 else p_V
        return None, p_V

    return _walk(draft, laws, coins, size, attempt)


def greedy_plus_one(draft: Draft, laws: TargetLaws, coins: Coins, size: int) -> Verdict:
    def attempt(node: int, p_V: Tensor) -> tuple[int | None, Tensor]:
        for group in draft.groups:
            if group.parent != node or group.drawn is Drawn.CHOSEN or group.law is None:
                continue
            child, q_V = next(iter(draws_of(draft, group, size)))
            x = draft.token_N[child]
            if vector(draft.laws[group.law], size)[x] == 0:
                continue
            if coins.flip(float(p_V[x] / q_V[x]), node, 0):
                return child, p_V
            left_V = (p_V - q_V).clamp(min=0)
            p_V = left_V if left_V.sum() > 0 else p_V
        return None, p_V

    return _walk(draft, laws, coins, size, attempt)


def spechub(draft: Draft, laws: TargetLaws, coins: Coins, size: int) -> Verdict:
    """Oracle of `spechub`: a table of all pairs, and what each gives to whom."""

    def attempt(node: int, p_V: Tensor) -> tuple[int | None, Tensor]:
        for group in draft.groups:
            if group.parent != node or group.drawn is Drawn.CHOSEN or group.law is None:
                continue
            q_V = vector(draft.laws[group.law], size)
            tokens = [draft.token_N[child] for child in group.nodes[:2]]
            if q_V[tokens[0]] == 0:
                continue
            if len(tokens) == 1:
                if coins.flip(float(p_V[tokens[0]] / q_V[tokens[0]]), node, 0):
                    return group.nodes[0], p_V
                left_V = (p_V - q_V).clamp(min=0)
                p_V = left_V if left_V.sum() > 0 else p_V
                continue
            (hub,) = draft.laws[group.law].top(1)
            rest_V = q_V.clone()
            rest_V[hub] = 0
            rest_V /= rest_V.sum()
            (x,) = (set(tokens) - {hub}) if hub in tokens else (-1,)
            if x < 0 or not rest_V[x] > 0:
                continue
            first_V, second_V = q_V.clone(), q_V[hub] * rest_V  # pairs by the token beside the hub
            first_V[hub] = 0
            to_first_V = torch.minimum(p_V, first_V)
            to_second_V = torch.minimum(p_V - to_first_V, second_V)
            others_V = p_V - to_first_V - to_second_V
            others_V[hub] = 0
            spare_first, spare_second = first_V.sum() - to_first_V.sum(), second_V.sum() - to_second_V.sum()
            take = torch.minimum(p_V[hub], spare_second)
            if tokens[0] == hub:
                given, pair, chance, spare = to_second_V[x], second_V[x], take, spare_second
            else:
                given, pair, chance, spare = to_first_V[x], first_V[x], p_V[hub] - take, spare_first
            if coins.flip(float(given / pair), node, 0):
                return group.nodes[tokens.index(x)], p_V
            if coins.flip(float(chance / spare) if spare > 0 else 1.0, node, 1):
                return group.nodes[tokens.index(hub)], p_V
            p_V = others_V if others_V.sum() > 0 else p_V
        return None, p_V

    return _walk(draft, laws, coins, size, attempt)


def _walk(draft: Draft, laws: TargetLaws, coins: Coins, size: int, attempt: Attempt) -> Verdict:
    """Try what was drawn; else draw the extra token, and follow it if it is a child."""
    node = ROOT
    kept: list[int] = []
    read: list[Law] = []
    while True:
        law = laws.law(node)
        read.append(law)
        child, rest_V = attempt(node, vector(law, size))
        if child is None:
            extra = coins.choose(_law(rest_V, law), node, -1)
            for i in range(len(draft)):
                if draft.parent_N[i] == node and draft.token_N[i] == extra:
                    child = i
        if child is None:
            emitted = (*(draft.token_N[i] for i in kept), extra)
            return Verdict(tuple(kept), emitted, tuple(read))
        kept.append(child)
        node = child


@dataclass
class _Node:
    """A node of the tree that `traversal` takes apart."""

    number: int
    law: Law
    p_V: Tensor
    weight: float | None = None
    """Set once, when the node becomes the leftmost child; then changed by refusals below it."""
    draws: list[tuple[_Node, int, Tensor]] = field(default_factory=list)
    """Child, its token, and the distribution of the draw; in the order they are tried."""
    parent: _Node | None = None


def traversal(draft: Draft, laws: TargetLaws, coins: Coins, size: int) -> Verdict:
    """Oracle of `traversal`: cuts leaves off a mutable tree, the leftmost first."""
    root = _Node(ROOT, laws.law(ROOT), vector(laws.law(ROOT), size), 1.0)
    nodes = {ROOT: root}
    for group in draft.groups:
        parent = nodes[group.parent]
        for child, q_V in draws_of(draft, group, size):
            node = _Node(child, laws.law(child), vector(laws.law(child), size), parent=parent)
            parent.draws.append((node, draft.token_N[child], q_V.clone()))
            nodes.setdefault(child, node)  # what hangs below is under the first that names it
    judged: dict[int, int] = {}
    while True:
        leaf = root
        while leaf.draws:
            child_node, x, q_V = leaf.draws[0]
            if child_node.weight is None:
                assert leaf.weight is not None
                child_node.weight = min(1.0, leaf.weight * float(leaf.p_V[x] / q_V[x]))
            leaf = child_node
        times = judged.get(leaf.number, 0)
        judged[leaf.number] = times + 1
        assert leaf.weight is not None
        if leaf.parent is None or coins.flip(leaf.weight, leaf.number, times):
            kept = draft.path(leaf.number)
            extra = coins.choose(_law(leaf.p_V, leaf.law), leaf.number, -1)
            read = (root.law, *(laws.law(node) for node in kept))
            return Verdict(kept, (*(draft.token_N[i] for i in kept), extra), read)
        up = leaf.parent
        _, _, q_V = up.draws.pop(0)
        assert up.weight is not None
        left_V = (up.weight * up.p_V - q_V).clamp(min=0)
        mass = float(left_V.sum())
        if mass > 0:
            up.p_V = left_V / mass
        if mass + 1 - up.weight > 0:
            up.weight = mass / (mass + 1 - up.weight)


def typical(draft: Draft, laws: TargetLaws, coins: Coins, size: int) -> Verdict:
    """Oracle of `typical`: every path is rated from the root."""
    config = TypicalConfig()
    best, rating = ROOT, (0, 0.0)
    for node in range(len(draft)):
        path, plausible, score = draft.path(node), True, 0.0
        for parent, child in zip((ROOT, *path), path, strict=False):
            p_V = vector(laws.law(parent), size)
            entropy = -sum(x * math.log(x) for x in p_V.tolist() if x > 0)
            prob = float(p_V[draft.token_N[child]])
            plausible &= prob > min(config.epsilon, config.delta * math.exp(-entropy))
            score += math.log(prob) if prob > 0 else -math.inf
        if plausible and (len(path), score) > rating:
            best, rating = node, (len(path), score)
    kept = draft.path(best)
    law = laws.law(best)
    extra = coins.choose(_law(vector(law, size), law), best, -1)
    read = tuple(laws.law(node) for node in (ROOT, *kept))
    return Verdict(kept, (*(draft.token_N[i] for i in kept), extra), read)


def _law(rest_V: Tensor, law: Law) -> Law:
    """A distribution on the support of another."""
    return Law(rest_V[law.ids] / rest_V.sum(), law.ids)


ORACLES: dict[str, Oracle] = {
    **oracle.ORACLES,
    "block": block,
    "k_seq": k_seq,
    "greedy_plus_one": greedy_plus_one,
    "spechub": spechub,
    "traversal": traversal,
    "typical": typical,
}
"""Verifier name -> its oracle."""
