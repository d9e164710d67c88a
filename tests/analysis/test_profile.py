import dataclasses
import gc
import json
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from outpace import Engine, RequestError
from outpace.analysis import cost, profile
from outpace.analysis.profile import Asked, Learned, Profile, _Answer
from outpace.cli import tune
from outpace.drafters.base import Traits
from outpace.engine import recall
from outpace.models import measured
from outpace.policies.costs import Costs
from outpace.types import Budget, CostCurve, KnownDrafter, RowRecord, StepRecord

CURVE = CostCurve(
    model="m",
    dtype="float32",
    threads=1,
    device="d",
    rows_R=(1, 5, 9),
    context_C=(0,),
    seconds_CR=((0.010, 0.010, 0.018),),
)
KNOWN = KnownDrafter(call=0.0, level=0.002, kept_D=(90.0, 60.0), tried_D=(100.0, 90.0))
LEARNED = Learned(
    spec="draft_model[model=tiny]",
    speedup=1.5,
    mean_emitted=2.0,
    drafted=200,
    accepted=150,
    previewed=False,
    known=KNOWN,
    expected_D=(1.2, 1.4, 1.3),
)
PROFILE = Profile(
    model="tiny",
    digest="d",
    dtype="float32",
    threads=1,
    device="a machine",
    workload="builtin",
    prompts=8,
    max_new_tokens=64,
    plain_tokens_per_second=50.0,
    pass_factor=1.1,
    drafters=(LEARNED,),
    left_out={"eagle3": "not trained"},
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "cache_folder", lambda: tmp_path)
    return tmp_path / "costs"


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", drafter="none", dtype="float32")


def step(drafted, accepted, depth=None, levels=0, draft=0.0, rest=0.001, riders=0, censored=False):
    """A step whose pass took twice what the curve says."""
    depth = drafted if depth is None else depth
    row = RowRecord(1, "m", drafted, accepted, (0,) * (accepted + 1), depth, censored)
    passed = 1 + drafted + riders
    seconds = {
        "plan": 0.0,
        "draft": draft,
        "score": 2.0 * CURVE.seconds(passed, 0),
        "judge": 0.0,
        "commit": rest,
    }
    return StepRecord(0, (row,), seconds, passed, draft_levels=levels)


def method(depth, previews=False):
    drafter = SimpleNamespace(traits=Traits(previews=previews))
    return SimpleNamespace(spec="m", preferred=SimpleNamespace(budget=Budget(depth, depth), drafter=drafter))


PLAIN = [_Answer([step(0, 0)] * 10, 40.0)]


def learn(steps, depth=4, new=100, previews=False):
    return profile.learn(method(depth, previews), [_Answer(steps, 60.0)], PLAIN, CURVE, 2.0, new)


def test_a_stall_behind_the_last_token_leaves_a_rate():
    """The step's own clock runs on after the answer's has stopped."""
    steps = [step(0, 0)] * 9 + [step(0, 0, rest=5.0)]
    seconds = sum(one.seconds["score"] + 0.001 for one in steps)
    engine = SimpleNamespace(listeners=[])
    engine.listening = partial(Engine.listening, engine)

    def generate(*_, **__):
        for one in steps:
            engine.listeners[0](one)
        return SimpleNamespace(seconds=0.1 + seconds, prefill_seconds=0.1, tokens=[0] * 11)

    engine.generate = generate
    answer = profile._answer(engine, "none", Asked(ids=(1,)), 11)
    assert answer.rate == pytest.approx(10 / (9 + profile.STALL) / 0.021, rel=0.01)
    assert not engine.listeners


def test_steps_tell_prices_acceptance_and_the_speedup_to_expect():
    steps = [step(4, 4, levels=4, draft=0.016), step(4, 1, levels=4, draft=0.016)]
    found = learn(steps)
    assert (found.speedup, found.mean_emitted, found.drafted, found.accepted) == (1.5, 3.5, 8, 5)
    assert found.known.level == 0.004 and found.known.call == 0.0
    # The second draft was refused at depth 2; what lay behind that was not tried.
    assert found.known.kept_D == (2, 1, 1, 1) and found.known.tried_D == (2, 2, 1, 1)
    alone = 2.0 * 0.010 + 0.001
    tokens = (2.0, 2.5, 3.0, 3.5)
    for depth, (mean, got) in enumerate(zip(tokens, found.expected_D, strict=True), 1):
        seconds = 2.0 * CURVE.seconds(1 + depth, 0) + 0.004 * depth + 0.001
        assert got == pytest.approx(mean / seconds * alone), depth
    assert found.best == (4, found.expected_D[3])


