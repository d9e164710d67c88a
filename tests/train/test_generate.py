import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import replace

import pytest

from outpace import Engine, ModelError, RequestError
from outpace.train import generate
from outpace.train.corpus import CorpusPrompt
from outpace.train.generate import PLAN, GenerateConfig, ask_of, generate_answers, loops, without_loop
from outpace.train.progress import Tick
from outpace.train.tokens import TokenStore
from tests.support import until

PROMPTS = [CorpusPrompt(messages=({"role": "user", "content": f"tell {i}"},), source=0) for i in range(7)]
SMALL = GenerateConfig(tokens=400, max_new_tokens=24, batch=4, shard_tokens=150)


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", dtype="float32", drafter="none")


def quiet(tick):
    pass


def contents(store):
    return {one.number: (one.ids.tolist(), one.prompt, one.temperature) for one in store}


@pytest.fixture(scope="module")
def whole(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return generate_answers(engine, PROMPTS, folder, SMALL, about={"command": "x"}, say=quiet)


def test_answers_are_the_targets_own(engine, whole):
    assert whole.answer_tokens >= SMALL.tokens
    assert len(whole.manifest["shards"]) > 2, "written as they come"
    kinds = Counter()
    for one in whole:
        ask = ask_of(one.number, len(PROMPTS), SMALL)
        messages = PROMPTS[ask.prompt].messages
        assert tuple(one.ids[: one.prompt]) == engine.encode(messages)
        answer = engine.generate(
            messages, drafter="none", temperature=ask.temperature, seed=ask.seed, max_new_tokens=24
        )
        kept = without_loop(answer.tokens)
        assert tuple(one.ids[one.prompt :].tolist()) == answer.tokens[:kept]
        assert one.temperature == pytest.approx(ask.temperature)
        kinds[one.temperature == 0] += 1
    assert kinds[True] and kinds[False]


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_no_more_is_made_than_was_asked_for(engine, tmp_path, batch):
    """At most about an answer more: a wide batch does not finish many that nobody needs."""
    config = GenerateConfig(tokens=200, max_new_tokens=24, batch=batch)
    store = generate_answers(engine, PROMPTS, tmp_path, config, say=quiet)
    assert 200 <= store.answer_tokens <= 200 + 3 * 24
    lengths = [len(one.ids) - one.prompt for one in store]
    assert max(lengths) <= 24 and len(set(one.number for one in store)) == len(store)


def test_the_manifest_tells_how(whole):
    about = TokenStore.open(whole.folder).manifest["about"]
    (work,) = about["plans"]
    assert work["command"] == "x"
    assert work["plan"]["greedy"] == 0.5 and work["plan"]["prompts"] == 7
    assert whole.manifest["target"]["name"] == "tiny"
    assert whole.manifest["counts"]["looped_answers"] == 0


def test_work_that_was_stopped_goes_on_and_gives_the_same(engine, whole, tmp_path):
    class Stop(Exception):
        pass

    seen = []

    def stop(record):
        seen.append(record)
        if len(seen) == 60:
            raise Stop

    engine.listeners.append(stop)
    with pytest.raises(Stop):
        generate_answers(engine, PROMPTS, tmp_path, SMALL, say=quiet)
    engine.listeners.remove(stop)
    assert engine.cache.open() == 0, "no slot is lost"
    engine.cache.close(0)
    first = TokenStore.open(tmp_path)
    assert 0 < len(first) < len(whole)
    again = generate_answers(engine, PROMPTS, tmp_path, SMALL, say=quiet)
    assert contents(first).items() <= contents(again).items()
    shared = contents(whole).keys() & contents(again).keys()
    assert len(shared) >= len(whole) - SMALL.batch
    assert all(contents(whole)[n] == contents(again)[n] for n in shared)
    more = GenerateConfig(**{**{f: getattr(SMALL, f) for f in SMALL.__slots__}, "tokens": 500})
    assert generate_answers(engine, PROMPTS, tmp_path, more, say=quiet).answer_tokens >= 500


def test_answers_to_other_prompts_are_added(engine, whole, tmp_path):
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)
    kinds = {f: getattr(SMALL, f) for f in SMALL.__slots__}
    wanted = whole.answer_tokens + 100
    others = [*PROMPTS[1:], replace(PROMPTS[0], messages=({"role": "user", "content": "another"},))]
    more = GenerateConfig(**{**kinds, "tokens": wanted})
    both = generate_answers(engine, others, tmp_path, more, about={"command": "y"}, say=quiet)
    assert both.answer_tokens >= wanted and contents(whole).items() <= contents(both).items()
    assert [work["command"] for work in both.manifest["about"]["plans"]] == ["x", "y"]
    new = contents(both).keys() - contents(whole).keys()
    assert new and min(new) == PLAN
    for number in new:
        ask = ask_of(number - PLAN, len(others), more)
        ids, prompt, _ = contents(both)[number]
        assert tuple(ids[:prompt]) == engine.encode(others[ask.prompt].messages)
    first = GenerateConfig(**{**kinds, "tokens": both.answer_tokens + 60})
    again = generate_answers(engine, PROMPTS, tmp_path, first, say=quiet)
    assert len(again.manifest["about"]["plans"]) == 2, "the first work went on"
    assert max(n for n in contents(again) if n < PLAN) > max(contents(whole))


