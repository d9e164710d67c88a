from types import SimpleNamespace

import pytest

from outpace import Engine
from outpace.analysis.explain import Explained
from outpace.types import Choice, RowRecord, StepRecord


def step(drafter, drafted, accepted, seconds, rates=None, reason="best", prompt=False):
    choice = None if rates is None else Choice(reason, rates)
    row = RowRecord(1, drafter, drafted, accepted, (0,) * (accepted + 1), drafted, False, choice)
    verbs = {"plan": 0.0, "draft": 0.0, "score": seconds, "judge": 0.0, "commit": 0.0}
    return StepRecord(0, (row,), verbs, 1 + drafted, prompt=prompt)


def told(*steps, known=True):
    found = Explained(SimpleNamespace(known=known))
    for one in steps:
        found(one)
    return found


RATES = {"none": 50.0, "a": 100.0, "b": 80.0}
STEPS = (
    step("none", 0, 0, 1.0, prompt=True),
    step("a", 3, 3, 0.04, RATES),
    step("a", 3, 0, 0.04, RATES, "stay"),
    step("b", 2, 1, 0.02, RATES, "probe"),
    step("a", 3, 1, 0.04, RATES),
    step("none", 0, 0, 0.02, RATES),
)


def test_runs_of_steps_are_added_up():
    runs = told(*STEPS).stretches()
    assert [(r.drafter, r.first, r.last) for r in runs] == [
        ("a", 1, 2),
        ("b", 3, 3),
        ("a", 4, 4),
        ("none", 5, 5),
    ]
    first = runs[0]
    assert (first.passes, first.drafted, first.accepted, first.emitted) == (2, 6, 3, 5)
    assert first.reasons == ("best", "stay") and runs[1].reasons == ("probe",)
    assert first.rate == pytest.approx(5 / 0.08) and first.expected == 100.0
    assert first.over_plain == pytest.approx(5 / 0.08 / 50.0)
    assert first.gained == pytest.approx(5 / 50.0 - 0.08)


def test_sums_by_drafter_and_of_all_add_up():
    found = told(*STEPS)
    by = found.by_drafter()
    assert [one.drafter for one in by] == ["a", "b", "none"]
    total = found.total()
    assert total.passes == 5 == sum(one.passes for one in by)
    assert total.emitted == 10 == sum(one.emitted for one in by)
    assert total.gained == pytest.approx(sum(one.gained for one in by))
    assert total.expected == pytest.approx((100 * 0.12 + 80 * 0.02 + 50 * 0.02) / 0.16), (
        "over the time, not the steps"
    )


def test_silence_is_nobodys_draft():
    found = told(step("a", 0, 0, 0.02, RATES), step("a", 2, 1, 0.02, RATES))
    assert [one.drafter for one in found.stretches()] == ["none", "a"]


def test_before_costs_are_seconds_nothing_is_expected():
    found = told(step("a", 3, 3, 0.04, RATES), known=False).total()
    assert found.expected is None and found.plain is None and found.over_plain is None
    assert found.gained is None and found.rate == pytest.approx(100)


def test_policies_without_reasons_are_compared_with_their_own_plain_steps():
    silent = [step("a", 0, 0, seconds) for seconds in (0.02, 0.01, 0.03)]
    drafted = step("a", 3, 3, 0.04)
    assert told(drafted, *silent).stretches()[0].over_plain == pytest.approx(100 / 50)
    assert told(drafted, *silent[:2]).total().over_plain is None, "two steps tell too little"


def test_no_step_no_story():
    found = told(STEPS[0])
    assert found.total() is None and found.stretches() == [] == found.by_drafter()
    assert found.to_json() == {"stretches": [], "by_drafter": [], "total": None}


def test_it_tells_of_a_real_answer():
    engine = Engine.load("tiny", drafter="none", dtype="float32")
    found = Explained(engine.costs)
    engine.listeners.append(found)
    result = engine.generate(
        [5, 9, 11] * 4,
        drafter="auto",
        max_new_tokens=40,
        ignore_eos=True,
        allowed_tokens=frozenset({3, 1, 4}),
    )
    total = found.total()
    assert total.passes == result.counters.passes and total.emitted == 39
    assert (total.drafted, total.accepted) == (result.counters.drafted, result.counters.accepted)
    assert total.plain > 0 and total.expected > 0
    first, *later = found.stretches()
    assert first.first == 1 and later[-1].last == total.passes
    assert all(a.last + 1 == b.first for a, b in zip([first, *later], later, strict=False))
