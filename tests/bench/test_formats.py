"""Workload files: recognised by their fields, refused in one line that says where and what."""

import json

import pytest

from outpace.bench.formats import FORMATS, read_workload
from outpace.bench.workloads import builtin
from outpace.errors import RequestError

SPEC_BENCH = {
    "question_id": "81",
    "category": "writing",
    "turns": ["Write a post.", "Now shorter."],
    "reference": ["the right answer"],
}
MT_BENCH = {"question_id": 101, "category": "reasoning", "turns": ["Who is second?", "And last?"]}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def f():\n",
    "entry_point": "f",
    "canonical_solution": "    return 1",
    "test": "assert f() == 1",
}
MBPP = {
    "text": "Write a function that adds.",
    "code": "SECRET",
    "task_id": 11,
    "test_setup_code": "",
    "test_list": ["assert add(1, 2) == 3"],
    "challenge_test_list": [],
}
SANITIZED = {
    "source_file": "x",
    "task_id": 12,
    "prompt": "Write a function that sorts.",
    "code": "SECRET",
    "test_imports": [],
    "test_list": [],
}
GSM8K = {"question": "How many apples?", "answer": "SECRET #### 3"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def one(tmp_path, row):
    (prompt,) = read_workload(write(tmp_path / "some-file.jsonl", [row]))
    return prompt


def test_builtin_needs_no_file():
    assert read_workload("builtin") == builtin()


@pytest.mark.parametrize(
    ("row", "id", "category", "text"),
    [
        (SPEC_BENCH, "81", "writing", "Write a post."),
        (MT_BENCH, "101", "reasoning", "Who is second?"),
        (HUMANEVAL, "HumanEval/0", "humaneval", "def f():\n"),
        (SANITIZED, "12", "mbpp", "Write a function that sorts."),
        (GSM8K, "gsm8k-1", "gsm8k", "How many apples?"),
        ({"prompt": "Hello"}, "some-file-1", "some-file", "Hello"),
        ({"prompt": "Hello", "id": 7, "group": "chat"}, "7", "chat", "Hello"),
        ({"prompt": "Hello", "category": "a", "group": "b"}, "some-file-1", "a", "Hello"),
    ],
)
def test_a_row_is_recognised_by_its_fields(tmp_path, row, id, category, text):
    prompt = one(tmp_path, row)
    assert (prompt.id, prompt.category) == (id, category)
    assert prompt.messages == ({"role": "user", "content": text},)
    assert prompt.reference is None


def test_right_answers_of_data_sets_are_not_read(tmp_path):
    for row in (SPEC_BENCH, HUMANEVAL, MBPP, SANITIZED, GSM8K):
        prompt = one(tmp_path, row)
        assert prompt.reference is None
        assert "SECRET" not in str(prompt)


def test_mbpp_shows_the_tests_that_its_authors_show(tmp_path):
    content = one(tmp_path, MBPP).messages[0]["content"]
    assert content.startswith("Write a function that adds.\n")
    assert content.endswith("\nassert add(1, 2) == 3")


def test_a_second_turn_follows_the_plain_answer_to_the_first(tmp_path):
    prompt = one(tmp_path, SPEC_BENCH)
    assert prompt.turns == ("Now shorter.",)
    assert prompt.after([]) == prompt.messages
    assert prompt.after(["A post."]) == (
        {"role": "user", "content": "Write a post."},
        {"role": "assistant", "content": "A post."},
        {"role": "user", "content": "Now shorter."},
    )


def test_messages_keep_role_and_content_and_a_plain_row_its_reference(tmp_path):
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", "name": "Ann"}]
    prompt = one(tmp_path, {"messages": talk, "reference": "Hello"})
    assert prompt.messages == (talk[0], {"role": "user", "content": "Hi"})
    assert prompt.reference == "Hello"


def test_a_json_list_reads_like_lines(tmp_path):
    rows = [{"id": "a", "prompt": "x ] , ["}, {"id": "b", "prompt": "y"}]
    (tmp_path / "l.json").write_text("\ufeff" + json.dumps(rows, indent=1), encoding="utf-8")
    lines = read_workload(write(tmp_path / "l.jsonl", rows))
    assert read_workload(str(tmp_path / "l.json")) == lines
    assert [prompt.id for prompt in lines] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("[]", "is empty"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not JSON"),
        ('{"prompt": "a"}\n\n17\n', "line 3: a row must be a JSON object, got 17"),
        ('{"query": "a", "docs": []}', "line 1: no known format has the fields docs, query; known"),
        ('{"prompt": null}', "no known format has the fields (none)"),
        ('{"prompt": "a"}\n{"question": "a", "answer": "b"}', "line 2: a row of GSM8K in a file"),
        ('{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}', "line 2: id '1' was used in line"),
        ('{"prompt": "  "}', "'prompt' must be text"),
        ('{"prompt": ["a"]}', "'prompt' must be text"),
        ('{"prompt": "a", "id": [1]}', "'id' must be text or a whole number"),
        ('{"prompt": "a", "category": 3}', "'category' must be text"),
        ('{"prompt": "a", "reference": ["b"]}', "'reference' must be text"),
        ('{"question_id": 1, "turns": []}', "'turns' must be a list of texts"),
        ('{"question_id": 1, "turns": ["a", 2]}', "'turns' must be a list of texts"),
        ('{"messages": "hello"}', "'messages' must be a list"),
        ('{"messages": ["hello"]}', "one of the roles"),
        ('{"messages": []}', "must end with what the user says"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "roles system, user, assistant"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "text as content, got {"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "must end with what the user says",
        ),
        ('[{"prompt": "a"},\n{"id": 2}]', "line 2: no known format"),
        ('[{"prompt": "a"}', "not JSON"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, text, told):
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RequestError) as caught:
        read_workload(str(path))
    message = str(caught.value)
    assert told in message
    assert str(path) in message
    assert "\n" not in message


def test_an_unknown_row_is_told_every_known_format(tmp_path):
    with pytest.raises(RequestError) as caught:
        one(tmp_path, {"query": "a"})
    for known in FORMATS:
        assert known.name in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(RequestError, match="neither 'builtin' nor a file"):
        read_workload("bultin")
    with pytest.raises(RequestError, match="cannot read"):
        read_workload(str(tmp_path))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(RequestError, match=r"latin\.jsonl is not UTF-8 text \(byte 15\)"):
        read_workload(str(tmp_path / "latin.jsonl"))


def test_whole_numbers_as_ids_stay_whole_numbers(tmp_path):
    from outpace.bench.answers import write_answers
    from outpace.bench.records import Run

    file, out = tmp_path / "w.jsonl", tmp_path / "answers.jsonl"
    file.write_text('{"id": 81, "prompt": "a"}\n{"id": "82", "prompt": "b"}\n{"prompt": "c"}\n')
    prompts = read_workload(str(file))
    runs = [[Run(tokens=((1, 2),), seconds=2.0, prefill_seconds=1.0)]] * 3
    write_answers(out, "none", prompts, runs, decode=str)
    assert [json.loads(line)["question_id"] for line in out.read_text().splitlines()] == [81, "82", "w-3"]
