"""Budgets of thinking: the same text with every kind of draft, cut inside of drafts too."""

import pytest

from outpace import Engine, RequestError, SamplingParams
from outpace.models.thinking import CLOSING, INSIDE, OUTSIDE, make_section

DRAFTERS = [
    "prompt_lookup",
    "suffix",
    "recycling[tree=2x2x1]",
    "grammar",
    "grammar[drafter=none]",
    "draft_model[model=tiny layers=1]",
    "draft_model[model=tiny layers=1 tree=2x2 verifier=traversal]",
    "draft_model[model=tiny tree=chain verifier=block]",
    "auto",
]
MARKS = ("\x01", "the\x02")
PROMPTS = ["ab ab ab\x01", "the there\x01 the", "no thinking", "\x01the\x02 the\x01the the"]


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", dtype="float32", drafter="none")


def settings(budget, **more):
    return {"thinking_token_budget": budget, "thinking_marks": MARKS, "max_new_tokens": 40, **more}


def thought(engine, prompt, tokens, budget):
    """Tokens of thinking in an answer, and whether the budget ended it."""
    section = make_section(engine.target, MARKS, budget)
    place, cut, count = section.begun(engine.encode(prompt)), False, 0
    for token in tokens:
        before, place = place, section.step(place, token)
        cut = cut or before.phase == CLOSING
        count += before.phase == INSIDE
        count -= len(section.end) if (before.phase, place.phase) == (INSIDE, OUTSIDE) else 0
    return count, cut


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("more", [{"temperature": 0}, {"temperature": 0.9, "seed": 4}], ids=repr)
def test_every_drafter_gives_the_plain_text(engine, drafter, more):
    if "verifier" in drafter and more["temperature"]:
        return  # then a seed names another text; tests/methods/grammar/test_law.py counts those
    forced = cut = accepted = 0
    for budget in (0, 1, 3, 7, 20):
        given = settings(budget, ignore_eos=True, **more)
        plain = engine.generate(PROMPTS, drafter="none", **given)
        fast = engine.generate(PROMPTS, drafter=drafter, **given)
        assert [one.tokens for one in fast] == [one.tokens for one in plain], budget
        single = engine.generate(PROMPTS[0], drafter=drafter, **given)
        assert single.tokens == plain[0].tokens
        for prompt, one in zip(PROMPTS, fast, strict=True):
            count, hit = thought(engine, prompt, one.tokens, budget)
            assert count <= budget
            cut, forced = cut + hit, forced + one.counters.forced
            accepted += one.counters.accepted
    assert cut > 5
    if drafter not in ("auto", "prompt_lookup", "suffix"):  # which need not guess what closes it
        assert forced > 0 and accepted > 0


def test_the_end_is_written_inside_a_draft(engine):
    """A draft that began before the budget ended is kept beyond it."""
    inside = []

    def watch(record):
        inside.extend(row for row in record.rows if row.drafted)

    engine.listeners.append(watch)
    try:
        section = make_section(engine.target, MARKS, 3)
        spec = "draft_model[model=tiny tree=chain tree_size=6]"
        result = engine.generate(PROMPTS[0], drafter=spec, temperature=0, **settings(3, ignore_eos=True))
    finally:
        engine.listeners.clear()
    text, at = result.tokens, 1
    crossed = 0
    for row in inside:
        begun = section.begun(engine.encode(PROMPTS[0]))
        places = [section.walk(begun, text[:i]) for i in (at, at + row.accepted)]
        crossed += places[0].phase != places[1].phase
        at += len(row.emitted)
    assert crossed > 0 and result.counters.forced > 0


def test_without_a_budget_nothing_changes(engine):
    plain = engine.generate(PROMPTS[0], temperature=0, max_new_tokens=30).tokens
    marked = engine.generate(PROMPTS[0], temperature=0, max_new_tokens=30, thinking_marks=MARKS)
    assert marked.tokens == plain and marked.counters.forced == 0
    many = engine.generate(PROMPTS[0], temperature=0, **{**settings(1000), "max_new_tokens": 30})
    assert many.tokens == plain


def test_stops_inside_the_thinking_and_its_end(engine):
    given = settings(5, temperature=0, ignore_eos=True)
    whole = engine.generate(PROMPTS[0], drafter="none", **given).tokens
    for length in range(1, 10):
        cut = engine.generate(PROMPTS[0], drafter="grammar", **{**given, "max_new_tokens": length})
        assert cut.tokens == whole[:length] and cut.finish_reason == "length"
    ended = engine.generate(PROMPTS[0], drafter="grammar", **{**given, "stop": "\x02"})
    assert ended.finish_reason == "stop" and ended.tokens == whole[: len(ended.tokens)]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"thinking_token_budget": 3}, "tiny has no marks of thinking among its tokens; name them"),
        ({"thinking_token_budget": -1}, "thinking_token_budget must be a whole number, at least 0"),
        ({"thinking_marks": ("a",)}, "thinking_marks must be two texts, or three"),
        ({"thinking_marks": ("a", "")}, "thinking_marks must hold non-empty strings"),
        ({**settings(3), "allowed_tokens": {5}}, "leave out what ends the thinking"),
        ({**settings(3), "banned_tokens": set(range(100, 280))}, "leave out what ends the thinking"),
    ],
)
def test_bad_wishes(engine, more, says):
    with pytest.raises(RequestError, match=says):
        engine.generate(PROMPTS[0], **more)


def test_settings_are_stored_as_they_are_shown():
    assert SamplingParams(thinking_marks=["a", "b"]).thinking_marks == ("a", "b")
