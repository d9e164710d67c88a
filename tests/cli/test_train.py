import json
import signal
from pathlib import Path

import pytest

from outpace.bench import stats
from outpace.bench.runner import Runner
from outpace.cli import train as command
from outpace.train import checkpoint


def settings(*pairs):
    return [arg for pair in pairs for arg in ("--set", pair)]


TRAINING = settings(
    "layers=1", "pipeline.vocab=64", "pipeline.tokens_per_batch=256", "loop.steps=4", "loop.evaluate_every=4"
)
FAST = [*TRAINING, *settings("data.batch=32", "data.max_new_tokens=16")]
MODEL = ("--model", "tiny:7", "--dtype", "float32", "--threads", "1")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"tell {i}"}) + "\n" for i in range(120)))
    return str(path)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTPACE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(command, "MEASURED_TOKENS", 12)
    for doubt in ("disturbed", "impossible"):  # whatever else runs beside
        monkeypatch.setattr(stats, doubt, lambda *of: False)
    return tmp_path / "data"


def train(outpace, *more):
    return outpace("train", "draft_model", *MODEL, *FAST, *more)


def test_a_dry_run_says_what_it_would_take(outpace, prompts, data_folder):
    ran = train(outpace, "--prompts", prompts, "--tokens", "1500", "--dry-run", "--json")
    found = json.loads(ran.out)
    assert ran.code == 0 and not data_folder.exists()
    assert found["answer_tokens"] == 1500 and found["steps"] == 4
    assert found["disk_free_bytes"] > found["disk_bytes"] > 0
    assert found["seconds"] > 0 and found["memory_bytes"] > 0
    assert found["out"].startswith(str(data_folder / "drafters"))
    plain = train(outpace, "--prompts", prompts, "--tokens", "1500", "--dry-run")
    for word in (
        "tokens   1500 in ",
        " answers, ",
        "with their prompts",
        "disk ",
        "memory ",
        "time ",
        "nothing was started",
    ):
        assert word in plain.out


def test_from_prompts_to_a_measured_drafter_that_methods_lists(outpace, prompts, data_folder, work):
    given = ("--prompts", f"{prompts}::CC0", "--tokens", "1500", "--work", str(work))
    before = outpace("methods", "--model", "tiny:7", "--json")
    listed = {m["name"]: m for m in json.loads(before.out)}
    assert listed["draft_model"]["status"] == "not trained"
    assert listed["prompt_lookup"]["status"] == "ready"
    assert listed["retrieval"]["status"] == "needs a file made of texts"
    data = train(outpace, *given, "--only-data", "--json")
    assert data.code == 0 and "generating" in data.err
    assert json.loads(data.out)["answer_tokens"] >= 1500
    ran = train(outpace, *given, "--json")
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    assert made["folder"].startswith(str(data_folder / "drafters"))
    assert made["measured"]["speedup"] > 0 and made["measured"]["mean_emitted"] >= 1
    assert made["measured"]["method"] == "draft_model" and made["steps"] == 4
    assert made["provenance"]["data"]["plans"][0]["sources"][0]["licence"] == "CC0"
    assert "acceptance" in ran.err
    after = outpace("methods", "--model", "tiny:7", "--json")
    listed = {m["name"]: m for m in json.loads(after.out)}
    assert listed["draft_model"]["status"] == "trained here"
    assert listed["draft_model"]["measured"] == made["measured"]
    table = outpace("methods", "--model", "tiny:7")
    assert "trained here" in table.out and f"{made['measured']['speedup']:.2f}" in table.out
    drafted = outpace(
        "generate", "--model", "tiny:7", "--drafter", "draft_model", "--json", "--max-new-tokens", "8", "a"
    )
    assert drafted.code == 0, drafted.err
    assert json.loads(drafted.out)["drafter"] == "draft_model"


def test_a_folder_of_ones_own_is_measured_too(outpace, prompts, work, data_folder, tmp_path):
    train(outpace, "--prompts", f"{prompts}::CC0", "--tokens", "1500", "--work", str(work), "--only-data")
    ran = outpace(
        "train", "draft_model", *MODEL, *TRAINING, "--work", str(work), "--out", str(tmp_path / "mine")
    )
    assert ran.code == 0, ran.err
    assert f"wrote {tmp_path / 'mine'}" in ran.out and "speed-up" in ran.out
    told = json.loads((tmp_path / "mine" / "provenance.json").read_text())
    assert told["measured"]["method"] == f"draft_model[model={tmp_path / 'mine'}]"
    refused = train(outpace, "--work", str(work), "--set", "data.greedy=0.1")
    assert refused.code == 2 and "is about answers to be made" in refused.err
    more = outpace("train", "draft_model", *MODEL, "--work", str(work), "--tokens", "9000")
    assert more.code == 2 and "--tokens 9000" in more.err


