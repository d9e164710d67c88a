import pytest

from outpace.policies.costs import Costs
from outpace.policies.tally import Option, Share, Tally
from outpace.types import Load
from tests.policies.simulator import CURVE, PASS


def tally_of(*shares):
    costs = Costs(CURVE)
    costs.suppose("look", 0.0)
    costs.suppose("m", 0.001)
    return Tally(costs, Load(len(shares), 64), shares)


GUESS = Share("m", kept=0.5, nodes=1.0, levels=1.0)


def test_sequences_that_are_alike_count_as_the_sum_of_their_tokens():
    for count in (1, 3):
        tally = tally_of(*[GUESS] * count)
        tally.leave_out(-1)
        seconds = CURVE.seconds(2, 64, count) + 0.001
        assert tally.total() == pytest.approx(count * 1.5 / seconds)


def test_one_that_copies_does_not_make_the_others_wait():
    tally = tally_of(Share("look", 12.0, 12.0, 1.0), Share())
    tally.leave_out(1)
    assert tally.rate(GUESS) > tally.rate(Share())
    total = {one.drafter: (14.0 + one.kept) / tally.seconds(one) for one in (GUESS, Share())}
    assert total["m"] < total["none"], "by the sum of tokens its guess would be worth nothing"


def test_a_level_is_paid_for_once_and_a_row_by_everyone():
    tally = tally_of(GUESS, Share(), Share())
    tally.leave_out(1)
    joined = tally.seconds(GUESS) - tally.seconds(Share())
    assert joined == pytest.approx(CURVE.seconds(5 / 3, 64, 3) - CURVE.seconds(4 / 3, 64, 3))
    deeper = tally.seconds(Share("m", 0.7, 2.0, 2.0)) - tally.seconds(GUESS)
    assert deeper > 0.001, "the second level is not"
    tally.leave_out(0)
    assert tally.seconds(GUESS) - tally.seconds(Share()) >= 0.001, "nor is the first one's"


def test_rows_between_whole_ones_cost_what_lies_between():
    tally = tally_of(Share())
    low, high = tally.passed(8), tally.passed(9)
    assert tally.passed(8.25) == pytest.approx(low + (high - low) / 4) and high > low > PASS


@pytest.mark.parametrize(("kept", "pays"), [(0.9, True), (0.1, False)])
def test_what_nobody_uses_is_weighed_for_all_together(kept, pays):
    tally = tally_of(*[Share()] * 8)
    option = Option("m", [kept], [1.0], [1.0], [(1, 1)])
    assert (tally.alike([option], margin=0.04) is not None) == pays
    assert tally.alike([Option("look", [kept], [1.0], [1.0], [(1, 1)])], margin=0.04) is None