def test_depth_is_worth_less_where_rows_are_dear():
    """Planted: priced as if a level took no row, the deepest draft would always be best."""
    steps = [step(8, 4)] * 5
    found = learn(steps, depth=8)
    assert found.best[0] == 4 and found.expected_D[7] < found.expected_D[3]
    assert max(1 + min(4, d) for d in range(1, 9)) == 5, "tokens alone never fall"


def test_a_lookup_has_a_price_per_call_and_its_silence_is_known_beforehand():
    steps = [step(3, 1, draft=2e-4), step(0, 0, draft=4e-4), step(0, 0, draft=4e-4)]
    assert learn(steps, previews=True).known == KnownDrafter(
        call=4e-4, level=0.0, kept_D=(1, 0), tried_D=(1, 1)
    )
    # Of one that gives no preview, silence where a level was asked for is a level not kept.
    assert learn(steps).known.tried_D == (3, 1)


def test_what_a_stop_or_the_end_cut_off_teaches_nothing():
    cut = learn([step(4, 1, censored=True), step(4, 4)])
    assert cut.known.tried_D == (2, 1, 1, 1) == cut.known.kept_D
    # After 5 and 1 of 7 tokens there is room for nothing.
    end = learn([step(4, 4), step(0, 0)], new=7)
    assert end.known.tried_D == (1, 1, 1, 1)


def test_riders_are_paid_for_and_trees_spread_over_their_levels():
    free, paid = learn([step(4, 1)] * 3), learn([step(4, 1, riders=4)] * 3)
    assert paid.expected_D[3] < free.expected_D[3]
    tree = learn([step(8, 2, depth=2)] * 3)
    assert len(tree.expected_D) == 2 and tree.expected_D[0] == pytest.approx(
        2 / (2.0 * CURVE.seconds(5, 0) + 0.001) * (2.0 * 0.010 + 0.001)
    )


def test_who_never_drafts_is_best_left_out():
    found = learn([step(0, 0)] * 3)
    assert found.expected_D == () and found.best == (0, 1.0)


def test_measuring_takes_turns_and_gives_every_drafter_a_line(engine, monkeypatch):
    monkeypatch.setattr(profile, "_disturbed", lambda own, plain: False)  # tests run beside each other
    told = []
    asked = [Asked(ids=(5, 9, 11) * 4), Asked(ids=(40, 41, 42, 40, 41), reference=(40, 41, 42))]
    found = profile.measure(
        engine,
        asked,
        ["prompt_lookup", "draft_model[model=tiny layers=1]"],
        CURVE,
        max_new_tokens=16,
        workload="w",
        left_out={"x": "why"},
        tick=lambda *a: told.append(a),
    )
    answered = [who for who, done in told if done]
    assert answered == [
        "none",
        "prompt_lookup",
        "draft_model[model=tiny layers=1]",
        "prompt_lookup",
        "draft_model[model=tiny layers=1]",
        "none",
    ]
    assert {one.spec for one in found.drafters} == {"prompt_lookup", "draft_model[layers=1 model=tiny]"}
    model = next(one for one in found.drafters if one.spec.startswith("draft_model"))
    assert model.drafted > 0 and model.known.level > 0 and not model.previewed
    assert (found.prompts, found.workload, found.left_out) == (2, "w", {"x": "why"})
    assert found.plain_tokens_per_second > 0 and found.pass_factor > 0
    assert [one.speedup for one in found.drafters] == sorted(
        (one.speedup for one in found.drafters), reverse=True
    )
    assert not engine.listeners


def disturbing(monkeypatch, slow):
    """The plain answers with these numbers take 100 times as long."""
    real, counts = profile._answer, {"none": 0}

    def answer(engine, spec, one, max_new_tokens):
        got = real(engine, spec, one, max_new_tokens)
        if spec != "none" or max_new_tokens == profile._WARM_UP:
            return dataclasses.replace(got, rate=100.0)
        counts["none"] += 1
        return dataclasses.replace(got, rate=1.0 if counts["none"] - 1 in slow else 100.0)

    monkeypatch.setattr(profile, "_answer", answer)