def test_stopped_while_measuring_leaves_the_drafter_in_use(
    outpace, prompts, data_folder, tmp_path, monkeypatch
):
    """And --resume, which has no step left to do, measures it. The work folder has a space."""
    given = ("--prompts", prompts, "--tokens", "600", "--work", str(tmp_path / "my work"))
    first = train(outpace, *given, "--json")
    home = Path(json.loads(first.out)["folder"])
    before = {one.name: one.read_bytes() for one in home.iterdir()}
    real, left = Runner.run, [KeyboardInterrupt, None]

    def run(runner, cases, settings):
        session = real(runner, cases, settings)
        session.interrupted = bool(left.pop(0))  # some units were complete by then
        return session

    monkeypatch.setattr(Runner, "run", run)
    more = ("--set", "loop.lr=0.01")
    stopped = train(outpace, *given, *more)
    assert stopped.code == 130
    best = tmp_path / "my work" / "draft_model" / "best"
    assert stopped.err.splitlines()[-1] == (
        f"stopped: the best drafter so far is in {best}, the last checkpoint is "
        "step-00000004.safetensors; --resume goes on"
    )
    assert {one.name: one.read_bytes() for one in home.iterdir()} == before
    again = train(outpace, *given, *more, "--resume", "--json")
    assert again.code == 0 and "step 4 " not in again.err, again.err
    made = json.loads(again.out)
    assert made["measured"]["method"] == "draft_model" and made["measured"]["speedup"] > 0
    told = json.loads((home / "provenance.json").read_text())
    assert told["measured"] == made["measured"] and told["settings"]["loop"]["lr"] == "0.01"
    assert not best.exists()
    nothing = train(outpace, *given, *more, "--resume")
    assert nothing.code == 2 and "holds no training that was stopped" in nothing.err
    assert len(nothing.err.strip().splitlines()) == 1


def test_sigterm_keeps_the_last_step_and_says_how_to_go_on(outpace, prompts, data_folder, work, monkeypatch):
    def ask(progress):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(command, "_report", ask)
    stopped = train(
        outpace,
        "--prompts",
        prompts,
        "--tokens",
        "600",
        "--work",
        str(work),
        *settings("loop.report_every=3"),
    )
    assert stopped.code == 143 and stopped.err.splitlines()[-2:] == [
        "stopping after this step, with a checkpoint; Ctrl-C ends at once",
        "stopped: no drafter was made, the last checkpoint is step-00000003.safetensors; --resume goes on",
    ]
    checkpoint.paths(work / "draft_model")[0].unlink()  # other tests begin anew


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("more", "at"),
    [((), "generating"), (("--only-data",), "generating"), (("--self-prompts", "9"), "written")],
)
def test_who_is_stopped_before_the_first_step_says_what_is_kept(
    outpace, prompts, data_folder, tmp_path, monkeypatch, more, at, number
):
    from outpace.cli import show
    from outpace.train import self_prompts

    def note(line, real=show.note):
        real(line)
        if at in line:
            signal.raise_signal(number)

    monkeypatch.setattr(show, "note", note)
    monkeypatch.setattr(self_prompts, "_written", lambda *given: iter([note("written")]))
    work = tmp_path / "own"
    stopped = train(outpace, "--prompts", prompts, "--tokens", "600", "--work", str(work), *more)
    assert stopped.code == 128 + number and stopped.err.splitlines()[-1] == (
        "stopped: no drafter was made, there is no checkpoint; "
        f"the same command goes on with what {work} holds"
    )
    assert stopped.err.count("stopped: ") == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_full_disk_is_one_line_that_says_how_to_go_on(outpace, prompts, data_folder, tmp_path, monkeypatch):
    from outpace.train.tokens import TokenStore

    def full(*given):
        raise OSError(28, "No space left on device", "a.safetensors")

    given = ("--prompts", prompts, "--tokens", "600", "--work", str(tmp_path))
    with monkeypatch.context() as disk:
        disk.setattr(TokenStore, "append", full)
        ran = train(outpace, *given)
        assert ran.code == 2 and ran.err.splitlines()[-1] == (
            "outpace: error: a.safetensors: No space left on device; make room on that disk; no drafter "
            f"was made, there is no checkpoint; the same command goes on with what {tmp_path} holds"
        )
        assert ran.err.count("No space") == 1
    assert train(outpace, *given, "--only-data").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("draft_modle",), "unknown method to train 'draft_modle'; did you mean draft_model or redrafter?"),
        (("targte",), "unknown method to train 'targte'; did you mean target?"),
        (("draft_model",), "no prompts"),
        (("draft_model", "--tokens", "0"), "--tokens must be at least 1"),
        (("draft_model", "--prompts", "nowhere.jsonl"), "nowhere.jsonl: No such file"),
        (("draft_model", "--set", "x=1"), "unknown setting 'x' of draft_model"),
        (("draft_model", "--set", "temperature=0"), "temperature must be above 0, got 0"),
        (("eagle3", "--set", "layer=99", "--self-prompts", "4"), "eagle3: layer=99, but tiny:7 has"),
    ],
)
def test_bad_input_is_one_line(outpace, data_folder, arguments, message):
    ran = outpace("train", *arguments, "--model", "tiny:7")
    assert ran.code == 2 and message in ran.err
    assert len(ran.err.strip().splitlines()) == 1
    assert not data_folder.exists()


