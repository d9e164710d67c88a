"""Tasks, log-likelihoods and answers on our engine, and against the harness's own model."""

import json
import math
import os
import subprocess
import sys

import huggingface_hub
import pytest
import torch

from outpace import Engine, RequestError
from outpace.bench.harness.model import settings
from outpace.bench.harness.scorer import Scorer
from outpace.bench.harness.scores import _gap, broken
from outpace.bench.harness.tasks import SAMPLE, of_rows, read_rows, read_tasks
from outpace.params import SamplingParams
from outpace.types import Feed


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", drafter="none", dtype="float32")


def slowly(target, context, rest):
    """Log-likelihood from one pass over everything."""
    cache = target.new_cache()
    whole = (*context, *rest)
    with torch.inference_mode():
        logits = target.score([Feed.chain(cache.open(), whole)], cache).logits_TV.double()
    rows = logits[len(context) - 1 : -1].log_softmax(-1)
    said = rows[range(len(rest)), list(rest)]
    return float(said.sum()), rows.argmax(-1).tolist() == list(rest)


@pytest.mark.parametrize("drafter", ["none", "auto", "prompt_lookup"])
def test_log_likelihoods_are_those_of_one_pass(engine, drafter):
    pairs = [((5, 9, 11), (4, 5)), ((7,), (1, 2, 3)), (tuple(range(3, 40)) * 12, (8,)), ((5,), (9,))]
    context = (5, 9, 11, 5, 9)
    best = engine.generate([context], SamplingParams(temperature=0, max_new_tokens=3, ignore_eos=True))[
        0
    ].tokens
    pairs.append((context, best))
    found = Scorer(engine, drafter, batch=2).log_likelihoods(pairs)
    for (context, rest), (total, greedy) in zip(pairs, found, strict=True):
        want, likeliest = slowly(engine.target, context, rest)
        assert total == pytest.approx(want, abs=1e-4) and greedy is likeliest
    assert found[-1][1] is True and found[0][1] is False


def test_contexts_that_are_too_long_lose_their_beginning(engine):
    longest = engine.target.max_positions
    context = tuple(3 + i % 50 for i in range(longest + 30))
    (found,) = Scorer(engine, "none").log_likelihoods([(context, (4, 5))])
    assert found[0] == pytest.approx(slowly(engine.target, context[-longest + 2 :], (4, 5))[0], abs=1e-4)
    for bad in (((), (1,)), ((1,), ()), ((1,), (2,) * longest)):
        with pytest.raises(RequestError, match="cannot be scored"):
            Scorer(engine, "none").log_likelihoods([bad])


def test_answers_end_at_their_stops_and_depend_on_no_drafter(engine):
    params = [SamplingParams(temperature=t, max_new_tokens=12, seed=3 if t else None) for t in (0.0, 0.9)]
    texts = ["one two one two", "the sea and the"]
    plain = Scorer(engine, "none").answers(texts, params)
    fast = Scorer(engine, "prompt_lookup")
    assert fast.answers(texts, params) == plain and len(fast.counters) == 2
    stop = plain[0][3:5]
    cut = Scorer(engine, "none").answers(
        texts[:1], [SamplingParams(temperature=0, max_new_tokens=12, stop=(stop,))]
    )
    assert cut[0] == plain[0][: plain[0].index(stop)]


def test_settings_of_a_task_become_those_of_the_engine():
    given = {"until": ["\n", ""], "max_gen_toks": 9, "do_sample": False, "temperature": 0.0}
    found = settings(given, ["</s>"], 5)
    assert (found.stop, found.max_new_tokens, found.temperature, found.seed) == (("\n", "</s>"), 9, 0.0, None)
    found = settings({"temperature": 0.7, "top_p": 0.9}, [], 5)
    assert (found.temperature, found.top_p, found.seed, found.max_new_tokens) == (0.7, 0.9, 5, 256)
    with pytest.raises(RequestError, match="num_beams=4"):
        settings({"num_beams": 4}, [], 0)


def test_rows_say_what_is_asked_of_them(tmp_path):
    tasks, folders = read_tasks([SAMPLE, "hellaswag"])
    assert [one["output_type"] for one in tasks[:3]] == [
        "multiple_choice",
        "generate_until",
        "loglikelihood_rolling",
    ]
    assert tasks[3] == "hellaswag" and folders == []
    file = tmp_path / "mine.jsonl"
    for row, words in (
        ({}, "needs question and answer"),
        ({"question": "x"}, "'answer' must be text"),
        ({"question": "", "answer": "y"}, "'question' must be text"),
        ({"question": "x", "choices": ["a"], "answer": 0}, "two texts or more"),
        ({"question": "x", "choices": ["a", "b"], "answer": 2}, "number from 0 to 1"),
        ([1], "must be an object"),
    ):
        file.write_text(json.dumps(row))
        with pytest.raises(RequestError, match=words):
            read_tasks([str(file)])
    with pytest.raises(RequestError, match="2 forms"):
        of_rows("x", [{"text": "a"}, {"question": "a", "answer": "b"}])
    for name, content in (("a.yaml", "task: [1"), ("b.yaml", "[1]"), ("c.jsonl", ""), ("d.txt", "x")):
        (tmp_path / name).write_text(content)
        with pytest.raises(RequestError):
            read_tasks([str(tmp_path / name)])


