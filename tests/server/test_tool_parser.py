"""Calls in the text of an answer: found however it is cut, and text that looks like one stays."""

import json

import pytest

from outpace.server.tool_parser import HERMES, LLAMA3, MISTRAL, CallReader

ONE = '{"name": "f", "arguments": {"a": "x}\\"<", "b": [1, {}]}}'
GIVEN = '{"a": "x}\\"<", "b": [1, {}]}'
TWO = '{"name":"g","arguments":{}}'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'

CASES = [
    # form, text, what is left as text, calls, how many of them are whole
    (HERMES, f"<tool_call>\n{ONE}\n</tool_call>", "", [("f", GIVEN)], 1),
    (
        HERMES,
        f"So.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>\n",
        "So.",
        [("f", GIVEN), ("g", "{}")],
        2,
    ),
    (HERMES, f"<tool_call>[{ONE}, {TWO}]</tool_call>", "", [("f", GIVEN), ("g", "{}")], 2),
    (HERMES, f"<tool_call>{ONE}\n{TWO}</tool_call> so", "so", [("f", GIVEN), ("g", "{}")], 2),
    (
        HERMES,
        f"a <tool_call> b < <tool_call>{TWO}}}</tool_call> c ",
        "a <tool_call> b < c ",
        [("g", "{}")],
        1,
    ),
    (HERMES, '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "zz"}', "", [("zz", '{"a": 1}')], 1),
    (HERMES, '<tool_call>{"name": "f", "arguments": "no"}', "", [("f", '"no"')], 1),
    (HERMES, '<tool_call>{"id": 7, "name": "f", "x": [1], "arguments": null}', "", [("f", "null")], 1),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")], 1),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')], 0),
    (HERMES, '<tool_call>{"name": "f', '<tool_call>{"name": "f', [], 0),
    (HERMES, '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', [], 0),
    (HERMES, "  plain <tool_cal  ", "  plain <tool_cal  ", [], 0),
    (HERMES, ONE, ONE, [], 0),
    (LLAMA3, f" {LLAMA}", "", [("f", '{"a": 1}')], 1),
    (LLAMA3, f"{LLAMA}; {LLAMA}", "", [("f", '{"a": 1}')] * 2, 2),
    (LLAMA3, LLAMA.replace("f", "bob", 1), LLAMA.replace("f", "bob", 1), [], 0),
    (LLAMA3, '{"x": 3, "name": "f"} and', '{"x": 3, "name": "f"} and', [], 0),
    (LLAMA3, f"well {LLAMA}", f"well {LLAMA}", [], 0),
    (LLAMA3, f"well <|python_tag|>{LLAMA}", "well", [("f", '{"a": 1}')], 1),
    (LLAMA3, "<|python_tag|>print(1)", "<|python_tag|>print(1)", [], 0),
    (MISTRAL, f"ok [TOOL_CALLS] [{ONE}, {TWO}]", "ok", [("f", GIVEN), ("g", "{}")], 2),
    (
        MISTRAL,
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x[ARGS]{}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
        2,
    ),
    (MISTRAL, f"[TOOL_CALLS][{TWO}, oops] x", ", oops] x", [("g", "{}")], 1),
    (MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS] none", [], 0),
]


def read(form, text, step, reader=CallReader):
    """What a reader makes of a text that comes in portions."""
    one = reader(form, {"f", "g"})
    parts = [one.push((), text[i : i + step]) for i in range(0, len(text), step)]
    said, calls = "", {}
    for part in (*parts, one.close()):
        said += part.text
        for call in part.calls:
            told = calls.setdefault(call["index"], {"name": "", "arguments": "", "ids": []})
            told["name"] += call["function"].get("name", "")
            told["arguments"] += call["function"]["arguments"]
            told["ids"] += [call["id"]] if "id" in call else []
    assert [*calls] == [*range(len(calls))] and one.begun == len(calls)
    assert all(len(told["ids"]) == 1 and told["ids"][0] for told in calls.values())
    return said, [(told["name"], told["arguments"]) for told in calls.values()], one.whole


@pytest.mark.parametrize(("form", "text", "left", "calls", "whole"), CASES)
@pytest.mark.parametrize("step", [1, 5, 1000])
def test_calls_are_found_however_the_text_is_cut(form, text, left, calls, whole, step):
    assert read(form, text, step) == (left, calls, whole)


