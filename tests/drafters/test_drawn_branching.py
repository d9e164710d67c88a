"""Trees that are drawn in one call are those drawn level by level, with their distributions, to the bit."""

import random
from dataclasses import replace

import pytest
import torch

from outpace.errors import LogitsError
from outpace.methods.draft_model.drafter import DraftModel
from outpace.methods.hybrid.union import Joint, Planted
from outpace.models.decoder import Decoder
from outpace.models.memory import MemoryCheckpoint
from outpace.models.products import works
from outpace.types import ROOT, Budget, Drawn, Price, Shape
from tests.drafters import test_branching
from tests.drafters.test_branching import TEXTS, WIDE, drafted, planted, random_budgets, second
from tests.methods.eagle3.oracle import random_tensors
from tests.methods.eagle3.test_drafter import tied

pytestmark = pytest.mark.skipif(not works("cpu"), reason="nothing is compiled here")
WARM = {"temperature": 0.8}
TRUNCATED = [{}, {}, {"top_k": 5}, {"top_k": 900}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9}]


def whole(draft):
    """All of a draft, its distributions too."""
    laws = [(law.prob_S.tolist(), None if law.id_S is None else law.id_S.tolist()) for law in draft.laws]
    return draft.token_N, draft.parent_N, draft.groups, laws


def random_draws(chance):
    """How each sequence draws: some choose, and some of these at temperature 0."""
    kinds, settings = [], []
    for _ in TEXTS:
        kinds.append(chance.choice([Drawn.DISTINCT, Drawn.COUPLED] * 2 + [Drawn.CHOSEN]))
        settings.append({"temperature": chance.choice([0.05, 0.2, 0.8, 1.7]), **chance.choice(TRUNCATED)})
        if kinds[-1] is Drawn.CHOSEN and chance.random() < 0.5:
            settings[-1] = {"temperature": 0}
    return {"drawn": kinds, "settings": settings, "told": whole}


@pytest.mark.parametrize("seed", range(80))
def test_one_call_draws_the_same_trees(seed):
    chance = random.Random(seed)
    budgets, given = random_budgets(chance), random_draws(chance) | {"ties": chance.random() < 0.3}
    ours, count, once = drafted(budgets, True, **given)
    theirs, expected, none = drafted(budgets, False, **given)
    assert none == 0 and once == (2 if any(one.max_nodes for one in budgets) else 0)
    assert ours == theirs and count == expected


@pytest.mark.parametrize("seed", range(80))
def test_one_call_draws_the_same_trees_around_guesses_of_others(seed):
    chance = random.Random(seed)
    budgets, given = random_budgets(chance), random_draws(chance)
    found = [tokens for tokens, *_ in drafted(budgets, True, **given)[0]]
    plants = [planted(chance, tokens, one.max_nodes) for tokens, one in zip(found, budgets, strict=True)]
    again = [replace(one) for one in plants]
    ours, count, once = drafted(budgets, True, **given, plants=plants)
    theirs, expected, none = drafted(budgets, False, **given, plants=again)
    assert none == 0 and once == (2 if any(one.max_nodes for one in budgets) else 0)
    assert ours == theirs and count == expected
    assert [one.said_N for one in plants] == [one.said_N for one in again]


@pytest.mark.parametrize("seed", range(40))
def test_a_draft_model_draws_the_same_trees_in_one_call(seed):
    chance = random.Random(seed)
    budgets, knows, given = random_budgets(chance), chance.choice([0, 2, 10]), random_draws(chance)
    plants, again = (), ()
    if seed % 2:
        known = [[*text, 60] for text in TEXTS[: len(budgets)]]
        plants = [planted(chance, *one) for one in zip(known, [b.max_nodes for b in budgets], strict=True)]
        again = [replace(one) for one in plants]
    ours, behind, count, once = second(budgets, True, knows, plants, **given)
    theirs, as_behind, expected, none = second(budgets, False, knows, again, **given)
    assert none == 0 and once == (2 if any(one.max_nodes for one in budgets) else 0)
    assert ours == theirs and count == expected
    for (*mine, keys), (*others, same) in zip(behind, as_behind, strict=True):
        assert mine == others and torch.equal(keys, same)


@pytest.mark.parametrize("drawn", [Drawn.DISTINCT, Drawn.COUPLED])
def test_trees_of_the_test_differ(drawn):
    """They have branches, several levels, and distributions that leave out what stands there."""
    given = {"drawn": drawn, "settings": {"temperature": 0.3}, "told": whole}
    trees, *_ = drafted([WIDE] * 5, True, **given)
    assert len({tokens for tokens, *_ in trees}) == 5
    assert max(len(tokens) for tokens, *_ in trees) > 5
    assert any(len(group.nodes) > 1 for _, _, groups, _ in trees for group in groups)
    assert any(group.parent != ROOT for _, _, groups, _ in trees for group in groups)
    plants = [Planted((tokens[0],), (ROOT,), (0.3,), Joint()) for tokens, *_ in trees]
    around, *_ = drafted([WIDE] * 5, True, **given, plants=plants)
    for tokens, _, groups, laws in around:
        first = next(group for group in groups if group.parent == ROOT and group.law is not None)
        prob, ids = laws[first.law]
        assert prob[ids.index(tokens[0])] == 0 and sum(prob) == pytest.approx(1)
        assert 0 not in first.nodes and groups[-1].drawn is Drawn.CHOSEN