def test_a_yaml_finds_its_files_beside_it(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"q": "x", "a": "y"}\n')
    (tmp_path / "t.yaml").write_text(
        "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\n"
        "output_type: generate_until\n"
    )
    ((task,), _) = read_tasks([str(tmp_path / "t.yaml")])
    assert task["task"] == "mine" and "dataset_path" not in task and callable(task["custom_dataset"])
    (tmp_path / "f.yaml").write_text("task: f\nprocess_docs: !function utils.x\n")
    assert read_tasks([str(tmp_path / "f.yaml")]) == (["f"], [tmp_path])
    assert read_rows(tmp_path / "rows.jsonl") == [{"q": "x", "a": "y"}]


def test_answers_are_compared_as_what_they_are():
    assert _gap(["a"], ["a"]) == 0.0 and _gap(["a"], ["b"]) == math.inf
    assert _gap([(-1.0, True)], [(-1.5, True)]) == 0.5 and _gap([(-1.0, True)], [(-1.0, False)]) == math.inf
    assert _gap([1.0, 2.0], [1.0]) == math.inf == _gap([1.0], None)
    task = {"task": "t", "samples": 3, "same": [{"drafter": "a", "equal": 2}, {"drafter": "b", "equal": 1}]}
    assert broken({"promised": True, "tasks": [task]}, ["a"]) == [
        "t: 1 of 3 samples with a differ from plain decoding"
    ]
    assert broken({"promised": False, "tasks": [task]}, ["a"]) == []


def test_without_the_harness_the_command_says_what_to_install(monkeypatch, capsys):
    from outpace.cli.main import main

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for model in ("tiny", "./nosuch"):  # before the model is loaded
        assert main(["eval", "--model", model]) == 2
        assert "pip install 'outpace[eval]'" in capsys.readouterr().err


def test_programs_that_the_harness_starts_are_not_heard(monkeypatch, capfd):
    from outpace.bench.harness import scores

    def simple_evaluate(**settings):
        subprocess.run([sys.executable, "-c", "import sys; print('fatal', file=sys.stderr)"], check=True)

    class TaskManager:
        def __init__(self, include_path):
            self.all_tasks = ["a"]

    monkeypatch.setattr(scores, "harness", lambda: (simple_evaluate, TaskManager))
    monkeypatch.setattr(scores, "language_model", lambda scorer: None)
    engine = Engine.load("tiny", drafter="none")
    with pytest.raises(RequestError, match="no task gave a sample"):
        scores.evaluate(engine, [], ["a"])
    assert capfd.readouterr().err == ""
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


@pytest.fixture
def harness():
    return pytest.importorskip("lm_eval")


@pytest.mark.filterwarnings("ignore")
def test_the_command_scores_the_sample(harness, tmp_path, capsys):
    from outpace.cli.main import main

    out = tmp_path / "out"
    words = [
        "eval",
        "--model",
        "tiny",
        "--dtype",
        "float32",
        "--limit",
        "2",
        "--drafters",
        "none,prompt_lookup",
    ]
    assert main([*words, "--out", str(out)]) == 0
    assert "equal to plain" in capsys.readouterr().out
    report = json.loads((out / "eval.json").read_text())
    assert [task["task"] for task in report["tasks"]] == ["sample_choices", "sample_answers", "sample_texts"]
    assert all(one["equal"] == task["samples"] for task in report["tasks"] for one in task["same"])
    for task in report["tasks"]:
        for one in task["metrics"]:
            assert len({cell["score"] for cell in one["scores"]}) == 1
    assert (out / "eval.png").is_file() and report["broken"] == []
    assert main([*words, "--chat"]) == 0 and main([*words, "--tasks", "no_such_task"]) == 2


@pytest.mark.filterwarnings("ignore")
def test_scores_are_those_of_the_harness_with_transformers(harness, tmp_path):
    """The same model and tasks through its own model class."""
    pytest.importorskip("accelerate")
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        pytest.skip("its model class asks the hub; run with HF_HUB_OFFLINE=1")
    from lm_eval import simple_evaluate

    from outpace.bench.harness.scores import evaluate
    from tools.check_lm_eval import write_model

    folder = write_model(tmp_path / "model")
    tasks, _ = read_tasks([SAMPLE])
    ours = evaluate(Engine.load(str(folder), drafter="none", dtype="float32"), ["prompt_lookup"], tasks)
    theirs = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32", "device": "cpu"},
        tasks=[dict(task) for task in read_tasks([SAMPLE])[0]],
        bootstrap_iters=0,
        batch_size=1,
    )
    for task in ours["tasks"]:
        for one in task["metrics"]:
            want = next(
                v for k, v in theirs["results"][task["task"]].items() if k.startswith(one["metric"] + ",")
            )
            for cell in one["scores"]:
                assert cell["score"] == pytest.approx(want, rel=1e-4)
