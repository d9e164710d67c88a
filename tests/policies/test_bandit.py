import pytest

from outpace.coins import KeyedCoins, Stream
from outpace.config import build
from outpace.errors import SpecError
from outpace.policies.bandit import Bandit, BanditConfig, Posterior, draw
from outpace.policies.base import Evidence, PolicyRow
from outpace.types import Budget, KnownDrafter
from tests.policies.simulator import Fake, Simulator, best_fixed, rate


class Uncensored(Bandit):
    """Planted bug: what lay behind the first refusal counts as refused."""

    def learn(self, rows, evidence):
        super().learn(rows, evidence)
        for row, seen in zip(rows, evidence, strict=True):
            row.state.posteriors["m"].refused += max(0, seen.depth - seen.accepted - 1)


def share(chance, level, cls=Bandit, seed=0):
    simulator = Simulator(cls(BanditConfig()), {"m": Fake([chance], level)}, seed)
    return rate(simulator.run(500)) / best_fixed(chance, level)[0]


@pytest.mark.parametrize("chance", [0.3, 0.7, 0.85, 0.95])
@pytest.mark.parametrize("level", [0.0, 0.004])
def test_regret_is_small(chance, level):
    assert share(chance, level) > 0.95


def test_the_regret_test_can_fail():
    assert share(0.85, 0.0, Uncensored) < 0.9


def test_only_what_was_tried_counts():
    policy = Bandit(BanditConfig(forget=1.0))
    row = PolicyRow(policy.begin(), {}, Budget(9, 9), None)
    for depth, kept, censored in ((8, 3, False), (8, 8, False), (8, 2, True), (0, 0, False)):
        policy.learn([row], [Evidence("m", depth, depth, kept, censored)])
    one = row.state.posteriors["m"]
    assert (one.kept, one.refused) == (13, 1)


def test_draws_follow_the_posterior_and_the_coins():
    state = Posterior(kept=6.0, refused=3.0)
    thetas = [draw(state, 0.5, KeyedCoins(1, i, Stream.POLICY)) for i in range(2000)]
    assert sum(thetas) / 2000 == pytest.approx(7 / 11, abs=0.01)
    assert thetas[5] == draw(state, 0.5, KeyedCoins(1, 5, Stream.POLICY))
    assert len(set(thetas)) == 2000


def test_it_begins_with_what_was_measured_unless_a_prior_is_given():
    known = KnownDrafter(call=0.0, level=0.0, kept_D=(90.0, 80.0), tried_D=(100.0, 90.0))
    for prior, low, high in ((None, 0.85, 0.95), (0.2, 0.199, 0.201)):
        policy = Bandit(BanditConfig(prior=prior))
        assert policy._prior("m") == (0.6 if prior is None else prior)
        policy.costs.know({"m": known})
        assert low < policy._prior("m") < high


def test_it_forgets():
    simulator = Simulator(Bandit(BanditConfig()), {"m": Fake([0.95, 0.1])})
    before = simulator.run(100)[-20:]
    after = simulator.run(60, part=1)[-20:]
    assert sum(s.depth for s in before) / 20 > 8 and sum(s.depth for s in after) / 20 < 6


def test_bad_settings_are_refused():
    for options in ({"forget": "0"}, {"prior": "1"}):
        with pytest.raises(SpecError, match="must be in"):
            build(BanditConfig, options, "policy 'bandit'")


def test_while_nothing_pays_it_looks_less_and_less_often():
    steps = Simulator(Bandit(BanditConfig()), {"m": Fake([0.05], 0.01)}).run(300)
    assert sum(one.drafter == "m" for one in steps[100:]) < 10
    both = {"a": Fake([0.2], 0.001), "b": Fake([0.8], 0.001)}
    steps = Simulator(Bandit(BanditConfig()), both).run(200)
    assert sum(one.drafter == "b" for one in steps[100:]) > 80
