"""``outpace bench serve``: against a server in this process, and how it starts one of its own."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from outpace import Engine
from outpace.bench import load_run
from outpace.bench.load import Server
from outpace.cli.options import ModelOptions
from outpace.cli.started import started
from outpace.errors import OutpaceError
from outpace.server.app import create_app
from outpace.server.limits import Limits
from outpace.serving.service import Service
from tests.server.test_wire import listening

FEW = ("--requests", "4", "--rounds", "2", "--max-new-tokens", "12")


@pytest.fixture(scope="module")
def target():
    return Engine.load("tiny", dtype="float32", drafter="none").target


@pytest.fixture(scope="module")
def url(target):
    with Service(Engine(target, "none"), drafters=("prompt_lookup",), max_queue=8) as service:
        limits = Limits(grace_seconds=1)
        with listening(create_app(service, name="tiny", limits=limits), limits) as address:
            yield address


@pytest.fixture
def workload(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(
            json.dumps({"id": f"p{n}", "prompt": f"ab {n} " * (9000 if n == 0 else 6)}) + "\n"
            for n in range(4)
        )
    )
    return str(file)


def load(outpace, url, workload, *arguments):
    return outpace(
        "bench", "serve", "--url", url, "--workload", workload, "-d", "prompt_lookup", *FEW, *arguments
    )


def test_drafters_take_turns_and_texts_are_those_of_single_requests(outpace, url, workload):
    ran = load(outpace, f"{url}/v1/", workload, "-c", "1,3", "--check-texts", "--json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    rows = report["loads"]
    assert [(row["drafter"], row["concurrency"]) for row in rows] == [
        ("prompt_lookup", 1),
        ("none", 1),
        ("prompt_lookup", 3),
        ("none", 3),
    ]
    for row in rows:
        assert (row["rounds"], row["requests"], row["errors"]) == (2, 8, 0)
        assert row["new_tokens"] == 8 * 12 and row["tokens_per_second"] > 0
        assert (row["over_one_stream"] == 1.0) == (row["concurrency"] == 1)
        assert row["texts"] == {"compared": 8, "different": 0, "share": 0.0, "differences": []}
        for name in ("first_token_seconds", "inter_token_seconds", "seconds_per_token"):
            assert 0 < row[f"{name}_p50"] <= row[f"{name}_p95"]
    assert 0 < rows[0]["accepted"] <= rows[0]["drafted"] and rows[1]["drafted"] == 0
    assert rows[1]["speedup"] == 1.0 and len(rows[0]["round_speedups"]) == 2
    assert report["notes"][0].startswith("1 of 4 prompts left out")
    about = report["provenance"]
    assert about["model"] == "tiny" and about["dtype"] == "float32" and about["prompts"] == 3
    assert about["server"].startswith("outpace-") and about["config"]["max_new_tokens"] == 12


def test_long_prompts_can_be_left_out(outpace, url, tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps({"id": f"p{n}", "prompt": "ab " * 10 * n}) + "\n" for n in (1, 2, 9)))
    ran = load(outpace, url, str(file), "-c", "1", "--max-prompt-tokens", "130", "--json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert report["notes"][0].startswith("1 of 3 prompts left out: too long for 130 tokens")
    assert report["provenance"]["prompts"] == 2
    assert report["provenance"]["config"]["max_prompt_tokens"] == 130


def test_an_open_loop_writes_its_report(outpace, url, workload, tmp_path):
    out = tmp_path / "report"
    ran = load(outpace, url, workload, "--rate", "200", "--temperature", "0.8", "-o", str(out))
    assert ran.code == 0, ran.err
    assert "200/s" in ran.out and "first token ms" in ran.out and "texts differ" not in ran.out
    names = {path.name for path in out.iterdir()}
    assert names == {"report.json", "report.md", "load.png", "load.svg"}
    assert json.loads((out / "report.json").read_text())["loads"][0]["rate"] == 200


def test_a_full_disk_costs_files_and_no_figures(outpace, url, workload, tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("outpace.bench.tables.write_whole", full)
    ran = load(outpace, url, workload, "-c", "1", "--json", "-o", str(tmp_path / "out"))
    assert ran.code == 2 and ran.err.count("report.json: No space left") == 1
    assert json.loads(ran.out)["loads"]


def test_a_report_that_cannot_be_printed_is_written(outpace, url, workload, tmp_path, monkeypatch):
    def gone(value):
        raise BrokenPipeError

    monkeypatch.setattr("outpace.cli.show.write_json", gone)
    ran = load(outpace, url, workload, "-c", "1", "--json", "-o", str(tmp_path))
    assert ran.code == 141 and (tmp_path / "load.svg").exists()
    assert json.loads((tmp_path / "report.json").read_text())["loads"]


def test_a_text_that_differs_is_counted_with_its_place(outpace, url, workload, monkeypatch):
    ask, asked = Server.ask, []

    async def lying(self, path, body, prompt):
        reply = await ask(self, path, body, prompt)
        asked.append(body["speculation"]["drafter"])
        if asked.count("prompt_lookup") == 2 and asked[-1] == "prompt_lookup":
            reply.tokens[5] += 1
        return reply

    monkeypatch.setattr(Server, "ask", lying)
    ran = load(outpace, url, workload, "-c", "2", "--check-texts", "--json")
    row, plain = json.loads(ran.out)["loads"]
    assert row["texts"]["different"] == 1 and row["texts"]["share"] == 1 / 8
    (found,) = row["texts"]["differences"]
    assert found["index"] == 5 and found["logit_gap"] > 0 and plain["texts"]["different"] == 0


def test_a_server_that_is_gone_at_the_end_costs_no_rounds(outpace, url, workload, monkeypatch):
    ask, post = Server.ask, Server.post

    async def lying(self, path, body, prompt):
        reply = await ask(self, path, body, prompt)
        if body["speculation"]["drafter"] == "prompt_lookup":
            reply.tokens[5] += 1
        return reply

    async def gone(self, path, body):
        if path == "/v1/completions":
            raise OutpaceError("no answer")
        return await post(self, path, body)

    monkeypatch.setattr(Server, "ask", lying)
    monkeypatch.setattr(Server, "post", gone)
    ran = load(outpace, url, workload, "-c", "2", "--check-texts", "--json")
    report = json.loads(ran.out)
    assert ran.code == 0 and report["loads"][0]["texts"]["different"] == 8
    assert "not all differences of texts were looked into: no answer" in report["notes"]


def test_requests_of_all_kinds_at_once(outpace, url, workload):
    """Drafters and lengths differ from request to request; a shorter text is a beginning."""
    ran = load(outpace, url, workload, "-c", "3", "-n", "16", "--mixed", "--check-texts", "--json")
    assert ran.code == 0, ran.err
    (row,) = json.loads(ran.out)["loads"]
    assert (row["drafter"], row["requests"], row["errors"]) == ("mixed", 32, 0)
    assert row["texts"]["compared"] == 32 and row["texts"]["different"] == 0
    assert 32 * 3 < row["new_tokens"] < 32 * 12 and row["drafted"] > 0 and row["speedup"] is None


def test_requests_that_are_turned_away_are_errors(outpace, target, workload):
    service = Service(Engine(target, "none"), drafters=("none",), max_batch=1, max_queue=1)
    with service, listening(create_app(service, name="tiny"), Limits(grace_seconds=1)) as url:
        ran = outpace(
            "bench",
            "serve",
            "--url",
            url,
            "--workload",
            workload,
            "-d",
            "none",
            "-c",
            "8",
            "--requests",
            "8",
            "--rounds",
            "1",
            "--json",
        )
    (row,) = json.loads(ran.out)["loads"]
    assert ran.code == 0 and 1 <= row["errors"] < 8
    assert all(kind.startswith("429: ") for kind in row["error_kinds"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_stops_it_keeps_what_is_whole(outpace, url, workload, monkeypatch, number):
    measure, calls = load_run.one_round, []

    async def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            if number == signal.SIGINT:  # which may be ignored here
                raise KeyboardInterrupt
            signal.raise_signal(number)
        return await measure(*arguments)

    monkeypatch.setattr(load_run, "one_round", interrupted)
    ran = load(outpace, url, workload, "-c", "2", "--json")
    report = json.loads(ran.out)
    assert ran.code == 128 + number and report["partial"]
    assert [row["rounds"] for row in report["loads"]] == [1, 1]
    calls[:] = [None] * 3  # before anything is measured: nothing to say
    ran = load(outpace, url, workload, "-c", "2", "--json")
    assert (ran.code, ran.out) == (128 + number, "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-c", "1,x"], "--concurrency '1,x' is no list of numbers from 1"),
        (["-c", "1_6"], "--concurrency '1_6' is no list of numbers from 1"),
        (["-c", "+4"], "--concurrency '+4' is no list of numbers from 1"),
        (["-c", "0"], "--concurrency '0' is no list"),
        (["--rate", "0"], "--rate must be above 0, got 0"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--check-texts", "-t", "0.5"], "--check-texts needs temperature 0, got 0.5"),
        (["-m", "tiny"], "has a model already"),
        (["-d", "x["], "cannot read method spec"),
        (["-d", "suffix"], "drafter 'suffix' was not started at http"),
        (["--api-key-file", "nowhere.txt"], "cannot read --api-key-file nowhere.txt"),
        (["--max-prompt-tokens", "3"], "no prompt has at most 3 tokens; give --max-prompt-tokens "),
        (["--max-new-tokens", "5000"], "no prompt leaves room for 5000 new tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(outpace, url, workload, arguments, says):
    ran = load(outpace, url, workload, *arguments)
    assert ran.code == 2 and says in ran.err.splitlines()[-1], ran.err


def test_without_httpx_there_is_a_line(outpace, url, workload, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    ran = load(outpace, url, workload)
    assert ran.code == 2 and "needs the package httpx; install it" in ran.err


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a script in the place of the Python that runs servers."""

    def put(script):
        file = tmp_path / "python"
        file.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n{script}\n')
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(file))
        return tmp_path / "arguments"

    return put


