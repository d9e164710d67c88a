"""Compiled distributions and draws are those of torch, with every kind of vector that runs here."""

import ctypes
import itertools
import math
import subprocess

import pytest
import torch

from outpace.errors import LogitsError
from outpace.kernels import build, compiled, draws
from outpace.params import SamplingParams
from outpace.sampling import Warp

SIZES = [1, 2, 7, 16, 33, 127, 1000, 1024, 1025, 5003, 49152]
FUNCTIONS = [f"outpace_{name}" for name in "softmax choose race rank place strike excess".split()]
PLANTED = {
    "a NaN at the end goes unseen": ("lanes.h", "isnan(most) ? most : x[i]", "x[i]"),
    "a NaN in a vector goes unseen": ("lanes.h", "if (odd[n]) most = NAN;", ""),
    "the largest of the end goes unseen": ("lanes.h", "if (!(x[i] <= most)) most", "if (0) most"),
    "an infinity counts as a score": ("draws.c", "<= FLT_MAX", "<= INFINITY"),
    "temperature is left out": ("draws.c", "(1.4426950408889634 / temperature)", "1.4426950408889634"),
    "the last scores get no weight": ("draws.c", "memcpy(out + i, rest, 4 * (width - i));", ""),
    "the last weights are not normed": ("draws.c", "for (; i < width; i++) weight[i] *= share;", ""),
    "the last weights are not summed": ("draws.c", "for (; i < width; i++) total += x[i];", ""),
    "sums in float32": ("draws.c", "double total = 0;\n    for", "float total = 0;\n    for"),
    "a token in the last block is not found": (
        "draws.c",
        "start + STEP < width ? start + STEP : width",
        "start + STEP",
    ),
    "a struck entry stays": ("draws.c", "out[at[n]] = 0", "out[at[n]] *= 0.5f"),
    "what is left is not normed": (
        "draws.c",
        "return normed(out, width) > 0;",
        "return sum_of(out, width) > 0;",
    ),
    "the weight is left out": ("draws.c", "const float by = (float)weight;", "const float by = 1;"),
    "a token of another vocabulary is read": (
        "draws.c",
        "if (at >= width) continue;",
        "if (at >= width) break;",
    ),
    "what q has too much of counts": ("draws.c", "left > 0 ? left : 0", "left > 0 ? left : -left"),
    "q by place": ("draws.c", "const int64_t at = id ? id[n] : n;", "const int64_t at = n;"),
    "an edge belongs to the entry before": (
        "draws.c",
        "(edge += weight[i]) > coin",
        "(edge += weight[i]) >= coin",
    ),
    "a stretch is passed too early": ("draws.c", "edge + sum[at] <= coin", "edge + 0.9 * sum[at] <= coin"),
    "past the end an impossible entry is drawn": ("draws.c", "!(weight[last] > 0)", "0"),
    "noise by place": ("draws.c", "if (id) hash = *(const uvec *)(id + i);", ""),
    "noise of another constant": ("draws.c", "0x94D049BB133111EB", "0x94D049BB133111ED"),
    "a bound that cuts winners": ("draws.c", "bound * doubles(prob + i)", "bound * doubles(prob + i) / 2"),
    "a bound that cuts runners-up": ("draws.c", "bound = when[count - 1]", "bound = when[0]"),
    "impossible entries arrive": ("draws.c", "if (!(prob[i] > 0)) continue;", ""),
    "a block without a place is read too late": ("draws.c", "largest(x + start, stop - start) > bound", "0"),
    "equal ranks are turned": ("draws.c", "x[best[at - 1]] < x[i]", "x[best[at - 1]] <= x[i]"),
    "ranks by place": ("draws.c", "if (id) best[n] = id[best[n]];", ""),
    "the end of a row counts for the sum": ("draws.c", "x[i + n] : -INFINITY", "x[i + n] : x[best[0]]"),
}
"""Name -> file, what stands there, what is planted."""


def load(path):
    code = ctypes.CDLL(str(path))
    for name in FUNCTIONS:
        getattr(code, name).argtypes = [compiled._TYPES[letter] for letter in compiled._ARGUMENTS[name]]
        getattr(code, name).restype = ctypes.c_int64
    return code


@pytest.fixture(scope="module", params=build.VARIANTS)
def variant(request, tmp_path_factory):
    """The code for one kind of vector."""
    if not build.needed(request.param) <= build.features():
        pytest.skip("not a processor for it")
    path = tmp_path_factory.mktemp("draws") / "draws.so"
    try:
        build.compile_to(path, build.VARIANTS[request.param], build.FOLDER / "draws.c")
    except (OSError, subprocess.SubprocessError):
        pytest.skip("cannot be compiled here")
    return load(path)


