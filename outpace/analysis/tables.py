"""Laws small enough to enumerate, and drafts made by hand over them.

A `World` gives a target distribution p and a draft distribution q for every context over a few tokens. A
*recipe* makes a draft from a world with coins, in every way that the records allow. `step_error` runs
recipe and verifier for every way the coins can fall and compares what is emitted with p.

Shape letters: V vocabulary.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any, cast

import numpy as np
import torch

from outpace.analysis.enumeration import EnumeratingCoins, Fate, fates
from outpace.coins import Coins, Stream
from outpace.tree.dynamic import draw
from outpace.types import ROOT, Draft, Drawn, Group, Law, Verdict
from outpace.verifiers.base import TargetLaws, Verifier
from outpace.verifiers.block import Block
from outpace.verifiers.chain import Chain
from outpace.verifiers.coupled import Coupled
from outpace.verifiers.greedy_plus_one import GreedyPlusOne
from outpace.verifiers.k_seq import KSeq
from outpace.verifiers.match import Match
from outpace.verifiers.spechub import SpecHub
from outpace.verifiers.traversal import Traversal
from outpace.verifiers.tree import Tree
from outpace.verifiers.typical import Typical, TypicalConfig

RIGHT: dict[str, Verifier] = {
    "match": Match(),
    "chain": Chain(),
    "tree": Tree(),
    "block": Block(),
    "k_seq": KSeq(),
    "greedy_plus_one": GreedyPlusOne(),
    "spechub": SpecHub(),
    "traversal": Traversal(),
    "coupled": Coupled(),
}
"""The verifiers whose cases are known."""

LOSSY: dict[str, Verifier] = {"typical": Typical(TypicalConfig())}
"""Verifiers that have an oracle, and promise no distribution."""

Context = tuple[int, ...]
Output = Mapping[Context, float]
"""Emitted tokens -> probability."""


@dataclass(frozen=True, eq=False)
class World:
    """Random distributions over ``vocab`` tokens, one pair per context."""

    seed: int
    vocab: int = 3
    p_edit: Callable[[Law], Law] = lambda law: law
    """Makes special distributions: one-hot, sparse, with zeros."""
    q_edit: Callable[[Law], Law] = lambda law: law
    same: bool = False
    """Whether q equals p."""
    _known: dict[tuple[int, Context], Law] = field(default_factory=dict)

    def p(self, context: Context) -> Law:
        return self._law(0, context, self.p_edit)

    def q(self, context: Context, drafter: int = 1) -> Law:
        """Draft distribution after a context; several drafters disagree."""
        return self._law(0 if self.same else drafter, context, self.q_edit)

    def _law(self, which: int, context: Context, edit: Callable[[Law], Law]) -> Law:
        if (which, context) not in self._known:
            rng = np.random.default_rng((self.seed, which, len(context), *context))
            prob_V = torch.from_numpy(rng.dirichlet(np.full(self.vocab, 0.8)))
            self._known[which, context] = edit(Law(prob_V))
        return self._known[which, context]


@dataclass(frozen=True)
class NodeLaws(TargetLaws):
    """Target distributions at the nodes of one draft."""

    world: World
    draft: Draft

    def law(self, node: int) -> Law:
        """Target distribution after the path of the node."""
        return self.world.p(self.draft.path_tokens(node))


class Sapling:
    """A draft under construction, group by group."""

    def __init__(self, world: World, coins: Coins) -> None:
        self.world = world
        self.coins = coins
        self._planted: Draft | None = None
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._groups: list[Group] = []
        self._laws: list[Law] = []

    def path(self, node: int) -> Context:
        out: list[int] = []
        while node != ROOT:
            out.append(self._tokens[node])
            node = self._parents[node]
        return tuple(reversed(out))

    def hang(self, parent: int, drawn: Drawn, tokens: Sequence[int], law: Law | None = None) -> list[int]:
        """Add a group; a token that the parent has already is the same node again."""
        nodes = []
        for token in tokens:
            branches = list(zip(self._parents, self._tokens, strict=True))
            if (parent, token) not in branches:
                self._parents.append(parent)
                self._tokens.append(token)
                branches.append((parent, token))
            nodes.append(branches.index((parent, token)))
        row = None
        if law is not None:
            row = len(self._laws)
            self._laws.append(law)
        if nodes:
            self._groups.append(Group(parent, drawn, tuple(nodes), row))
        return nodes

    def sample(self, parent: int, drawn: Drawn, count: int, drafter: int = 1) -> list[int]:
        """Draw a group from q. Groups of one parent have their own coins."""
        path = self.path(parent)
        law = self.world.q(path, drafter)
        key = parent + 64 * len(self._groups)
        return self.hang(parent, drawn, self.draws(law, drawn, count, key, len(path) + 1), law)

    def draws(self, law: Law, drawn: Drawn, count: int, key: int, depth: int) -> list[int]:
        """Tokens drawn from a distribution by one of the rules."""
        return draw(law, count, drawn, self.coins, key, depth)

    def top(self, parent: int, count: int, drafter: int = 2) -> list[int]:
        """Hang a drafter's best tokens that the parent does not have yet."""
        has = [t for p, t in zip(self._parents, self._tokens, strict=True) if p == parent]
        best = self.world.q(self.path(parent), drafter).top(self.world.vocab)
        return self.hang(parent, Drawn.CHOSEN, [t for t in best if t not in has][:count])

    def plant(self, draft: Draft) -> None:
        self._planted = draft

    def done(self) -> Draft:
        if self._planted is not None:
            return self._planted
        return Draft(tuple(self._tokens), tuple(self._parents), tuple(self._groups), tuple(self._laws))


