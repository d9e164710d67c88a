"""The bound against brute force, and every verifier's acceptance against enumeration and bound."""

import time
import tracemalloc
from itertools import combinations, pairwise, permutations, product

import numpy as np
import pytest
import torch

from outpace.analysis import bound as module
from outpace.analysis.acceptance import RULES, acceptance, acceptances, rules_of
from outpace.analysis.bound import Pair, bound, bounds
from outpace.analysis.tables import RIGHT, World, fan, outputs
from outpace.coins import KeyedCoins, Stream
from outpace.errors import UnknownNameError
from outpace.types import Drawn
from outpace.verifiers.tree import Tree, TreeConfig

COINS = KeyedCoins(0, 0, Stream.POLICY)


def laws(seed, vocab, flat=1.0):
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(vocab, 0.5)), rng.dirichlet(np.full(vocab, flat))
    return p, q / q.sum()


def tensors(p, q):
    return torch.from_numpy(p), torch.from_numpy(q)


def tuples(q, k, drawn):
    """Every outcome of k draws, with its probability."""
    tokens = range(len(q))
    if drawn is Drawn.IID:
        for drafts in product(tokens, repeat=k):
            yield drafts, float(np.prod(q[list(drafts)]))
    elif drawn is Drawn.DISTINCT:
        for drafts in permutations(tokens, k):
            chance = 1.0
            for i, x in enumerate(drafts):
                chance *= q[x] / sum(q[y] for y in tokens if y not in drafts[:i])
            yield drafts, chance
    elif drawn is Drawn.HUB:
        hub = int(np.argmax(q))
        for x in tokens:
            if k == 1:
                yield (x,), float(q[x])
            elif x != hub:
                yield (x, hub), float(q[x])
                yield (hub, x), float(q[hub] * q[x] / sum(q[y] for y in tokens if y != hub))
    else:
        top = tuple(np.argsort(-q)[: k - 1].tolist())
        rest = [x for x in tokens if x not in top]
        for x in rest:
            yield (*top, x), float(q[x] / q[rest].sum())


def brute(p, q, k, drawn):
    """The dual over all subsets: exact."""
    outcomes = list(tuples(q, k, drawn))
    subsets = [set(h) for size in range(len(q) + 1) for h in combinations(range(len(q)), size)]
    return 1 + min(
        sum(p[x] for x in h) - sum(chance for drafts, chance in outcomes if h.issuperset(drafts))
        for h in subsets
    )


KINDS = (Drawn.IID, Drawn.DISTINCT, Drawn.GREEDY_PLUS_ONE, Drawn.HUB)


@pytest.mark.parametrize("drawn", KINDS)
@pytest.mark.parametrize("flat", [0.1, 1.0, 5.0])
def test_the_dual_over_all_subsets(drawn, flat):
    for seed in range(3):
        p, q = laws(seed, 5, flat)
        found = bounds(*tensors(p, q), 4, drawn)
        for k in range(1, 5):
            assert found[k - 1] == pytest.approx(brute(p, q, k, drawn), abs=1e-8)


def test_this_test_can_fail(monkeypatch):
    p, q = laws(1, 5)
    right = brute(p, q, 3, Drawn.DISTINCT)
    monkeypatch.setattr(module, "_STEP", 1.0)
    assert abs(bound(*tensors(p, q), 3, Drawn.DISTINCT) - right) > 1e-7
    assert abs(bound(*tensors(p, q), 3, Drawn.IID) - right) > 1e-3


def test_nothing_is_missed_between_the_prefixes_looked_at():
    for seed, flat in ((0, 0.02), (1, 0.3), (2, 3.0)):
        pair = Pair.of(*laws(seed, 3000, flat))
        clocks = module._Clocks(pair, 6)
        q_NC = clocks.inside(np.arange(len(pair.q_S) + 1))
        least = 1 + (pair.p_C - q_NC).min(1)
        assert pair.distinct(6)[1:] == pytest.approx(least.tolist(), abs=2e-9)
        # Two draws have a closed form.
        a, b = np.cumsum(pair.q_S / (1 - pair.q_S)), np.cumsum(pair.q_S**2 / (1 - pair.q_S))
        assert q_NC[0, 1:] == pytest.approx(pair.q_C[1:] * a - b, abs=1e-9)
        rising = np.diff(q_NC, axis=1)
        assert (rising > -1e-12).all() and q_NC[:, -1] == pytest.approx(1.0)


def test_edges():
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    half = torch.tensor([0.5, 0.5])
    for drawn in (*KINDS, Drawn.CHOSEN):
        assert bounds(one, other, 3, drawn) == pytest.approx([0.0, 0.0, 0.0])
        assert bounds(other, other, 3, drawn) == pytest.approx([1.0, 1.0, 1.0])
    assert bounds(one, half, 2, Drawn.IID) == pytest.approx([0.5, 0.75])
    assert bounds(one, half, 4, Drawn.DISTINCT) == pytest.approx([0.5, 1.0, 1.0, 1.0])
    third = torch.tensor([0.4, 0.3, 0.3])
    partly = torch.tensor([0.5, 0.5, 0.0])
    assert bound(third, partly, 3, Drawn.DISTINCT) == pytest.approx(0.7), "p where q can draw"
    with pytest.raises(ValueError, match="at least 1 draft, got 0"):
        bound(half, half, 0, Drawn.IID)
    with pytest.raises(ValueError, match="no bound is known for drafts drawn 'coupled'"):
        bound(half, half, 1, Drawn.COUPLED)


