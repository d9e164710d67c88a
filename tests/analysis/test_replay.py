from dataclasses import replace

import pytest

from outpace import Engine, RequestError
from outpace.analysis import ablation, judge, recording
from outpace.analysis.recording import Guess, Recorded, Text
from outpace.analysis.replay import Always, Device, Replay, Rule, best_choice, replay, turning, whole
from outpace.analysis.scenarios import scenarios
from outpace.engine.portfolio import largest
from outpace.policies.acceptance import sizes_to_weigh
from outpace.policies.auto import Auto, AutoConfig
from outpace.policies.tuning import Tuning
from outpace.tree.shapes import budget
from outpace.types import Budget, Shape

DEVICE = Device(
    name="d", rows_R=(1, 2, 65), pass_R=(10.0, 11.0, 74.0), levels={"model": (2.0, 0.0)}, look=0.0, step=0.0,
    judge=0.0,
)  # fmt: skip


def text(lookup=(), model=(), positions=60, kind="k"):
    """A lookup that keeps so many of four guesses, in turn, and a draft model that keeps so many of two."""
    drafters = {}
    if lookup:
        kept = [lookup[i % len(lookup)] for i in range(positions)]
        told = tuple((0.9, 0.8, 0.7, 0.6) if one else () for one in kept)
        made = tuple(Guess((1, 2, 3, 4), one, 0) if one else Guess((), 0, 0) for one in kept)
        drafters["suffix"] = Recorded(Budget(4, 4), False, told, {4: made}, None, (0.0,))
    if model:
        made = tuple(Guess((1, 2), model[i % len(model)], 2) for i in range(positions))
        drafters["draft_model"] = Recorded(Budget(2, 2), True, None, {2: made}, None, (0.2,))
    return Text("t", kind, 10, drafters)


def one(moment):
    return 1


def test_plain_decoding_takes_a_pass_per_token():
    found = replay(Always(Rule(None)), DEVICE, [whole(text((4,)))], one)
    assert (found.tokens, found.steps, found.milliseconds) == (60, 60, pytest.approx(600.0))
    assert found.rate == pytest.approx(100.0)


def test_drafts_cost_rows_and_levels_and_bring_what_the_text_says():
    found = replay(Always(Rule(0.5)), DEVICE, [whole(text((4,)))], one)
    assert found.steps == 12 and found.by_drafter == {"suffix": 12}
    assert found.milliseconds == pytest.approx(12 * (14.0 + 0.02))
    found = replay(Always(Rule(None, "draft_model", 2, 2)), DEVICE, [whole(text(model=(1,)))], one)
    # The last draft has room for one token.
    assert found.steps == 30 and found.milliseconds == pytest.approx(30 * (12.0 + 4.0 + 0.02) - 3.0)


def test_late_reading_is_paid_for():
    late = replace(DEVICE, unread=1.0)
    once = Replay(Always(Rule(None, "draft_model", 1, 1)), late)
    once.run([whole(text(model=(0,), positions=1))], one)
    assert once.milliseconds == pytest.approx(10.0), "no room for a draft in the last place"
    found = replay(Always(Rule(None, "draft_model", 1, 1)), late, [whole(text(model=(0,), positions=2))], one)
    assert found.milliseconds == pytest.approx(11.0 + 2.0 + 0.02 + (10 - 8) + 10.0)


def test_hindsight_finds_the_best_rule():
    rule, best, plain = best_choice(DEVICE, [whole(text((4, 0, 0), (2,)))], one)
    assert rule.least is not None and best > 1.5 * plain
    rule, best, plain = best_choice(DEVICE, [whole(text((0,), (2,)))], one)
    assert rule.other == "draft_model" and best > 1.5 * plain
    rule, best, plain = best_choice(DEVICE, [whole(text((1,), (0,)))], one)
    assert str(rule) != "none" and rule.least >= 0.55, "one guess of four pays, all four do not"


def test_requests_come_go_and_turn():
    walks = [turning(text((4,)), text((1,)))] * 3
    assert walks[0].length == 60 and walks[0].at(31)[1] == 31
    runs = Replay(Always(Rule(None)), DEVICE)
    found = runs.run(walks, lambda moment: 1 if moment < 50.0 else 2, until=300.0)
    assert 300.0 <= found.milliseconds < 312.0 and found.tokens > found.steps
    assert Replay(Always(Rule(None)), DEVICE).run(walks, lambda moment: 5).steps == 0, "too few to begin"


def test_the_policy_hears_noise_and_the_score_does_not():
    noisy = replace(DEVICE, noise=0.3, stalls=0.1)
    found = replay(Auto(AutoConfig()), noisy, [whole(text((4, 0), (1, 0)))] * 4, one)
    assert found.milliseconds > 0
    quiet = replay(Always(Rule(0.5)), DEVICE, [whole(text((4,)))], one)
    assert replay(Always(Rule(0.5)), noisy, [whole(text((4,)))], one).rate == quiet.rate


