import json
import types
from collections import Counter

import pytest

from outpace import Engine, ModelError, OutpaceError, SamplingParams
from outpace.train import self_prompts
from outpace.train.self_prompts import (
    SelfPromptConfig,
    opening_of,
    user_turn,
    write_conversations,
    write_prompts,
)


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", dtype="float32", drafter="none")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(self_prompts, "_ROUND", 2)
    monkeypatch.setattr(self_prompts, "_FEWEST", 1)


@pytest.fixture
def ending(engine, monkeypatch):
    """A tiny model hardly ever ends a turn: a letter that it likes does it instead."""
    turn = user_turn
    monkeypatch.setattr(self_prompts, "user_turn", lambda *given, **said: (turn(*given, **said)[0], "e"))
    monkeypatch.setattr(self_prompts, "OPENINGS", ("Was ist", "Show"))
    return lambda number: turn(engine, said=opening_of(number))[0]


def quiet(tick):
    pass


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_a_turn_begins_as_the_template_writes_it(engine):
    prefix, end = user_turn(engine)
    whole = engine.encode([{"role": "user", "content": "hello"}])
    assert whole[: len(prefix)] == prefix and len(whole) > len(prefix)
    assert end and end not in engine.target.tokenizer.decode(prefix, skip_special=False)[-len(end) :]


def test_the_number_alone_says_a_prompt(engine, ending, tmp_path):
    config = SelfPromptConfig(count=6, max_new_tokens=40, batch=3)
    found = write_prompts(engine, tmp_path / "p.jsonl", config, say=quiet)
    made = rows(tmp_path / "p.jsonl")
    assert found == len(made) == 6 and [r["number"] for r in made] == sorted(r["number"] for r in made)
    assert len({r["prompt"] for r in made}) == len(made)
    assert {opening_of(row["number"]) for row in made} > {""}, "some begin with words that are given"
    for row in made:
        opening = opening_of(row["number"])
        alone = engine.generate(
            ending(row["number"]),
            SamplingParams(
                temperature=0.8,
                seed=row["number"],
                max_new_tokens=40,
                stop="e",
                top_k=0,
                top_p=1.0,
                min_p=0.0,
                repetition_penalty=1.0,
            ),
        )
        assert alone.finish_reason == "stop" and (opening + alone.text.rstrip()).strip() == row["prompt"]
        assert "e" not in row["prompt"][len(opening) :]


def test_beginnings_are_of_code_and_of_several_languages():
    said = Counter(map(opening_of, range(480)))
    assert said.pop("") == 360 and set(said) == set(self_prompts.OPENINGS) and set(said.values()) == {10}


def test_a_file_is_gone_on_with(engine, ending, tmp_path):
    few, many = (SelfPromptConfig(count=n, max_new_tokens=40, batch=4) for n in (3, 20))
    write_prompts(engine, tmp_path / "whole.jsonl", many, say=quiet)
    write_prompts(engine, tmp_path / "parts.jsonl", few, say=quiet)
    assert len(rows(tmp_path / "parts.jsonl")) < 20
    ticks = []
    write_prompts(engine, tmp_path / "parts.jsonl", many, say=ticks.append)
    assert rows(tmp_path / "parts.jsonl") == rows(tmp_path / "whole.jsonl")
    assert ticks[-1].done == ticks[-1].total == 20
    before = (tmp_path / "parts.jsonl").read_bytes()
    assert write_prompts(engine, tmp_path / "parts.jsonl", few, say=ticks.append) >= 20
    assert (tmp_path / "parts.jsonl").read_bytes() == before, "enough is there"


def test_rounds_are_no_larger_than_what_is_wanted(engine, ending, tmp_path, monkeypatch):
    """The size of a round decides about nothing but when something is told."""
    monkeypatch.setattr("outpace.train.progress._SAY_EVERY", 0.0)
    config = SelfPromptConfig(count=12, max_new_tokens=40, batch=4)
    asked, ticks = [], []
    written = self_prompts._written

    def counted(engine, prompts, *more):
        asked.append(len(prompts))
        return written(engine, prompts, *more)

    monkeypatch.setattr(self_prompts, "_written", counted)
    write_prompts(engine, tmp_path / "small.jsonl", config, say=ticks.append)
    monkeypatch.setattr(self_prompts, "_ROUND", 64)
    del asked[1:]
    write_prompts(engine, tmp_path / "large.jsonl", config, say=quiet)
    assert asked[:2] == [8, 12 + 3 + 8]
    assert rows(tmp_path / "small.jsonl") == rows(tmp_path / "large.jsonl")
    assert len(rows(tmp_path / "small.jsonl")) == 12
    assert ticks[0].done == 1 and ticks[0].total == 12 and str(ticks[0]), "told while a round is under way"


