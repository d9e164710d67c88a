from itertools import pairwise

import pytest

from outpace.config import build
from outpace.errors import SpecError
from outpace.policies.acceptance_model import Belief, Pool, sizes
from outpace.policies.goodput import Goodput, GoodputConfig
from outpace.tree.shapes import budget
from outpace.types import Budget
from tests.policies.simulator import PASS, Fake, Simulator, best_fixed, rate


class Blind(Goodput):
    """Planted bug: the pass is taken to cost the same whatever its rows."""

    def plan(self, rows, load):
        self.costs.passed = lambda rows, context, batch: PASS
        return super().plan(rows, load)


def share(chance, level, cls=Goodput, steps=500, seed=0):
    simulator = Simulator(cls(GoodputConfig()), {"m": Fake([chance], level)}, seed)
    return rate(simulator.run(steps)) / best_fixed(chance, level)[0]


@pytest.mark.parametrize("chance", [0.05, 0.3, 0.5, 0.7, 0.85, 0.95])
@pytest.mark.parametrize("level", [0.0, 0.001, 0.004])
def test_regret_is_at_most_five_percent(chance, level):
    assert sum(share(chance, level, seed=seed) for seed in range(2)) / 2 > 0.95


def test_the_regret_test_can_fail():
    assert share(0.85, 0.0, Blind) < 0.95


@pytest.mark.parametrize(
    ("parts", "level"), [([0.9, 0.05], 0.002), ([0.05, 0.85], 0.001), ([0.5, 0.95], 0.001)]
)
def test_it_follows_the_text_within_32_tokens(parts, level):
    shares = []
    for seed in range(4):
        simulator = Simulator(Goodput(GoodputConfig()), {"m": Fake(parts, level)}, seed)
        simulator.run(120)
        emitted = 0
        while emitted < 32:
            emitted += simulator.step(part=1)[0].emitted
        shares.append(rate(simulator.run(40, part=1)) / best_fixed(parts[1], level)[0])
    assert sum(shares) / 4 > 0.9


def test_larger_batches_get_shorter_drafts():
    simulator = Simulator(Goodput(GoodputConfig()), {"m": Fake([0.8])})
    depth = {}
    for batch in (1, 4, 16, 2):
        taken = [one.depth for _ in range(40) for one in simulator.step(batch=batch)]
        depth[batch] = sum(taken[-10 * batch :]) / (10 * batch)
    assert depth[1] > depth[2] > depth[4] > depth[16]
    assert depth[16] <= 3 and depth[1] >= 5


@pytest.mark.parametrize(("margin", "fewest", "most"), [(0.04, 0, 4), (0.0, 8, 80)])
def test_a_batch_at_the_threshold_does_not_oscillate(margin, fewest, most):
    """Up to 5 sequences a guess pays a little, from 6 on it does not. Without a margin it flips."""
    policy = Goodput(GoodputConfig(margin=margin, probe=0.0))
    simulator = Simulator(policy, {"m": Fake([0.25])})
    for _ in range(60):
        simulator.step(batch=5)
    drafts = []
    for step in range(80):
        drafts.append(simulator.step(batch=(5, 6)[step % 2])[0].depth > 0)
    changes = sum(a != b for a, b in pairwise(drafts))
    assert fewest <= changes <= most


def test_stops_teach_nothing():
    pool, belief = Pool(), Belief()
    belief.learn(pool, 0, refused=False)
    assert belief.reach(pool.chances(3)) == Belief().reach(Pool().chances(3))
    simulator = Simulator(Goodput(GoodputConfig()), {"m": Fake([0.02])})
    assert all(s.depth >= 3 for s in [simulator.step(censor=True)[0] for _ in range(30)])


def test_nodes_by_depth():
    assert sizes(Budget(3, 9)) == (1, 2, 3)
    assert sizes(budget("3x2x1", None, 0)) == (3, 9, 15)
    assert sizes(budget("3x2x1", 5, 0)) == (3, 5)
    assert sizes(budget("dynamic", 16, 0)) == (2, 4, 6, 8, 10, 12, 14, 16)
    assert sizes(Budget(0, 0)) == ()


def test_bad_settings_are_refused():
    for options in ({"margin": "-1"}, {"probe": "2"}):
        with pytest.raises(SpecError, match="must be in"):
            build(GoodputConfig, options, "policy 'goodput'")


@pytest.mark.parametrize(("level", "drafts"), [(0.003, True), (0.012, False)])
def test_levels_that_all_share_are_paid_for_together(level, drafts):
    """One of four sequences alone would never begin; four together do, if it pays for four."""
    simulator = Simulator(Goodput(GoodputConfig(probe=0.0)), {"m": Fake([0.75], level)})
    steps = [simulator.step(batch=4) for _ in range(60)]
    drafting = [sum(one.depth > 0 for one in step) for step in steps[20:]]
    assert (best_fixed(0.75, level, batch=4)[1] > 0) == drafts
    assert min(drafting) >= 3 if drafts else max(drafting) <= 1
