"""What compiled code leaves of a distribution is what torch leaves."""

import itertools
import math

import pytest
import torch

from outpace.kernels import draws
from outpace.models.products import works
from outpace.params import SamplingParams
from outpace.sampling import Warp

pytestmark = pytest.mark.skipif(not works("cpu"), reason="nothing is compiled here")
EDGE = 1e-6
"""Sums of probabilities in float32 are off by less."""
RTOL = 1e-5
SIZES = [1, 2, 63, 65, 127, 1000, 1025, 5003, 49152]
SETTINGS = [
    *({"top_k": k} for k in (1, 2, 20, 60, 900)),
    *({"top_p": p} for p in (0.01, 0.5, 0.9, 0.999)),
    *({"min_p": p} for p in (0.001, 0.2, 1.0)),
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 50, "min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.02},
]


def rows(width):
    """Sharp and flat ones, with ties, and with entries that may not come."""
    coins = torch.Generator().manual_seed(width)
    x_V = torch.randn(width, generator=coins)
    yield 4 * x_V
    yield x_V
    yield (2 * x_V).round()
    yield torch.where(x_V > 0.5, x_V, -0.0 * x_V.sign())
    if width > 2:
        yield torch.where(x_V < x_V.median() + 1, x_V, -math.inf)


def law(x_V, temperature, settings, ids=None):
    params = SamplingParams(temperature=temperature, **settings)
    return Warp(params, [1], frozenset(), len(x_V)).law(x_V, (), ids)


def heavier(x_V, top_k):
    """What the entries above each weigh together, of the ``top_k`` largest, in float64."""
    best_V = x_V.sort(descending=True, stable=True).indices
    prob_V = x_V[best_V[:top_k]].double().softmax(0)
    return torch.full((len(x_V),), -1.0).double().index_copy(0, best_V[:top_k], prob_V.cumsum(0) - prob_V)


@pytest.mark.parametrize("width", SIZES)
def test_what_is_left_is_what_torch_leaves(width, monkeypatch):
    """In float64, but for tokens at the very edge of top-p; a token there has the others share the rest."""
    given = list(itertools.product(rows(width), (0.3, 1.0, 1.7), SETTINGS))
    ours = [law(*one) for one in given]
    monkeypatch.setattr(draws, "library", lambda: None)
    for (x_V, temperature, settings), mine in zip(given, ours, strict=True):
        other = law(x_V.double(), temperature, settings)
        assert mine.ids.tolist() == sorted(set(mine.ids.tolist()))
        mine_V, other_V = mine.dense(width), other.dense(width)
        odd_V = (mine_V > 0) != (other_V > 0)
        if odd_V.any():
            above_V = heavier(x_V / temperature, settings.get("top_k", width))[odd_V]
            assert bool((above_V - settings.get("top_p", math.inf)).abs().max() < EDGE), settings
            mine_V, other_V = (one_V[~odd_V] / one_V[~odd_V].sum() for one_V in (mine_V, other_V))
        assert torch.allclose(mine_V.double(), other_V, rtol=RTOL, atol=1e-7), settings
        if "top_k" in settings and "top_p" not in settings:
            assert torch.equal(mine.ids, other.ids), settings


def test_columns_have_tokens():
    x_V = torch.tensor([0.0, 3.0, 1.0, 3.0])
    found = law(x_V, 1.0, {"top_k": 2}, torch.tensor([3, 2, 1, 0]))
    assert found.ids.tolist() == [2, 0] and found.prob_S.tolist() == [0.5, 0.5]


def test_the_best_stays_where_top_p_is_too_small_for_a_number():
    x_V = torch.tensor([0.0, 3.0, 1.0, 3.0] + [2.0] * 9)
    for top_k in (0, 2):
        found = draws.truncate(x_V, 50.0, top_k, 5e-324, 0.0)
        assert found is not None and found[0].tolist() == [1]


def test_a_row_without_a_distribution_has_none():
    for wrong in (math.nan, math.inf):
        assert draws.truncate(torch.tensor([0.0, wrong]), 1.0, 1, 0.5, 0.0) is None
    assert draws.truncate(torch.tensor([-math.inf] * 3), 1.0, 1, 1.0, 0.0) is None
