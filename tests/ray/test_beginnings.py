"""Which replica a request goes to, by what it begins with."""

import json

import pytest

from outpace.ray.beginnings import BLOCK, Beginnings, blocks


def chat(*texts, **more):
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"messages": messages, **more}).encode()


def shared(one, other):
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_a_conversation_that_goes_on_begins_as_it_did():
    first = blocks(chat("a" * 1000))
    assert len(first) == 1000 // BLOCK + 1
    assert shared(first, blocks(chat("a" * 1000, "and then?" * 100))) >= len(first) - 1
    assert shared(first, blocks(chat("b" + "a" * 999))) == 0, "a block is named by all that stands before it"


def test_settings_tell_nothing_and_keys_share_nothing():
    body = chat("a" * 600)
    assert blocks(body) == blocks(chat("a" * 600, temperature=0.5, model="m", stream=True))
    assert not set(blocks(body, b"Bearer x")) & set(blocks(body, b"Bearer y"))


@pytest.mark.parametrize("name", ["prompt", "input", "system", "instructions"])
def test_all_apis_have_beginnings(name):
    assert len(blocks(json.dumps({name: "word " * 200}).encode())) == 1000 // BLOCK


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"5", b'{"prompt": ""}', b"[" * 100_000, b"\xff", b'{"prompt": "\\ud800"}']
)
def test_bodies_without_a_prompt_have_none(body):
    assert blocks(body) == ()


def test_half_a_surrogate_pair_is_text_too():
    assert len(blocks(json.dumps({"prompt": "\ud800" * BLOCK}).encode())) == 3


def test_who_has_read_it_gets_it_unless_it_is_much_busier():
    seen = Beginnings()
    seen.sent("a", [b"1", b"2", b"3"])
    seen.sent("b", [b"1"])
    assert seen.ranked({"a": 8, "b": 0}, [b"1", b"2"], 8) == ["a", "b"]
    assert seen.ranked({"a": 9, "b": 0}, [b"1", b"2"], 8) == ["b", "a"]
    assert seen.ranked({"a": 9, "b": 0, "c": 1}, [b"1"], 8) == ["b", "c", "a"]
    assert seen.known("a", [b"1", b"9", b"3"]) == 1


def test_what_nobody_has_read_goes_to_the_least_busy_then_to_who_has_least():
    seen = Beginnings()
    seen.sent("a", [b"1", b"2"])
    seen.sent("b", [b"1"])
    assert seen.ranked({"a": 0, "b": 0}, [b"7"], 8) == ["b", "a"]
    assert seen.ranked({"a": 0, "b": 1}, [b"7"], 8) == ["a", "b"]
    assert seen.ranked({}, [b"7"], 8) == []


def test_memory_is_bounded_and_loses_ends_before_beginnings():
    seen = Beginnings(most=4)
    seen.sent("a", [b"1", b"2", b"3"])
    seen.sent("a", [b"4", b"5"])
    assert seen.known("a", [b"1", b"2", b"3"]) == 2 and seen.known("a", [b"4", b"5"]) == 2


def test_a_replica_that_is_gone_is_forgotten():
    seen = Beginnings()
    seen.sent("a", [b"1"])
    seen.keep({"b"})
    assert seen.known("a", [b"1"]) == 0