def test_judging_names_every_scenario_and_policy():
    texts = [text((4, 0, 1), (1, 2), kind=kind) for kind in ("a", "b")]
    rows = judge.judge(texts, judge.named(["auto", "two_lines"]), judge.chosen(texts, "cpu, a"), orders=2)
    (row,) = rows
    assert set(row.rates) == {"auto", "two_lines"} and row.best_rate >= row.plain_rate
    assert row.regret("auto") == 1.0 - row.rates["auto"] / row.best_rate
    assert len({one.name for one in scenarios(texts)}) == len(scenarios(texts)) > 15


def test_one_text_is_enough():
    texts = [text(lookup=[2, 0], positions=20)]
    rows = judge.judge(texts, judge.named(["auto"]), judge.chosen(texts, "cpu, "))
    names = [row.scenario for row in rows]
    assert "cpu, 1" in names and not any("turning" in name for name in names)


def test_a_recording_is_what_drafters_would_have_done(tmp_path):
    engine = Engine.load("tiny", drafter="none", dtype="float32")
    ids = (5, 9, 11, 5, 9, 11, 5, 9)
    specs = ["suffix", "draft_model[model=tiny]", "draft_model[layers=1 model=tiny tree=chain]"]
    texts = recording.record(engine, [("p", "chat", ids)], specs, max_new_tokens=12)
    whole_text = texts[0]
    assert whole_text.positions == 11 and whole_text.start == 8, (
        "the prompt's last pass gives the first token"
    )
    same = whole_text.drafters["draft_model[model=tiny]"]
    assert (
        same.passes
        and same.previews_P is None
        and same.budget == largest(engine.method("draft_model[model=tiny]").preferred)
    )
    assert set(same.guesses) >= {nodes for nodes, _ in sizes_to_weigh(same.budget)}, (
        "whatever `auto` may ask for"
    )
    # The target itself drafts, so all it drafts is right, as far as the text goes.
    full = same.budget.max_nodes
    for place, guess in enumerate(same.guesses[full]):
        assert guess.accepted == min(len(guess.nodes_D), 11 - place)
    lookup = whole_text.drafters["suffix"]
    assert not lookup.passes and len(lookup.previews_P) == 11
    file = tmp_path / "texts.gz"
    recording.write(file, texts)
    (again,) = recording.read(file)
    assert again.drafters["suffix"].previews_P == lookup.previews_P
    assert again.drafters["draft_model[model=tiny]"].guesses == same.guesses
    plain = engine.generate(list(ids), max_new_tokens=12, ignore_eos=True, temperature=0.0)
    assert replay(Always(Rule(None)), DEVICE, [whole(again)], one).steps == len(plain.tokens) - 1
    assert not engine.cache._slots
    file.write_bytes(b"no gzip")
    with pytest.raises(RequestError, match=r"cannot read|holds no recorded"):
        recording.read(file)


def test_a_shorter_draft_is_the_first_part_of_a_longer_one():
    guesses = {1: (Guess((1,), 0, 1),), 4: (Guess((2, 4), 2, 2),)}
    tree = Recorded(budget("dynamic", 4, 0), True, None, guesses, None, (0.2,))
    assert tree.draft(0, Budget(4, 2, shape=Shape(beam=8))) == (4, 2, 2, 2)
    assert tree.draft(0, Budget(4, 1, shape=Shape(beam=8))) == (2, 1, 1, 1)
    assert tree.draft(0, Budget(1, 1, shape=Shape(beam=8))) == (1, 1, 0, 1)
    assert tree.draft(0, Budget(0, 0)) == (0, 0, 0, 0)


def test_replay_foresees_what_is_measured():
    engine = Engine.load("tiny", drafter="none", dtype="float32")
    ids = (5, 9, 11, 5, 9, 11, 5, 9)
    texts = recording.record(engine, [("p", "chat", ids)], ["suffix"], max_new_tokens=40)
    tries = [judge.reality(engine, [ids], texts, "two_lines") for _ in range(5)]
    ratio = sorted(one["predicted"] / one["measured"] for one in tries)[2]
    assert 0.3 < ratio < 3.0, "a busy machine; on a quiet one 5 %"


def test_every_part_of_auto_is_left_out_by_name():
    texts = [text(lookup=[2, 0], model=[1, 2, 0], positions=30, kind=kind) for kind in "ab"]
    rows = judge.judge(texts, ablation.variants(), judge.chosen(texts, "cpu, 1"))
    found = ablation.worth(rows)
    assert len(found) == len(ablation.variants()) - 1
    assert [one.most for one in found] == sorted((one.most for one in found), reverse=True)
    assert all(one.where and one.mean <= one.most for one in found)
    constants = ablation.variants(constants=True)
    assert len(constants) == 1 + 2 * len(Tuning.__slots__)
    assert judge.judge(texts, constants, judge.chosen(texts, "rows one by one"))


def test_a_recording_that_fails_leaves_nothing_open(monkeypatch):
    engine = Engine.load("tiny", drafter="none")
    drafter, ended = engine.method("suffix").preferred.drafter, []
    monkeypatch.setattr(drafter, "end", ended.append)
    monkeypatch.setattr(recording, "_ask", lambda *more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recording.record(engine, [("p", "chat", (1, 2, 1, 2, 3))], ["suffix"], max_new_tokens=12)
    assert engine.cache.open() == 0 and len(ended) == 1, "the first slot is free again"