Recipe = Callable[[Sapling], None]


def chain(drawn: Drawn, depth: int = 2) -> Recipe:
    def grow(s: Sapling) -> None:
        node = ROOT
        for _ in range(depth):
            (node,) = s.sample(node, drawn, 1)

    return grow


def fan(drawn: Drawn, count: int, below: int = 1) -> Recipe:
    """Several draws at the root, and again ``below`` the first and the last of them."""

    def grow(s: Sapling) -> None:
        nodes = s.sample(ROOT, drawn, count)
        for node in dict.fromkeys((nodes[0], nodes[-1])) if below else ():
            s.sample(node, drawn, below)

    return grow


def best(counts: Sequence[int]) -> Recipe:
    """A chosen tree: ``counts[d]`` children under every node of level d."""

    def grow(s: Sapling) -> None:
        level = [ROOT]
        for count in counts:
            level = [child for node in level for child in s.top(node, count)]

    return grow


def chain_with_tails(s: Sapling) -> None:
    """A sampled chain; beside each of its tokens, another drafter's favourite."""
    node = ROOT
    for _ in range(2):
        (child,) = s.sample(node, Drawn.IID, 1)
        s.top(node, 1)
        node = child


def two_and_one(s: Sapling) -> None:
    """Two draws, and one more below the first."""
    first = s.sample(ROOT, Drawn.IID, 2)
    s.sample(first[0], Drawn.IID, 1)


def hub_with_tails(s: Sapling) -> None:
    """Another drafter's favourites beside both of a pair, and a pair below each."""
    for node in s.sample(ROOT, Drawn.HUB, 2):
        s.top(node, 1)
    s.top(ROOT, 1)


def chain_of_both(s: Sapling) -> None:
    """A chain: drawn, chosen, drawn by another drafter."""
    (node,) = s.sample(ROOT, Drawn.IID, 1)
    (node,) = s.top(node, 1)
    s.sample(node, Drawn.IID, 1, drafter=3)


def tail_of_the_draw(s: Sapling) -> None:
    """A chosen sibling that depends on what was drawn before it: the next id."""
    (node,) = s.sample(ROOT, Drawn.IID, 1)
    after = (s.path(node)[0] + 1) % s.world.vocab
    (tail,) = s.hang(ROOT, Drawn.CHOSEN, [after])
    s.sample(tail, Drawn.IID, 1)