@pytest.mark.parametrize("own", [(0.4, 0.4), (0.2, 0.7)])
def test_the_most_valuable_slot_comes_first(own):
    """Of equal ones the first; distributions stand in the order of nodes whichever was drawn from first."""
    given = {"drawn": Drawn.DISTINCT, "settings": {"temperature": 0.3}, "told": whole}
    budgets = [Budget(9, 2, shape=Shape(beam=4), price=Price((0.0,), (0.0,)))] * 5
    plants = [Planted((132, 150), (ROOT, ROOT), own, Joint()) for _ in TEXTS]
    ours, theirs = (drafted(budgets, spreads, **given, plants=plants)[0] for spreads in (True, False))
    assert ours == theirs
    # The first draws behind those below the pending token: below 0, then below 1, or the other way round.
    turned = [[p for p in parents[2:] if p in (0, 1)] for _, parents, *_ in ours]
    assert all(below[0] == (own[0] < own[1]) for below in turned if set(below) == {0, 1})
    assert any(set(below) == {0, 1} for below in turned)


@pytest.mark.parametrize("drawn", [Drawn.DISTINCT, Drawn.COUPLED])
def test_a_level_is_opened_for_rows_behind_those_that_are_drawn(drawn):
    """Two rows are free, and all others too dear: no second level opens behind two guesses."""
    price = Price((0.0,), (0.0, 0.0, 0.0, 1.0))
    budgets = [Budget(8, 4, shape=Shape(beam=4, least=0.05), price=price)] * 5
    given = {"drawn": drawn, "settings": {"temperature": 0.5}, "told": whole}
    ours, passes, _ = drafted(budgets, True, **given)
    assert (ours, passes) == drafted(budgets, False, **given)[:2]
    assert any(len(tokens) == 2 and set(parents) == {ROOT} for tokens, parents, *_ in ours)


@pytest.mark.parametrize("drawn", [Drawn.DISTINCT, Drawn.COUPLED])
def test_what_is_drawn_is_the_same_beside_others_and_on_any_number_of_threads(drawn, monkeypatch):
    given = {"drawn": drawn, "settings": WARM, "told": whole}
    budgets, found = [WIDE, replace(WIDE, max_depth=3), replace(WIDE, max_nodes=40), WIDE, WIDE], []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(drafted(budgets, True, **given)[0])
    assert found[0] == found[1] == found[2]
    for budget, text, tree in zip(budgets, TEXTS, found[0], strict=True):
        assert drafted([budget], True, **given, texts=[text])[0] == [tree]


def test_distributions_outlive_the_next_draft():
    """Whoever judges reads them later, in the order in which drafts were made."""
    kept = []

    def told(draft):
        kept.append(draft)
        return whole(draft)

    given = {"drawn": Drawn.DISTINCT, "settings": WARM, "told": told}
    drafts, *_ = drafted([WIDE] * 2, True, **given)
    assert [whole(draft) for draft in kept] == [*drafts, *drafts]


@pytest.mark.parametrize("made_of", [drafted, second])
@pytest.mark.parametrize("drawn", [Drawn.DISTINCT, Drawn.COUPLED])
def test_rows_without_a_distribution_go_level_by_level(made_of, drawn, monkeypatch):
    """There the settings leave none, so that any will do; or the model gives none, which is said."""
    given = {"drawn": drawn, "settings": {"temperature": 1e-4}, "told": whole}
    tuned(monkeypatch, 1e35)
    ours, theirs = made_of([WIDE] * 2, True, **given), made_of([WIDE] * 2, False, **given)
    assert ours[0] == theirs[0] and ours[-1] == 0
    assert all(len(prob) == 1 for *_, laws in ours[0] for prob, _ in laws)
    tuned(monkeypatch, float("nan"))
    for spreads in (True, False):
        with pytest.raises(LogitsError, match="not finite"):
            made_of([WIDE] * 2, spreads, **given)


def tuned(monkeypatch, factor):
    """Multiply the logits of what `drafted` and `second` make."""

    def head(shape):
        tensors = random_tensors(shape)
        tensors["norm.weight"] = tensors["norm.weight"] * factor
        return tensors

    def model():
        plain = tied()
        tensors = {name: plain.checkpoint.tensor(name) for name in plain.config.tensor_shapes()}
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * factor
        return Decoder.load(MemoryCheckpoint(plain.config, tensors, name="tuned"), dtype=torch.float32)

    monkeypatch.setattr(test_branching, "random_tensors", head)
    monkeypatch.setattr(test_branching, "DraftModel", lambda _, size: DraftModel(model(), size))
