"""Looking back on an answer: prices, settings, passages, and the shortest way."""

from types import SimpleNamespace

import pytest

from outpace import Engine
from outpace.analysis import hindsight
from outpace.analysis.explain import Explained, Step
from outpace.analysis.hindsight import Priced, Setting, compare, look_back, rising
from outpace.analysis.recording import Guess, Recorded, record_given
from outpace.analysis.replay import Device
from outpace.types import Budget

DEVICE = Device(
    name="d", rows_R=(1, 2, 65), pass_R=(10.0, 11.0, 74.0), levels={"model": (2.0, 0.0)}, look=0.5, step=1.0,
    judge=0.25,
)  # fmt: skip


def lookup(kept):
    """Tells 0.9, 0.5, ... of four guesses where something is kept; says nothing elsewhere."""
    told = tuple((0.9, 0.5, 0.35, 0.15) if one else () for one in kept)
    made = tuple(Guess((1, 2, 3, 4), one, 0) if one else Guess((), 0, 0) for one in kept)
    return Recorded(Budget(4, 4), False, told, {4: made}, None, (0.0,))


def model(kept):
    made = tuple(Guess((1, 2), one, 2) for one in kept)
    return Recorded(Budget(2, 2), True, None, {2: made}, None, (0.2,))


def step(drafter, drafted, accepted, number=1):
    verbs = {"plan": 0.0005, "draft": 0.0, "score": 0.01, "judge": 0.0, "commit": 0.001}
    return Step(
        number, drafter, None, drafted, drafted, accepted, accepted + 1, 1 + drafted, verbs, None, None
    )


def test_steps_are_priced_by_rows_levels_and_looks():
    priced = Priced({"suffix": lookup([4] * 10), "draft_model": model([2] * 10)}, 10, DEVICE)
    assert priced.step("none", 0, 0, False) == pytest.approx(0.011)
    assert priced.step("suffix", 1, 1) == pytest.approx(1e-3 * (11 + 1 + 0.25 + 0.5))
    assert priced.step("draft_model", 2, 2, False) == pytest.approx(1e-3 * (12 + 4 + 1 + 0.25))


def test_the_best_setting_of_every_drafter_is_found():
    priced = Priced({"suffix": lookup([2, 0, 0] * 4), "draft_model": model([0] * 12)}, 12, DEVICE)
    found = priced.best()
    first, seconds = next(iter(found.items()))
    assert first == Setting("suffix", least=0.4), "two guesses of four are right"
    assert seconds == pytest.approx(4 * 1e-3 * (12 + 1 + 0.25 + 0.5))
    assert found[Setting("none")] == pytest.approx(12 * 0.011)
    assert {one.drafter for one in found} == {"none", "suffix", "draft_model"}
    assert found[Setting("draft_model", 1, 1)] == max(found.values())


def test_a_step_across_the_end_of_a_passage_counts_for_both_in_part():
    priced = Priced({"suffix": lookup([4] * 20)}, 20, DEVICE)
    one, always = priced.step("suffix", 4, 4), Setting("suffix", least=0.0)
    seconds, steps = priced.walk(always, 0, 2)
    assert (seconds, steps) == (one, [(5, one)])
    found = priced.by_passage([2, 12, 20])
    assert [setting for setting, _ in found] == [always] * 3
    assert [spent for _, spent in found] == pytest.approx([2 / 5 * one, 2 * one, 8 / 5 * one])


def test_the_drafter_changes_with_the_passage():
    priced = Priced(
        {"suffix": lookup([2] * 6 + [0] * 6), "draft_model": model([0] * 6 + [2] * 6)}, 12, DEVICE
    )
    first, second = priced.by_passage([6, 12])
    assert first[0].drafter == "suffix" and second[0] == Setting("draft_model", 2, 2)
    assert first[1] + second[1] < min(priced.best().values())
    assert priced.by_step() <= first[1] + second[1]


def test_no_way_is_shorter_than_the_shortest():
    kept = [3, 0, 1, 0, 0, 2, 0, 4, 1, 0, 0, 0]
    priced = Priced({"suffix": lookup(kept), "draft_model": model([1, 2, 0] * 4)}, 12, DEVICE)
    assert priced.by_step() < min(priced.best().values())

    def ways(place):
        """All ways from here on, one by one."""
        if place == 12:
            return 0.0
        after = [priced.step("none", 0, 0, False) + ways(place + 1)]
        for name, most in (("suffix", 4), ("draft_model", 2)):
            for asked in range(1, most + 1):
                drafted = priced.drafters[name].draft(place, Budget(asked, asked))
                if drafted[0]:
                    kept = min(drafted[2], 11 - place)
                    after.append(priced.step(name, *drafted[:2], name == "suffix") + ways(place + 1 + kept))
        return min(after)

    assert priced.by_step() == pytest.approx(ways(0))


