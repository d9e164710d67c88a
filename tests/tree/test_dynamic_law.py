"""The emitted tokens have the target's law, exactly, when the tree grows by the drafter's laws."""

import itertools

import pytest
import torch

from outpace.analysis.enumeration import EnumeratingCoins, fates
from outpace.coins import Stream
from outpace.law import Law
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.dynamic import Scale, draw
from outpace.tree.growth import DraftRow, grow
from outpace.types import ROOT, Budget, Draft, Drawn, Group, Shape
from outpace.verifiers.base import TargetLaws
from outpace.verifiers.coupled import Coupled
from outpace.verifiers.spechub import SpecHub
from outpace.verifiers.tree import Tree, TreeConfig

V = 3
FREE = Scale(level_D=(0.0,))


def logits(name, path):
    g = torch.Generator().manual_seed(1 + sum((i + 2) * (t + 3) * 7 for i, t in enumerate(path)))
    scale = 1.2 if name == "p" else 0.9
    skip = 0 if name == "p" else 40
    return torch.randn(V + skip, generator=g, dtype=torch.float64)[-V:] * scale


def p(path):
    return torch.softmax(logits("p", path), 0)


class Laws(TargetLaws):
    def __init__(self, draft):
        self.draft = draft

    def law(self, node):
        return Law(p(self.draft.path_tokens(node)))


def expand(branches):
    rows = []
    for branch in branches:
        for node in branch.nodes:
            path = []
            while node != ROOT:
                path.insert(0, branch.token_N[node])
                node = branch.parent_N[node]
            rows.append(logits("q", path))
    return torch.stack(rows), None


def emitted_law(drawn, verifier, asked, prune=None):
    """Exact law of the first two tokens: what one step emits, then p where it emitted one."""
    warp = Warp(SamplingParams(temperature=1.0).resolved(None), (0,), frozenset(), V)
    found = torch.zeros(V, V, dtype=torch.float64)
    sizes = set()

    def run(fate):
        coins = EnumeratingCoins(fate, 0, 0, Stream.DRAFT)
        row = DraftRow(None, [0], asked, coins, warp, drawn)
        ((draft, _),) = grow([row], expand, FREE)
        if prune is not None:
            draft = prune(draft)
        sizes.add(draft.parent_N)
        judging = EnumeratingCoins(fate, 0, 0, Stream.JUDGE)
        return verifier.judge(draft, Laws(draft), judging).emitted

    for fate, emitted in fates(run):
        if len(emitted) == 1:
            found[emitted[0]] += fate.weight * p(emitted)
        else:
            found[emitted[0], emitted[1]] += fate.weight
    return found, sizes


def truth():
    return torch.stack([p(())[a] * p((a,)) for a in range(V)])


CASES = {
    "distinct": (Drawn.DISTINCT, Tree(), 4, 0.5),
    "iid": (Drawn.IID, Tree(TreeConfig(replacement=True)), 3, 0.5),
    "greedy_plus_one": (Drawn.GREEDY_PLUS_ONE, Tree(), 4, 1.2),
    "hub": (Drawn.HUB, SpecHub(), 4, 0.5),
    "hub, tree": (Drawn.HUB, Tree(), 4, 0.5),
    "coupled": (Drawn.COUPLED, Coupled(), 4, 0.5),
}


@pytest.mark.parametrize("name", CASES)
def test_the_emitted_law_is_the_targets(name):
    drawn, verifier, size, least = CASES[name]
    asked = Budget(size, 2, shape=Shape(beam=2, least=least))
    found, shapes = emitted_law(drawn, verifier, asked)
    assert float((found - truth()).abs().max()) < 1e-12
    if drawn is not Drawn.GREEDY_PLUS_ONE:  # there the number of siblings follows from the law
        assert len(shapes) > 1, "the shape depends on what was drawn"


def without_unlikely(draft):
    """The planted bug: nodes that turned out unlikely are dropped after they were drawn."""
    kept = []
    for node in range(len(draft)):
        group = next(g for g in draft.groups if node in g.nodes)
        law = draft.laws[group.law]
        parent = draft.parent_N[node]
        if (parent == ROOT or parent in kept) and law.prob(draft.token_N[node]) >= 0.3:
            kept.append(node)
    place = {ROOT: ROOT, **{node: i for i, node in enumerate(kept)}}
    groups = tuple(
        Group(place[g.parent], g.drawn, tuple(place[n] for n in g.nodes if n in place), g.law)
        for g in draft.groups
        if g.parent in place and any(n in place for n in g.nodes)
    )
    return Draft(
        tuple(draft.token_N[n] for n in kept),
        tuple(place[draft.parent_N[n]] for n in kept),
        groups,
        draft.laws,
    )


def test_dropping_what_was_drawn_is_caught():
    drawn, verifier, size, least = CASES["distinct"]
    asked = Budget(size, 2, shape=Shape(beam=2, least=least))
    found, _ = emitted_law(drawn, verifier, asked, prune=without_unlikely)
    assert float((found - truth()).abs().max()) > 1e-3


def test_every_number_of_siblings_draws_the_same_tokens():
    """The draws of a node are those of a fixed number of draws: none is skipped or reordered."""
    warp = Warp(SamplingParams(temperature=1.0).resolved(None), (0,), frozenset(), V)
    for fate, draft in itertools.islice(
        fates(
            lambda fate: grow(
                [
                    DraftRow(
                        None,
                        [0],
                        Budget(4, 2, shape=Shape(beam=2, least=0.1)),
                        EnumeratingCoins(fate, 0, 0, Stream.DRAFT),
                        warp,
                        Drawn.DISTINCT,
                    )
                ],
                expand,
                FREE,
            )[0][0]
        ),
        60,
    ):
        for group in draft.groups:
            picked = [draft.token_N[node] for node in group.nodes]
            coins = EnumeratingCoins(fate, 0, 0, Stream.DRAFT)
            law = draft.laws[group.law]
            again = draw(law, len(picked), Drawn.DISTINCT, coins, group.parent, 0)
            assert again == picked
