import pytest

from outpace.policies.costs import LATE, Costs
from outpace.types import CostCurve, KnownDrafter, RowRecord, StepRecord

CURVE = CostCurve(
    model="m",
    dtype="float32",
    threads=1,
    device="d",
    rows_R=(1, 4, 16, 64),
    context_C=(0, 512),
    seconds_CR=((0.01, 0.01, 0.02, 0.06), (0.02, 0.02, 0.03, 0.07)),
)


def record(
    score, rows=1, draft=0.0, levels=0, drafters=("none",), prompt=False, rest=0.0, plan=0.0, num_uncached=1
):
    rows_B = [
        RowRecord(i, name, 0, 0, (1,), 0, False, num_uncached=num_uncached) for i, name in enumerate(drafters)
    ]
    return StepRecord(
        0,
        tuple(rows_B),
        {"plan": plan, "draft": draft, "score": score, "judge": rest / 2, "commit": rest / 2},
        rows,
        draft_levels=levels,
        prompt=prompt,
    )


def test_the_curve_is_the_start():
    costs = Costs(CURVE)
    costs.suppose("m", 0.004)
    for rows, context in ((1, 0), (10, 0), (40, 512)):
        assert costs.passed(rows, context, 1) == pytest.approx(CURVE.seconds(rows, context))
    assert costs.passed(8, 0, 2) == pytest.approx(CURVE.seconds(4, 0, 2))
    assert costs.price("m") == (0.0, 0.004)
    assert costs.price("unknown") == (0.0, pytest.approx(0.001)), "a tenth of a pass"


def test_a_slower_day_is_noticed_soon_and_a_stall_is_not_believed():
    costs = Costs(CURVE)
    for _ in range(5):
        costs.watch(record(0.01))
    costs.watch(record(2.0))
    assert costs.passed(1, 0, 1) < 0.013
    for _ in range(30):
        costs.watch(record(0.02))
    assert costs.passed(1, 0, 1) == pytest.approx(0.02, rel=0.05)
    assert costs.passed(16, 0, 1) == pytest.approx(0.04, rel=0.25), "of which most is for all rows"


def test_the_shape_is_learned_where_it_is_wrong():
    costs = Costs(CURVE)
    for _ in range(150):
        costs.watch(record(0.01))
        costs.watch(record(0.04, rows=16))  # twice what the curve says
    assert costs.passed(1, 0, 1) == pytest.approx(0.01, rel=0.15)
    assert costs.passed(16, 0, 1) == pytest.approx(0.04, rel=0.15)


def test_without_a_curve_steps_do_all_the_work():
    costs = Costs()
    assert costs.passed(4, 0, 1) == 1.0 < costs.passed(8, 0, 1)
    for _ in range(3):
        costs.watch(record(0.01))
    assert costs.passed(1, 0, 1) == pytest.approx(0.01, rel=0.01)


def test_prompts_teach_nothing():
    costs = Costs(CURVE)
    costs.watch(record(5.0, rows=256, prompt=True))
    assert costs.passed(1, 0, 1) == pytest.approx(0.01) and costs.around(1) == (0.0, 0.0, 0.0)


def test_what_drafts_cost_beside_drafting_is_told_apart():
    costs = Costs(CURVE)
    both = [record(0.01, 4, 0.001, 1, drafters=("m", "m"), rest=0.005, plan=0.003)] * 60
    for one in both:
        costs.watch(one)
    all_of_it = (0.0, pytest.approx(0.003), pytest.approx(0.0025, rel=0.03))
    assert costs.around(2) == all_of_it, "no step without drafts was seen"
    costs.watch(record(0.01, 2, drafters=("none", "none"), rest=0.001, plan=1.0))
    for one in both:
        costs.watch(one)
    assert costs.around(2) == (pytest.approx(0.001), pytest.approx(0.003), pytest.approx(0.002, rel=0.06))
    assert costs.around(4)[:2] == costs.around(2)[:2], "till it is seen"
    assert costs.price("m")[0] == 0.0
    for _ in range(2):
        costs.watch(record(0.01, 8, drafters=("none",) * 8, rest=0.003))
    assert costs.around(8)[0] == pytest.approx(0.003)
    assert costs.around(2)[0] == pytest.approx(0.001)
    assert 0.001 < costs.around(4)[0] < 0.003, "between them"


