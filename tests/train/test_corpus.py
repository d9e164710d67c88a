import json

import pytest

from outpace import RequestError
from outpace.train.corpus import digest_of, read_corpus, read_prompts
from outpace.train.templates import passage_prompts

SENTENCES = [f"The boat number {i} left the harbour early and came back late." for i in range(60)]
TEXT = " ".join(SENTENCES)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def questions(path):
    return [messages[-1]["content"] for messages in read_prompts(path)]


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n\n1 2"),
        ({"instruction": "Sing.", "input": "", "output": "la"}, "Sing."),
        ({"question": "How many?", "answer": "4"}, "How many?"),
        ({"prompt": "Why?"}, "Why?"),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A"}]}, "Hi"),
        ({"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "B"}]}, "Hello"),
        (
            {"query": "### Instruction:\nshorten\n\n### Input:\nlong\n\n### Response:", "docs": ["s"]},
            "shorten\n\nlong",
        ),
        (
            {"query": "who?", "docs": ["one", "two"]},
            "[1] one\n\n[2] two\n\nUse these passages to answer: who?",
        ),
        (
            {"text": "Write f.", "code": "def f(): pass", "test_list": ["assert f"]},
            "Write f.\n\nThe following must hold:\n\n```python\nassert f\n```",
        ),
    ],
)
def test_every_kind_of_row_becomes_its_question(tmp_path, row, question):
    assert questions(write(tmp_path / "rows.jsonl", [row])) == [question]
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    assert questions(tmp_path / "rows.json") == [question]


def test_lines_of_text_are_prompts(tmp_path):
    (tmp_path / "a.txt").write_text("One?\n\n  Two?  \n")
    assert questions(tmp_path / "a.txt") == ["One?", "Two?"]


def test_an_answer_that_is_known_opens_a_conversation(tmp_path):
    rows = [{"question": f"q{i}", "answer": f"<<1>>a{i}"} for i in range(1, 9)]
    long = [m for m in read_prompts(write(tmp_path / "r.jsonl", rows)) if len(m) > 1]
    assert [[turn["content"] for turn in m] for m in long] == [["q6", "a6", "q7"]]
    assert [turn["role"] for turn in long[0]] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": " "}', "row 2: the prompt is empty"),
        ("a.jsonl", '{"wrong": 1}', "row 1 has keys wrong; need messages"),
        ("a.jsonl", '{"prompt": "x"}\n{', "line 2 is no JSON"),
        ("a.json", "[1]", "row 1 is no JSON object"),
        ("a.txt", "\n", "gives no prompt at all"),
        ("a.txt", b"a\xff\xfe", r"not UTF-8 text \(byte 1\)"),
    ],
)
def test_bad_files_are_named_with_the_row(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RequestError, match=message) as error:
        read_corpus([str(path)])
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_no_files_at_all():
    with pytest.raises(RequestError, match="no prompts"):
        read_corpus()


def test_texts_become_tasks_of_many_kinds(tmp_path):
    (tmp_path / "t.txt").write_text(f"{TEXT}<|endoftext|>{TEXT.replace('boat', 'train')}")
    corpus, sources = read_corpus(texts=[f"{tmp_path / 't.txt'}::CC0"])
    assert len(corpus) == sources[0].prompts > 10
    assert sources[0].licence == "CC0" and len(sources[0].sha256) == 64
    openings = {prompt.question.split("\n")[0][:12] for prompt in corpus}
    assert len(openings) > 8
    assert sum("train number" in prompt.question for prompt in corpus) > 2
    assert all(len(prompt.question) < 13_000 for prompt in corpus)


def test_code_gets_tasks_about_code(tmp_path):
    blocks = [f"def function_{i}(argument):\n    return argument + {i}" for i in range(40)]
    (tmp_path / "t.py").write_text("\n\n".join(blocks))
    corpus, _ = read_corpus(texts=[str(tmp_path / "t.py")])
    assert all("```python\ndef function_" in prompt.question for prompt in corpus)
    (tmp_path / "t.jsonl").write_text('{"words": 1}')
    with pytest.raises(RequestError, match="row 1 has keys words; need text"):
        read_corpus(texts=[str(tmp_path / "t.jsonl")])


def test_all_templates_can_be_filled():
    for code in (None, "py"):
        made = {prompt for n in range(18) for prompt in passage_prompts(TEXT[:300], n, code)}
        assert len(made) == (18 if code is None else 6)
        assert not any("{" in prompt.split("\n")[0] for prompt in made)


def test_questions_to_measure_with_do_not_occur(tmp_path):
    rows = [{"prompt": p} for p in ("Keep", "MINE  yes", "in mine yes")]
    path = write(tmp_path / "r.jsonl", rows)
    corpus, _ = read_corpus([str(path)], exclude=["mine\nyes"])
    assert [prompt.question for prompt in corpus] == ["Keep"]


def test_a_prompt_comes_once_and_the_order_mixes_files(tmp_path):
    large = write(tmp_path / "l.jsonl", [{"prompt": f"large {i}"} for i in range(400)])
    small = write(tmp_path / "s.jsonl", [{"prompt": f"small {i}"} for i in range(25)] * 2)
    corpus, sources = read_corpus([str(large), str(small)])
    assert [source.prompts for source in sources] == [400, 25]
    # Of any beginning, parts as 20 to 5, the roots of the sizes.
    part = [prompt.source for prompt in corpus[:50]]
    assert part.count(1) == 10
    again, _ = read_corpus([str(large), str(small)])
    assert digest_of(again) == digest_of(corpus) != digest_of(corpus[1:])