@pytest.mark.parametrize("form", [HERMES, MISTRAL], ids=lambda form: form.name)
def test_a_call_that_is_cut_off_leaks_nothing(form):
    call = f"[{ONE}]" if form is MISTRAL else f"\n{ONE}\n"
    text = f"So.\n{form.opens}{call}{form.closes}"
    for end in range(len("So.\n") + 2, len(text) + 1):
        reader = CallReader(form, {"f"})
        parts = [reader.push((), text[:end]), reader.close(cut=True)]
        assert "".join(part.text for part in parts).strip() == "So.", text[:end]
    reader = CallReader(form, {"f"})  # what is no beginning of a call stays, also before a limit
    parts = [reader.push((), f"a {form.opens} b <"), reader.close(cut=True)]
    assert "".join(part.text for part in parts) == f"a {form.opens} b <"


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA3], ids=lambda form: form.name)
def test_calls_alone_leave_no_sign_where_they_are_cut(form):
    call = LLAMA if form is LLAMA3 else f"{form.opens}[{ONE}]{form.closes}"
    for text in (call, f"{call}\n{call}") if form is HERMES else (call,):
        for end in range(1, len(text)):
            reader = CallReader(form, {"f"}, alone=True)
            parts = [reader.push((), text[:end]), reader.close(cut=True)]
            assert "".join(part.text for part in parts) == "", text[:end]


DEEP = (
    '{"a": {"b": [{"c": "</tool_call> <tool_call> [TOOL_CALLS] <|python_tag|> }{ \\\\"}]}, "d": "[ARGS]{}"}'
)
"""Arguments that hold objects in lists in objects, and marks and braces in strings."""
NESTED = f'{{"name": "f", "arguments": {DEEP}}}'


@pytest.mark.parametrize(
    ("form", "text", "begins"),
    [
        (HERMES, f"So. <tool_call>\n{NESTED}\n</tool_call>\n<tool_call>{NESTED}</tool_call>", 4),
        (MISTRAL, f"So. [TOOL_CALLS][{NESTED}, {NESTED}]", 4),
        (MISTRAL, f"So. [TOOL_CALLS]f[ARGS]{DEEP}[TOOL_CALLS]f[ARGS]{DEEP}", 4),
        (LLAMA3, f"So. <|python_tag|>{NESTED}; {NESTED}", 4),
        (LLAMA3, f"{NESTED}; {NESTED}", len('{"name": "f"')),
    ],
    ids=["hermes", "mistral list", "mistral named", "llama3", "llama3 bare"],
)
def test_nested_calls_may_be_cut_anywhere(form, text, begins):
    """The text before them stays as it is, and what is told of arguments is their beginning."""
    assert json.loads(DEEP)
    for end in range(begins + 2, len(text) + 1):
        for step in (1, 7, 1000):
            reader = CallReader(form, {"f"})
            parts = [reader.push((), text[i : min(i + step, end)]) for i in range(0, end, step)]
            parts.append(reader.close(cut=end < len(text)))
            told: dict[int, str] = {}
            for call in (call for part in parts for call in part.calls):
                told[call["index"]] = told.get(call["index"], "") + call["function"]["arguments"]
            left = "".join(part.text for part in parts).strip()
            assert all(DEEP.startswith(one) for one in told.values())
            if end < len(text) and text[:end].endswith(form.opens[0]):
                left = left.removesuffix(form.opens[0]).strip()  # one sign alone is text
            assert left == ("So." if text[0] == "S" else ""), text[:end]
    assert told == {0: DEEP, 1: DEEP} and reader.whole == reader.begun == 2


def test_nothing_is_lost_or_made_up():
    """Whatever a text holds, without a call all of it comes back."""
    pieces = ["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", '"f', "\\", " ", "[", ","]
    coins = 12345
    for _ in range(400):
        text = ""
        for _ in range(9):
            coins = coins * 6364136223846793005 % 2**64 + 1
            text += pieces[(coins >> 33) % len(pieces)]
        said, calls, _ = read(HERMES, text, 1)
        assert said == text or calls, (said, text)
        assert (said, calls) == read(HERMES, text, 4)[:2]


def test_arguments_come_as_they_are_written():
    reader = CallReader(HERMES, {"f"})
    text = f"<tool_call>{ONE}"
    told = [reader.push((), letter).calls for letter in text]
    first = next(i for i, calls in enumerate(told) if calls)
    assert text[: first + 1].endswith('"arguments": {') and told[first][0]["type"] == "function"
    later = [call for calls in told[first + 1 :] for call in calls]
    assert len(later) == len(GIVEN) - 1 and all(len(c["function"]["arguments"]) == 1 for c in later)
    assert json.loads("".join(c["function"]["arguments"] for c in [*told[first], *later]))


class Hasty(CallReader):
    """The planted bug: looks for a mark in every portion by itself."""

    def push(self, ids, text):
        if self._form.opens not in text:
            self._say(text)
            text = ""
        return super().push(ids, text)


def test_a_reader_that_forgets_half_a_mark_is_caught():
    form, text, *expected = CASES[0]
    assert read(form, text, 1000, Hasty) == tuple(expected)
    assert read(form, text, 5, Hasty) != tuple(expected)
