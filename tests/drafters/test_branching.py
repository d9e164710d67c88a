"""Trees that grow in one call are those that grow level by level, node by node."""

import random
from dataclasses import replace

import pytest

from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.models.products import works
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.types import NOTHING, Budget, Drawn, Price, Shape
from tests.methods.eagle3.test_drafter import made, show, tied

TEXTS = [[5, 9, 11, 40, 7, 150, 5, 9], [40, 41, 42], [77, 8, 9, 10, 11], [3, 5], [60, 61, 62, 63] * 40]
pytestmark = pytest.mark.skipif(not works("cpu"), reason="nothing is compiled here")


def drafted(budgets, spreads, monkeypatch, settings=None, sharp=1.0, temper=(), drawn=Drawn.CHOSEN, seed=0):
    """Drafts, numbers of all candidates' rule as Python saw them, passes, and how often one call did it."""
    target = tied()
    drafter, _ = made(target, quantize="int8")
    drafter.traits = replace(drafter.traits, temper_D=(sharp, *temper))
    states = [drafter.begin(Request(prompt=tuple(text))) for text in TEXTS]
    for state, text in zip(states, TEXTS, strict=True):
        show(drafter, state, target, text[:-1])
    done, spread, settings = [], drafter.spread, settings or {"temperature": 0}

    def counting(*given):
        made_B = spread(*given) if spreads else None
        done.append(made_B is not None)
        return made_B

    drafter.spread = counting
    rows = [
        DraftRow(
            state,
            text,
            budget,
            KeyedCoins(seed, len(text) - 1, Stream.DRAFT),
            Warp(SamplingParams(**settings), text, frozenset({2}), target.vocab_size),
            drawn,
        )
        for state, text, budget in zip(states, TEXTS, budgets, strict=False)
    ]
    drafts = [drafter.propose(rows) for _ in range(2)]
    assert [told(one) for one in drafts[0]] == [told(one) for one in drafts[1]], (
        "a draft leaves nothing behind"
    )
    # What was a guess is dropped, and the text goes on.
    for state in states:
        drafter.forget(state)
        assert drafter.cache.slot(state.slot).tail_ids == []
    return drafts[0], drafter.clock.count, sum(done)


def told(draft):
    return draft.token_N, draft.parent_N, draft.groups


def prices(random_one, nodes):
    """None, free, dear in one way or the other, or some of all."""
    kind = random_one.choice(["none", "free", "rows", "levels", "both"])
    if kind == "none":
        return None
    rows = [0.0]
    for _ in range(random_one.randint(1, nodes + 2)):
        rows.append(rows[-1] + (random_one.random() * 0.02 if kind in ("rows", "both") else 0.0))
    dear = 0.05 if kind in ("levels", "both") else 0.0
    levels = tuple(random_one.random() * dear for _ in range(random_one.randint(1, 4)))
    return Price(levels, tuple(rows))


@pytest.mark.parametrize("seed", range(40))
def test_one_call_grows_the_same_trees(seed, monkeypatch):
    chance, budgets = random.Random(seed), []
    for _ in range(chance.randint(1, 5)):
        nodes, depth = chance.choice([1, 2, 5, 8, 13, 40]), chance.randint(1, 9)
        shape = Shape(beam=chance.choice([1, 2, 3, 8, 20]), least=chance.choice([0.0, 0.05, 0.5, 1.5]))
        budgets.append(Budget(nodes, depth, shape=shape, price=prices(chance, nodes)))
    if chance.random() < 0.3:
        budgets.insert(chance.randrange(len(budgets)), NOTHING)
    budgets = budgets[: len(TEXTS)]
    given = {"sharp": chance.choice([0.02, 0.05, 0.3, 1.0]), "temper": (0.04, 0.7)[: chance.randint(0, 2)]}
    settings = {"temperature": chance.choice([0, 0.8])}
    ours, count, whole = drafted(budgets, True, monkeypatch, settings, **given)
    theirs, expected, none = drafted(budgets, False, monkeypatch, settings, **given)
    assert none == 0 and whole == (2 if any(one.max_nodes for one in budgets) else 0)
    assert [told(one) for one in ours] == [told(one) for one in theirs]
    assert count == expected, "as many levels"
    assert [len(one) > 0 for one in ours] == [one.max_nodes > 0 for one in budgets]
