import pytest

from outpace.policies.costs import Costs, Line
from outpace.policies.tuning import TUNING
from outpace.types import CostCurve, KnownDrafter, RowRecord, StepRecord

CURVE = CostCurve(
    model="m",
    dtype="float32",
    threads=1,
    device="d",
    rows_R=(1, 8, 64),
    context_C=(0, 512),
    seconds_CR=((0.010, 0.017, 0.080), (0.020, 0.027, 0.090)),
)


def record(
    rows=1,
    score=0.010,
    draft=0.0,
    levels=0,
    drafter="none",
    batch=1,
    uncached=0,
    prompt=False,
    context=0,
    rest=0.0,
):
    made = [RowRecord(i, drafter, rows, 0, (0,), rows, False, None, uncached) for i in range(batch)]
    seconds = {"plan": 0.0, "draft": draft, "score": score, "judge": rest, "commit": 0.0}
    return StepRecord(
        0, tuple(made), seconds, batch * rows, draft_levels=levels, prompt=prompt, context=context
    )


def watched(*records, curve=None, times=1):
    costs = Costs(curve)
    for _ in range(times):
        for one in records:
            costs.watch(one)
    return costs


def test_a_line_finds_both_of_its_numbers_and_follows_them():
    line = Line(None, 0.5)
    for i in range(60):
        line.learn(1.0, float(i % 4), 2.0 + 0.3 * (i % 4))
    assert (line.a, line.b) == pytest.approx((2.0, 0.3), rel=0.01)
    for i in range(200):
        line.learn(1.0, float(i % 4), 3.0 + 0.1 * (i % 4))
    assert (line.a, line.b) == pytest.approx((3.0, 0.1), rel=0.05)


def test_what_does_not_vary_keeps_its_ratio():
    line = Line(None, 0.25)
    for _ in range(20):
        line.learn(1.0, 0.0, 4.0)
    assert (line.a, line.b) == pytest.approx((4.0, 1.0))


def test_a_slow_start_is_soon_forgotten():
    line = Line(None, 0.1)
    for seconds in [5.0] * 8 + [1.0] * 24:
        line.learn(1.0, 0.0, seconds)
    assert line.a < 1.4


def test_one_stall_is_no_price_and_two_in_a_row_are_one():
    line = Line(None, 0.1)
    for _ in range(20):
        line.learn(1.0, 0.0, 1.0)
    line.learn(1.0, 0.0, 50.0)
    assert line.a < 1.1
    line.learn(1.0, 0.0, 50.0)
    assert line.a > 2.0


def test_passes_without_a_curve_are_learned_from_steps():
    costs = watched(record(1, 0.010), record(4, 0.016), times=20)
    assert costs.passed(1, 0, 1) == pytest.approx(0.010, rel=0.03)
    assert costs.passed(3, 0, 1) == pytest.approx(0.014, rel=0.05)
    assert costs.passed(9, 0, 1) == pytest.approx(0.026, rel=0.05)


def test_rows_that_are_free_up_to_a_number_are_seen_to_be():
    steps = [record(n, 0.010 if n < 5 else 0.010 + 0.005 * (n - 4)) for n in (1, 2, 3, 4, 8, 12)]
    costs = watched(*steps, times=20)
    assert costs.passed(4, 0, 1) / costs.passed(1, 0, 1) < 1.35
    assert costs.passed(8, 0, 1) == pytest.approx(0.030, rel=0.1)


def test_a_curve_is_corrected_by_steps():
    costs = Costs(CURVE)
    assert costs.passed(8, 0, 1) == pytest.approx(0.017) and costs.passed(1, 512, 1) == pytest.approx(0.020)
    for _ in range(30):
        costs.watch(record(1, 0.020))
    assert costs.passed(1, 0, 1) == pytest.approx(0.020, rel=0.05)
    assert costs.passed(8, 0, 1) == pytest.approx(0.034, rel=0.1), "rows are dearer in the same ratio"


def test_a_batch_of_a_new_size_begins_like_its_neighbour():
    costs = watched(record(1, 0.010), record(3, 0.012), times=20)
    assert costs.passed(8, 0, 8) == pytest.approx(0.017, rel=0.1), "seven rows more"


