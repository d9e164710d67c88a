"""Levels and rows of dynamic trees are opened where they pay, by hand."""

import pytest
import torch

from outpace.coins import KeyedCoins, Stream
from outpace.curve import RATE, assumed
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.dynamic import Scale
from outpace.tree.growth import DraftRow, grow
from outpace.types import Budget, Drawn, Price, Shape

VOCAB = 8


def drafted(kept, price, temper=(), nodes=6, drawn=Drawn.CHOSEN, temperature=0.0):
    """A draft of a drafter that gives ``kept`` to its first token at every node; and its levels."""
    levels = []

    def expand(branches):
        rows = sum(len(branch.nodes) for branch in branches)
        levels.append(rows)
        p = torch.full((rows, VOCAB), (1 - kept) / (VOCAB - 1))
        p[:, 0] = kept
        return p.log(), None

    params = SamplingParams(temperature=temperature, seed=1).resolved(None)
    budget = Budget(nodes, nodes, shape=Shape(beam=8, least=0.5), price=price)
    coins = KeyedCoins(1, 3, Stream.DRAFT)
    row = DraftRow(None, (1, 2), budget, coins, Warp(params, (1, 2), frozenset(), VOCAB), drawn)
    scale = Scale(level_D=(0.0,), temper_D=temper)
    ((draft, _),) = grow([row], expand, scale)
    return draft, len(levels)


FREE = Price((0.0,), (0.0,))


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
def test_a_level_opens_while_it_should_bring_more_than_it_costs(kept):
    """Below k levels it should bring kept ** (k + 1), and as much of likely siblings."""
    for cost in (0.05, 0.2, 0.5):
        _, levels = drafted(kept, Price((cost,), (0.0,)), nodes=4)
        chain = next(k for k in range(1, 5) if k == 4 or kept ** (k + 1) <= cost)
        assert levels in (chain, min(4, chain + 1)), (kept, cost)
    assert drafted(kept, Price((2.0,), (0.0,)))[1] == 1, "the first is asked for by whoever plans"


def test_a_guess_gets_a_row_if_it_is_worth_it():
    draft, _ = drafted(0.6, FREE, nodes=6)
    assert len(draft) == 4, "0.6 ** 5 is below the threshold, 0.5 / 6"
    dear = Price((0.0,), (0.0, 0.0, 0.0, 0.5, 1.0))
    draft, _ = drafted(0.6, dear, nodes=6)
    assert len(draft) == 2, "0.6 and 0.36 for nothing; no third is worth 0.5"


def test_drawn_trees_are_priced_before_they_draw():
    """Of tokens drawn nothing is taken out, so fewer are drawn."""
    many, _ = drafted(0.6, FREE, drawn=Drawn.DISTINCT, temperature=1.0)
    few, levels = drafted(0.6, Price((0.5,), (0.0,)), drawn=Drawn.DISTINCT, temperature=1.0)
    assert len(few) <= len(many) and levels == 1
    dear = Price((0.0,), (0.0, 0.9))
    one, _ = drafted(0.6, dear, drawn=Drawn.DISTINCT, temperature=1.0)
    assert len(one) == 1


@pytest.mark.parametrize(("drawn", "fans"), [(Drawn.IID, [6, 3, 1]), (Drawn.COUPLED, [7, 1, 1])])
def test_siblings_drawn_at_once_are_priced_too(drawn, fans):
    """A second one keeps 0.24 if it may repeat the first, and else 0.06."""
    for cost, fan in zip((0.0, 0.1, 0.3), fans, strict=True):
        price = Price((9.0,), (0.0, 0.0, cost))
        draft, _ = drafted(0.6, price, nodes=8, drawn=drawn, temperature=1.0)
        assert len(draft.groups[0].nodes) == fan, cost


def test_tempered_probabilities_decide_at_temperature_0_alone():
    price = Price((0.3,), (0.0,))
    plain, sharp = drafted(0.5, price)[1], drafted(0.5, price, temper=(0.5,))[1]
    assert plain < sharp, "twice the logits, a surer drafter"
    free = drafted(0.5, FREE, drawn=Drawn.DISTINCT, temperature=1.0)[0]
    again = drafted(0.5, FREE, temper=(0.5,), drawn=Drawn.DISTINCT, temperature=1.0)[0]
    assert free.token_N == again.token_N


def test_assumed_prices():
    price = Price.assumed((0.1, 0.02))
    assert [price.level(n) for n in range(3)] == [RATE * 0.1, RATE * 0.02, RATE * 0.02]
    for rows in (0, 2, 3, 9):
        assert price.row(rows) == pytest.approx(RATE * (assumed(rows + 2) - assumed(rows + 1)))
    measured = Price((0.1,), (0.0, 0.1, 0.3))
    assert [measured.row(n) for n in range(4)] == pytest.approx([0.1, 0.2, 0.2, 0.2])
