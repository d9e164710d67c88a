"""One tree of two sources keeps the target's law, counted exactly, and known-wrong ones are caught."""

from dataclasses import replace

import pytest

from outpace.analysis.growths import Growth, TableDrafter
from outpace.analysis.law import CAUGHT
from outpace.analysis.tables import RIGHT, World, outputs, step_error
from outpace.drafters.base import Drafter
from outpace.drafters.worth import Chances
from outpace.methods.hybrid.drafter import Hybrid
from outpace.tree.shapes import parse_shape
from outpace.types import ROOT, Budget, Draft, Drawn, Group, Price
from outpace.verifiers.tree import Tree, TreeConfig

WORLDS = (World(4), World(2, vocab=2), World(5))
VERIFIERS = {
    "tree": RIGHT["tree"],
    "with replacement": Tree(TreeConfig(replacement=True)),
    "traversal": RIGHT["traversal"],
    "k_seq": RIGHT["k_seq"],
    "spechub": RIGHT["spechub"],
}
SHAPES = {
    "a guess": ((ROOT,), (0.6,)),
    "a chain": ((ROOT, 0), (0.4, 0.5)),
    "siblings": ((ROOT, ROOT), (0.4, 0.3)),
    "a fork": ((ROOT, ROOT, 0), (0.4, 0.3, 0.4)),
    "nothing": ((), ()),
}


class Text(Drafter):
    """Guesses another drafter's favourites, and says how sure it is."""

    def __init__(self, world, shape):
        self.world, (self.parents, self.own) = world, SHAPES[shape]

    @classmethod
    def load(cls, config, target):
        raise NotImplementedError

    def begin(self, request):
        return None

    def propose(self, rows):
        tokens = []
        for node, parent in enumerate(self.parents):
            rank = sum(other == parent for other in self.parents[:node])
            path = [tokens[parent]] if parent != ROOT else []
            best = self.world.q(tuple(path), 2).top(self.world.vocab)
            tokens.append(best[rank])
        return [Draft.chosen(tokens, self.parents, Chances(self.own, 1.0)) for _ in rows]

    def observe(self, states, outcomes):
        return


def made(shape, spoil=None, size=(4, 2)):
    """A growth of a hybrid drafter; ``spoil`` changes its drafts."""

    def make(world):
        hybrid = Hybrid(Text(world, shape), TableDrafter(world))
        if spoil is not None:
            proposed = hybrid.propose
            hybrid.propose = lambda rows: [spoil(draft, world) for draft in proposed(rows)]
        return hybrid

    free = Price((0.0,), (0.0,))  # so that every level opens
    return Growth(Budget(*size, shape=parse_shape("dynamic"), price=free), make)


def error(verifier, shape, spoil=None, size=(4, 2)):
    recipe = made(shape, spoil, size).recipe(verifier)
    return max(step_error(verifier, recipe, world) for world in WORLDS)


@pytest.mark.parametrize("name", VERIFIERS)
def test_the_union_keeps_the_law(name):
    for shape in SHAPES:
        assert error(VERIFIERS[name], shape) < 1e-12, shape


def grown(shape):
    drafts = []
    recipe = made(shape, lambda draft, world: drafts.append(draft) or draft).recipe(VERIFIERS["tree"])
    outputs(VERIFIERS["tree"], recipe, WORLDS[0])
    return drafts


def test_draws_leave_out_what_the_text_says_and_are_judged_first():
    for shape in ("a chain", "siblings", "a fork"):
        mixed = 0
        for draft in grown(shape):
            for groups in draft.groups_of.values():
                kinds = [group.drawn for group in groups]
                mixed += kinds == [Drawn.DISTINCT, Drawn.CHOSEN]
                assert kinds in ([Drawn.CHOSEN], [Drawn.DISTINCT], [Drawn.DISTINCT, Drawn.CHOSEN])
                chosen = [draft.token_N[n] for g in groups if g.law is None for n in g.nodes]
                for group in groups:
                    if group.law is not None:
                        assert all(draft.laws[group.law].prob(token) == 0 for token in chosen)
        assert mixed > 0, "not vacuous"
    below = [group for draft in grown("a guess") for group in draft.groups if group.parent == 0]
    assert any(group.law is not None for group in below), "the head guesses below a guess of the text"


