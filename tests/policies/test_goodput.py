import pytest

from outpace.config import build
from outpace.errors import SpecError, UnknownNameError
from outpace.policies.base import PolicyRow
from outpace.policies.goodput import Goodput, GoodputConfig
from outpace.policies.two_lines import TwoLines, TwoLinesConfig
from outpace.types import NOTHING, Budget, Load
from tests.policies.simulator import CURVE, PASS, Fake, Simulator, best_fixed, rate


class Blind(Goodput):
    """Planted bug: the pass is taken to cost the same whatever its rows."""

    def plan(self, rows, load):
        self.costs.passed = lambda rows, context, batch: PASS
        return super().plan(rows, load)


def share(chance, level, cls=Goodput, steps=500, seed=0):
    simulator = Simulator(cls(GoodputConfig()), {"m": Fake([chance], level)}, seed)
    return rate(simulator.run(steps)) / best_fixed(chance, level)[0]


@pytest.mark.parametrize("chance", [0.05, 0.3, 0.7, 0.85, 0.95])
@pytest.mark.parametrize("level", [0.0, 0.001, 0.004])
def test_regret_is_at_most_six_percent(chance, level):
    assert sum(share(chance, level, seed=seed) for seed in range(2)) / 2 > 0.94


def test_the_regret_test_can_fail():
    assert share(0.85, 0.0, Blind) < 0.94


def test_larger_batches_get_shorter_drafts():
    simulator = Simulator(Goodput(GoodputConfig()), {"m": Fake([0.8])})
    depth = {}
    for batch in (1, 4, 16):
        taken = [one.depth for _ in range(40) for one in simulator.step(batch=batch)]
        depth[batch] = sum(taken[-10 * batch :]) / (10 * batch)
    assert depth[1] > depth[4] > depth[16]


def test_it_picks_among_drafters_and_does_not_come_back():
    drafters = {"a": Fake([0.2, 0.9], 0.001), "b": Fake([0.8, 0.8], 0.001)}
    simulator = Simulator(Goodput(GoodputConfig()), drafters)
    assert {one.drafter for one in simulator.run(200)[100:]} == {"b"}
    assert {one.drafter for one in simulator.run(100, part=1)} == {"b"}, "its average stands still"


def test_stops_teach_nothing():
    simulator = Simulator(Goodput(GoodputConfig()), {"m": Fake([0.02])})
    assert len({simulator.step(censor=True)[0].depth for _ in range(30)}) == 1


def test_two_lines_ask_a_sure_lookup_then_another_then_nobody():
    sure = {"look": Fake([lambda coins: [0.8, 0.5, 0.2]]), "m": Fake([0.5], 0.001)}
    simulator = Simulator(TwoLines(TwoLinesConfig()), sure)
    (one,) = simulator.run(1)
    assert (one.drafter, one.depth) == ("look", 3) or (one.drafter, one.depth) == ("look", 2)
    silent = {"look": Fake([lambda coins: []]), "m": Fake([0.5], 0.001)}
    (one,) = Simulator(TwoLines(TwoLinesConfig()), silent).run(1)
    assert (one.drafter, one.depth) == ("m", 2)
    assert all(one.drafter == "none" for one in Simulator(TwoLines(TwoLinesConfig()), sure).step(batch=9))


def test_who_may_not_have_the_best_drafter_gets_no_draft():
    """A request under rules has a drafter more than its neighbour, or one that may not draft yet."""
    policy, fake = Goodput(GoodputConfig()), Fake([0.9])
    policy.costs.start(CURVE)
    limit = Budget(9, 9)
    rows = [PolicyRow(None, own, limit, None) for own in ({"m": fake.budget}, {"x": NOTHING}, {"m": NOTHING})]
    for order in (rows, rows[::-1]):
        nodes = [one.budget.max_nodes for one in policy.plan(order, Load(3, 64))]
        assert nodes[order.index(rows[0])] > 0 and sum(n > 0 for n in nodes) == 1


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [(GoodputConfig, "weight", "2"), (TwoLinesConfig, "sure", "7"), (TwoLinesConfig, "depth", "-1")],
)
def test_bad_settings_are_refused(config, key, value):
    with pytest.raises(SpecError, match=f"{key} must be .*{value}"):
        build(config, {key: value}, "the policy")
    with pytest.raises(UnknownNameError) as error:
        build(config, {"foo": value}, "the policy")
    assert "verifier" not in str(error.value)
