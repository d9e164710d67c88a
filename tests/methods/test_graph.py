"""Graphs: what is shared, what is run, laws that are those drawn from, keys that stay true."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outpace import Engine, ModelError, SpecError
from outpace.analysis.sequence_law import MoodyDrafter, SequenceCase
from outpace.analysis.tables import RIGHT
from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.methods.draft_model.drafter import DraftModel
from outpace.methods.graph import Graph, GraphConfig, _Graph
from outpace.models.tiny import TableTarget
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import Branch, DraftRow
from outpace.tree.shapes import parse_shape, widths
from outpace.types import ROOT, Budget, Drawn

TEXT = [0, 2, 1, 1, 0]
WIDE = Budget(64, 5, shape=widths((3, 2, 2, 1, 1)))


def counting(table):
    """A model drafter on a table, and the number of rows that its passes score."""
    drafter, rows = DraftModel(table, table.vocab_size), SimpleNamespace(count=0, passes=0)
    real = table.score

    def score(feeds, cache, **more):
        rows.passes += 1
        rows.count += sum(len(feed.token_J) for feed in feeds)
        return real(feeds, cache, **more)

    table.score = score
    return drafter, rows


def drafted(drafter, drawn=Drawn.CHOSEN, budget=WIDE, state=None, text=TEXT, vocab=5):
    state = drafter.begin(Request(prompt=tuple(text))) if state is None else state
    params = SamplingParams(temperature=0.0 if drawn is Drawn.CHOSEN else 1.0).resolved(None)
    warp = Warp(params, text, frozenset(), vocab)
    coins = KeyedCoins(7, len(text) - 1, Stream.DRAFT)
    (draft,) = drafter.propose([DraftRow(state, text, budget, coins, warp, drawn)])
    return draft


def table(order=None, seed=5, vocab=5):
    return TableTarget.random(seed, vocab, order=order)


@pytest.mark.parametrize("drawn", [Drawn.CHOSEN, Drawn.IID, Drawn.DISTINCT])
@pytest.mark.parametrize("shape", ["3x2x2x1x1", "dynamic:8:0"])
def test_where_laws_look_no_further_back_the_tree_is_the_same_and_cheaper(drawn, shape):
    """Two tokens decide the next one, so hypotheses that agree in two have equal laws."""
    budget = replace(WIDE, shape=parse_shape(shape))
    plain, all_rows = counting(table(order=2))
    base, rows = counting(table(order=2))
    expected = drafted(plain, drawn, budget)
    draft = drafted(Graph(GraphConfig(), base), drawn, budget)
    assert (draft.token_N, draft.parent_N) == (expected.token_N, expected.parent_N)
    assert [law.prob_S.tolist() for law in draft.laws] == [law.prob_S.tolist() for law in expected.laws]
    assert rows.count < all_rows.count and rows.passes <= all_rows.passes
    # It can fail: where fewer tokens have to agree than decide, the tree is another one.
    other = drafted(Graph(GraphConfig(agree=0), counting(table(order=2))[0]), drawn, budget)
    assert other.token_N != expected.token_N


def test_if_none_may_meet_it_is_the_plain_tree():
    plain, all_rows = counting(table())
    base, rows = counting(table())
    expected = drafted(plain)
    draft = drafted(Graph(GraphConfig(agree=-1), base))
    assert draft.token_N == expected.token_N and rows.count == all_rows.count
    # 1 + 3 + 6 + 12 + 12 places have children.
    assert rows.count == len(TEXT) - 1 + 34


def branches(state, tokens, parents, nodes):
    return [Branch(state, TEXT, tuple(nodes), tokens, parents)]


def test_hypotheses_meet_by_their_last_tokens_but_never_with_their_own_past():
    graph = Graph(GraphConfig(agree=1), counting(table())[0])
    state = graph.begin(Request(prompt=tuple(TEXT)))
    seen = []

    def expand(asked):
        seen.append([(b.nodes, list(b.parent_N)) for b in asked])
        return torch.stack([torch.full((5,), float(node)) for b in asked for node in b.nodes]), None

    graph.draft.expand = expand
    graph._graphs = {id(state): _Graph(tuple(TEXT[-2:]))}
    #  0: 3 - 4 - 3 - 4      1: 2 - 3 - 4 - 1
    tokens, parents = [3, 2, 4, 3, 3, 4, 4, 1], [ROOT, ROOT, 0, 1, 2, 3, 4, 5]
    said = []
    for nodes in ([ROOT], [0, 1], [2, 3], [4, 5], [6, 7]):
        logits_FD, _ = graph._expand(branches(state, tokens, parents, nodes))
        said.append(logits_FD[:, 0].tolist())
    # Node 5 ends in 3 4 as node 2 does; node 6 does too, but stands behind node 2 itself.
    assert said == [[-1.0], [0.0, 1.0], [2.0, 3.0], [4.0, 2.0], [6.0, 7.0]]
    assert [nodes for ((nodes, _),) in seen] == [(ROOT,), (0, 1), (2, 3), (4,), (6, 7)]
    assert seen[-1][0][1][7] == 2, "a child of a copy follows the node that was run"


class Moody(MoodyDrafter):
    """The table drafter of the cases, with shared branches."""

    agree = 0
    plant = staticmethod(lambda graph, row, draft: draft)

    @classmethod
    def load(cls, config, target):
        graph = Graph(GraphConfig(agree=cls.agree), super().load(config, target))
        real = graph.propose

        def propose(rows):
            drafts = zip(rows, real(rows), strict=True)
            return [cls.plant(graph, row, draft) for row, draft in drafts]

        graph.propose = propose
        return graph


class Relabelled(Moody):
    """The planted mistake: a copy says the law that its own path would have had."""

    @staticmethod
    def plant(graph, row, draft):
        laws = list(draft.laws)
        for group in draft.groups:
            tokens = [*row.tokens, *(draft.path_tokens(group.parent))]
            if group.law is not None:
                prob_S = graph.draft._tables[row.state.refused].law_after(tokens)
                laws[group.law] = replace(laws[group.law], prob_S=prob_S)
        return replace(draft, laws=tuple(laws))


STORY = {"shape": widths((2, 1, 1)), "depth": 3, "length": 4}


@pytest.mark.parametrize("verifier", ["tree", "traversal", "coupled"])
def test_what_is_emitted_has_the_targets_law(verifier):
    assert SequenceCase(drafter=Moody, **STORY).error(RIGHT[verifier]) < 1e-12


@pytest.mark.parametrize("verifier", ["tree", "traversal"])
def test_a_law_that_was_not_drawn_from_is_caught(verifier):
    assert SequenceCase(drafter=Relabelled, **STORY).error(RIGHT[verifier]) > 1e-3


def texts(graph):
    """Commit one path after another, each with copies in it if there are any.

    Yields: state, text, and how many tokens of it the draft model has to read again.
    """
    text = [0, 1, 2, 0]
    state = graph.begin(Request(prompt=tuple(text)))
    for start in range(3, 15):
        draft, node, path = drafted(graph, state=state, text=text, vocab=3), ROOT, []
        while node in draft.groups_of:
            node = draft.groups_of[node][-1].nodes[-1]
            path.append(node)
        graph.observe(
            [state],
            [SimpleNamespace(draft=draft, forced=False, row_F=(0, *(n + 1 for n in path)), start=start)],
        )
        text = [*text, *(draft.token_N[n] for n in path), 1]
        held = graph.draft.cache.ids(state.slot)
        assert held == text[: len(held)]
        yield state, text, len(text) - 2 - len(held)


def test_keys_made_behind_other_words_are_not_kept():
    """The table reads the whole text, so a wrong word before a row would show in a draft."""
    again = 0
    for state, text, missing in texts(graph := Graph(GraphConfig(agree=0), narrow())):
        again += missing
        mine = drafted(graph, state=state, text=text, vocab=3)
        other = drafted(Graph(GraphConfig(agree=0), narrow()), text=text, vocab=3)
        assert mine.token_N == other.token_N
    assert again > 0, "some of the paths had copies in them"
    careless = Graph(GraphConfig(agree=0), narrow())
    careless.draft.renumber = lambda state, numbers: None
    with pytest.raises(ValueError, match="no path"):
        list(texts(careless))


def narrow():
    return counting(table(vocab=3))[0]


# On a model ------------------------------------------------------------------------------------

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42, 43, 44], [3, 1, 4, 1, 5, 9, 2, 6]]
GREEDY = {"max_new_tokens": 40, "ignore_eos": True}
DRAFT = "draft_model[model=tiny layers=1]"


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", drafter="none", dtype="float32")


def run(engine, spec):
    results = engine.generate(PROMPTS, drafter=spec, **GREEDY)
    return [one.tokens for one in results], sum(one.counters.passes for one in results)


def test_it_emits_as_much_per_pass_as_its_draft_model(engine):
    plain, chain = run(engine, DRAFT)
    shape = "tree=4x3x2x1x1"
    same, as_many = run(engine, f"{DRAFT[:-1]} {shape}]")
    text, passes = run(engine, f"graph[draft={DRAFT} {shape}]")
    assert plain == text == same
    assert passes <= as_many < chain, "copies cost nothing of what the tree is worth"
    assert run(engine, f"graph[draft={DRAFT}]")[1] < chain


@pytest.mark.parametrize(
    "draft",
    [
        "suffix",
        "early_exit",
        "cascade[levels=draft_model[model=tiny layers=1]]",
        "draft_model[model=tiny]+suffix",
    ],
)
def test_what_cannot_share_is_refused(engine, draft):
    with pytest.raises(SpecError, match="draft must be one drafter with a model and a"):
        engine.generate([1, 2], drafter=f"graph[draft={draft}]")


def test_bad_settings_are_refused(engine):
    for spec, error, words in (
        ("graph[agree=-2]", SpecError, "agree must be at least -1, got -2"),
        ("graph[draft=draft_model[model=tiny tree=2x2]]", SpecError, "says tree"),
        ("graph", ModelError, "no trained draft_model for tiny"),
        ("graph[draft=draft_model[model=tiny] tree=dynamic verifier=chain]", SpecError, "takes chains only"),
    ):
        with pytest.raises(error, match=words):
            engine.generate([1, 2], drafter=spec)