def chosen_then_drawn(s: Sapling) -> None:
    """Chosen first; then draws of two drafters, one of them without replacement."""
    s.top(ROOT, 1)
    first = s.sample(ROOT, Drawn.IID, 1)
    s.sample(ROOT, Drawn.DISTINCT, 2, drafter=3)
    s.sample(first[0], Drawn.GREEDY_PLUS_ONE, 2)


def called_chosen(s: Sapling) -> None:
    """Drawn from q, but reported as chosen: right, only less often kept."""
    law = s.world.q(())
    (node,) = s.hang(ROOT, Drawn.CHOSEN, s.draws(law, Drawn.IID, 1, ROOT, 1))
    s.top(node, 1)


def called_distinct(s: Sapling) -> None:
    """Drawn with replacement, but reported as without: right, since a repeat counts as chosen."""
    law = s.world.q(())
    s.hang(ROOT, Drawn.DISTINCT, s.draws(law, Drawn.IID, 3, ROOT, 1), law)


def past_the_support(s: Sapling) -> None:
    """Without replacement from q, and when q has no more, whatever is missing."""
    law = s.world.q(())
    tokens = s.draws(law, Drawn.DISTINCT, s.world.vocab, ROOT, 1)
    tokens += [t for t in range(s.world.vocab) if t not in tokens]
    s.hang(ROOT, Drawn.DISTINCT, tokens, law)


def nothing(s: Sapling) -> None:
    """The empty draft."""


def outputs(
    verifier: Verifier, recipe: Recipe, world: World, coins: type[Any] = EnumeratingCoins
) -> tuple[dict[Context, float], float]:
    """The exact distribution of what one step emits, and the mean number of tokens kept.

    Raises:
        AssertionError: the distributions in a verdict are not the target's at the emitted positions.
    """
    law: dict[Context, float] = defaultdict(float)
    kept = 0.0

    def grow(fate: Fate) -> Draft:
        sapling = Sapling(world, coins(fate, 0, 9, Stream.DRAFT))
        recipe(sapling)
        return sapling.done()

    for drawing, draft in fates(grow):

        def judge(fate: Fate, draft: Draft = draft) -> Verdict:
            judging = coins(fate, 0, 9, Stream.JUDGE)
            return verifier.judge(draft, NodeLaws(world, draft), judging, want_laws=True)

        for judging, verdict in fates(judge, drawing.known):
            assert verdict.laws is not None
            assert len(verdict.laws) == len(verdict.emitted) == len(verdict.kept) + 1
            for i, true in enumerate(verdict.laws):
                assert true is world.p(verdict.emitted[:i]), (draft, verdict)
            weight = drawing.weight * judging.weight
            law[verdict.emitted] += weight
            kept += weight * len(verdict.kept)
    return dict(law), kept


def step_error(
    verifier: Verifier, recipe: Recipe, world: World, coins: type[Any] = EnumeratingCoins
) -> float:
    """Largest error of the distribution of the output, one step continued by p."""
    emitted, _ = outputs(verifier, recipe, world, coins)
    return distance(emitted, world.p, world.vocab, max(len(tokens) for tokens in emitted) + 1)


def distance(output: Output, p: Callable[[Context], Law], vocab: int, length: int) -> float:
    """Largest difference between two distributions over sequences of ``length`` tokens.

    Args:
        output: shorter sequences are continued by p.
    """
    worst = abs(sum(output.values()) - 1)

    @cache
    def after(context: Context) -> list[float]:
        return cast("list[float]", p(context).dense(vocab).tolist())

    for whole in product(range(vocab), repeat=length):
        share = [after(whole[:i])[whole[i]] for i in range(length)]
        got = sum(output.get(whole[:size], 0.0) * math.prod(share[size:]) for size in range(length + 1))
        worst = max(worst, abs(got - math.prod(share)))
    return worst