def test_a_killed_process_loses_no_shard(tmp_path, engine):
    code = textwrap.dedent(f"""
        from pathlib import Path
        from outpace import Engine
        from outpace.train.corpus import CorpusPrompt
        from outpace.train.generate import GenerateConfig, generate_answers
        prompts = [CorpusPrompt(messages=({{"role": "user", "content": f"tell {{i}}"}},), source=0)
                   for i in range(7)]
        config = GenerateConfig(tokens=10**9, max_new_tokens=24, batch=4, shard_tokens=150)
        generate_answers(Engine.load("tiny", dtype="float32"), prompts, Path({str(tmp_path)!r}),
                         config, say=lambda tick: None)
    """)
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: child.poll() is not None or len(list(tmp_path.glob("tokens-*.safetensors"))) >= 3, 60)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    left = contents(TokenStore.open(tmp_path))
    assert len(left) > 5
    more = GenerateConfig(
        tokens=sum(len(ids) - p for ids, p, _ in left.values()) + 50, max_new_tokens=24, batch=4
    )
    again = contents(generate_answers(engine, PROMPTS, tmp_path, more, say=quiet))
    assert left.items() <= again.items() and len(again) > len(left)


def test_the_same_prompt_gets_other_coins_each_round():
    config = GenerateConfig(greedy=0.5, answers=1)
    asks = [ask_of(n, 40, config) for n in range(200)]
    assert len({(a.prompt, a.seed) for a in asks if a.temperature}) == 160
    greedy = [a.prompt for a in asks if a.temperature == 0]
    assert sorted(greedy) == list(range(40)), "once each, in the first two rounds"
    assert 10 < len([a for a in asks[:40] if a.temperature == 0]) < 30
    assert all(0.7 <= a.temperature <= 1.0 for a in asks if a.temperature)
    assert not [a for n in range(99) if (a := ask_of(n, 9, GenerateConfig(greedy=0.0))).seed == 0]
    assert all(ask_of(n, 9, GenerateConfig(greedy=1.0, answers=1)).temperature == 0 for n in range(9))


def test_answers_to_a_prompt_come_together():
    """It is read once for all of them; one of each prompt's first two is greedy, and no other."""
    asks = [ask_of(n, 10, GenerateConfig(greedy=0.5, answers=4)) for n in range(80)]
    assert [a.prompt for a in asks[:8]] == [0] * 4 + [1] * 4 and asks[40].prompt == 0
    for group in range(10):
        own = [a.temperature for a in asks if a.prompt == group]
        assert len(own) == 8 and own[:2].count(0.0) == own.count(0.0) == 1
    assert len({(a.prompt, a.seed) for a in asks if a.temperature}) == 70


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([*range(100)], 100),
        ([1, 2, 3] * 10, 30),  # short
        ([9, 8, *[7] * 63], 65),  # the last 64 hold one other token
        ([9, 8, *[7] * 64], 3),
        ([*range(10), *[1, 2, 3] * 30], 13),
        ([*range(10), *range(40, 72), *range(40, 72)], 42),
        ([*range(10), *range(40, 73), *range(40, 73)], 76),  # a period of 33
        ([5, *[1, 2] * 40, 3], 82),  # it got out of the loop
        ([*range(6), *[4, 5] * 40], 6),  # the loop began before
    ],
)
def test_a_loop_is_cut_where_it_only_repeats(tokens, kept):
    assert without_loop(tokens) == kept


