"""Growing trees: from a drafter that can expand nodes to drafts of every shape.

One loop serves chains and trees, greedy and sampled, one sequence and a batch. Level by level,
the nodes that may have children are expanded in one pass of the drafter. Their children are drawn
by the rule that the verifier asks for. The distribution really drawn from is recorded.

Shape letters: F nodes of a frontier (all sequences together), D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from outpace.cache.base import Lease
from outpace.coins import Coins
from outpace.sampling import Warp
from outpace.tree.dynamic import Dynamic, Paths, Scale, draw
from outpace.tree.mask import is_chain
from outpace.tree.shapes import children
from outpace.types import ROOT, Budget, Draft, Drawn, Group, Law, Rooted, Signals

S = TypeVar("S")


@dataclass(frozen=True, slots=True, eq=False)
class DraftRow(Generic[S]):
    """One sequence for which a draft is wanted."""

    state: S
    """The drafter's own, from ``Drafter.begin``."""
    tokens: Sequence[int]
    """All committed ids, the pending token last. Read only; valid during the call."""
    budget: Budget
    coins: Coins
    """Stream DRAFT; under the verifier `coupled` its ``race`` is the target's own."""
    warp: Warp
    """The sequence's sampling settings and history: p and q go through the same code."""
    drawn: Drawn
    """How to draw if the drafter has a distribution; CHOSEN at temperature 0. CHOSEN is always legal."""
    lease: Lease | None = None
    """The sequence's slot in the target's cache; None if nobody lends it."""
    chain: bool = False
    """Whether no node may have two children: the verifier, or the target, takes chains only. The
    budget's shape is a chain then, which matters to drafters that branch by their own reasons."""
    grower: Callable[[DraftRow[Any], Scale], Growing] | None = None
    """Grows the draft in the place of the budget's shape, where there are guesses of others already."""

    def fault(self, draft: Draft) -> str | None:
        """Say what a draft has that was not asked for."""
        most, depth = self.budget, draft.levels
        nodes, rows = len(draft), draft.num_rows - 1
        if nodes > most.max_nodes or depth > most.max_depth or rows > most.max_rows:
            return (
                f"{nodes} nodes, {depth} levels and {rows} rows, where {most.max_nodes}, "
                f"{most.max_depth} and {most.max_rows} were granted"
            )
        if self.chain and not is_chain(draft.parent_N):
            return "several branches, where chains alone can be checked"
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Branch(Rooted, Generic[S]):
    """The nodes of one sequence that are to be expanded together."""

    state: S
    tokens: Sequence[int]
    """Committed ids, the pending token last."""
    nodes: tuple[int, ...]
    """Draft nodes; ``(ROOT,)`` in the first call."""
    token_N: Sequence[int]
    """Tokens of all nodes drawn so far."""
    parent_N: Sequence[int]


Expand = Callable[[Sequence[Branch[Any]]], tuple[Tensor, "Tensor | None"]]
Estimate = Callable[[Sequence[Branch[Any]]], Tensor]
"""Float32 [F]: chance that each node, or a draw below it, is accepted, given that all above it are."""


Level = tuple[Sequence[int], Sequence[float], "Sequence[Law | None]"]
"""A guess per sequence, their probabilities, and the distributions of those that were drawn."""
Descend = Callable[[Sequence[DraftRow[Any]], Sequence[Branch[Any]], int], Sequence[Level]]


class Growing(Protocol):
    """A draft under construction, by whatever rule it grows."""

    row: DraftRow[Any]
    tokens: list[int]
    parents: list[int]
    q: list[float]
    """Probability that the drafter gave to each node's token."""
    open: list[int]
    """Nodes that will be expanded next."""
    reach: dict[int, float]
    """Expanded node -> chance, as the drafter estimates, that it and all above it are accepted;
    empty where nobody asks."""

    def may_grow(self, depth: int) -> bool:
        """Whether another level is wanted; if so ``open`` holds the nodes to expand."""

    def level(self, logits_FD: Tensor, id_D: Tensor | None, paths: Paths, depth: int) -> None:
        """Draw the children of the open nodes, and open the next; see ``Paths``."""

    def finish(self) -> tuple[Draft, Sequence[int] | None]:
        """The draft, and what its nodes were called in ``Branch``, if that changed."""


Spread = Callable[[Sequence[Growing], Sequence[Branch[Any]]], "Sequence[Draft] | None"]