PROMPTS = [Asked(ids=(5, 9, 11, 5, 9, 11)), Asked(ids=(7, 8, 7, 8))]


def test_a_disturbed_answer_is_repeated(engine, monkeypatch):
    disturbing(monkeypatch, {0})
    (one,) = profile.measure(engine, PROMPTS, ["prompt_lookup"], CURVE, max_new_tokens=16).drafters
    assert one.speedup == 1.0 and one.disturbed == 0


def test_what_stays_disturbed_is_left_out_and_counted(engine, monkeypatch):
    disturbing(monkeypatch, {0, 1})
    found = profile.measure(engine, PROMPTS, ["prompt_lookup"], CURVE, max_new_tokens=16)
    assert found.drafters[0].speedup == 1.0 and found.drafters[0].disturbed == 1
    assert "1 disturbed answer left out" in "".join(tune.lines(found, CURVE, False))
    disturbing(monkeypatch, set(range(20)))
    found = profile.measure(engine, PROMPTS, ["prompt_lookup"], CURVE, max_new_tokens=16)
    assert found.drafters == () and "something else" in found.left_out["prompt_lookup"]
    assert "disturbed by something else" in tune.lines(found, CURVE, False)[-1]


def test_nothing_to_measure_is_refused(engine):
    for asked, specs, length in (
        ([], ["suffix"], 16),
        ([Asked(ids=(1,))], [], 16),
        ([Asked(ids=(1,))], ["suffix"], 7),
    ):
        with pytest.raises(RequestError, match=r"need a prompt and a drafter|at least 8, got 7"):
            profile.measure(engine, asked, specs, CURVE, max_new_tokens=length)
    assert tune.SHORTEST == profile.SHORTEST


def test_available_are_those_that_need_no_setting(engine):
    specs, left_out = profile.available(engine)
    assert {"prompt_lookup", "suffix", "early_exit"} <= set(specs)
    assert not {"none", "auto", "select", "cascade"} & {*specs, *left_out}
    assert "eagle3" in left_out


def test_a_profile_is_kept_whole(engine, own_folder):
    file = profile.save(engine.target, PROFILE)
    assert list(own_folder.iterdir()) == [file]
    assert json.loads(file.read_text())["value"] == json.loads(json.dumps(dataclasses.asdict(PROFILE)))


@pytest.mark.parametrize(
    "harm", ["", "[]", "{", '{"key": 1}', '"drafters": [{', '"kept_D": [900', '"level": NaN', '"format": 0']
)
def test_a_bad_file_is_as_none(engine, harm, monkeypatch):
    monkeypatch.setattr(measured, "_digest", lambda value: "of whoever wrote it")
    file = profile.save(engine.target, PROFILE)
    good = file.read_text()
    bad = {
        '"drafters": [{': good.replace('"drafters": [{', '"drafters": ["x", {'),
        '"kept_D": [900': good.replace('"kept_D": [90', '"kept_D": [900'),
        '"level": NaN': good.replace('"level": 0.002', '"level": NaN'),
        '"format": 0': good.replace('"format": 2', '"format": 0'),
    }.get(harm, harm)
    assert bad != good
    file.write_text(bad)
    costs = Costs()
    recall.recall(engine.target, costs)
    assert costs.kept(LEARNED.spec) == ((), ())


def begun(engine):
    """An engine as ``Engine.load`` gives it."""
    fresh = Engine(engine.target, "none")
    fresh.costs.later(lambda: recall.recall(fresh.target, fresh.costs))
    return fresh


def test_what_policies_learned_is_kept_for_the_next_process(engine):
    spec = "auto[drafters=suffix]"
    settings = {"max_new_tokens": 30, "ignore_eos": True, "allowed_tokens": frozenset({3, 4})}
    first = Engine(engine.target, "none")
    first.remember()
    first.generate([3, 4, 3, 4, 3, 4], drafter=spec, **settings)
    learned = first.method(spec).policy.learned()
    (kind,) = learned
    assert learned[kind]["suffix"][0]
    del first
    gc.collect()
    for drafter in (spec, "none"):  # also by a method that is made after the first question
        second = Engine(engine.target, drafter)
        second.remember()
        second.costs.kept("suffix")  # a policy asks what was learned with its first question
        assert second.method(spec).policy.learned() == learned
    kept = next(measured.cache_folder().rglob("learned-*.json"))
    kept.write_text("{broken")
    Engine(engine.target, spec).remember()
    del second
    gc.collect()