def test_a_step_with_few_drafts_says_little_of_what_a_draft_costs_beside_drafting():
    """The rest of a step wavers by a millisecond; a draft adds 0.05 ms to it."""
    costs = Costs(CURVE)
    for step in range(200):
        asked = 16 if step % 2 else 1
        drafters = ("m",) * asked + ("none",) * (16 - asked)
        noise = 0.001 * (-1) ** (step // 2)
        costs.watch(record(0.01, 16, drafters=("none",) * 16, rest=0.003))
        costs.watch(record(0.01, 17, 0.001, 1, drafters, rest=0.003 + 5e-5 * asked + noise))
    assert costs.around(16)[2] == pytest.approx(5e-5, rel=0.3), "a mean of steps is off by 3e-4"


def test_a_stall_beside_a_draft_is_forgotten():
    """Else nobody would draft any more, and nothing would correct it."""
    costs = Costs(CURVE)
    for _ in range(20):
        costs.watch(record(0.01, 16, drafters=("none",) * 16, rest=0.003))
    costs.watch(record(0.01, 17, 0.001, 1, ("m",) + ("none",) * 15, rest=0.5))
    stalled = costs.around(16)[2]
    assert stalled < 0.01, "a stall of half a second is not believed"
    for _ in range(100):
        costs.watch(record(0.01, 16, drafters=("none",) * 16, rest=0.003))
    assert costs.around(16)[2] < stalled / 10


def test_drafters_are_timed():
    costs = Costs(CURVE)
    costs.suppose("look", 0.0)
    for _ in range(10):
        costs.watch(record(0.01, 2, 0.006, 3, drafters=("m", "none"), rest=0.001))
    assert costs.price("m") == (0.0, pytest.approx(0.002)) and costs.timed("m") == 10
    assert costs.around(2) == (0.0, 0.0, pytest.approx(0.001, rel=0.12))
    for _ in range(10):
        costs.watch(record(0.01, 2, 0.0004, drafters=("look", "look")))
    assert costs.price("look") == (pytest.approx(0.0002), 0.0), "no model: a price per sequence"
    # Beside one whose price is known, the rest is the other's.
    costs.watch(record(0.01, 2, 0.0062, 3, drafters=("m", "look")))
    assert costs.price("m") == (0.0, pytest.approx(0.002))
    costs.watch(record(0.01, 2, 0.0092, 3, drafters=("m", "look")))
    assert costs.price("m") == (0.0, pytest.approx(0.00215))
    # Two that both run models cannot be told apart.
    costs.watch(record(0.01, 2, 1.0, 3, drafters=("m", "n")))
    assert costs.price("m") == (0.0, pytest.approx(0.00215)) and not costs.timed("n")
    costs.watch(record(0.01))


def test_what_a_drafter_reads_late_moves_its_price_little_and_a_cheap_level_brings_it_down():
    costs = Costs(CURVE)
    for _ in range(10):
        costs.watch(record(0.01, draft=0.002, levels=1, drafters=("m",)))
    costs.watch(record(0.01))
    costs.watch(record(0.01, draft=1.0, levels=1, drafters=("m",), num_uncached=LATE + 1000))
    assert costs.price("m")[1] == pytest.approx(0.002, rel=0.05), "no price of a level"
    costs.watch(record(0.01, draft=0.004, levels=1, drafters=("m",)))
    dear = costs.price("m")[1]
    assert dear > 0.0022
    costs.watch(record(0.01))
    costs.watch(record(0.01, draft=0.001, levels=1, drafters=("m",)))
    assert costs.price("m")[1] < dear, "what began too high comes down"


def test_what_a_drafter_reads_after_a_pause_is_no_level():
    """A level takes 2 ms, and each token that it missed 0.03 ms."""
    costs, blind = Costs(CURVE), Costs(CURVE)
    for step in range(120):
        missed = 100 * (step % 3 == 0)
        seen = {"draft": 0.002 + 3e-5 * missed, "levels": 1, "drafters": ("m",)}
        costs.watch(record(0.01, num_uncached=LATE + missed, **seen))
        blind.watch(record(0.01, **seen))
    assert costs.price("m")[1] == pytest.approx(0.002, rel=0.05)
    assert costs.late("m", LATE + 50) == pytest.approx(0.0015, rel=0.15)
    assert costs.late("m", LATE) == 0.0 == costs.late("unknown", 1000)
    assert blind.price("m")[1] > 0.0025, "who does not know what was missed takes it for a level"


def test_the_first_guess_is_no_dearer_than_the_next_ones():
    """Long without guesses while the machine is slow, then fast with them: no step in between."""
    costs = Costs(CURVE)
    for _ in range(40):
        costs.watch(record(0.02, drafters=("none",)))
    for _ in range(3):
        costs.watch(record(CURVE.seconds(16, 0), rows=16, drafters=("m",)))
    seconds = [costs.passed(rows, 0, 1) for rows in (1, 2, 3, 5, 9, 17)]
    assert seconds == sorted(seconds)
    assert seconds[1] - seconds[0] <= 0.002, "the curve says nothing"


def test_a_batch_is_no_long_draft():
    """Eight rows of eight sequences cost more than eight of one; neither is taken for the other."""
    costs = Costs(CURVE)
    for _ in range(60):
        costs.watch(record(CURVE.seconds(8, 0), rows=8))
        costs.watch(record(0.03, rows=8, drafters=("none",) * 8))
    assert costs.passed(8, 0, 8) == pytest.approx(0.03, rel=0.05)
    assert costs.passed(8, 0, 1) == pytest.approx(CURVE.seconds(8, 0), rel=0.05)
    assert costs.passed(7, 0, 7) == pytest.approx(0.03, rel=0.1), "what is near is alike"
    assert Costs().passed(8, 0, 8) > Costs().passed(8, 0, 1), "where nothing is known as well"


def test_passes_with_guesses_say_little_of_passes_without():
    """In a batch of 8, plain passes cost 0.03 s and a guess for each doubles that."""
    costs = Costs(CURVE)
    for _ in range(60):
        costs.watch(record(0.06, rows=16, drafters=("m",) * 8))
    before = costs.passed(8, 0, 8)
    for _ in range(3):
        costs.watch(record(0.03, rows=8, drafters=("none",) * 8))
    assert before > 0.036 > costs.passed(8, 0, 8) > 0.027
    assert costs.passed(16, 0, 8) == pytest.approx(0.06, rel=0.1)


def test_a_cold_first_draft_does_not_forbid_a_second_one():
    costs = Costs(CURVE)
    costs.watch(record(0.01, draft=0.5, levels=1, drafters=("m",)))
    assert costs.price("m")[1] == pytest.approx(0.003), "three tenths of a pass, not fifty passes"
    for _ in range(12):
        costs.watch(record(0.01, draft=0.005, levels=1, drafters=("m",)))
    assert costs.price("m")[1] == pytest.approx(0.005, rel=0.1), "what is dear is found out"


def test_a_level_may_cost_more_for_more_sequences():
    costs = Costs(CURVE)
    for _ in range(30):
        for sequences, level in ((1, 0.002), (8, 0.004)):
            for _ in range(2):
                costs.watch(record(0.01, 16, 2 * level, 2, drafters=("m",) * sequences))
    assert costs.price("m", 1)[1] == pytest.approx(0.002, rel=0.01)
    assert costs.price("m", 8)[1] == pytest.approx(0.004, rel=0.01)
    assert 0.002 < costs.price("m", 3)[1] < costs.price("m", 5)[1] < 0.004
    assert costs.price("m", 32) == costs.price("m", 8)


KNOWN = KnownDrafter(call=0.0, level=0.004, kept_D=(6.0, 3.0), tried_D=(10.0, 6.0))


def test_what_was_measured_is_read_when_it_is_needed():
    costs, asked = Costs(), []
    costs.later(lambda: (asked.append(1), costs.start(CURVE), costs.know({"m": KNOWN})))
    costs.watch(record(5.0, prompt=True))
    costs.suppose("m", 0.0)
    assert not asked and costs.timed("m") == 0
    assert costs.price("m") == (0.0, 0.004) and asked == [1]
    assert costs.passed(1, 0, 1) == pytest.approx(0.01) and costs.known and asked == [1]
    assert costs.kept("m") == (KNOWN.kept_D, KNOWN.tried_D) and costs.kept("x") == ((), ())
    other = Costs()
    other.later(lambda: asked.append(2))
    other.start(CURVE)
    assert other.price("m")[1] > 0 and asked == [1], "a curve that was given comes first"


def test_a_measured_price_is_a_start_that_steps_correct():
    costs = Costs(CURVE)
    costs.know({"m": KNOWN})
    for _ in range(2):
        costs.watch(record(0.01, draft=0.008, levels=1, drafters=("m",)))
    # Each moves the price by its weight.
    assert 0.004 < costs.price("m")[1] < 0.0055
    for _ in range(60):
        costs.watch(record(0.01, draft=0.008, levels=1, drafters=("m",)))
    assert costs.price("m")[1] == pytest.approx(0.008, rel=0.01)
    seen = costs.price("m")
    costs.know({"m": KNOWN})
    assert costs.price("m") == seen, "what steps taught stays"


def test_a_spec_may_be_known_under_another_name():
    costs = Costs(CURVE)
    costs.known_as("m[policy=goodput]", "m")
    costs.know({"m": KNOWN})
    costs.known_as("m[policy=bandit]", "m")
    for name in ("m", "m[policy=goodput]", "m[policy=bandit]"):
        assert costs.price(name) == (0.0, 0.004) and costs.kept(name)[0] == KNOWN.kept_D


@pytest.mark.parametrize(
    "wrong",
    [
        {"level": -1.0},
        {"call": float("nan")},
        {"kept_D": (2.0,), "tried_D": (1.0,)},
        {"kept_D": (1.0,), "tried_D": ()},
        {"kept_D": (1.0,), "tried_D": (float("nan"),)},
    ],
)
def test_what_cannot_have_been_measured_is_refused(wrong):
    with pytest.raises(ValueError):
        KnownDrafter(**{"call": 0.0, "level": 0.0, **wrong})


def test_costs_without_a_curve_or_a_step_are_in_no_unit():
    costs = Costs()
    assert not costs.known
    costs.watch(record(0.01))
    assert costs.known and Costs(CURVE).known


def test_a_new_curve_forgets_passes_and_keeps_drafts():
    costs = Costs()
    costs.suppose("m", 0.004)
    for _ in range(9):
        costs.watch(record(7.0))
    costs.start(CURVE)
    assert costs.passed(1, 0, 1) == pytest.approx(0.01) and costs.price("m") == (0.0, 0.004)