def test_loops_are_cut_and_counted(monkeypatch, engine, tmp_path):
    monkeypatch.setattr(generate, "LOOP_TOKENS", 2)
    monkeypatch.setattr(generate, "LOOP_PERIOD", 1)
    monkeypatch.setattr(generate, "_LOOK_EVERY", 1)
    store = generate_answers(engine, PROMPTS, tmp_path, SMALL, say=quiet)
    counts = store.manifest["counts"]
    assert counts["looped_answers"] > 0 and counts["loop_tokens_cut"] >= counts["looped_answers"]
    assert store.answer_tokens == counts["answer_tokens"] >= SMALL.tokens


def test_an_answer_that_loops_ends_early(monkeypatch, engine):
    """Nobody waits for the rest of what is cut anyway."""
    monkeypatch.setattr(generate, "LOOP_TOKENS", 8)
    monkeypatch.setattr(generate, "LOOP_PERIOD", 1)
    monkeypatch.setattr(generate, "_LOOK_EVERY", 1)
    long = {"drafter": "none", "temperature": 0, "max_new_tokens": 200}
    whole = engine.generate(PROMPTS[0].messages, **long).tokens
    ended = engine.generate(PROMPTS[0].messages, stop_when=loops, **long).tokens
    assert len(set(ended[-8:])) == 1 and ended == whole[: len(ended)] and len(ended) < len(whole)
    assert without_loop(ended) == len(ended) - 7


def test_a_prompt_is_read_once_for_all_of_its_answers(engine, tmp_path):
    """Answers that copied their prompt are those that read it themselves, and no slot is lost."""
    read = []
    engine.listeners.append(lambda record: read.append(record.passed_rows if record.prompt else 0))
    config = replace(SMALL, tokens=100, answers=4, max_new_tokens=8)
    store = generate_answers(engine, PROMPTS, tmp_path, config, say=quiet)
    engine.listeners.pop()
    prompts = {ask_of(one.number, 7, config).prompt: one.prompt for one in store}
    whole = sum(one.prompt for one in store)
    assert sum(prompts.values()) < sum(read) < whole / 2
    assert sum(read) <= sum(prompts.values()) + 2 * len(store)
    assert engine.cache.open() == 0
    engine.cache.close(0)


def test_progress_is_told(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("outpace.train.progress._SAY_EVERY", 0.0)
    ticks = []
    generate_answers(engine, PROMPTS, tmp_path, SMALL, say=ticks.append)
    assert len(ticks) > 5 and ticks[-1].done == ticks[-1].total == 400
    assert [t.done for t in ticks] == sorted(t.done for t in ticks)
    assert str(Tick("generating", 50, 200, "tokens", 3.0)) == (
        "generating: 50/200 tokens (25.0 %), 3.0 tokens/s, 0:00:50 left"
    )
    assert str(Tick("generating", 0, 200, "tokens", 0.0)).endswith("? left")
    assert str(Tick("generating", 200, 200, "tokens", 0.0)).endswith("0:00:00 left")


def test_what_does_not_fit_is_refused(engine, tmp_path, whole):
    with pytest.raises(RequestError, match="no prompts"):
        generate_answers(engine, [], tmp_path, SMALL)
    with pytest.raises(RequestError, match="no prompt has at most 3 tokens"):
        generate_answers(engine, PROMPTS, tmp_path, GenerateConfig(tokens=9, max_prompt=3))
    other = Engine.load("tiny:1", dtype="float32")
    with pytest.raises(ModelError, match="holds answers of tiny "):
        generate_answers(other, PROMPTS, whole.folder, SMALL)
    with pytest.raises(ValueError, match="coolest"):
        GenerateConfig(coolest=1.5)
    with pytest.raises(ValueError, match="greedy"):
        GenerateConfig(greedy=2)
    with pytest.raises(ValueError, match=r"batch must be in \[1, 10+\], got 0"):
        GenerateConfig(batch=0)


def test_other_prompts_that_add_nothing_are_not_noted(engine, whole, tmp_path):
    folder, told = tmp_path / "full", []
    shutil.copytree(whole.folder, folder)
    same = generate_answers(engine, PROMPTS[1:], folder, SMALL, about={"command": "y"}, say=told.append)
    assert contents(same) == contents(whole)
    assert [work["command"] for work in same.manifest["about"]["plans"]] == ["x"]
    assert any("by other prompts or settings" in str(one) for one in told)


def test_a_prompt_longer_than_the_context_is_left_out(engine, tmp_path):
    too_long = replace(PROMPTS[0], messages=({"role": "user", "content": "word " * 20_000},))
    config = replace(SMALL, tokens=60)
    made = generate_answers(engine, [too_long, *PROMPTS], tmp_path, config, say=quiet)
    assert made.answer_tokens >= 60
    assert max(one.prompt for one in made) <= config.max_prompt
