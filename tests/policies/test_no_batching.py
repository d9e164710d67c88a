"""`auto` where rows cannot share a pass: every guess costs as much as a token, so nothing is to be gained.

    python -m tests.policies.test_no_batching      speed over plain decoding; below 0.95 is too slow

Models whose layers keep a recurrent state read their rows one after the other.
"""

import pytest

from outpace.policies.auto import Auto, AutoConfig
from outpace.types import CostCurve
from tests.policies.simulator import CURVE, PASS, Bush, Fake, Simulator, rate

ROWS = CURVE.rows_R
LINEAR = CostCurve(
    model="row by row",
    dtype="float32",
    threads=1,
    device="none",
    rows_R=ROWS,
    context_C=(64,),
    seconds_CR=(tuple(PASS * rows for rows in ROWS),),
)


def lookup(coins):
    """Has something to say in half of the steps, and is fairly sure of it."""
    return [0.8] * 8 if coins.random() < 0.5 else []


DRAFTERS = {
    "a lookup": {"a": Fake([lookup])},
    "a model": {"a": Fake([0.8], 0.002)},
    "trees": {"a": Bush([0.7], 0.001)},
    "several": {"a": Fake([lookup]), "b": Fake([0.8], 0.002), "c": Bush([0.7], 0.001)},
}


def share(case, known, steps=500, seeds=3):
    """Speed of `auto` over plain decoding.

    Args:
        case: the drafters.
        known: whether the cost of passes was measured before, or is learned on the way.
        steps: of one sequence.
        seeds: runs to take the mean of.
    """
    runs = (
        Simulator(Auto(AutoConfig()), DRAFTERS[case], seed, curve=LINEAR, know=known).run(steps)
        for seed in range(seeds)
    )
    return sum(rate(run) * PASS for run in runs) / seeds


@pytest.mark.parametrize("known", [True, False], ids=["measured before", "learned on the way"])
@pytest.mark.parametrize("case", DRAFTERS)
def test_auto_is_about_as_fast_as_plain_decoding(case, known):
    assert share(case, known) > 0.95


if __name__ == "__main__":
    for case in DRAFTERS:
        told, learned = share(case, known=True), share(case, known=False)
        print(f"{case:<10}  measured before {told:.2f}, learned on the way {learned:.2f}")