def test_a_server_is_started_on_loopback_and_ended(program, tmp_path):
    said = "INFO: running on http://127.0.0.1:4321 (stop it)"
    arguments = program(f"echo $$ > {tmp_path}/pid\necho '{said}' >&2\nexec sleep 60")
    model = ModelOptions(model="m", dtype="float32", threads=2)
    with started(None, model, ["auto", "none"], clients=64, seconds=7) as address:
        assert address == "http://127.0.0.1:4321"
        pid = int(Path(tmp_path / "pid").read_text())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    words = arguments.read_text().split()
    assert words[:5] == ["-m", "outpace", "serve", "--port", "0"] and "--host" not in words
    for pair in (
        "--model m",
        "--dtype float32",
        "--threads 2",
        "--drafter auto",
        "--drafter none",
        "--max-batch 64",
        "--stored-pages 0",
        "--timeout 7",
    ):
        assert pair in " ".join(words)
    assert "--quantize" not in words


def test_a_server_that_does_not_start_says_why(program):
    program("echo 'outpace: error: unknown model' >&2\nexit 2")
    with (
        pytest.raises(OutpaceError, match=r"the server did not start: unknown model$"),
        started(None, ModelOptions(), ["none"], clients=1, seconds=7),
    ):
        raise AssertionError("it did not")
