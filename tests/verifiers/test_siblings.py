"""k_seq, greedy_plus_one, spechub and traversal: what they take, what they keep, what they read."""

import pytest
import torch

from outpace.analysis.agreement import check_oracle
from outpace.analysis.tables import LOSSY, RIGHT, NodeLaws, Sapling, World, best, fan, outputs
from outpace.coins import KeyedCoins, Stream
from outpace.errors import SpecError
from outpace.law import Law
from outpace.types import ROOT, Draft, Drawn, Group
from outpace.verifiers.base import TargetLaws
from outpace.verifiers.k_seq import discount
from outpace.verifiers.traversal import Traversal, Visit
from tests.verifiers.refusing import Refusing

K_SEQ, GREEDY, TRAVERSAL, TREE = (RIGHT[name] for name in ("k_seq", "greedy_plus_one", "traversal", "tree"))
FOUR = ("k_seq", "greedy_plus_one", "spechub", "traversal")


class Given(TargetLaws):
    def __init__(self, laws):
        self.laws, self.read = laws, []

    def law(self, node):
        self.read.append(node)
        return self.laws[node] if isinstance(self.laws, dict) else self.laws


# k_seq ----------------------------------------------------------------------------------------


def surplus(p, q, k, rho):
    beta = float(torch.minimum(q, p / rho).sum())
    return 1 - (1 - beta) ** k - rho * beta, beta


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_the_discount_is_the_least_that_leaves_a_law(k):
    for seed in range(30):
        world = World(seed, vocab=(3, 20, 300)[seed % 3])
        p, q = world.p(()).prob_S, world.q(()).prob_S
        rho, beta = discount(p, q, k)
        left, its_beta = surplus(p, q, k, rho)
        assert 1 <= rho <= k and left < 1e-12 and beta == pytest.approx(its_beta)
        if rho > 1 + 1e-9:
            assert surplus(p, q, k, rho * (1 - 1e-6))[0] > 0, "a smaller one is too small"
        residual = p - torch.minimum(q, p / rho) * (1 - (1 - beta) ** k) / beta
        assert float(residual.min()) > -1e-12


def test_the_discount_at_the_edges():
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert discount(one, one, 4) == (1.0, 1.0)
    assert discount(one, other, 4)[1] == 0.0
    p = torch.tensor([0.5, 0.5])
    assert discount(p, p, 3) == (1.0, 1.0)


@pytest.mark.parametrize("seed", range(4))
def test_k_seq_keeps_what_its_formula_says(seed):
    world = World(seed + 30, vocab=4)
    p, q = world.p(()).prob_S, world.q(()).prob_S
    for k in (1, 2, 3):
        kept = outputs(K_SEQ, fan(Drawn.IID, k, 0), world)[1]
        assert kept == pytest.approx(1 - (1 - discount(p, q, k)[1]) ** k)