def test_passages_end_with_steps_and_add_up(monkeypatch):
    monkeypatch.setattr(hindsight, "TOKENS", 5)
    steps = [step("suffix", 4, 4), step("none", 0, 0), step("suffix", 4, 3), *[step("none", 0, 0)] * 2]
    priced = Priced({"suffix": lookup([4] * 12)}, 12, DEVICE)
    passages, whole, by_step = compare(priced, steps, lambda start, end: f"{start}-{end}")
    assert [one.text for one in passages] == ["0-5", "5-10", "10-12"]
    assert [(one.first, one.last) for one in passages] == [(2, 6), (7, 11), (12, 13)]
    assert passages[1].drafters == {"none": 1, "suffix": 1}
    drafted, plain = priced.step("suffix", 4, 4), priced.step("none", 0, 0)
    assert sum(one.seconds for one in passages) == pytest.approx(2 * drafted + 3 * plain)
    assert passages[0].regret == pytest.approx(0.0) and passages[1].regret > 0.2
    assert passages[1].gained == pytest.approx(5 * 0.011 - drafted)
    assert by_step <= min(whole.values())


def test_prices_of_passes_never_fall():
    assert rising([1.0, 3.0, 2.0, 4.0]) == (1.0, 2.5, 2.5, 4.0)
    assert rising([3.0, 2.0, 1.0]) == (2.0, 2.0, 2.0) and rising([1.0, 2.0]) == (1.0, 2.0)


def test_a_short_end_belongs_to_the_passage_before(monkeypatch):
    monkeypatch.setattr(hindsight, "TOKENS", 4)
    found = hindsight._cut([step("none", 0, 0)] * 5)
    assert [(start, end) for start, end, _ in found] == [(0, 5)]


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", drafter="none", dtype="float32")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_known_answer_is_recorded_as_it_is(engine, temperature):
    from outpace.params import SamplingParams

    params = SamplingParams(temperature=temperature, max_new_tokens=12, ignore_eos=True, seed=4)
    request = engine.request([5, 9, 11] * 4, params)
    answer = (7, 7, 7, 7, 7, 7, 9, 11, 5, 9)  # nothing that the model would say
    methods = {"suffix": engine.method("suffix").preferred}
    took = []
    text = record_given(engine, methods, request, answer, lambda *one: took.append(one))
    found = text.drafters["suffix"]
    (guesses,) = found.guesses.values()
    assert text.positions == len(guesses) == len(took) == 9
    assert guesses[4].accepted >= 1, "7 follows 7"
    assert guesses[7].accepted == 2, "5 9 follows 9 11 in the prompt"


def test_an_answer_of_an_engine_is_looked_back_on(engine):
    told = Explained(engine.costs)
    engine.listeners.append(told)
    settings = {"max_new_tokens": 40, "ignore_eos": True, "allowed_tokens": frozenset({3, 1, 4})}
    prompt = [5, 9, 11] * 4
    result = engine.generate(prompt, drafter="auto", **settings)
    engine.listeners.remove(told)
    from outpace.params import SamplingParams

    request = engine.request(prompt, SamplingParams(**settings))
    parts = []
    seen = look_back(
        engine,
        engine.method("auto"),
        request,
        result.tokens,
        told.steps,
        lambda part, done: parts.append(done),
    )
    assert sum(parts) == 3 and seen.measured > 0
    assert seen.by_step <= seen.by_passage + 1e-9
    assert set(seen.regret) == {"whole", "passages", "steps"}
    assert seen.regret["steps"] >= seen.regret["passages"] - 1e-9
    (rules,) = (name for name in engine.method("auto").members if name.startswith("grammar"))
    assert rules not in {one.drafter for one in seen.whole}, "it takes no part without a form"
    assert seen.passages[0].first == 2 and seen.passages[-1].last == 40
    assert min(seen.whole.values()) <= seen.plain + 1e-9
    again = engine.generate(prompt, drafter="auto", **settings)
    assert again.tokens == result.tokens, "looking back leaves no trace"


def test_who_remembers_other_answers_is_left_out(engine):
    method = engine.method("suffix[shared=true]")
    assert not method.preferred.drafter.traits.deterministic
    told = SimpleNamespace(steps=[step("none", 0, 0)] * 3)
    from outpace.params import SamplingParams

    request = engine.request([5, 9, 11], SamplingParams(max_new_tokens=4))
    seen = look_back(engine, method, request, (1, 2, 3, 4), told.steps)
    assert seen.left_out == ("suffix[shared=true]",) and list(seen.whole) == [Setting("none")]
    assert seen.regret["whole"] == pytest.approx(0.0, abs=0.05)