def test_laws_of_many_sizes():
    """Tails that float32 barely holds, against the same in exact sums."""
    for tail in (1e-3, 1e-6, 1e-9):
        q = np.array([1 - 10 * tail, 4 * tail, 3 * tail, 2 * tail, tail])
        p = np.array([0.5, 0.1, 0.1, 0.1, 0.2])
        for k in (2, 3, 4):
            found = bound(*tensors(p, q), k, Drawn.DISTINCT)
            assert found == pytest.approx(brute(p, q, k, Drawn.DISTINCT), abs=1e-8)


# Acceptance -----------------------------------------------------------------------------------

VERIFIERS = {**RIGHT, "tree[replacement=true]": Tree(TreeConfig(replacement=True))}


@pytest.mark.parametrize("rule", [r for r in RULES if r not in ("typical", "coupled")])
def test_acceptance_is_what_enumeration_keeps(rule):
    drawn = RULES[rule][0]
    assert VERIFIERS[rule].draws is drawn
    for seed in (1, 12, 30):
        world = World(seed, vocab=4)
        p, q = world.p(()).prob_S, world.q(()).prob_S
        curve = acceptances(p, q, 3, rule, coins=COINS, paths=400)
        assert len(curve) == {"chain": 1, "block": 1, "spechub": 2}.get(rule, 3)
        for k, got in enumerate(curve, start=1):
            if drawn is Drawn.CHOSEN:
                kept = outputs(VERIFIERS[rule], lambda s, k=k: s.top(-1, k, drafter=1), world)[1]
            else:
                kept = outputs(VERIFIERS[rule], fan(drawn, k, 0), world)[1]
            sampled = drawn is Drawn.DISTINCT and k > 2
            assert got == pytest.approx(kept, abs=0.01 if sampled else 1e-9)


def test_coupled_is_what_races_agree_in():
    rng = np.random.default_rng(0)
    for seed in range(3):
        p, q = laws(seed, 5)
        noise = rng.exponential(size=(200_000, 5))
        agree = ((noise / p).argmin(1) == (noise / q).argmin(1)).mean()
        assert acceptance(*tensors(p, q), 1, "coupled") == pytest.approx(agree, abs=0.006)
        assert acceptance(*tensors(p, p), 1, "coupled") == pytest.approx(1.0)


def test_typical_is_all_or_nothing():
    p, q = torch.tensor([0.05, 0.05, 0.9]), torch.tensor([0.6, 0.1, 0.3])
    assert acceptances(p, q, 3, "typical") == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("flat", [0.1, 1.0])
def test_no_lossless_verifier_beats_the_bound(flat):
    for seed in range(4):
        p, q = tensors(*laws(seed + 50, 200, flat))
        for drawn in (*KINDS, Drawn.CHOSEN):
            most = bounds(p, q, 6, drawn)
            assert all(a <= b + 1e-9 for a, b in pairwise(most))
            for rule in rules_of(drawn):
                if rule == "typical":
                    continue
                curve = acceptances(p, q, 6, rule, coins=COINS, paths=64)
                slack = 0.02 if drawn is Drawn.DISTINCT else 1e-8
                for got, limit in zip(curve, most, strict=False):
                    assert got <= limit + slack, (rule, drawn)
                if drawn in (Drawn.GREEDY_PLUS_ONE, Drawn.HUB, Drawn.CHOSEN):
                    assert curve == pytest.approx(most[: len(curve)]), "these are optimal"


def test_what_cannot_be_answered_is_said():
    p, q = tensors(*laws(0, 5))
    with pytest.raises(UnknownNameError, match="did you mean k_seq"):
        acceptance(p, q, 1, "kseq")
    with pytest.raises(ValueError, match="chain takes 1 draft per position, got k=2"):
        acceptance(p, q, 2, "chain")
    with pytest.raises(ValueError, match="spechub takes 2 drafts per position, got k=3"):
        acceptance(p, q, 3, "spechub")
    with pytest.raises(ValueError, match="give coins"):
        acceptance(p, q, 3, "tree")
    with pytest.raises(ValueError, match="at least 1 draft, got 0"):
        acceptance(p, q, 0, "k_seq")


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [49152, 262144])
def test_time_and_memory_of_one_bound(vocab, capsys):
    """Prints the figures; only memory is asserted, since time depends on who else is at work."""
    torch.manual_seed(0)
    logits = torch.randn(vocab) * 3
    p, q = logits.softmax(0), (logits + torch.randn(vocab)).softmax(0)
    for drawn in KINDS:
        for k in (2, 4, 8):
            times = []
            for _ in range(3):
                start = time.perf_counter()
                bound(p, q, k, drawn)
                times.append(time.perf_counter() - start)
            tracemalloc.start()
            bound(p, q, k, drawn)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            with capsys.disabled():
                print(
                    f"\nV={vocab} {drawn.value} k={k}: {1e3 * min(times):.1f} ms, {peak / 1e6:.0f} MB", end=""
                )
            assert peak < 100e6