def test_prompts_teach_nothing():
    assert watched(record(1, 9.0, prompt=True)).passed(1, 0, 1) == Costs().passed(1, 0, 1)


def test_levels_and_calls_have_prices():
    costs = watched(record(3, 0.02, 0.004, 2, "m"), record(5, 0.02, 0.008, 4, "m"), times=20)
    assert costs.price("m") == pytest.approx(0.002, rel=0.05)
    costs = watched(record(3, 0.02, 0.0005, 0, "look", batch=4), times=20)
    assert costs.price("look") == pytest.approx(0.000125, rel=0.1)


def test_reading_late_makes_no_level_dearer():
    steps = [record(3, 0.02, 0.004 + 0.0001 * n, 2, "m", uncached=n) for n in (0, 2, 200, 1, 90)]
    costs = watched(*steps, times=12)
    assert costs.price("m", 1, 2) == pytest.approx(0.004, rel=0.1)


def test_beside_one_with_levels_a_lookup_costs_next_to_nothing():
    costs = watched(record(3, 0.02, 0.0002, 0, "look"), times=5)
    costs.suppose("look", (0.0,))
    rows = (RowRecord(0, "look", 2, 0, (0,), 2, False), RowRecord(1, "m", 2, 0, (0,), 2, False))
    for _ in range(20):
        costs.watch(StepRecord(0, rows, {"draft": 0.0042, "score": 0.02}, 6, draft_levels=2))
    assert costs.price("m", 1, 2) == pytest.approx(0.004, rel=0.1)
    two = (RowRecord(0, "n", 2, 0, (0,), 2, False), RowRecord(1, "m", 2, 0, (0,), 2, False))
    for _ in range(20):
        costs.watch(StepRecord(0, two, {"draft": 0.09, "score": 0.02}, 6, draft_levels=2))
    assert costs.price("m", 1, 2) == pytest.approx(0.004, rel=0.1), "nobody knows whose seconds these are"


def test_the_first_draft_warms_up():
    costs = watched(record(1), record(3, 0.02, 5.0, 2, "m"))
    assert costs.price("m") < 3.0 * TUNING.part * costs.passed(1, 0, 1)


def test_what_was_measured_is_where_prices_begin():
    costs = Costs(CURVE)
    costs.known_as("m[policy=goodput]", "m")
    costs.know({"m": KnownDrafter(call=0.0, level=0.003, kept_D=(4.0,), tried_D=(8.0,))})
    assert costs.price("m[policy=goodput]") == 0.003 and costs.kept("m") == ((4.0,), (8.0,))
    assert costs.kept("other") == ((), ())


def test_judging_guesses_makes_them_dearer():
    costs = watched(record(1, 0.010, rest=0.001), record(4, 0.010, rest=0.004), times=30)
    assert costs.passed(1, 0, 1) == pytest.approx(0.011, rel=0.03)
    assert costs.passed(4, 0, 1) == pytest.approx(0.014, rel=0.03)


def test_steps_are_learned_from_when_a_cost_is_read_or_many_wait():
    costs, one = Costs(), record(1, 0.010)
    for _ in range(TUNING.most - 1):
        costs.watch(one)
    assert not costs._passes
    costs.watch(one)
    assert costs._passes and not costs._seen
    costs.watch(record(1, 0.020))
    assert costs.passed(1, 0, 1) > 0.0101, "reading a cost takes in what waits"


def test_a_drafter_of_unknown_price_has_the_usual_one():
    costs = watched(record(1, 0.010), times=9)
    costs.know({"m": KnownDrafter(call=0.0, level=0.0, kept_D=(3.0,), tried_D=(5.0,))})
    assert costs.price("m") == costs.price("other") == pytest.approx(TUNING.part * 0.010)


def test_prices_of_many_rows_are_those_of_each():
    costs = watched(record(1, 0.010), record(4, 0.016), curve=CURVE, times=20)
    many = costs.passes(1, 100, 1, 8)
    assert many == pytest.approx([costs.passed(1 + n, 100, 1) for n in range(9)])