@pytest.mark.parametrize("option", ["--prompts", "--texts"])
def test_a_file_that_is_missing_is_said_before_the_model_is_loaded(outpace, option):
    ran = outpace("train", "draft_model", "--model", "./nowhere", option, "missing.jsonl::CC0")
    assert ran.code == 2 and "cannot read missing.jsonl: No such file" in ran.err


def test_what_the_target_cannot_do_is_said_before_it_answers(outpace, prompts, data_folder, tmp_path):
    given = ("--prompts", prompts, "--work", str(tmp_path / "work"))
    ran = outpace("train", "eagle3", *MODEL, *given, *settings("layer=99"))
    assert ran.code == 2 and "eagle3: layer=99, but tiny:7 has" in ran.err
    assert not (tmp_path / "work").exists()


def test_a_model_without_chat_template_is_refused_before_it_answers(
    outpace, prompts, data_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("outpace.models.tiny._TEMPLATE", None)
    for given in (("--prompts", prompts), ("--self-prompts", "4")):
        ran = train(outpace, *given, "--work", str(tmp_path / "work"), "--dry-run")
        assert ran.code == 2 and "tiny:7 has no chat template, in which prompts are asked" in ran.err
        assert len(ran.err.strip().splitlines()) == 1 and not (tmp_path / "work").exists()


def test_help_shows_examples(outpace):
    ran = outpace("train", "--help")
    assert ran.code == 0 and "outpace train eagle3 --resume" in ran.out


def test_where_a_drafter_goes_is_checked_before_a_model_is_loaded(outpace, tmp_path, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_text("x")
    for out, said in (
        ("file", "it is a file"),
        ("file/below", "below: Not a directory; name another folder"),
        ("new", "No space left"),
    ):
        if out == "new":
            monkeypatch.setattr("os.fsync", full)
        ran = outpace("train", "medusa", "--model", "no-such-model", "--out", str(tmp_path / out))
        assert ran.code == 2 and said in ran.err and ran.err.count("\n") == 1, ran.err


@pytest.mark.parametrize("work", ["file", "file/below"])
def test_where_answers_are_kept_is_checked_before_a_model_is_loaded(outpace, tmp_path, work):
    (tmp_path / "file").write_text("x")
    ran = outpace("train", "medusa", "--model", "no-such-model", "--work", str(tmp_path / work))
    assert ran.code == 2 and ran.err == f"outpace: error: {tmp_path / work}: Not a directory\n"


def test_a_dry_run_thinks_of_few_prompts(outpace, data_folder, monkeypatch):
    from outpace.train import self_prompts

    asked = []

    def written(engine, prompts, config, numbers, *more):
        asked.append(len(prompts))
        return [(i, f"what is number {number} called?") for i, number in enumerate(numbers)]

    monkeypatch.setattr(self_prompts, "_written", written)
    ran = train(outpace, "--self-prompts", "30", "--tokens", "1500", "--dry-run")
    assert ran.code == 0, ran.err
    assert asked == [45, 10, 10], "prompts, then answers to one in three, then what the user says to those"
    assert "prompts: 30/30" in ran.err and "nothing was started" in ran.out and not data_folder.exists()
    assert ": prompts 0:00:0" in ran.out, "the time that it takes to write them counts"
