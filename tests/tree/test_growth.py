"""Growth over a table of laws: what is drawn, what is recorded, where it stops."""

from dataclasses import replace

import pytest
import torch

from outpace.coins import KeyedCoins, Stream
from outpace.errors import SpecError
from outpace.law import Law
from outpace.params import SamplingParams
from outpace.policies.confidence import Threshold
from outpace.sampling import Warp
from outpace.tree.dynamic import Scale, draw
from outpace.tree.growth import DraftRow, grow
from outpace.tree.shapes import budget, parse_shape
from outpace.types import NOTHING, ROOT, Budget, Drawn, Price, Shape

V = 6
FREE = Scale(level_D=(0.0,))


def logits_after(path):
    """A law that depends on the whole path, so that a wrong parent shows."""
    g = torch.Generator().manual_seed(hash(tuple(path)) % 2**31)
    return torch.randn(V, generator=g)


class Table:
    """An expander that remembers what it was asked."""

    def __init__(self):
        self.calls = []

    def __call__(self, branches):
        self.calls.append([branch.nodes for branch in branches])
        rows = []
        for branch in branches:
            for node in branch.nodes:
                path = []
                while node != ROOT:
                    path.insert(0, branch.token_N[node])
                    node = branch.parent_N[node]
                rows.append(logits_after([*branch.tokens, *path]))
        return torch.stack(rows), None


def row(asked, drawn, seed=0, tokens=(1, 2)):
    params = SamplingParams(temperature=0.0 if drawn is Drawn.CHOSEN else 1.0).resolved(None)
    return DraftRow(
        None,
        list(tokens),
        asked,
        KeyedCoins(seed, len(tokens) - 1, Stream.DRAFT),
        Warp(params, tokens, frozenset(), V),
        drawn,
    )


def grown(rows, expand):
    return [draft for draft, _ in grow(rows, expand, FREE)]


def check(draft, tokens):
    """Every recorded law is the law after its parent's path; every node is a possible draw."""
    for group in draft.groups:
        path = [*tokens, *draft.path_tokens(group.parent)]
        law = torch.softmax(logits_after(path), 0)
        picked = [draft.token_N[node] for node in group.nodes]
        if group.drawn is Drawn.CHOSEN:
            assert picked == law.topk(len(picked)).indices.tolist()
        else:
            torch.testing.assert_close(draft.laws[group.law].dense(V), law)
        if group.drawn is Drawn.DISTINCT:
            assert len(set(picked)) == len(picked)


@pytest.mark.parametrize("drawn", [Drawn.CHOSEN, Drawn.IID, Drawn.DISTINCT, Drawn.COUPLED])
@pytest.mark.parametrize("shape", ["chain", "3x2x1", "[-1,-1,0,0,1,2,2]"])
def test_drafts_record_the_laws_they_were_drawn_from(drawn, shape):
    asked = budget(shape, None, 4)
    rows = [row(asked, drawn, seed, (1, 2, seed)) for seed in range(8)]
    expand = Table()
    for one, draft in zip(rows, grown(rows, expand), strict=True):
        check(draft, one.tokens)
        assert 0 < len(draft) <= asked.max_nodes
        if drawn is not Drawn.IID:  # repeated draws share a node, so a tree may be smaller
            assert len(draft) == asked.max_nodes
            if asked.shape.parent_N:
                order = [parse_shape(shape).parent_N[:n] for n in (len(draft),)]
                assert sorted(draft.depth_N) == sorted(depths(order[0]))
    assert len(expand.calls) == asked.max_depth, "one pass per level for the whole batch"


def depths(parents):
    out = []
    for parent in parents:
        out.append(1 if parent == ROOT else out[parent] + 1)
    return out


def test_a_repeated_draw_names_its_node_again():
    certain = DraftRow(
        None,
        [1],
        Budget(3, 1, shape=parse_shape("3")),
        KeyedCoins(0, 0, Stream.DRAFT),
        Warp(SamplingParams(temperature=1.0).resolved(None), [1], frozenset(), V),
        Drawn.IID,
    )
    peak = torch.full((1, V), -30.0)
    peak[0, 4] = 30.0
    (draft,) = grown([certain], lambda branches: (peak, None))
    assert draft.token_N == (4,) and draft.groups[0].nodes == (0, 0, 0)


def test_budgets_of_a_batch_differ():
    rows = [
        row(NOTHING, Drawn.CHOSEN),
        row(Budget(1, 5), Drawn.CHOSEN),
        row(Budget(5, 2), Drawn.CHOSEN),
        row(Budget(4, 9, shape=parse_shape("2x2")), Drawn.CHOSEN),
    ]
    assert [len(draft) for draft in grown(rows, Table())] == [0, 1, 2, 4]


