"""Trees that grow where the drafter's own probabilities say that a guess is likely to be reached.

The value of a place for a guess is the probability, by the drafter's own distributions, that verification
gets there. For that, the parent is accepted, and every sibling before it is refused. A chosen tree takes
the most valuable nodes of all that were looked at. A tree drawn without replacement draws slots, most
valuable first. It never looks at a token before it has decided to draw it, and keeps what it has drawn. For
the other kinds of draws the distribution alone says how many siblings a node gets, before any of them is
drawn. Their verifiers count siblings (`k_seq` divides by a function of their number). A number that depends
on the draws would tell them something of the tokens.

Every level costs one pass of the drafter, for all branches that go on together. It opens if what it is
expected to bring is more than its price and that of the rows (``Price``). That is the values of the nodes
that go on, times how likely the level before was kept. A guess gets a row if it is worth more than the row.
At temperature 0 the drafter's logits are first divided by what makes its probabilities those of being kept.

Sources: DySpec, arXiv:2410.11744 (values and slots; its threshold variant with one pass per layer,
the test turned round). EAGLE-2, arXiv:2406.16858 (expand and re-rank, for CHOSEN drafts alone).

Shape letters: F open nodes, D draft vocabulary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add
from typing import Any

from torch import Tensor

from outpace.coins import Coins
from outpace.tree.shapes import LEAST
from outpace.types import ROOT, Draft, Drawn, Group, Law, Price

MOST = 8
"""Most children of one node."""
_HALVING = math.log(2.0)

Paths = Sequence[Sequence[int]]
"""Of the open nodes, in the order of their logits: the tokens from the first guess down to each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What a drafter says of its levels; the last one stands for all further ones."""

    level_D: tuple[float, ...] = (0.1,)
    """What they cost where nothing was measured, in passes of the target over one row."""
    temper_D: tuple[float, ...] = ()
    """What to divide its logits by so that its probabilities are those of being kept at temperature 0.
    Empty: nothing."""


class Dynamic:
    """One draft under construction.

    Args:
        row: a ``DraftRow`` whose budget has a dynamic shape.
        scale: of the drafter's levels.
    """

    begins: Any = None
    """Guesses that it has before it grows: ``outpace.models.branching.Beginning``."""

    def __init__(self, row: Any, scale: Scale) -> None:
        self.row, self.temper_D = row, scale.temper_D if row.warp.greedy else ()
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.q: list[float] = []
        """Probability that the drafter gave to each node's token."""
        self.open: list[int] = [ROOT]
        """Nodes that will be expanded next."""
        self.reach: dict[int, float] = {}
        """See ``Growing``."""
        self._value: list[float] = []
        self._groups: list[Group] = []
        self._laws: list[Law] = []
        self.chosen = row.drawn is Drawn.CHOSEN
        self._budget = row.budget
        self.least = row.budget.shape.least / max(1, row.budget.max_nodes)
        self.price = row.budget.price or Price.assumed(scale.level_D)
        self.pays = self.least > 0.0
        """Whether levels and rows are weighed; a threshold of 0 fills the tree."""

    def may_grow(self, depth: int) -> bool:
        """Whether another level is worth a pass; ``open`` holds the nodes to expand."""
        return depth < self._budget.max_depth and self._budget.max_nodes > 0 and bool(self.open)

    def level(self, logits_FD: Tensor, id_D: Tensor | None, paths: Paths, depth: int) -> None:
        """Draw below the open nodes, whose logits these are, and say which are open next."""
        last, opened = depth + 1 == self._budget.max_depth, list(self.open)
        if self.chosen:
            temper = self.temper(depth)
            fresh = self._choose(logits_FD if temper == 1.0 else logits_FD / temper, id_D, paths)
            alive = {node for node, _ in self._best()}
            fresh = [node for node in fresh if node in alive]
        elif self.row.drawn is Drawn.DISTINCT:
            fresh = self._sample(logits_FD, id_D, paths, last)
        else:
            fresh = self._sample_at_once(logits_FD, id_D, paths, depth)
        room = len(self.tokens) < self._budget.max_nodes or self.chosen
        fresh = [node for node in fresh if room and self._value[node] > self.least]
        fresh = sorted(fresh + self._beside(opened), key=lambda node: -self._promise(node))
        fresh = fresh[: self._budget.shape.beam or MOST]
        self.open = sorted(fresh) if self._opens(fresh, depth + 1) else []

    def temper(self, depth: int) -> float:
        """What the logits of a level are divided by before guesses are chosen."""
        return self.temper_D[min(depth, len(self.temper_D) - 1)] if self.temper_D else 1.0

    def _beside(self, opened: Sequence[int]) -> list[int]:
        """Nodes below those just expanded that were there before."""
        return []

    def _promise(self, node: int) -> float:
        """Chance that verification gets to a node, and has nothing below it that was there before."""
        return self._value[node]

    def _opens(self, fresh: Sequence[int], depth: int) -> bool:
        """Whether the level below these nodes, likeliest first, should bring more than it costs."""
        if not self.pays or not fresh:
            return bool(fresh)
        # The likeliest children of this level, over what was opened for them: the next should do as well.
        best: dict[int, float] = {}
        for node in fresh:
            parent = self.parents[node]
            best[parent] = max(best.get(parent, 0.0), self._value[node])
        kept = reduce(add, best.values()) / reduce(add, map(self._worth, best))  # rounded as written
        more = [kept * self._promise(node) for node in fresh]
        if self.chosen:  # what is likelier takes the place of what is not
            gain = self._gain([*self._value, *more]) - self._gain(self._value)
        else:
            gain = self._gain(more, len(self.tokens))
        return gain > self.price.level(depth)

    def _gain(self, value_N: Sequence[float], rows: int = 0) -> float:
        """What the best nodes bring over the price of their rows, behind so many."""
        ranked = sorted(value_N, reverse=True)[: self._budget.max_nodes]
        return reduce(add, [max(0.0, value - self.price.row(i)) for i, value in enumerate(ranked, rows)], 0.0)

    def finish(self) -> tuple[Draft, list[int] | None]:
        """The draft, and for each of its nodes the number it had while the tree grew.

        None where all nodes stayed and kept their numbers.
        """
        if not self.chosen:
            drawn = tuple(self._groups), tuple(self._laws)
            return Draft(tuple(self.tokens), tuple(self.parents), *drawn), None
        kept = sorted(node for node, _ in self._best())
        place = {ROOT: ROOT, **{node: i for i, node in enumerate(kept)}}
        # Created parents first, and siblings best first: the order survives the cut.
        tokens, parents = [self.tokens[node] for node in kept], [place[self.parents[node]] for node in kept]
        draft = Draft.chosen(tokens, parents)
        return draft, None if kept == list(range(len(self.tokens))) else kept

    def _best(self) -> list[tuple[int, float]]:
        """The most valuable nodes, as many as the budget has and as pay. Closed under ancestors,
        since a child is worth at most its parent and comes after it.
        """
        ranked = sorted(enumerate(self._value), key=lambda pair: (-pair[1], pair[0]))
        most = min(len(ranked), self._budget.max_nodes)
        while self.pays and most and ranked[most - 1][1] < self.price.row(most - 1):
            most -= 1
        return ranked[:most]

    def _choose(self, logits_FD: Tensor, id_D: Tensor | None, paths: Paths) -> list[int]:
        """Add the likeliest children of every open node as candidates."""
        most = min(MOST, self._budget.max_nodes)
        fresh = []
        tokens_Fk, probs_Fk = self.row.warp.ranking(logits_FD, paths, most, id_D)
        for node, picked, probs in zip(self.open, tokens_Fk, probs_Fk, strict=True):
            value = self._worth(node)
            for token, prob in zip(picked, probs, strict=True):
                if value * prob > self.least or not self.tokens:
                    fresh.append(self._add(node, token, prob, value * prob))
        return fresh

    def _sample(self, logits_FD: Tensor, id_D: Tensor | None, paths: Paths, last: bool) -> list[int]:
        """Draw slots of all open nodes, most valuable first, while they are worth their place.

        A slot has to leave room for the children of what was drawn already and is worth more.
        """
        row, fresh, laws = self.row, list[int](), dict[int, Law | None]()
        drawn: dict[int, list[int]] = {node: [] for node in self.open}
        slots = sorted((-self._free(node), node) for node in self.open)  # a heap
        while slots:
            worth, node = -slots[0][0], slots[0][1]
            wanted = 0 if last else sum(self._below(child, worth) for child in fresh)
            if self._budget.max_nodes - len(self.tokens) <= wanted or (worth <= self.least and self.tokens):
                break
            heapq.heappop(slots)
            picks = [self.tokens[child] for child in drawn[node]]
            if not picks:
                i = self.open.index(node)
                laws[node] = self._left(node, row.warp.guess(logits_FD[i], paths[i], id_D))
            law = laws[node]
            law_left = law.without(picks) if law is not None and picks else law
            if law is None or law_left is None or len(picks) == MOST or self._dear(worth, law_left):
                continue
            token = row.coins.choose(law_left, node, len(picks))
            prob = law_left.prob(token)
            fresh.append(self._add(node, token, law.prob(token), worth * prob))
            drawn[node].append(fresh[-1])
            heapq.heappush(slots, (-worth * (1.0 - prob), node))
        for node, children in drawn.items():
            self.group(node, children, laws.get(node))
        return fresh

    def _sample_at_once(self, logits_FD: Tensor, id_D: Tensor | None, paths: Paths, depth: int) -> list[int]:
        """Draw siblings together: their number follows from the distribution alone, before any is drawn."""
        row, fresh = self.row, list[int]()
        for i, node in enumerate(self.open):
            if not (left := self._budget.max_nodes - len(self.tokens)):
                break
            law = self._left(node, row.warp.guess(logits_FD[i], paths[i], id_D))
            fan = 0 if law is None else self._fan(law, self._free(node), left)
            if law is not None and fan:
                picks, at = draw(law, fan, row.drawn, row.coins, node, depth + 1), dict[int, int]()
                for token in dict.fromkeys(picks):  # an IID draw may repeat one
                    prob = law.prob(token)
                    at[token] = self._add(node, token, prob, self._worth(node) * prob)
                fresh += at.values()
                self.group(node, [at[token] for token in picks], law)
        return fresh

    def _fan(self, law: Law, worth: float, left: int) -> int:
        """How many siblings are expected to be worth their rows."""
        least = max(self.least, LEAST / self._budget.max_nodes)
        most = min(MOST, left)
        if self.row.drawn is Drawn.IID:
            refused = 1.0 - float(law.prob_S.square().sum())  # by the drafter's distribution, of a draw
            lost = [worth * refused**i for i in range(most + 1)]
        else:
            best = [law.prob(token) for token in law.top(most)]
            lost = [worth * (1.0 - taken) for taken in accumulate([0.0, *best])]
        fan = 0
        while fan + 1 < len(lost) and lost[fan] > least:
            if self.pays and lost[fan] - lost[fan + 1] <= self.price.row(len(self.tokens) + fan):
                break
            fan += 1
        return fan or min(most, 0 if self.tokens else 1)

    def _below(self, node: int, worth: float) -> int:
        """Guess how many slots below a node are worth more: values halve from level to level."""
        value = self._value[node]
        return 1 + int(math.log(value / worth) / _HALVING) if value > worth > 0 else 0

    def _dear(self, worth: float, law: Law) -> bool:
        """Whether a draw is worth less than its row: it is kept about as likely as its law is sure."""
        price = self.price.row(len(self.tokens)) if self.pays and self.tokens else 0.0
        return price > 0.0 and worth * float(law.prob_S.max()) <= price

    def _left(self, node: int, law: Law) -> Law | None:
        """What to draw from below a node; None: nothing."""
        return law

    def _free(self, node: int) -> float:
        """Value of the first draw below a node."""
        return self._worth(node)

    def _worth(self, node: int) -> float:
        return 1.0 if node == ROOT else self._value[node]

    def _add(self, parent: int, token: int, prob: float, value: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.q.append(prob)
        self._value.append(value)
        return len(self.tokens) - 1

    def group(self, parent: int, children: Sequence[int], law: Law | None) -> None:
        """Note children that were drawn from a distribution, in order; there may be none."""
        if children and law is not None:
            self._groups.append(Group(parent, self.row.drawn, tuple(children), len(self._laws)))
            self._laws.append(law)


def draw(law: Law, count: int, drawn: Drawn, coins: Coins, node: int, depth: int) -> list[int]:
    """Draw siblings from a distribution, in order.

    Args:
        count: draws wanted; of a smaller support all but IID give fewer, and HUB gives two at most.
        node: parent of the siblings, part of the coins' key.
        depth: of the siblings, for the race of COUPLED.
    """
    if drawn is Drawn.IID:
        return [coins.choose(law, node, i) for i in range(count)]
    if drawn is Drawn.COUPLED:
        return coins.race(law, depth, count)
    picked: list[int] = []
    if drawn is Drawn.GREEDY_PLUS_ONE:
        picked = law.top(count - 1)
    elif drawn is Drawn.HUB:
        picked, count = [coins.choose(law, node, 0)], min(count, 2)
        picked += [hub for hub in law.top(count - 1) if hub not in picked]
    while len(picked) < count:
        rest = law.without(picked) if picked else law
        if rest is None:
            break
        picked.append(coins.choose(rest, node, len(picked)))
    return picked
