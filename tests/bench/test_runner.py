"""Who runs when, what is dropped, and what a run of the engine reports."""

from dataclasses import replace

import pytest

from outpace import Engine
from outpace.bench.cases import make_cases, turn_id
from outpace.bench.ours import Ours, Watch
from outpace.bench.records import VERBS, Case, Settings
from outpace.bench.runner import Runner, make_units
from outpace.bench.workloads import Prompt
from outpace.errors import RequestError
from outpace.policies.acceptance import KEPT
from outpace.policies.auto import Auto
from tests.bench.fakes import CASES, LONG, Fake, case, session


def test_turns_rotate_unit_by_unit_after_noise_floor_and_warm_up():
    log = []
    fakes = [Fake(name, log=log) for name in ("none", "one", "two")]
    found = session(*fakes)
    names = [(name, unit[0]) for name, unit, _ in log]
    assert names[:9] == [
        ("none", "bb"),
        *[("none", unit) for unit in ("a", "c", "bb", "dd") for _ in range(2)],
    ]
    assert log[9:12] == [(name, ("bb",), 16) for name in ("none", "one", "two")]
    assert names[12:] == [
        ("none", "a"),
        ("one", "a"),
        ("two", "a"),
        ("one", "c"),
        ("two", "c"),
        ("none", "c"),
        ("two", "bb"),
        ("none", "bb"),
        ("one", "bb"),
        ("none", "dd"),
        ("one", "dd"),
        ("two", "dd"),
    ]
    (part,) = found.parts
    keys = {(unit, 0) for unit in range(4)}
    assert {name: set(runs) for name, runs in part.runs.items()} == dict.fromkeys(
        ("none", "one", "two"), keys
    )
    assert set(found.noise[0]) == set(found.noise[1]) == keys


class Stopped(Fake):
    """Ctrl-C comes during its run number ``at``."""

    def __init__(self, name, at, **more):
        super().__init__(name, **more)
        self.at = at

    def run(self, unit, settings):
        if len(self.log) == self.at:
            raise KeyboardInterrupt
        return super().run(unit, settings)


def test_ctrl_c_keeps_whole_units():
    # One warm-up, then the first unit whole; the second is broken off before or after the others.
    found = session(Fake("none"), Fake("one"), Stopped("two", at=2))
    assert found.interrupted
    (part,) = found.parts
    assert {name: list(runs) for name, runs in part.runs.items()} == {
        name: [(0, 0)] for name in ("none", "one", "two")
    }
    with pytest.raises(KeyboardInterrupt):
        session(Fake("none"), Stopped("one", at=1))
    with pytest.raises(KeyboardInterrupt):
        session(Stopped("none", at=3))


def test_only_wide_cells_are_repeated_and_not_for_ever():
    def noisy(case, turn):
        return 0.5 + 0.2 * (turn % 2) * (case.group == "y")

    found = session(
        Fake("none"), Fake("steady", lambda case, turn: 0.5), Fake("noisy", noisy), repeat=2, max_repeat=5
    )
    (part,) = found.parts
    rounds = {
        name: {unit: sum(key[0] == unit for key in runs) for unit in range(4)}
        for name, runs in part.runs.items()
    }
    assert rounds["steady"] == {0: 2, 1: 2, 2: 2, 3: 2}
    assert rounds["noisy"] == rounds["none"] == {0: 2, 1: 5, 2: 2, 3: 5}


def test_with_one_round_nothing_is_settled():
    found = session(Fake("none"), Fake("steady", lambda case, turn: 0.5), max_repeat=4)
    assert {turn for _, turn in found.parts[0].runs["steady"]} == {0, 1}


def test_who_cannot_serve_the_settings_stays_out():
    keyed = Settings(max_new_tokens=40, temperature=0.5, reproducible=True)
    free = Settings(max_new_tokens=40, temperature=0.5)
    found = session(
        Fake("none"),
        Fake("one", fails=lambda s: not s.reproducible),
        Fake("hf", kind="peer"),
        settings=(free, keyed),
    )
    assert [list(part.runs) for part in found.parts] == [["none", "hf"], ["none", "one"]]
    assert found.notes == ["one takes no part: one cannot do this"]
    with pytest.raises(RequestError, match="one cannot do this"):
        session(Fake("none"), Fake("one", fails=lambda s: True))


