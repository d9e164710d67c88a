"""One tree of guesses from text and of a head's, with the law of every sibling.

The text's guesses are there before the head is asked. They are nodes of the tree like others: the head is
asked what follows them where that pays, and its guesses stand beside them.

    pending -+- sat  (text)  -+- down (text)
             |                +- on   (head, below a guess of the text)
             +- slept (head)

At temperature 0 all are chosen, and the likeliest stay. A token that both propose is one node, whose chance
follows from what both say (`Joint`). The head's other tokens share the rest in their own proportions.

Above it C are the text's children of a node, fixed before anything is drawn. The head draws from

    q' = norm(q, without C)

which is recorded, and its draw is judged first, then C on what is left of p. So one draw is kept with
p(C) + sum of min(p, q') outside of C, the most of all orders. Nothing is taken out after a draw. Where
q' has no mass, nothing is drawn. The number of draws grows with tokens that are drawn and stay
(`tree.dynamic`).

Source of the merged tree: RASD, arXiv:2503.03434; of trees with retrieved nodes: Graft, arXiv:2605.20104.
Law: tests/methods/hybrid/test_law.py
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add
from typing import Any

from torch import Tensor

from outpace.drafters.worth import reached
from outpace.models.branching import Beginning
from outpace.tree.dynamic import MOST, Dynamic, Paths, Scale
from outpace.types import Draft, Drawn, Group, Law

UNSEEN = 0.01
"""Chance of a token that is not among the head's likeliest."""
SURE = 0.995
"""No chance is above this, so that its odds are finite."""
RATE = 0.1
"""How fast `Joint` follows what happens."""


@dataclass(slots=True)
class Joint:
    """The chance of a token that both propose: log odds, weighted. Their errors go together, so that weights
    that add to one would be those of one witness, and to two those of independent ones.
    """

    text: float = 0.8
    head: float = 0.5
    bias: float = 0.0

    def chance(self, text: float, head: float) -> float:
        return _chance(self.bias + self.text * _odds(text) + self.head * _odds(head))

    def learn(self, text: float, head: float, right: bool) -> None:
        """Take in one such token that verification got to."""
        wrong = RATE * (right - self.chance(text, head))
        self.bias += wrong
        self.text += wrong * _odds(text) / 4
        self.head += wrong * _odds(head) / 4


@dataclass(frozen=True)
class Planted:
    """Guesses that are there before the head is asked: parents before children."""

    token_N: tuple[int, ...] = ()
    parent_N: tuple[int, ...] = ()
    own_N: tuple[float, ...] = ()
    """Chance that each is kept if its parent is."""
    joint: Joint = field(default_factory=Joint)

    @cached_property
    def said_N(self) -> array[float]:
        """Chance that the head gave to each; below 0 until the tree grows there."""
        return array("d", [-1.0] * len(self.token_N))

    @property
    def value_N(self) -> list[float]:
        """Chance that each is reached and kept."""
        return reached(self.own_N, self.parent_N)

    def first(self, count: int) -> Planted:
        if count >= len(self.token_N):
            return self
        return Planted(self.token_N[:count], self.parent_N[:count], self.own_N[:count], self.joint)


class Union(Dynamic):
    """Grows a head's guesses into a tree that has guesses already.

    Args:
        row: as the head was asked.
        planted: of which the first stay, as many as the budget has nodes: a head may want none at all.
    """

    def __init__(self, row: Any, scale: Scale, planted: Planted) -> None:
        super().__init__(row, scale)
        self.pays = True
        self._said_N = planted.said_N
        planted = planted.first(row.budget.max_nodes)
        self._joint, self._own = planted.joint, list(planted.own_N)
        self._below_N: dict[int, list[int]] = {}
        for node, (token, parent, own) in enumerate(
            zip(planted.token_N, planted.parent_N, self._own, strict=True)
        ):
            self._add(parent, token, own, own * self._worth(parent))
            self._below_N.setdefault(parent, []).append(node)

        weight = planted.joint.bias, planted.joint.text, planted.joint.head
        self.begins = Beginning(
            token_P=planted.token_N,
            parent_P=planted.parent_N,
            own_P=planted.own_N,
            said_P=self._said_N,
            weight=weight,
        )

    def finish(self) -> tuple[Draft, list[int] | None]:
        if self.chosen:
            return super().finish()
        # Behind the draws of the same parent: those are judged first.
        chosen = [Group(parent, Drawn.CHOSEN, tuple(nodes)) for parent, nodes in self._below_N.items()]
        groups = (*self._groups, *chosen)
        return Draft(tuple(self.tokens), tuple(self.parents), groups, tuple(self._laws)), None

    def _beside(self, opened: Sequence[int]) -> list[int]:
        return [node for parent in opened for node in self._below_N.get(parent, ())]

    def _promise(self, node: int) -> float:
        return self._value[node] * self._rest(node)

    def _rest(self, node: int) -> float:
        """Chance that none of the text's children of a node is right."""
        return max(0.0, 1.0 - reduce(add, [self._own[child] for child in self._below_N.get(node, ())], 0.0))

    def _left(self, node: int, law: Law) -> Law | None:
        taken = [self.tokens[child] for child in self._below_N.get(node, ())]
        return law.without(taken) if taken else law

    def _free(self, node: int) -> float:
        return self._worth(node) * self._rest(node)

    def _choose(self, logits_FD: Tensor, id_D: Tensor | None, paths: Paths) -> list[int]:
        most = min(MOST, self._budget.max_nodes)
        tokens_Fk, probs_Fk = self.row.warp.ranking(logits_FD, paths, most, id_D)
        fresh: list[int] = []
        for node, picked, probs in zip(self.open, tokens_Fk, probs_Fk, strict=True):
            said = dict(zip(picked, probs, strict=True))
            there = self._below_N.get(node, [])
            for child in there:
                head = said.pop(self.tokens[child], UNSEEN)
                self._said_N[child] = head
                self._own[child] = self._joint.chance(self._own[child], head)
            over = reduce(add, [self._own[child] for child in there], 0.0)
            if over > SURE:
                for child in there:
                    self._own[child] *= SURE / over
            self._revalue()
            # What the head gives to other tokens, as shares of the chance that the text is wrong.
            mass = 1.0 - reduce(add, [self._said_N[child] for child in there], 0.0)
            scale = self._rest(node) / max(mass, UNSEEN)
            for token, prob in said.items():
                value = self._worth(node) * (prob * min(scale, 1.0 / max(prob, UNSEEN)))
                if value > self.least or not self.tokens:
                    fresh.append(self._add(node, token, prob, value))
        return fresh

    def _revalue(self) -> None:
        for node, own in enumerate(self._own):
            self._value[node] = own * self._worth(self.parents[node])


def _odds(chance: float) -> float:
    chance = min(SURE, max(1.0 - SURE, chance))
    return math.log(chance / (1.0 - chance))


def _chance(odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-odds))