def without(draft, gone):
    """The draft without some nodes and all below them."""
    lost = set(gone)
    for node, parent in enumerate(draft.parent_N):
        if parent in lost:
            lost.add(node)
    kept = [node for node in range(len(draft)) if node not in lost]
    place = {ROOT: ROOT, **{node: i for i, node in enumerate(kept)}}
    groups = []
    for group in draft.groups:
        nodes = tuple(place[node] for node in group.nodes if node in place)
        if nodes and group.parent in place:
            groups.append(replace(group, parent=place[group.parent], nodes=nodes))
    tokens = tuple(draft.token_N[node] for node in kept)
    return Draft(tokens, tuple(place[draft.parent_N[node]] for node in kept), tuple(groups), draft.laws)


def chosen(draft, parent):
    return [n for g in draft.groups_of.get(parent, ()) if g.law is None for n in g.nodes]


def drawn(draft, parent):
    return [n for g in draft.groups_of.get(parent, ()) if g.law is not None for n in g.nodes]


def drops_a_draw(draft, world):
    """The text's guess takes the place of a draw that is less likely than it."""
    rivals = [n for n in drawn(draft, ROOT) if world.q(()).prob(draft.token_N[n]) < 0.5]
    return without(draft, rivals) if chosen(draft, ROOT) else draft


def records_all_of_q(draft, world):
    """Drawn from q', and said to be of q."""
    laws = list(draft.laws)
    for group in draft.groups:
        if group.law is not None:
            laws[group.law] = world.q(draft.path_tokens(group.parent))
    return Draft(draft.token_N, draft.parent_N, draft.groups, tuple(laws))


def judges_the_text_by_q(draft, world):
    """A guess of the text, said to be a draw of the head."""
    laws, groups = list(draft.laws), []
    for group in draft.groups:
        if group.law is None:
            laws.append(world.q(draft.path_tokens(group.parent)))
            group = Group(group.parent, Drawn.DISTINCT, group.nodes, len(laws) - 1)
        groups.append(group)
    return Draft(draft.token_N, draft.parent_N, tuple(groups), tuple(laws))


def removes_by_draws_below(draft, world):
    """A guess of the text goes because of what was drawn below it."""
    gone = [n for n in chosen(draft, ROOT) if any(draft.token_N[c] == 0 for c in drawn(draft, n))]
    return without(draft, gone)


def judges_the_text_first(draft):
    groups = sorted(draft.groups, key=lambda group: group.law is not None)
    return Draft(draft.token_N, draft.parent_N, tuple(groups), draft.laws)


def removes_by_a_sibling(draft, world):
    """The text first, and it goes because of the draw beside it."""
    first = judges_the_text_first(draft)
    likely = any(world.q(()).prob(draft.token_N[d]) < 0.3 for d in drawn(draft, ROOT))
    return without(first, chosen(draft, ROOT) if likely else [])


@pytest.mark.parametrize(
    "spoil",
    [drops_a_draw, records_all_of_q, judges_the_text_by_q, removes_by_draws_below, removes_by_a_sibling],
    ids=lambda spoil: spoil.__name__,
)
def test_known_wrong_unions_are_caught(spoil):
    cases = (("a guess", (4, 2)), ("a guess", (2, 1)), ("a fork", (4, 2)))
    assert max(error(RIGHT["tree"], shape, spoil, size) for shape, size in cases) > CAUGHT


def test_what_may_be_done_is_told_from_that():
    """Another order, and taking out a leaf of the text by a draw that was judged before it."""
    tree = RIGHT["tree"]
    assert error(tree, "a chain", lambda draft, world: judges_the_text_first(draft)) < 1e-12

    def removes_a_leaf(draft, world):
        leaves = [n for n in chosen(draft, ROOT) if n not in draft.parent_N]
        return without(draft, leaves if any(draft.token_N[d] == 0 for d in drawn(draft, ROOT)) else [])

    assert error(tree, "siblings", removes_a_leaf) < 1e-12
    keeps = [
        max(outputs(tree, made("siblings", spoil).recipe(tree), world)[1] for world in WORLDS[:1])
        for spoil in (None, lambda draft, world: judges_the_text_first(draft))
    ]
    assert keeps[0] >= keeps[1] - 1e-12, "draws first keep at least as much"
