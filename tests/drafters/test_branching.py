"""Trees that grow in one call are those that grow level by level, node by node."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.methods.draft_model.drafter import DraftModel
from outpace.methods.eagle3.drafter import Eagle3
from outpace.methods.eagle3.net import EagleNet
from outpace.methods.hybrid.union import UNSEEN, Joint, Planted, Union
from outpace.models.products import works
from outpace.params import SamplingParams
from outpace.policies.confidence import Threshold
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.types import NOTHING, ROOT, Budget, Drawn, Feed, Price, Shape
from tests.methods.eagle3.oracle import random_tensors, shape_for
from tests.methods.eagle3.test_drafter import every, show, tied

TEXTS = [[5, 9, 11, 40, 7, 150, 5, 9], [40, 41, 42], [77, 8, 9, 10, 11], [3, 5], [60, 61, 62, 63] * 40]
WIDE = Budget(13, 6, shape=Shape(beam=4, least=0.05))
pytestmark = pytest.mark.skipif(not works("cpu"), reason="nothing is compiled here")


def told(draft):
    return draft.token_N, draft.parent_N, draft.groups


def drafted(
    budgets,
    spreads,
    settings=None,
    temper=(),
    drawn=Drawn.CHOSEN,
    ties=False,
    texts=TEXTS,
    plants=(),
    told=told,
):
    """Drafts, the passes of the head, and how many proposals were one call.

    Args:
        settings: of all sequences, or of each; as ``drawn``.
        told: what a draft is compared by.
    """
    target = tied()
    ids = every(target)
    shape = shape_for(target, draft_vocab=len(ids))
    tensors = random_tensors(shape)
    if ties:  # every guess has a twin that is as likely
        tensors["lm_head.weight"][1::2] = tensors["lm_head.weight"][:-1:2]
    net = EagleNet(shape, tensors, target, id_D=ids, quantize="int8")
    drafter = Eagle3(net, ids, temper_D=temper)
    states = [drafter.begin(Request(prompt=tuple(text))) for text in texts]
    for state, text in zip(states, texts, strict=True):
        show(drafter, state, target, text[:-1])
    done, spread = [], drafter.spread

    def counting(*given):
        found = spread(*given) if spreads else None
        done.append(found is not None)
        return found

    drafter.spread = counting
    rows = [
        DraftRow(
            state,
            text,
            budget,
            KeyedCoins(3, len(text) - 1, Stream.DRAFT),
            Warp(SamplingParams(**each(settings, i)), text, frozenset({2}), target.vocab_size),
            each(drawn, i),
            grower=partial(Union, planted=plants[i]) if plants else None,
        )
        for i, (state, text, budget) in enumerate(zip(states, texts, budgets, strict=False))
    ]
    drafts = [[told(one) for one in drafter.propose(rows)] for _ in range(2)]
    assert drafts[0] == drafts[1], "a draft leaves nothing behind"
    for state in states:
        drafter.forget(state)
        assert drafter.cache.slot(state.slot).tail_ids == []
    return drafts[0], drafter.clock.count, sum(done)


def each(given, i):
    """What all sequences have, or one of them."""
    return given[i] if isinstance(given, list) else given or {"temperature": 0}


def prices(chance, nodes):
    """As assumed, free, or dear in one way or in both."""
    kind = chance.choice(["none", "free", "rows", "levels", "both"])
    if kind == "none":
        return None
    rows = [0.0]
    for _ in range(chance.randint(1, nodes + 2)):
        rows.append(rows[-1] + (chance.random() * 0.02 if kind in ("rows", "both") else 0.0))
    dear = 0.05 if kind in ("levels", "both") else 0.0
    return Price(tuple(chance.random() * dear for _ in range(chance.randint(1, 4))), tuple(rows))


def second(budgets, spreads, knows=10, plants=(), settings=None, drawn=Drawn.CHOSEN, told=told):
    """Drafts of a draft model, what is in its cache behind them, and its passes."""
    model = tied()
    drafter = DraftModel(model, model.vocab_size)
    states = [drafter.begin(Request(prompt=tuple(text))) for text in TEXTS]
    for state, text in zip(states, TEXTS if knows else (), strict=False):  # that much is read already
        drafter.model.score([Feed.chain(state.slot, text[: min(len(text) - 1, knows)])], drafter.cache)
        drafter.cache.keep(state.slot, range(min(len(text) - 1, knows)))
    done, spread = [], drafter.spread

    def counting(*given):
        found = spread(*given) if spreads else None
        done.append(found is not None)
        return found

    drafter.spread = counting
    rows = [
        DraftRow(
            state,
            text,
            budget,
            KeyedCoins(3, len(text) - 1, Stream.DRAFT),
            Warp(SamplingParams(**each(settings, i)), (), frozenset({2}), model.vocab_size),
            each(drawn, i),
            grower=partial(Union, planted=plants[i]) if plants else None,
        )
        for i, (state, text, budget) in enumerate(zip(states, TEXTS, budgets, strict=False))
    ]
    drafts = [[told(one) for one in drafter.propose(rows)] for _ in range(2)]
    assert drafts[0] == drafts[1], "a draft leaves nothing behind"
    behind = []
    for row in rows:
        state, slot = row.state, drafter.cache.slot(row.state.slot)
        stored = len(slot.ids) + len(slot.tail_ids)
        keys = drafter.cache.first_keys(slice(None), state.slot, stored).clone()
        behind.append((slot.tail_ids, slot.tail_parents, slot.tail_depths, state.row, state.lead, keys))
    return drafts[0], behind, drafter.clock.count, sum(done)


def random_budgets(chance):
    budgets = []
    for _ in range(chance.randint(1, 5)):
        nodes, depth = chance.choice([1, 2, 3, 5, 8, 13, 40]), chance.randint(1, 9)
        shape = Shape(beam=chance.choice([1, 2, 3, 8, 20]), least=chance.choice([0.0, 0.05, 0.5, 1.5]))
        budgets.append(Budget(nodes, depth, shape=shape, price=prices(chance, nodes)))
    if chance.random() < 0.3:
        budgets.insert(chance.randrange(len(budgets)), NOTHING)
    return budgets[: len(TEXTS)]


@pytest.mark.parametrize("seed", range(40))
def test_a_draft_model_grows_the_same_trees_in_one_call(seed):
    chance = random.Random(seed)
    budgets, knows = random_budgets(chance), chance.choice([0, 2, 10])
    ours, behind, count, whole = second(budgets, True, knows)
    theirs, as_behind, expected, none = second(budgets, False, knows)
    assert none == 0 and whole == (2 if any(one.max_nodes for one in budgets) else 0)
    assert ours == theirs and count == expected
    for (*mine, keys), (*others, same) in zip(behind, as_behind, strict=True):
        assert mine == others and torch.equal(keys, same)


@pytest.mark.parametrize("seed", range(60))
def test_one_call_grows_the_same_trees(seed):
    chance = random.Random(seed)
    budgets = random_budgets(chance)
    given = {
        "settings": {"temperature": chance.choice([0, 0.8])},
        "temper": ((), (0.02,), (0.05, 0.3), (1.0, 0.04, 0.7))[seed % 4],
        "ties": chance.random() < 0.4,
    }
    ours, count, whole = drafted(budgets, True, **given)
    theirs, expected, none = drafted(budgets, False, **given)
    assert none == 0 and whole == (2 if any(one.max_nodes for one in budgets) else 0)
    assert ours == theirs and count == expected
    assert [len(one[0]) > 0 for one in ours] == [one.max_nodes > 0 for one in budgets]


def planted(chance, token_N, most):
    """Guesses that a tree begins with, some of them those of a drafter: parents before children."""
    tokens, parents, below = [], [], set()
    wide, even = chance.random() < 0.3, chance.random() < 0.3
    for node in range(chance.randint(0, most)):
        token = chance.choice(token_N or [7]) if chance.random() < 0.6 else chance.randrange(160)
        parent = chance.choice([ROOT, node - 1, chance.randrange(-1, node) if node else ROOT])
        parent = ROOT if wide else parent
        if (parent, token) in below:
            break
        below.add((parent, token))
        tokens.append(token)
        parents.append(parent)
    own = [chance.choice([0.002, 0.3, 0.6, 0.99]) * (0.5 if even else chance.random()) for _ in tokens]
    joint = Joint(*(chance.uniform(-0.2, 1.2) for _ in range(3)))
    return Planted(tuple(tokens), tuple(parents), tuple(own), joint)


@pytest.mark.parametrize("seed", range(80))
def test_one_call_grows_the_same_trees_around_guesses_of_others(seed):
    chance = random.Random(seed)
    budgets = random_budgets(chance)
    temper = ((), (0.02,), (0.05, 0.3), (1.0, 0.04, 0.7))[seed % 4]
    given = {"temper": temper, "ties": chance.random() < 0.3}
    found = [tokens for tokens, *_ in drafted(budgets, True, **given)[0]]
    plants = [planted(chance, tokens, one.max_nodes) for tokens, one in zip(found, budgets, strict=True)]
    again = [replace(one) for one in plants]  # what is said of them is written there
    ours, count, whole = drafted(budgets, True, **given, plants=plants)
    theirs, expected, none = drafted(budgets, False, **given, plants=again)
    assert none == 0 and whole == (2 if any(one.max_nodes for one in budgets) else 0)
    assert ours == theirs and count == expected
    assert [one.said_N for one in plants] == [one.said_N for one in again]


@pytest.mark.parametrize(
    ("why", "nodes", "beam", "parent", "own", "level"),
    [
        ("a sure guess promises little of its own, but counts for its level", 8, 8, 0, (0.9, 0.8), 0.1),
        ("more nodes are opened than stay", 2, 8, 0, (0.001, 0.5), 0.0),
        ("of equal ones the first is opened", 8, 1, ROOT, (0.7, 0.7), 0.0),
    ],
)
def test_one_call_opens_the_same_nodes(why, nodes, beam, parent, own, level):
    budgets = [Budget(nodes, 4, shape=Shape(beam=beam), price=Price((0.0, level), (0.0,)))] * 5
    joint = Joint(head=0.0 if parent == ROOT else 0.5)
    plants, again = ([Planted((132, 150), (ROOT, parent), own, joint) for _ in TEXTS] for _ in range(2))
    ours = drafted(budgets, True, temper=(0.3, 0.05), plants=plants)
    theirs = drafted(budgets, False, temper=(0.3, 0.05), plants=again)
    assert ours[:2] == theirs[:2]
    assert [one.said_N for one in plants] == [one.said_N for one in again]


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_model_grows_the_same_trees_around_guesses_of_others(seed):
    chance = random.Random(seed)
    budgets, knows = random_budgets(chance), chance.choice([0, 2, 10])
    plants = [planted(chance, [*text, 60], one.max_nodes) for text, one in zip(TEXTS, budgets, strict=False)]
    again = [replace(one) for one in plants]
    ours, behind, count, whole = second(budgets, True, knows, plants)
    theirs, as_behind, expected, none = second(budgets, False, knows, again)
    assert none == 0 and whole == (2 if any(one.max_nodes for one in budgets) else 0)
    assert ours == theirs and count == expected
    assert [one.said_N for one in plants] == [one.said_N for one in again]
    for (*mine, keys), (*others, same) in zip(behind, as_behind, strict=True):
        assert mine == others and torch.equal(keys, same)


def test_guesses_of_others_matter_in_the_test():
    budgets, chance = [WIDE] * 5, random.Random(1)
    alone, *_ = drafted(budgets, True, temper=(0.3, 0.05))
    plants = [planted(chance, tokens, 13) for tokens, *_ in alone]
    both, *_ = drafted(budgets, True, temper=(0.3, 0.05), plants=plants)
    kept = [set(one.token_N) & set(tokens) for one, (tokens, *_) in zip(plants, both, strict=True)]
    assert both != alone and any(kept)
    said = [said for one in plants for said in one.said_N]
    assert any(said > UNSEEN for said in said) and UNSEEN in said and -1.0 in said


def test_trees_of_the_test_differ():
    trees, *_ = drafted([WIDE] * 5, True, temper=(0.3, 0.05))
    sizes = [len(tokens) for tokens, _, _ in trees]
    branches = [len(set(parents)) < len(parents) for _, parents, _ in trees]
    assert max(sizes) > 5 and any(branches) and len({tokens for tokens, _, _ in trees}) == 5, trees


def test_a_tree_is_the_same_beside_others_and_on_any_number_of_threads(monkeypatch):
    budgets = [WIDE, replace(WIDE, max_depth=3), replace(WIDE, max_nodes=40), WIDE, WIDE]
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(drafted(budgets, True, temper=(0.3, 0.05))[0])
    assert found[0] == found[1] == found[2]
    for budget, text, tree in zip(budgets, TEXTS, found[0], strict=True):
        assert drafted([budget], True, temper=(0.3, 0.05), texts=[text])[0] == [tree]


@pytest.mark.parametrize(
    ("why", "given"),
    [
        ("drawn otherwise", {"drawn": Drawn.IID, "settings": {"temperature": 0.8}}),
        ("penalized", {"settings": {"temperature": 0, "repetition_penalty": 1.3}}),
        ("too short", {"settings": {"temperature": 0, "min_tokens": 2}}),
        ("stops", {"budgets": [replace(WIDE, stop=Threshold(0.2))]}),
        ("estimated", {"budgets": [WIDE, replace(WIDE, estimate=True)]}),
        ("template", {"budgets": [WIDE, Budget(2, 1, shape=Shape(parent_N=(-1, -1)))]}),
    ],
)
def test_what_needs_more_goes_level_by_level(why, given, monkeypatch):
    if why == "estimated":
        monkeypatch.setattr(Eagle3, "estimate", lambda self, branches: torch.ones(1))
    given = {"budgets": [WIDE] * 3, "temper": (0.3,), **given}
    trees, _, whole = drafted(spreads=True, **given)
    assert whole == 0 and all(tokens for tokens, _, _ in trees)