def test_files_are_read_when_costs_are_first_asked_for():
    costs, asked = Costs(), []
    costs.later(lambda: asked.append(1))
    assert not asked
    costs.passed(1, 0, 1), costs.price("m"), costs.kept("m")
    assert asked == [1]
    costs.later(lambda: asked.append(2))
    costs.start(CURVE)
    costs.passed(1, 0, 1)
    assert asked == [1], "what is given meanwhile counts"


def test_guesses_of_unknown_cost_are_few():
    costs = Costs()
    assert costs.foreseen(1) == TUNING.first and Costs(CURVE).foreseen(1) > 1000
    costs.watch(record(7, 0.02, 0.001, 1, "m"))
    assert costs.foreseen(1) == 12


def test_a_text_that_is_read_late_makes_no_level_free():
    read = [record(3, 0.02, 0.0269, 1, "m", uncached=731), record(3, 0.02, 0.0120, 3, "m", uncached=412)]
    usual = [record(3, 0.02, 0.00075 + 0.00017 * levels, levels, "m", uncached=2) for levels in (1, 3, 2)]
    costs = Costs()
    costs.know({"m": KnownDrafter(call=0.0, level=0.0005)})
    warming = record(3, 0.02, 0.5, 1, "m", uncached=100)
    for one in (warming, *read, *usual, *usual):
        costs.watch(one)
    for levels in (1, 2, 5):
        assert costs.price("m", 1, levels) == pytest.approx(0.00075 + 0.00017 * levels, rel=0.15)
    assert costs.reading("m", 1000) == pytest.approx(0.033, rel=0.15)


def test_single_guesses_tell_little_of_what_many_cost():
    """A pass over 64 sequences varies by what ten guesses cost, and a trial is one guess."""
    costs = Costs()
    for guesses in (0, 1) * 4:  # while the first of them comes, rows seem dear
        costs.watch(passed(1, guesses, 0.010 + 0.003 * guesses))
    for n in range(400):
        costs.watch(passed(64, n % 8 == 0, 0.060 + (0.004 if n % 8 == 0 else 0.0)))
    assert costs.passed(80, 0, 64) < 0.060 * (1.0 + 16 * 0.3 / 64) + 0.002, "as supposed, not as tried"
    for _ in range(30):
        costs.watch(passed(64, 32, 0.076))
        costs.watch(passed(64, 0, 0.060))
    assert costs.passed(96, 0, 64) == pytest.approx(0.076, rel=0.02), "many guesses are believed"


def passed(batch, guesses, seconds):
    """A step of so many sequences, with so many guesses in all."""
    rows = tuple(RowRecord(i, "none", 0, 0, (0,), 0, False) for i in range(batch))
    return StepRecord(0, rows, {"score": seconds}, batch + guesses)


def test_what_some_read_late_does_not_count_as_a_level_of_all():
    """Of 64 sequences one has joined: its 300 tokens take longer than all levels."""
    costs = Costs()
    for n in range(300):
        late = 300 if n % 3 == 1 else 0
        rows = tuple(
            RowRecord(i, "m", 1, 0, (0,), 1, False, None, 2 + (late if i == 0 else 0)) for i in range(64)
        )
        seconds = {"draft": 0.010 + 2e-5 * late, "score": 0.06}
        costs.watch(StepRecord(0, rows, seconds, 128, draft_levels=1))
    assert costs.price("m", 64) == pytest.approx(0.010, rel=0.05)
    assert costs.reading("m", 300) == pytest.approx(0.006, rel=0.2)


def test_a_draft_that_seemed_dear_becomes_cheaper_though_some_read_late_in_every_step():
    costs = Costs()
    costs.know({"m": KnownDrafter(call=0.0, level=0.030)})
    for _ in range(200):
        costs.watch(record(1, 0.06, 0.010 + 2e-5 * 92, 1, "m", uncached=100))
    assert costs.price("m") + costs.reading("m", 92) == pytest.approx(0.0118, rel=0.1)