def test_a_stop_rule_ends_branches_and_keeps_what_was_drawn():
    rows = [row(Budget(20, 20, stop=Threshold(0.3)), Drawn.IID, seed) for seed in range(10)]
    for one, draft in zip(rows, grown(rows, Table()), strict=True):
        probs = [float(draft.laws[g.law].prob_S[draft.token_N[g.nodes[0]]]) for g in draft.groups]
        assert all(prob >= 0.3 for prob in probs[:-1])
        assert probs[-1] < 0.3 or len(draft) == 20
        check(draft, one.tokens)


def test_reduced_vocabularies_give_target_ids():
    ids = torch.tensor([5, 0, 3])
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    for drawn in (Drawn.CHOSEN, Drawn.DISTINCT):
        one = row(Budget(3, 1, shape=Shape((-1, -1, -1))), drawn)
        (draft,) = grown([one], lambda branches: (logits, ids))
        assert sorted(draft.token_N) == [0, 3, 5]
        if drawn is Drawn.CHOSEN:
            assert draft.token_N == (0, 3, 5)
        else:
            assert draft.laws[0].prob(1) == 0.0


def test_greedy_plus_one_draws_the_last_from_the_rest():
    law = Law(torch.tensor([0.1, 0.5, 0.25, 0.15, 0.0, 0.0]))
    seen = {
        tuple(draw(law, 3, Drawn.GREEDY_PLUS_ONE, KeyedCoins(s, 1, Stream.DRAFT), ROOT, 1)) for s in range(50)
    }
    assert seen == {(1, 2, 0), (1, 2, 3)}
    assert len(draw(law, 9, Drawn.DISTINCT, KeyedCoins(0, 1, Stream.DRAFT), ROOT, 1)) == 4
    assert law.without([0, 1, 2, 3]) is None


def test_a_pair_has_the_hub_and_keeps_the_order_of_drawing():
    law = Law(torch.tensor([0.1, 0.5, 0.25, 0.15, 0.0, 0.0]))
    coins = [KeyedCoins(seed, 1, Stream.DRAFT) for seed in range(80)]
    first = [draw(law, 1, Drawn.IID, c, ROOT, 1)[0] for c in coins]
    for count in (2, 5):
        pairs = [draw(law, count, Drawn.HUB, c, ROOT, 1) for c in coins]
        assert [pair[0] for pair in pairs] == first, "the first is a draw from q"
        assert {tuple(pair) for pair in pairs} == {(0, 1), (2, 1), (3, 1), (1, 0), (1, 2), (1, 3)}
    assert [draw(law, 1, Drawn.HUB, c, ROOT, 1) for c in coins] == [[x] for x in first]
    assert draw(Law.one_hot(4), 2, Drawn.HUB, coins[0], ROOT, 1) == [4]


@pytest.mark.parametrize(
    "drawn", [Drawn.CHOSEN, Drawn.IID, Drawn.DISTINCT, Drawn.COUPLED, Drawn.GREEDY_PLUS_ONE, Drawn.HUB]
)
@pytest.mark.parametrize("size", [1, 3, 12])
def test_dynamic_trees_record_their_laws_and_keep_the_budget(drawn, size):
    rows = [row(budget("dynamic:4", size, 4), drawn, seed, (1, 2, seed)) for seed in range(8)]
    expand = Table()
    drafts = grown(rows, expand)
    for one, draft in zip(rows, drafts, strict=True):
        if drawn is not Drawn.GREEDY_PLUS_ONE:
            check(draft, one.tokens)
        assert 0 < len(draft) <= size
        assert max(draft.depth_N) <= one.budget.max_depth
    assert len(expand.calls) <= max(one.budget.max_depth for one in rows)
    assert all(len(nodes) <= 4 for call in expand.calls for nodes in call)
    if size == 12:
        assert len({draft.parent_N for draft in drafts}) > 1, "the shape follows the laws"


def cumulative(draft, node, tokens):
    path = draft.path_tokens(node)
    value = 1.0
    for i, token in enumerate(path):
        value *= float(torch.softmax(logits_after([*tokens, *path[:i]]), 0)[token])
    return value


def test_a_chosen_dynamic_tree_takes_the_most_valuable_nodes():
    """Against all 6 + 36 paths of two levels, scored one by one."""
    for seed in range(6):
        asked = Budget(7, 2, shape=Shape(beam=50))
        one = row(asked, Drawn.CHOSEN, seed, (1, 2, seed))
        ((draft, numbers),) = grow([one], Table(), FREE)
        everything = []
        for a in range(V):
            pa = float(torch.softmax(logits_after([*one.tokens]), 0)[a])
            everything.append(pa)
            law = torch.softmax(logits_after([*one.tokens, a]), 0)
            everything += [pa * float(law[b]) for b in range(V)]
        best = sorted(everything, reverse=True)[:7]
        mine = sorted((cumulative(draft, n, one.tokens) for n in range(7)), reverse=True)
        assert mine == pytest.approx(best, rel=1e-5)
        assert numbers is None or len(numbers) == 7


