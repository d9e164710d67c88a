"""spechub: what it keeps of a pair, and where the order of the pair matters."""

import pytest
import torch

from outpace.analysis.bound import bound
from outpace.analysis.tables import RIGHT, World, fan, outputs, step_error
from outpace.coins import KeyedCoins, Stream
from outpace.law import Law
from outpace.types import ROOT, Draft, Drawn, Group
from outpace.verifiers.base import TargetLaws
from tests.verifiers.refusing import Refusing

HUB, GREEDY, TREE = (RIGHT[name] for name in ("spechub", "greedy_plus_one", "tree"))
SURE = Law.one_hot(0, torch.float64)
Q = Law(torch.tensor([0.5, 0.3, 0.2]))


class One(TargetLaws):
    """The same distribution at every node."""

    def __init__(self, law):
        self.one = law

    def law(self, node):
        return self.one


def pair(*tokens, q=Q):
    nodes = tuple(range(len(tokens)))
    return Draft(tokens, (ROOT,) * len(tokens), (Group(ROOT, Drawn.HUB, nodes, 0),), (q,))


@pytest.mark.parametrize("vocab", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(6))
def test_the_law_is_the_targets_and_what_is_kept_is_optimal(vocab, seed):
    world = World(seed + 500, vocab=vocab)
    p, q = world.p(()).prob_S, world.q(()).prob_S
    one = fan(Drawn.HUB, 2, 0)
    assert step_error(HUB, one, world) < 1e-12
    kept = outputs(HUB, one, world)[1]
    assert kept == pytest.approx(bound(p, q, 2, Drawn.HUB), abs=1e-12)
    assert kept == pytest.approx(outputs(GREEDY, fan(Drawn.GREEDY_PLUS_ONE, 2, 0), world)[1], abs=1e-12)
    assert outputs(TREE, one, world)[1] <= kept + 1e-12


def first_kept(verifier, drawn, world):
    """How often the first draft is the one kept: whatever hangs below it counts double."""
    below = outputs(
        verifier, below_the_first(drawn), Certain(world.seed, world.vocab, world.p_edit, same=world.same)
    )[1]
    return below - outputs(verifier, fan(drawn, 2, 0), world)[1]


class Certain(World):
    """A world in which the token after the first is known to all."""

    def _law(self, which, context, edit):
        return SURE if context else super()._law(which, context, edit)


def below_the_first(drawn):
    def grow(s):
        s.sample(s.sample(ROOT, drawn, 2)[0], drawn, 1)

    return grow


@pytest.mark.parametrize("seed", range(8))
def test_the_first_is_kept_as_often_as_the_rule_says(seed):
    world = World(seed + 520, vocab=4)
    p, q = world.p(()).prob_S, world.q(()).prob_S
    hub = int(q.argmax())
    others = torch.arange(4) != hub
    lack = (p - q).clamp(min=0)[others]
    second = torch.minimum(lack, q[hub] * q[others] / q[others].sum()).sum()
    left = min(float(p[hub]), float(q[hub] - second))
    expected = float(torch.minimum(p, q)[others].sum()) + left
    assert first_kept(HUB, Drawn.HUB, world) == pytest.approx(expected, abs=1e-12)
    assert first_kept(GREEDY, Drawn.GREEDY_PLUS_ONE, world) == pytest.approx(float(p[hub]), abs=1e-12)
    assert expected <= float(torch.minimum(p, q).sum()) + 1e-12, "a single draw is kept as often, or more"


def test_the_first_is_kept_more_often_where_p_spreads_and_less_where_it_is_sure_of_the_hub():
    flat = World(42, vocab=4, same=True)
    assert first_kept(HUB, Drawn.HUB, flat) == pytest.approx(1.0), "where q is p, each first is kept"
    assert first_kept(GREEDY, Drawn.GREEDY_PLUS_ONE, flat) == pytest.approx(float(flat.p(()).prob_S.max()))
    sure = World(53, vocab=4, p_edit=lambda law: Law.one_hot(law.top(1)[0], torch.float64))
    (hub,) = sure.q(()).top(1)
    assert sure.p(()).top(1) == [hub]
    assert first_kept(HUB, Drawn.HUB, sure) == pytest.approx(sure.q(()).prob(hub))
    assert first_kept(GREEDY, Drawn.GREEDY_PLUS_ONE, sure) == pytest.approx(1.0)


@pytest.mark.parametrize(("first", "second"), [(1, 0), (0, 1)])
def test_where_q_is_p_the_first_is_kept_with_its_own_coin(first, second):
    verdict = HUB.judge(pair(first, second), One(Q), KeyedCoins(0, 1, Stream.JUDGE))
    assert verdict.kept == (0,)


def test_a_refused_draw_goes_to_the_hub_before_the_residual():
    p = Law(torch.tensor([0.9, 0.1, 0.0]))
    verdict = HUB.judge(pair(2, 0), One(p), KeyedCoins(0, 1, Stream.JUDGE))
    assert verdict.kept == (1,), "2 cannot come, and nothing but the hub is owed"


def test_more_than_a_pair_counts_as_chosen():
    def three(s):
        nodes = s.sample(ROOT, Drawn.HUB, 2)
        tokens = [s.path(node)[0] for node in nodes]
        s.hang(ROOT, Drawn.CHOSEN, [t for t in range(4) if t not in tokens][:1])
        whole = s.done()
        group = Group(ROOT, Drawn.HUB, tuple(range(len(whole))), 0)
        s.plant(Draft(whole.token_N, whole.parent_N, (group,), whole.laws))

    for verifier in (HUB, TREE):
        assert step_error(verifier, three, World(12, vocab=4)) < 1e-12


def test_what_q_cannot_have_drawn_counts_as_chosen():
    coins = Refusing()
    for draft in (
        pair(1, 2),
        pair(1, 2, 0),
        pair(0, 1, q=Law.one_hot(0)),
        pair(2, 0, q=Law(torch.tensor([0.5, 0.5]))),
    ):
        assert HUB.judge(draft, One(Q), coins).emitted
    assert all(key[-1] == -1 for key in coins.keys), "only the extra token is drawn"