def test_of_two_that_end_each_keeps_what_the_other_learned(engine):
    """One draws its tokens and the other does not, as two servers of one model."""
    spec = "auto[drafters=suffix]"
    settings = {"max_new_tokens": 30, "ignore_eos": True, "allowed_tokens": frozenset({3, 4})}
    both = [Engine(engine.target, "none") for _ in range(2)]
    for one in both:
        one.remember()
    for one, temperature in zip(both, (0.0, 1.0), strict=True):
        one.generate([3, 4] * 4, drafter=spec, temperature=temperature, seed=1, **settings)
    greedy, drawn = (one.method(spec).policy.learned() for one in both)
    del one, both
    gc.collect()
    assert measured.kept("learned", engine.target, "", dict) == {spec: {**greedy, **drawn}}
    assert {*greedy} == {"greedy"} and {*drawn} == {"drawn"}


def test_what_others_learned_since_stays():
    begun = {"auto": {"greedy": {"suffix": 1, "none": 1}}}
    own = {"auto": {"greedy": {"suffix": 2, "none": 1}}, "new": {"drawn": {}}}
    found = {"auto": {"greedy": {"suffix": 3, "none": 3, "more": 3}, "drawn": {}}, "old": {}}
    assert measured.merged(begun, own, found) == {
        "auto": {"greedy": {"suffix": 2, "none": 3, "more": 3}, "drawn": {}},
        "old": {},
        "new": {"drawn": {}},
    }


def test_what_is_kept_changes_one_process_after_another(engine):
    def count():
        for _ in range(20):
            measured.change("counts", engine.target, lambda found: {"n": found.get("n", 0) + 1})

    kept = measured.store("counts", engine.target, "", {})
    part = kept.with_name(".profile.json.7-ab.part")
    part.touch()
    threads = [threading.Thread(target=count) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert measured.kept("counts", engine.target, "", dict) == {"n": 80}
    assert part.exists(), "another process may be writing it"


def test_files_are_read_once_and_only_by_those_who_need_them(engine, monkeypatch):
    cost.keep(engine.target, CURVE)
    profile.save(engine.target, PROFILE)
    read = []
    monkeypatch.setattr(recall, "kept", lambda *a: (read.append(a[0]), measured.kept(*a))[1])
    fresh = begun(engine)
    short = {"max_new_tokens": 6, "ignore_eos": True}
    fresh.generate([5, 9, 11] * 4, drafter="prompt_lookup", **short)
    assert not read
    for _ in range(2):
        fresh.generate([5, 9, 11] * 4, drafter="auto", **short)
    assert read == ["passes", "profile"]


def test_policies_begin_with_what_was_measured(engine):
    cost.keep(engine.target, CURVE)
    profile.save(engine.target, PROFILE)
    fresh = begun(engine)
    spec = "draft_model[model=tiny policy=goodput]"
    with_policy = fresh.method(spec)
    assert fresh.costs.passed(9, 0, 1) == pytest.approx(0.018)
    assert fresh.costs.price("draft_model[model=tiny]") == 0.002
    assert fresh.costs.price(with_policy.spec) == 0.002, "the policy changes no price"
    assert fresh.costs.kept(with_policy.spec) == (KNOWN.kept_D, KNOWN.tried_D)
    rows = []
    fresh.listeners.append(lambda r: rows.extend(() if r.prompt else r.rows))
    with_auto = "auto[drafters=draft_model[model=tiny]]"
    fresh.generate([77], drafter=with_auto, max_new_tokens=8, ignore_eos=True)
    assert rows[0].choice.rates["none"] == pytest.approx(100, rel=0.01), "in seconds from the first step on"
    assert 130 < rows[0].choice.rates["draft_model[model=tiny]"] < 250


def test_without_files_nothing_changes(engine):
    fresh = begun(engine)
    assert fresh.costs.passed(1, 0, 1) == 1.0 and fresh.costs.kept("suffix") == ((), ())


def test_a_checkpoint_that_vanished_is_no_error(engine, monkeypatch):
    def gone(*a, **k):
        raise FileNotFoundError("model.safetensors")

    monkeypatch.setattr(recall, "kept", gone)
    recall.recall(engine.target, Costs())