@pytest.mark.parametrize("drawn", [Drawn.CHOSEN, Drawn.DISTINCT, Drawn.IID])
def test_the_least_chance_of_a_guess_says_how_full_a_dynamic_tree_gets(drawn):
    def nodes(least):
        asked = budget(f"dynamic:4:{least}", 12, 4)
        drafts = grow([row(asked, drawn, s, (1, 2, s)) for s in range(8)], Table(), FREE)
        return [len(draft) for draft, _ in drafts]

    full, some, few = nodes(0), nodes(1.5), nodes(6)
    assert max(full) == 12 and (drawn is Drawn.IID or min(full) == 12)
    assert sum(full) > sum(some) > sum(few) > 0


@pytest.mark.parametrize("drawn", [Drawn.COUPLED, Drawn.GREEDY_PLUS_ONE, Drawn.HUB])
def test_siblings_that_are_drawn_together_leave_room_below_them(drawn):
    def depths(least):
        asked = replace(budget(f"dynamic:4:{least}", 5, 4), price=Price((0.0,), (0.0,)))
        drafts = grow([row(asked, drawn, s, (1, 2, s)) for s in range(8)], Table(), FREE)
        return [max(draft.depth_N) for draft, _ in drafts]

    assert depths(0) == depths(0.5) and max(depths(0)) > 1


def test_numbers_lead_back_to_what_was_expanded():
    seen = {}

    class Watching(Table):
        def __call__(self, branches):
            for branch in branches:
                for node in branch.nodes:
                    path, at = [], node
                    while at != ROOT:
                        path.insert(0, at)
                        at = branch.parent_N[at]
                    tokens = [branch.token_N[at] for at in path]
                    assert branch.path(node) == tuple(path)
                    assert branch.path_tokens(node) == tuple(tokens)
                    seen[tuple(branch.tokens), node] = tokens
            return super().__call__(branches)

    renamed = 0
    for seed in range(12):
        one = row(budget("dynamic:3", 6, 4), Drawn.CHOSEN, seed, (1, 2, seed))
        ((draft, numbers),) = grow([one], Watching(), FREE)
        for node, old in enumerate(numbers or range(len(draft))):
            path = seen.get((tuple(one.tokens), old))
            assert path is None or path == list(draft.path_tokens(node))
        renamed += numbers is not None and numbers != sorted(range(len(numbers)))
    assert renamed, "some candidate was left out, or the test shows nothing"


def test_a_peaked_law_makes_a_chain_and_a_flat_one_a_bush():
    def law(scale):
        return lambda branches: (
            torch.arange(V).float().repeat(sum(len(b.nodes) for b in branches), 1) * scale,
            None,
        )

    for drawn in (Drawn.CHOSEN, Drawn.DISTINCT):
        asked = budget("dynamic", 6, 4)
        (chain,) = grown([row(asked, drawn)], law(30.0))
        (bush,) = grown([row(asked, drawn)], law(0.01))
        assert max(chain.depth_N) == len(chain) == 6
        assert max(bush.depth_N) <= 2 and bush.parent_N.count(ROOT) >= 4


def test_cape_adds_siblings_where_the_drafter_is_unsure():
    """Chain first; as many siblings as the table says for the probability of the likeliest token."""
    sure = {0: [9.0, 0, 0, 0, 0, 0], 1: [0.0] * V, 2: [3.0, 1.0, 0, 0, 0, 0]}

    def expand(branches):
        return torch.stack([torch.tensor(sure[len(b.path(n))]) for b in branches for n in b.nodes]), None

    asked = budget("cape:3", None, 5)
    assert (asked.max_nodes, asked.max_depth) == (24, 3)
    (draft,) = grown([row(asked, Drawn.CHOSEN)], expand)
    # 0.998 of the first token: 2. A sixth of each: 8, of which there are 6. 0.65: 4.
    assert [draft.depth_N.count(depth) for depth in (1, 2, 3)] == [2, 6, 4]
    assert draft.parent_N == (ROOT, ROOT, *[0] * 6, *[2] * 4), "siblings have no children"
    (small,) = grown([row(budget("cape:3", 7, 5), Drawn.CHOSEN)], expand)
    assert [small.depth_N.count(depth) for depth in (1, 2, 3)] == [2, 4, 1], "room is left for the chain"


@pytest.mark.parametrize("drawn", [Drawn.DISTINCT, Drawn.IID, Drawn.GREEDY_PLUS_ONE, Drawn.HUB])
def test_cape_draws_as_many_as_the_distribution_says(drawn):
    """Whatever comes out, the number of draws of a level is the same."""
    counts = set()
    for seed in range(12):
        (draft,) = grown([row(budget("cape:2", None, 5), drawn, seed)], lambda b: Table()(b))
        assert draft.groups[0].parent == ROOT and draft.groups[1].parent == draft.groups[0].nodes[0]
        counts.add(len(draft.groups[0].nodes))
    assert len(counts) == 1


@pytest.mark.parametrize("text", ["cape:0", "cape:", "cape:x", "cape:1000", "cape:2:3"])
def test_a_wrong_cape_is_said(text):
    with pytest.raises(SpecError, match="unknown tree"):
        parse_shape(text)