def test_one_prompt_in_three_goes_on_as_a_conversation(engine, ending, tmp_path, monkeypatch):
    stopping = lambda **given: SamplingParams(**{**given, "stop": ("e",)})  # noqa: E731
    monkeypatch.setattr(self_prompts, "SamplingParams", stopping)
    begins = []

    def turn(engine, before=(), said=""):
        begins.append(before)
        return user_turn(engine, before, said)[0], "e"

    monkeypatch.setattr(self_prompts, "user_turn", turn)
    config = SelfPromptConfig(count=40, max_new_tokens=40, batch=4)
    prompts, path = tmp_path / "p.jsonl", tmp_path / "c.jsonl"
    write_prompts(engine, prompts, config, say=quiet)
    asked = {row["number"]: row["prompt"] for row in rows(prompts)}
    found = write_conversations(engine, prompts, path, config, say=quiet)
    made = rows(path)
    assert found == len(made) > 2 and all(row["number"] % 3 == 0 for row in made)
    for row in made:
        assert [turn["role"] for turn in row["messages"]] == ["user", "assistant", "user"]
        assert row["messages"][0]["content"] == asked[row["number"]]
        assert row["messages"][:2] in begins, "the user's next turn follows the answer"
    text = path.read_text()
    path.write_text(json.dumps(made[0]) + "\n")  # as if stopped after the first round
    write_conversations(engine, prompts, path, config, say=quiet)
    assert rows(path) == made, "the number alone says a conversation"
    before = path.stat().st_mtime_ns
    write_conversations(engine, prompts, path, config, say=quiet)
    assert path.stat().st_mtime_ns == before and text.startswith(json.dumps(made[0])[:20])


def test_a_model_that_says_the_same_again_and_again_is_stopped(engine, ending, tmp_path):
    cold = SelfPromptConfig(count=99, temperature=1e-6, max_new_tokens=40)
    with pytest.raises(OutpaceError, match="different prompts and then none"):
        write_prompts(engine, tmp_path / "p.jsonl", cold, say=quiet)


@pytest.mark.parametrize(
    "row",
    [
        b'{"number": 0}',
        b'{"number": 1, "prompt": "caf\xe9"}',
        b'{"number": 1e999, "prompt": "a"}',
        b'{"number": 1, "prompt": ["a"]}',
        b'{"number": 1, "prompt": "a',
        b"",
    ],
)
def test_a_damaged_file_is_refused_and_left_as_it_is(engine, tmp_path, row):
    file, good = tmp_path / "p.jsonl", b'{"number": 0, "prompt": "a"}\n'
    file.write_bytes(good + row + b"\n")
    with pytest.raises(OutpaceError, match=r"line 2 is no row with number and prompt \(.*delete the file"):
        write_prompts(engine, file, SelfPromptConfig(count=1), say=quiet)
    assert file.read_bytes() == good + row + b"\n"


def test_what_cannot_be_is_refused(engine, tmp_path):
    with pytest.raises(ValueError, match="count must be at least 1"):
        SelfPromptConfig(count=0)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        SelfPromptConfig(count=1, temperature=0)
    dumb = types.SimpleNamespace(target=types.SimpleNamespace(name="m", tokenizer=None))
    with pytest.raises(ModelError, match="m has no tokenizer"):
        user_turn(dumb)
    plain = types.SimpleNamespace(
        chat_template="", chat_text=lambda messages, **_: messages[0]["content"].upper()
    )
    other = types.SimpleNamespace(target=types.SimpleNamespace(name="m", tokenizer=plain))
    with pytest.raises(ModelError, match="shows no end"):
        user_turn(other)
