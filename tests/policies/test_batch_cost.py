import random

import pytest

from outpace.policies.batch_cost import BatchCost, Option, Share
from outpace.policies.costs import Costs
from outpace.types import Load
from tests.policies.simulator import CURVE, PASS


def cost_of(*shares):
    costs = Costs(CURVE)
    costs.suppose("look", 0.0)
    costs.suppose("m", 0.001)
    return BatchCost(costs, Load(len(shares), 64), shares)


GUESS = Share("m", kept=0.5, nodes=1.0, levels=1.0)


def test_sequences_that_are_alike_count_as_the_sum_of_their_tokens():
    for count in (1, 3):
        batch_cost = cost_of(*[GUESS] * count)
        batch_cost.leave_out(-1)
        seconds = CURVE.seconds(2, 64, count) + 0.001
        assert batch_cost.total() == pytest.approx(count * 1.5 / seconds)


def test_one_that_copies_does_not_make_the_others_wait():
    batch_cost = cost_of(Share("look", 12.0, 12.0, 1.0), Share())
    batch_cost.leave_out(1)
    assert batch_cost.rate(GUESS) > batch_cost.rate(Share())
    total = {one.drafter: (14.0 + one.kept) / batch_cost.seconds(one) for one in (GUESS, Share())}
    assert total["m"] < total["none"], "by the sum of tokens its guess would be worth nothing"


def test_a_level_is_paid_for_once_and_a_row_by_everyone():
    batch_cost = cost_of(GUESS, Share(), Share())
    batch_cost.leave_out(1)
    joined = batch_cost.seconds(GUESS) - batch_cost.seconds(Share())
    assert joined == pytest.approx(CURVE.seconds(5 / 3, 64, 3) - CURVE.seconds(4 / 3, 64, 3))
    deeper = batch_cost.seconds(Share("m", 0.7, 2.0, 2.0)) - batch_cost.seconds(GUESS)
    assert deeper > 0.001, "the second level is not"
    batch_cost.leave_out(0)
    assert batch_cost.seconds(GUESS) - batch_cost.seconds(Share()) >= 0.001, "nor is the first one's"


def test_rows_between_whole_ones_cost_what_lies_between():
    batch_cost = cost_of(Share())
    low, high = batch_cost.passed(8), batch_cost.passed(9)
    assert batch_cost.passed(8.25) == pytest.approx(low + (high - low) / 4) and high > low > PASS


@pytest.mark.parametrize(("kept", "pays"), [(0.9, True), (0.1, False)])
def test_what_nobody_uses_is_weighed_for_all_together(kept, pays):
    batch_cost = cost_of(*[Share()] * 8)
    option = Option("m", [kept], [1.0], [1.0], [(1, 1)])
    assert (batch_cost.alike([option], margin=0.04) is not None) == pays
    assert batch_cost.alike([Option("look", [kept], [1.0], [1.0], [(1, 1)])], margin=0.04) is None


def test_sums_that_are_kept_up_are_those_of_a_look_at_all():
    """The plain version is a new one of the same shares."""
    coins = random.Random(0)

    def share():
        name = coins.choice(["none", "look", "m"])
        levels = 0.0 if name == "none" else coins.choice([1.0, 2.0, 2.5])
        return Share(name, coins.random() * 3, coins.random() * 4, levels, 0.01 * coins.random())

    batch_cost = cost_of(*[share() for _ in range(7)])
    for _ in range(60):
        batch_cost.put(coins.randrange(7), share())
        plain = cost_of(*batch_cost.shares)
        for index in range(-1, 7):
            batch_cost.leave_out(index)
            plain.leave_out(index)
            assert batch_cost.total() == pytest.approx(plain.total())
            for one in (GUESS, Share()):
                assert batch_cost.seconds(one) == pytest.approx(plain.seconds(one))
                assert batch_cost.rate(one) == pytest.approx(plain.rate(one))


def test_reading_what_was_missed_is_laid_on_many_steps_but_taken_at_once():
    missed = Share("m", kept=0.5, nodes=1.0, levels=1.0, late=0.016)
    batch_cost = cost_of(Share(), Share())
    batch_cost.leave_out(0)
    assert batch_cost.seconds(missed) - batch_cost.seconds(GUESS) == pytest.approx(0.001)
    before = batch_cost.slower()
    batch_cost.put(0, missed)
    slower = batch_cost.slower()
    batch_cost.put(0, GUESS)
    plain = batch_cost.plain()
    assert slower - batch_cost.slower() == pytest.approx(0.016 / plain) and before == pytest.approx(1.0)
