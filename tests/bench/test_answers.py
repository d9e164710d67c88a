"""Answer files: what Spec-Bench's scripts compute from them is what was measured."""

import json
import statistics

import pytest

from outpace import Engine
from outpace.bench.answers import accept_lengths, write_answers
from outpace.bench.records import Run
from outpace.bench.workloads import Prompt
from outpace.engine.results import Counters
from outpace.errors import RequestError


def prompt(id, category="writing", turns=()):
    return Prompt(id=id, category=category, messages=({"role": "user", "content": "x"},), turns=turns)


def run(tokens, seconds, **counters):
    counted = (Counters(new_tokens=len(tokens), **counters),) if counters else ()
    return Run(tokens=(tuple(tokens),), seconds=seconds, prefill_seconds=0.1, counters=counted)


def decode(ids):
    return " " + " ".join(map(str, ids))


def speed(rows):
    """What speed.py takes from the file of a method: tokens per second and accepted lengths."""
    rates, lengths = [], []
    for row in rows:
        choice = row["choices"][0]
        rates.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
        lengths.extend(choice["accept_lengths"])
    return statistics.mean(rates), statistics.mean(lengths)


def test_fields_and_what_their_readers_make_of_them(tmp_path):
    prompts = [prompt("81", turns=("more",)), prompt("q2", "qa")]
    runs = [
        [run([5, 6, 7, 8], 2.0, passes=2, accepted=1, accepted_at=(1,)), run([5], 1.0, passes=0)],
        [run([9, 8, 7], 1.5, passes=2, accepted=0)],
    ]
    path = tmp_path / "new" / "answers.jsonl"
    write_answers(path, "prompt_lookup", prompts, runs, decode=decode, clock=lambda: 12.5)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    first = rows[0]
    assert {k: v for k, v in first.items() if k != "answer_id"} == {
        "question_id": "81",
        "category": "writing",
        "model_id": "prompt_lookup",
        "tstamp": 12.5,
        "choices": [
            {
                "index": 0,
                "turns": ["5 6 7 8", "5"],
                "decoding_steps": [2, 0],
                "new_tokens": [4, 1],
                "wall_time": [2.0, 1.0],
                "accept_lengths": [2, 1],
            }
        ],
    }
    assert (rows[1]["question_id"], rows[1]["category"]) == ("q2", "qa")
    assert first["answer_id"] != rows[1]["answer_id"]
    assert speed(rows) == (pytest.approx((5 / 3 + 2) / 2), pytest.approx(5 / 4))
    assert [file.name for file in path.parent.iterdir()] == ["answers.jsonl"]


def test_a_contender_that_counts_nothing_has_null_steps(tmp_path):
    path = tmp_path / "a.jsonl"
    write_answers(path, "openvino", [prompt("1")], [[run([1, 2], 1.0)]], decode=decode)
    choice = json.loads(path.read_text(encoding="utf-8"))["choices"][0]
    assert choice["decoding_steps"] == [None]
    assert choice["accept_lengths"] == []


@pytest.mark.parametrize(
    ("counters", "lengths"),
    [
        ({"new_tokens": 1, "passes": 0}, []),
        ({"new_tokens": 4, "passes": 3}, [1, 1, 1]),
        ({"new_tokens": 8, "passes": 3, "accepted_at": (2, 1, 1)}, [4, 2, 1]),
        ({"new_tokens": 7, "passes": 3, "accepted_at": (2, 1, 1)}, [3, 2, 1]),
    ],
)
def test_lengths_of_passes_are_found_from_counts_by_depth(counters, lengths):
    assert accept_lengths(Counters(**counters)) == lengths


def test_lengths_of_a_real_run_are_those_of_its_passes():
    engine = Engine.load("tiny", drafter="prompt_lookup")
    chunks = list(engine.stream([5, 6, 7, 8] * 6, max_new_tokens=80, ignore_eos=True))
    counters = chunks[-1].result.counters
    assert counters.accepted > 5
    passes = [len(chunk.tokens) for chunk in chunks[1:]]
    assert accept_lengths(counters) == sorted(passes, reverse=True)


def test_what_cannot_be_written_is_refused_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("old", encoding="utf-8")
    both = Run(tokens=((1,), (2,)), seconds=1.0, prefill_seconds=0.5)
    for runs, told in (([[both]], "one of 2 in a batch; use --batch 1"), ([[]], "no answer to")):
        with pytest.raises(RequestError, match=told):
            write_answers(path, "none", [prompt("1")], runs, decode=decode)

    def broken(ids):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_answers(path, "none", [prompt("1")], [[run([1], 1.0)]], decode=broken)
    assert path.read_text(encoding="utf-8") == "old"
    assert len(list(tmp_path.iterdir())) == 1