def test_a_peer_that_dies_leaves_no_unpaired_runs():
    peer = Fake("hf", kind="peer")
    peer.fails = lambda settings: len(peer.log) == 2
    found = session(Fake("none"), peer, Fake("one"))
    (part,) = found.parts
    assert set(part.runs) == {"none", "one"} and len(part.runs["none"]) == 4
    assert found.notes == ["hf left the benchmark: hf cannot do this"]
    ours = Fake("one")
    ours.fails = lambda settings: len(ours.log) == 2
    with pytest.raises(RequestError):
        session(Fake("none"), ours)


def test_units_hold_one_category_one_seed_and_no_loops_among_others():
    cases = [case(f"{group}{i}", group, seed) for group in "xy" for i in range(5) for seed in (0, 1)]
    units = make_units(cases, 2, lambda case: case.id in ("x0", "x3"))
    assert sorted(case.id + str(case.seed) for unit in units for case in unit) == sorted(
        case.id + str(case.seed) for case in cases
    )
    for unit in units:
        assert len({(case.group, case.seed, case.id in ("x0", "x3")) for case in unit}) == 1
    assert max(map(len, units)) == 2
    assert [len(unit) for unit in make_units(cases, 1)] == [1] * 20


def test_categories_take_turns():
    cases = [
        case(f"{group}{i}", group) for group, count in (("x", 3), ("y", 1), ("z", 2)) for i in range(count)
    ]
    assert [unit[0].id for unit in make_units(cases, 1)] == ["x0", "y0", "z0", "x1", "z1", "x2"]


def test_plain_texts_are_known_before_batches_are_made():
    def text(case):
        return [1] * 99 if case.id in ("a", "c") else list(range(99))

    texts = {}
    more = [*CASES, case("e"), case("f", "y")]
    found = session(Fake("none", text=text), cases=more, batch=2, texts=texts)
    assert {tuple(c.id for c in unit) for unit in found.parts[0].units} == {
        ("a",),
        ("bb", "e"),
        ("c",),
        ("dd", "f"),
    }
    assert texts["e", 0, False] == tuple(range(40))


def test_progress_counts_every_run():
    ticks = []
    runner = Runner([Fake("none"), Fake("one")], {}, repeat=2, tick=lambda part, units: ticks.append(units))
    steps = runner.steps(CASES, [LONG])
    runner.run(CASES, [LONG])
    assert sum(ticks) == steps == 2 * 4 + 2 * 2 * 4


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", dtype="float32", drafter="none")


def made(engine, *texts, seed=3):
    return tuple(
        Case(id=text, group="x", ids=engine.encode(text), seed=seed + i) for i, text in enumerate(texts)
    )


@pytest.mark.parametrize("spec", ["none", "prompt_lookup", "draft_model[model=tiny]"])
@pytest.mark.parametrize(
    "settings",
    [Settings(max_new_tokens=24), Settings(max_new_tokens=24, temperature=0.8, reproducible=True)],
    ids=["greedy", "sampled"],
)
def test_a_run_is_what_generate_gives(engine, spec, settings):
    unit = made(engine, "a b a b a b a", "one two one two one")
    run = Ours(engine, engine.method(spec)).run(unit, settings)
    for one, tokens, counters in zip(unit, run.tokens, run.counters, strict=True):
        alone = engine.generate(
            one.ids,
            drafter=spec,
            temperature=settings.temperature,
            seed=one.seed,
            reproducible=settings.reproducible,
            max_new_tokens=24,
            ignore_eos=True,
        )
        assert tokens == alone.tokens and counters == alone.counters
    assert run.decode_tokens == 2 * 23
    assert 23 < run.full_tokens <= run.decode_tokens
    assert 0 < run.full_seconds <= run.decode_seconds
    assert 0 < run.prefill_seconds < run.seconds
    assert 0 < sum(run.verb_seconds.values()) <= run.decode_seconds
    assert set(run.verb_seconds) == set(VERBS) - {"other"}
    assert (run.draft_levels > 0) == (run.verb_seconds["draft_pass"] > 0) == ("model" in spec)
    assert run.peak_memory_bytes is None or run.peak_memory_bytes > 1e6
    assert engine.listeners == []


