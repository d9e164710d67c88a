import pytest

from outpace.config import build
from outpace.errors import SpecError
from outpace.policies.base import Evidence, PolicyRow
from outpace.policies.schedule import Schedule, ScheduleConfig
from outpace.types import Budget, Load
from tests.policies.simulator import Fake, Simulator


def depths(results, start=5, budget=16, room=99):
    """Depths planned; every result is (levels drafted or None for all, kept, censored)."""
    policy = Schedule(ScheduleConfig(start=start))
    row = PolicyRow(policy.begin(), {"m": Budget(budget, budget)}, Budget(room, room), None)
    out = []
    for drafted, kept, censored in results:
        plan = policy.plan([row], Load(1, 10))[0]
        out.append(plan.budget.max_depth)
        depth = plan.budget.max_depth if drafted is None else drafted
        policy.learn([row], [Evidence("m", depth, depth, min(kept, depth), censored)])
    return out


@pytest.mark.parametrize(
    ("results", "want"),
    [
        ([(None, 99, False)] * 4, [5, 7, 9, 11]),  # kept whole: two more
        ([(None, 0, False)] * 6, [5, 4, 3, 2, 1, 1]),  # refused: one fewer, never none
        ([(None, 99, False), (None, 6, False)] * 2, [5, 7, 6, 8]),
        ([(0, 0, False)] * 2, [5, 5]),  # an empty draft says nothing
        ([(None, 2, True)] * 2, [5, 5]),  # nor does one that a stop cut off
        ([(3, 3, False)] * 2, [5, 5]),  # it ended early of itself
    ],
)
def test_up_by_two_down_by_one(results, want):
    assert depths(results) == want


def test_never_beyond_the_budget_nor_the_room():
    assert depths([(None, 99, False)] * 9, budget=8)[-1] == 8
    assert depths([(None, 99, False)] * 3, room=6) == [5, 6, 6]
    # Long at its limit, it still comes down at the first refusal.
    assert depths([*[(None, 99, False)] * 9, (None, 0, False), (None, 0, False)], budget=8)[-1] == 7


def test_it_follows_acceptance():
    for chance, low, high in ((0.1, 1, 2), (0.98, 12, 16)):
        simulator = Simulator(Schedule(ScheduleConfig()), {"m": Fake([chance])})
        later = [s.depth for s in simulator.run(200)[50:]]
        assert low <= sum(later) / len(later) <= high


def test_bad_settings_are_refused():
    with pytest.raises(SpecError, match="start of at least 1"):
        build(ScheduleConfig, {"start": "0"}, "policy 'schedule'")