def rows(size):
    """Scores of all kinds."""
    torch.manual_seed(size)
    x_V = 4 * torch.randn(size)
    yield x_V
    yield torch.zeros(size)  # all equal
    yield 1e30 * x_V
    some_V = x_V.masked_fill(torch.rand(size) < 0.7, -math.inf)
    some_V[size // 2] = 50.0
    yield some_V
    for at in {0, size // 2, size - 1}:
        one_V = torch.full((size,), -math.inf)
        one_V[at] = 3.0
        yield one_V


def faults(code, with_torch):
    """Where compiled code differs from torch; the first of each kind."""
    kinds = (_softmax, _refusal, _choose, _race, _rank, _place, _strike, _excess)
    return list(filter(None, (wrong(code, with_torch) for wrong in kinds)))


def _softmax(code, with_torch):
    for size in SIZES:
        for x_V, t in itertools.product(rows(size), (1e-5, 0.3, 1.0, 2.5)):
            own_V = code(draws.softmax, x_V, t)
            true_V = (x_V.double() / t).softmax(0)
            if own_V is None or not torch.allclose(own_V.double(), true_V, rtol=1e-5, atol=1e-37):
                return f"softmax of {size} at {t}"
            if abs(float(own_V.double().sum()) - 1) > 2e-7 or not bool((own_V[x_V == -math.inf] == 0).all()):
                return f"sum of {size} at {t}"
    return None


def _refusal(code, with_torch):
    for t in (1e-39, 1e-300):
        cold_V = code(draws.softmax, torch.tensor([0.0, -1e-20, 0.0]), t)
        if cold_V is None or cold_V.tolist() != [0.5, 0.0, 0.5]:
            return f"softmax at {t}"
    for size in SIZES:
        for odd in (math.nan, math.inf):
            for at in {0, size // 2, size - 1, max(0, size - 3)}:
                bad_V = torch.randn(size)
                bad_V[at] = odd
                if code(draws.softmax, bad_V, 1.0) is not None:
                    return f"{odd} at {at} of {size}"
        if code(draws.softmax, torch.full((size,), -math.inf), 1.0) is not None:
            return f"nothing possible of {size}"
    return None if code(draws.softmax, torch.tensor([1e37, 0.0]), 1e-3) is None else "overflow"


def _weights(size):
    for x_V in rows(size):
        yield x_V.softmax(0)
    yield torch.rand(size).bernoulli_().index_fill_(0, torch.tensor([size // 2]), 1.0) / 64  # exact edges
    yield torch.cat((torch.rand(size), torch.zeros(size)))
    yield torch.full((size,), 1.0 + 2.0**-23)  # sums that float32 cannot hold


def _choose(code, with_torch):
    for size in SIZES:
        for weight_S in _weights(size):
            sevenths = [i / 7 for i in range(7)]
            for coin in (*sevenths, 2.0**-53, 0.25, 0.5, 0.75):
                if code(draws.choose, weight_S, coin) != with_torch(draws.choose, weight_S, coin):
                    return f"choice of {size} by {coin}"
            if not weight_S[code(draws.choose, weight_S, 1 - 2.0**-53)] > 0:
                return f"an impossible choice of {size}"
    at = code(draws.choose, torch.tensor([0.0, 0.5, 0.5, 0.0]), 1.0)  # as where rounding goes past the end
    return None if at == 2 else "choice past the end"


def _race(code, with_torch):
    for size in SIZES:
        id_S = torch.randperm(3 * size)[:size]
        for (n, prob_S), ids in itertools.product(enumerate(_weights(size)), (None, id_S)):
            for count in (1, 2, 5):
                ids = None if ids is None or len(ids) != len(prob_S) else ids
                given = (prob_S, ids, (1 << 63) + 977 * n + size, count)
                if code(draws.race, *given) != with_torch(draws.race, *given):
                    return f"race of {count} among {size}"
    return None


def _rank(code, with_torch):
    for size in SIZES:
        x_RV = torch.stack([x_V if n else x_V.mul(2).round() for n, x_V in enumerate(rows(size))])  # ties
        id_V = torch.randperm(3 * size)[:size]
        prob_RV = x_RV.double().softmax(-1)
        for k, ids in itertools.product((1, 2, 8, 40), (None, id_V)):
            for listed, x_V, prob_V in zip(code(draws.rank, x_RV, ids, k), x_RV, prob_RV, strict=True):
                order = x_V.sort(descending=True, stable=True).indices[:k]
                order = order[x_V[order] > -math.inf]
                if [token for token, _ in listed] != (order if ids is None else ids[order]).tolist():
                    return f"ranks of {k} among {size}"
                if not torch.allclose(
                    torch.tensor([p for _, p in listed]).double(), prob_V[order], rtol=1e-5
                ):
                    return f"probabilities of {k} among {size}"
    return None


def _place(code, with_torch):
    for size in SIZES:
        id_S = torch.randperm(3 * size)[:size]
        for at in {0, size // 3, size // 2, size - 1}:
            if code(draws.place, id_S, int(id_S[at])) != at:
                return f"place {at} of {size}"
        if code(draws.place, id_S, 3 * size) != -1:
            return f"a place for a token that is not among {size}"
    return None


def _same(own, true):
    """Whether two distributions, or their absences, are the same."""
    if own is None or true is None:
        return own is true
    return torch.allclose(own.double(), true.double(), rtol=1e-5, atol=1e-9)


def _strike(code, with_torch):
    for size in SIZES:
        for prob_S in _weights(size):
            some = sorted({0, len(prob_S) // 2, len(prob_S) - 1})
            for places in (some[:1], some, [*range(len(prob_S))]):
                if not _same(code(draws.strike, prob_S, places), with_torch(draws.strike, prob_S, places)):
                    return f"strikes of {len(places)} among {size}"
    return None


def _excess(code, with_torch):
    for size in SIZES:
        p_V, few = (3 * torch.randn(size)).softmax(0), max(1, size // 3)
        for width, weight in itertools.product((few, size, size + 5), (1.0, 0.5, 1.5)):
            near_S = p_V[:width] if width <= size else torch.cat((p_V, torch.full((width - size,), 0.01)))
            for ids in (None, torch.randperm(width), torch.randperm(2 * width)[:width]):
                for q_S in ((3 * torch.randn(width)).softmax(0), near_S, 2 * near_S):
                    at_S = torch.arange(width) if ids is None else ids
                    true_V = (weight * p_V.double()).index_add(
                        0, at_S[at_S < size], q_S.double()[at_S < size], alpha=-1.0
                    )
                    true_V.clamp_min_(0)
                    mass, own_V = code(draws.excess, p_V, q_S, ids, weight)
                    some = float(true_V.sum()) > 1e-6  # less is rounding
                    if abs(mass - float(true_V.sum())) > 1e-6:
                        return f"mass of {size} less {width}"
                    if some and not torch.allclose(own_V.double() * mass, true_V, rtol=1e-4, atol=1e-7):
                        return f"excess of {size} over {width}"
    return None


@pytest.fixture
def with_code(monkeypatch):
    """Makes of a library, or None for torch, what calls a function with it."""

    def made(library):
        def call(function, *given):
            monkeypatch.setattr(draws, "library", lambda: library)
            return function(*given)

        return call

    return made


def test_compiled_draws_are_those_of_torch(variant, with_code):
    assert faults(with_code(variant), with_code(None)) == []


def test_torch_finds_no_distribution_where_there_is_none(with_code):
    assert _refusal(with_code(None), None) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name, tmp_path, with_code):
    file, old, new = PLANTED[name]
    for source in ("draws.c", "lanes.h"):
        text = (build.FOLDER / source).read_text()
        if source == file:
            assert text.count(old) >= 1, "moved"
            text = text.replace(old, new)
        (tmp_path / source).write_text(text)
    try:
        build.compile_to(tmp_path / "draws.so", [build.NATIVE], tmp_path / "draws.c")
    except (OSError, subprocess.SubprocessError):
        pytest.skip("cannot be compiled here")
    assert faults(with_code(load(tmp_path / "draws.so")), with_code(None))


def test_a_row_has_the_same_numbers_wherever_it_lies(variant, with_code):
    call = with_code(variant)
    block_RV = torch.randn(6, 5003)
    for row_V in block_RV:
        assert torch.equal(call(draws.softmax, row_V, 0.7), call(draws.softmax, row_V.clone(), 0.7))


def test_numbers_that_code_does_not_read_go_through_torch(variant, with_code):
    call = with_code(variant)
    x_V = torch.randn(2000)
    for other_V in (x_V.double(), torch.stack((x_V, x_V), 1)[:, 0]):
        assert torch.equal(call(draws.softmax, other_V, 0.7), (other_V / 0.7).softmax(0))
        below = other_V.softmax(0).double().cumsum(0)
        assert call(draws.choose, other_V.softmax(0), 0.4) == int((below < 0.4).sum())
        assert len(call(draws.race, other_V.softmax(0), None, 5, 3)) == 3
        assert call(draws.strike, other_V.softmax(0), [7])[7] == 0
    prob_V = x_V.softmax(0)
    assert call(draws.excess, prob_V.double(), prob_V, None, 1.0) is None


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_row_that_is_not_finite_is_refused(odd, settings):
    warp = Warp(SamplingParams(temperature=0.8, **settings), [1], frozenset(), 500)
    x_V = torch.randn(500)
    x_V[499] = odd
    with pytest.raises(LogitsError, match="not finite"):
        warp.law(x_V)


def test_compiled_code_is_not_asked_for_nothing(monkeypatch):
    """It would write before its output."""
    monkeypatch.setattr(draws, "library", lambda: object())
    assert draws.race(torch.ones(9), None, 5, 0) == []
    assert draws.rank(torch.ones(2, 9), None, 0) is None