@pytest.mark.parametrize("fresh", [True, False])
def test_a_fresh_answer_knows_nothing_of_others(engine, monkeypatch, fresh):
    known = []
    begin = Auto.begin

    def begun(self, *kind, **more):
        known.append(sum(pool.ratio(KEPT) != 1.0 for some in self._pools.values() for pool in some.values()))
        return begin(self, *kind, **more)

    monkeypatch.setattr(Auto, "begin", begun)
    ours = Ours(engine, engine.method("auto"), fresh=fresh)
    runs = [ours.run(made(engine, "a b a b a b a"), Settings(max_new_tokens=24)) for _ in range(2)]
    assert known[0] == 0 and (known[1] == 0) == fresh
    assert runs[0].tokens == runs[1].tokens and runs[0].decode_tokens == 23
    assert 0 < sum(runs[1].verb_seconds.values()) <= runs[1].decode_seconds and engine.listeners == []


def test_prefill_is_no_part_of_the_shares(engine):
    unit = made(engine, "long " * 150)
    run = Ours(engine, engine.method("none")).run(unit, Settings(max_new_tokens=2))
    assert sum(run.verb_seconds.values()) <= run.decode_seconds < run.seconds / 2


def test_decoding_between_parts_of_a_prompt_counts_as_decoding(engine):
    unit = made(engine, "a b", *(f"{i}" + " long" * 150 for i in range(6)))
    run = Ours(engine, engine.method("none")).run(unit, Settings(max_new_tokens=24))
    assert run.counters[0].passes == 23
    assert 0 < sum(run.verb_seconds.values()) <= run.decode_seconds < run.seconds


def prompts(*texts, **more):
    return [
        Prompt(id=f"p{i}", category="x", messages=({"role": "user", "content": text},), **more)
        for i, text in enumerate(texts)
    ]


def test_cases_are_spread_and_fit(engine):
    asked = make_cases(
        engine,
        prompts("a", "b", "word " * 900, "c", "d", "word " * 9000),
        limit=2,
        max_new_tokens=8,
        seeds=(5, 6),
    )
    assert [(case.id, case.seed) for case in asked.cases] == [("p0", 5), ("p0", 6), ("p3", 5), ("p3", 6)]
    assert asked.notes == ["2 of 6 prompts left out: too long for the context of 1024"]
    with pytest.raises(RequestError, match="no prompt leaves room"):
        make_cases(engine, prompts("word " * 900), limit=None, max_new_tokens=8, seeds=(0,))


@pytest.mark.parametrize("long", [900, 9000])
def test_later_turns_follow_plain_answers(engine, long):
    (prompt,) = prompts("hello", turns=("again", "word " * long), reference="hello")
    asked = make_cases(engine, [prompt], limit=None, max_new_tokens=8, seeds=(0,))
    first, second = asked.cases
    answer = engine.generate(list(prompt.messages), max_new_tokens=8, drafter="none").text
    assert second.id == turn_id(prompt, 1) == "p0#2" and first.id == "p0"
    assert second.ids == engine.encode(list(prompt.after([answer])))
    assert first.reference == tuple(engine.target.tokenizer.encode("hello", special=False))
    assert asked.notes == ["1 later turns left out: too long for the context of 1024"]


class Stalling(Fake):
    """Stalls whenever it answers ``case``, so many times."""

    def __init__(self, name, case, times, **more):
        super().__init__(name, **more)
        self.case, self.left = case, times

    def run(self, unit, settings):
        done = super().run(unit, settings)
        if unit[0].id == self.case and settings.max_new_tokens > 16 and self.left:
            self.left -= 1
            return replace(done, stalled_seconds=done.decode_seconds / 2)
        return done


@pytest.mark.parametrize(("times", "left_out"), [(0, 0), (2, 0), (3, 1)])
def test_a_unit_that_stalls_is_repeated_then_left_out_and_counted(times, left_out):
    found = session(Fake("none"), Stalling("one", "a", times))
    (part,) = found.parts
    assert part.left_out == [(0, 0)] * left_out
    assert {len(runs) for runs in part.runs.values()} == {len(CASES) - left_out}


def test_a_unit_whose_plain_run_was_slow_is_repeated():
    """Twice as fast at 1.25 tokens per pass: the plain run was slow, and not a second time."""
    plain = Fake("none", lambda case, turn: 2.0 if case.id == "a" and turn == 1 else 1.0)
    found = session(plain, Fake("one", lambda case, turn: 0.8))
    (part,) = found.parts
    assert not part.left_out and part.runs["none"][0, 0].decode_seconds == 39.0


def test_steps_of_a_run_that_stall_are_found():
    watch = Watch()
    watch.steps = [0.01] * 20 + [0.54]
    assert watch.stalled() == pytest.approx(0.5)