# greedy_plus_one ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_greedy_plus_one_keeps_as_much_as_tree_with_fewer_coins(seed):
    world, recipe = World(seed + 40, vocab=4), fan(Drawn.GREEDY_PLUS_ONE, 3, 0)
    assert outputs(GREEDY, recipe, world)[1] == pytest.approx(outputs(TREE, recipe, world)[1])
    q = Law(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    draft = Draft((0, 1, 3), (ROOT,) * 3, (Group(ROOT, Drawn.GREEDY_PLUS_ONE, (0, 1, 2), 0),), (q,))
    p = Law(torch.tensor([0.0, 0.0, 1.0, 0.0]))
    asked = {}
    for verifier in (GREEDY, TREE):
        coins = Refusing()
        verifier.judge(draft, Given(p), coins)
        asked[verifier.name] = len(coins.keys)
    assert asked == {"greedy_plus_one": 1 + 1, "tree": 3 + 1}


def test_a_greedy_sibling_is_met_by_the_extra_token():
    q = Law(torch.tensor([0.6, 0.3, 0.1]))
    group = Group(ROOT, Drawn.GREEDY_PLUS_ONE, (0, 1), 0)
    draft = Draft((0, 2), (ROOT, ROOT), (group,), (q,))
    laws = {ROOT: Law(torch.tensor([0.5, 0.4, 0.1])), 0: Law.one_hot(7)}
    verdict = GREEDY.judge(draft, Given(laws), Refusing())
    assert (verdict.kept, verdict.emitted) == ((0,), (0, 7))


# traversal ------------------------------------------------------------------------------------


def test_traversal_reads_laws_where_it_has_to():
    #  ROOT - 0, 1;  0 - 2;  1 - 3;  the target wants 1, then 3
    draft = Draft.chosen([10, 11, 12, 13], [ROOT, ROOT, 0, 1])
    laws = {ROOT: Law.one_hot(11), 1: Law.one_hot(13), 3: Law.one_hot(5)}
    given = Given(laws)
    verdict = TRAVERSAL.judge(draft, given, KeyedCoins(0, 1, Stream.JUDGE), want_laws=True)
    assert (verdict.kept, verdict.emitted) == ((1, 3), (11, 13, 5))
    assert given.read == [ROOT, 1, 3] and verdict.laws == tuple(laws.values())


def test_long_chains_are_no_recursion():
    tokens = [i % 2 for i in range(3000)]
    even, odd = Law.one_hot(0), Law.one_hot(1)
    laws = {i: (odd if i % 2 == 0 else even) for i in range(-1, 3000)}
    verdict = TRAVERSAL.judge(Draft.chosen(tokens), Given(laws), KeyedCoins(0, 1, Stream.JUDGE))
    assert len(verdict.kept) == 3000


# All four -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("block", {Drawn.CHOSEN, Drawn.IID, Drawn.DISTINCT}),
        ("k_seq", {Drawn.CHOSEN, Drawn.IID}),
        ("greedy_plus_one", {Drawn.CHOSEN, Drawn.GREEDY_PLUS_ONE}),
        ("spechub", {Drawn.CHOSEN, Drawn.HUB}),
        ("traversal", set(Drawn) - {Drawn.COUPLED}),
    ],
)
def test_wrong_groups_are_refused_by_name(name, takes):
    assert RIGHT[name].takes == takes
    q = Law(torch.tensor([0.5, 0.5]))
    for drawn in Drawn:
        chosen = drawn is Drawn.CHOSEN
        group = Group(ROOT, drawn, (0,), None if chosen else 0)
        draft = Draft((1,), (ROOT,), (group,), () if chosen else (q,))
        if drawn in takes:
            RIGHT[name].judge(draft, Given(q), KeyedCoins(0, 1, Stream.JUDGE))
        else:
            right = "coupled" if drawn is Drawn.COUPLED else "tree"
            with pytest.raises(SpecError, match=f"{drawn.value}.*verifier={right}"):
                RIGHT[name].judge(draft, Given(q), KeyedCoins(0, 1, Stream.JUDGE))


@pytest.mark.parametrize("name", ["k_seq", "greedy_plus_one", "spechub"])
def test_two_drawn_groups_below_one_parent_are_refused(name):
    q = Law(torch.tensor([0.5, 0.5]))
    drawn = RIGHT[name].draws
    groups = (Group(ROOT, drawn, (0,), 0), Group(ROOT, drawn, (1,), 0))
    with pytest.raises(SpecError, match=f"one drawn group per parent, got {drawn.value} and"):
        RIGHT[name].check(Draft((0, 1), (ROOT, ROOT), groups, (q,)))


@pytest.mark.parametrize("name", FOUR)
def test_greedy_finds_the_branch(name):
    draft = Draft.chosen([1, 2, 3, 4, 5], [ROOT, ROOT, 1, 1, 3])
    laws = {ROOT: Law.one_hot(2), 1: Law.one_hot(4), 3: Law.one_hot(9)}
    verdict = RIGHT[name].judge(draft, Given(laws), KeyedCoins(0, 1, Stream.JUDGE))
    assert (verdict.kept, verdict.emitted, verdict.laws) == ((1, 3), (2, 4, 9), None)