@dataclass(slots=True, eq=False)
class Fixed:
    """A draft under construction that follows a template, or goes on as a chain, which may have siblings."""

    row: DraftRow[Any]
    kids: dict[int, list[int]] | None
    """Template: place -> places of its children; None grows a chain."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    laws: list[Law] = field(default_factory=list)
    q: list[float] = field(default_factory=list)
    """Probability that the drafter gave to each node's token."""
    place: list[int] = field(default_factory=list)
    """Node -> its place in the template."""
    open: list[int] = field(default_factory=lambda: [ROOT])
    """Nodes that will be expanded next."""
    reach: dict[int, float] = field(default_factory=dict)
    wanted: int = 1
    """Tokens of a level of a chain."""

    def fan(self, node: int) -> int:
        """How many children the budget and the template grant this node."""
        if self.kids is None:
            wanted = self.wanted
        else:
            wanted = len(self.kids.get(ROOT if node == ROOT else self.place[node], ()))
        return min(wanted, self.row.budget.max_nodes - len(self.tokens))

    def add(
        self, parent: int, picked: Sequence[int], probs: Sequence[float], law: Law | None, drawn: Drawn
    ) -> list[int]:
        """Hang the drawn tokens below ``parent``; a repeated draw names its node again."""
        places = None if self.kids is None else self.kids[ROOT if parent == ROOT else self.place[parent]]
        at: dict[int, int] = {}
        for token, prob in zip(picked, probs, strict=True):
            if token not in at:
                if places is not None:
                    self.place.append(places[len(at)])
                at[token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
                self.q.append(prob)
        row = None
        if law is not None:
            row = len(self.laws)
            self.laws.append(law)
        self.groups.append(Group(parent, drawn, tuple(at[token] for token in picked), row))
        return list(at.values())

    def may_grow(self, depth: int) -> bool:
        self.open = [node for node in self.open if self.fan(node) > 0]
        return depth < self.row.budget.max_depth and bool(self.open)

    def level(self, logits_FD: Tensor, id_D: Tensor | None, paths: Paths, depth: int) -> None:
        row, grown, table = self.row, [], self.row.budget.shape.siblings
        if table:  # by the distribution alone, before anything is drawn from it
            sure, later = float(logits_FD.softmax(-1).max()), row.budget.max_depth - depth - 1
            most = table[min(int(len(table) * sure), len(table) - 1)]
            self.wanted = max(1, min(most, row.budget.max_nodes - len(self.tokens) - later))
        if row.drawn is Drawn.CHOSEN:
            most = max(self.fan(node) for node in self.open)
            tokens_Fk, probs_Fk = row.warp.ranking(logits_FD, paths, most, id_D)
            for node, picked, probs in zip(self.open, tokens_Fk, probs_Fk, strict=True):
                fan = self.fan(node)
                if fan and picked:  # the settings may leave nothing
                    grown += self.add(node, picked[:fan], probs[:fan], None, Drawn.CHOSEN)
        else:
            for i, (node, path) in enumerate(zip(self.open, paths, strict=True)):
                fan = self.fan(node)
                if fan:
                    law = row.warp.guess(logits_FD[i], path, id_D)
                    picked = draw(law, fan, row.drawn, row.coins, node, depth + 1)
                    probs = [law.prob(token) for token in picked]
                    grown += self.add(node, picked, probs, law, row.drawn)
        self.open = grown[:1] if table else grown

    def straight(self, depth: int) -> int:
        """How many levels of one guess each follow, whatever they are."""
        budget = self.row.budget
        if self.kids is not None or budget.shape.siblings or budget.stop or budget.estimate:
            return 0
        return min(budget.max_depth - depth, budget.max_nodes - len(self.tokens))

    def finish(self) -> tuple[Draft, None]:
        return Draft(tuple(self.tokens), tuple(self.parents), tuple(self.groups), tuple(self.laws)), None


def grow(
    rows: Sequence[DraftRow[S]],
    expand: Expand,
    scale: Scale,
    estimate: Estimate | None = None,
    foresee: Estimate | None = None,
    descend: Descend | None = None,
    spread: Spread | None = None,
) -> list[tuple[Draft, Sequence[int] | None]]:
    """Grow one draft per row.

    Args:
        rows: budgets may differ; a budget without nodes gives an empty draft.
        expand: scores nodes, see ``ExpandingDrafter.expand``. Called once per level.
        scale: of the drafter's levels.
        estimate: see ``ExpandingDrafter.estimate``; called after ``expand`` where a budget asks.
        foresee: see ``ExpandingDrafter.foresee``; stop rules are then asked between it and the draw.
        descend: see ``ExpandingDrafter.descend``.
        spread: see ``ExpandingDrafter.spread``; asked at the first level.

    Returns:
        Drafts whose groups are CHOSEN at temperature 0 and otherwise drawn as asked; with each,
        for every node the number that ``expand`` knew it by, or None if all kept theirs.
    """
    trees = [_begun(row, scale) for row in rows]
    depth = 0
    while True:
        growing = [tree for tree in trees if tree.may_grow(depth)]
        if foresee is None:
            growing = _ask_stop_rules(growing, depth)
        if not growing:
            return [tree.finish() for tree in trees]
        branches = [Branch(t.row.state, t.row.tokens, tuple(t.open), t.tokens, t.parents) for t in growing]
        if spread is not None and not depth and (made := spread(growing, branches)) is not None:
            whole = dict(zip(map(id, growing), made, strict=True))
            return [(whole[id(t)], None) if id(t) in whole else t.finish() for t in trees]
        if descend is not None and (done := _descend(growing, branches, descend, depth)):
            depth += done
            continue
        logits_FD, id_D = expand(branches)
        if estimate is not None:
            _estimate(growing, branches, estimate, depth)
        if foresee is not None:
            growing, branches, logits_FD = _foresee(growing, branches, foresee, logits_FD, depth)
        start = 0
        for tree, branch in zip(growing, branches, strict=True):
            stop = start + len(tree.open)
            paths = [branch.path_tokens(node) for node in branch.nodes]
            tree.level(logits_FD[start:stop], id_D, paths, depth)
            start = stop
        depth += 1


def _descend(trees: Sequence[Growing], branches: Sequence[Branch[Any]], descend: Descend, depth: int) -> int:
    """Go down levels of chains in one call of the drafter, and give how many."""
    chains = [tree for tree in trees if isinstance(tree, Fixed)]
    most = min(tree.straight(depth) for tree in chains) if len(chains) == len(trees) else 0
    levels = descend([tree.row for tree in chains], branches, most) if most > 1 else ()
    for level in levels:
        for tree, token, prob, law in zip(chains, *level, strict=True):
            tree.open = tree.add(tree.open[0], [token], [prob], law, tree.row.drawn)
    return len(levels)


def _begun(row: DraftRow[Any], scale: Scale) -> Growing:
    if row.grower is not None:
        return row.grower(row, scale)
    shape = row.budget.shape
    if shape.beam and not shape.siblings:
        return Dynamic(row, scale)
    return Fixed(row, None if shape.parent_N is None else children(shape.parent_N))


def _estimate(trees: list[Growing], branches: Sequence[Branch[Any]], estimate: Estimate, depth: int) -> None:
    """Note how likely verification gets through the open nodes, where a rule will read that."""
    asking = [t.row.budget.estimate and depth + 1 < t.row.budget.max_depth for t in trees]
    # The pending token is committed: nobody judges it.
    chance_F: list[float] = estimate(branches).tolist() if depth and any(asking) else []
    start = 0
    for tree, asks in zip(trees, asking, strict=True):
        for i, node in enumerate(tree.open if asks else (), start):
            tree.reach[node] = tree.reach[tree.parents[node]] * chance_F[i] if depth else 1.0
        start += len(tree.open)


def _foresee(
    trees: list[Growing], branches: list[Branch[Any]], foresee: Estimate, logits_FD: Tensor, depth: int
) -> tuple[list[Growing], list[Branch[Any]], Tensor]:
    """Close the branches below which no draw is worth while: nothing is drawn there yet."""
    if not any(tree.row.budget.stop for tree in trees):
        return trees, branches, logits_FD
    asked = any(tree.row.budget.estimate for tree in trees)
    chance_F: list[float] = foresee(branches).tolist() if asked else []
    keep, kept, start = [], [], 0
    for tree, branch in zip(trees, branches, strict=True):
        for i, node in enumerate(branch.nodes if tree.row.budget.estimate else (), start):
            tree.reach[node] = (1.0 if node == ROOT else tree.reach[tree.parents[node]]) * chance_F[i]
        _ask(tree, depth, [tree.reach[node] for node in branch.nodes] if tree.reach else None)
        keep += [start + i for i, node in enumerate(branch.nodes) if node in tree.open]
        start += len(branch.nodes)
        if tree.open:
            kept.append((tree, replace(branch, nodes=tuple(tree.open))))
    return [tree for tree, _ in kept], [branch for _, branch in kept], logits_FD[keep]


def _ask_stop_rules(trees: list[Growing], depth: int) -> list[Growing]:
    """Close the branches that a stop rule ends. It reads kept tokens only, so nothing is lost."""
    if depth == 0:
        return trees
    for tree in trees:
        _ask(tree, depth, [tree.reach[tree.parents[n]] for n in tree.open] if tree.reach else None)
    return [tree for tree in trees if tree.open]


def _ask(tree: Growing, depth: int, reach: Sequence[float] | None) -> None:
    if tree.row.budget.stop is not None:
        signals = Signals(
            torch.full((len(tree.open),), depth),
            torch.tensor([1.0 if n == ROOT else tree.q[n] for n in tree.open]),
            None if reach is None else torch.tensor(reach),
        )
        more = tree.row.budget.stop.more(signals).tolist()
        tree.open = [n for n, go in zip(tree.open, more, strict=True) if go]