@pytest.mark.parametrize("name", ["block", *FOUR, "typical"])
def test_at_temperature_0_all_keep_what_tree_keeps(name):
    verifier = {**RIGHT, **LOSSY}[name]
    lengths = set()
    for seed in range(60):
        world = World(seed, vocab=4, p_edit=lambda law: Law.one_hot(law.top(1)[0]))
        sapling = Sapling(world, KeyedCoins(seed, 5, Stream.DRAFT))
        best([1] * 4 if verifier.chains_only else [2, 1, 2, 1])(sapling)
        draft = sapling.done()
        one, other = (
            v.judge(draft, NodeLaws(world, draft), KeyedCoins(seed, 5, Stream.JUDGE), want_laws=True)
            for v in (verifier, TREE)
        )
        assert (one.kept, one.emitted, one.laws) == (other.kept, other.emitted, other.laws)
        lengths.add(len(one.kept))
    assert len(lengths) > 2


@pytest.mark.parametrize("name", ["block", *FOUR])
def test_refusals_never_leave_nothing(name):
    """Rounding may refuse what has almost all the mass; the extra token still comes from p."""
    verifier = RIGHT[name]
    p = Law(torch.tensor([1 - 2**-23, 1e-30, 2**-23]))
    count = 1 if verifier.chains_only else 3
    tokens, parents = (0, 1, 2)[:count], (ROOT,) * count
    for q in (
        p,
        Law(p.prob_S * (1 - 2**-22)),
        Law(p.prob_S[:1]),
        Law.one_hot(2),
        Law(torch.tensor([0.0, 1.0])),
    ):
        for drawn in verifier.takes - {Drawn.CHOSEN}:
            draft = Draft(tokens, parents, (Group(ROOT, drawn, tuple(range(count)), 0),), (q,))
            assert verifier.judge(draft, Given(p), Refusing()).emitted[0] in (0, 1, 2)
    chosen = Draft.chosen(tokens, parents)
    assert verifier.judge(chosen, Given(p), Refusing()).emitted[0] in (0, 1, 2)
    alone = Law(torch.tensor([1 - 2**-23]), torch.tensor([4]))
    assert verifier.judge(Draft.chosen([4]), Given(alone), Refusing()).emitted[0] == 4


def test_every_coin_of_a_step_has_its_own_key():
    q = Law(torch.full((30,), 1 / 30))
    twice = Draft(
        (3, 4, 5, 6),
        (ROOT, ROOT, 0, 0),
        (Group(ROOT, Drawn.IID, (0, 1, 0, 1), 0), Group(0, Drawn.IID, (2, 3, 3), 0)),
        (q,),
    )
    p = Law(torch.tensor([0.1] * 3 + [0.05] * 4 + [0.5 / 23] * 23))
    for verifier in (K_SEQ, TRAVERSAL):
        coins = Refusing()
        verifier.judge(twice, Given(p), coins)
        assert len(coins.keys) == len(set(coins.keys)) > 4


def test_the_comparison_with_the_oracle_can_fail(monkeypatch):
    class Hasty(Visit):
        def _weigh(self, mass):
            self.weight = mass

    class Wrong(Traversal):
        visit = Hasty

    monkeypatch.setattr(
        "outpace.analysis.agreement.RIGHT", {"traversal": Wrong(), "k_seq": Swapped(RIGHT["k_seq"].config)}
    )
    names = ["traversal", "k_seq"]
    for name, report in check_oracle(seed=0, cases=77, names=names).items():
        assert report.agreed < report.cases, name


class Swapped(type(K_SEQ)):
    """Tries the draws in the reverse order."""

    def attempt(self, draft, coins, group, q, p):
        turned = Group(group.parent, group.drawn, group.nodes[::-1], group.law)
        return super().attempt(draft, coins, turned, q, p)
