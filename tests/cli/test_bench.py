import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outpace import Engine, registry
from outpace.bench import disturb, tables, workloads
from outpace.bench.ours import Ours
from outpace.cli.contenders import gather
from outpace.cli.drafting import PlanOptions
from tests.support import until

ROWS = [
    {"prompt": "a b c a b c a b", "category": "x"},
    {"prompt": "the cat sat on the mat, the cat", "category": "x"},
    {"prompt": "one two one two", "group": "y", "reference": "one two"},
]
TINY = ("bench", "--model", "tiny", "--dtype", "float32", "--max-new-tokens", "12")


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def few(*arguments):
    return (*TINY, "--workload", "w.jsonl", *arguments)


def test_json_has_a_row_per_method_and_its_baseline(outpace):
    ran = outpace(
        *few(
            "--drafters", "prompt_lookup[min_ngram=1 max_ngram=4]", "--json", "--synthetic-acceptance", "1,0"
        )
    )
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    plain, lookup, synthetic = report["rows"]
    assert [row["method"] for row in report["rows"]] == [
        "none",
        "prompt_lookup[max_ngram=4 min_ngram=1]",
        "synthetic[acceptance=1,0]",
    ]
    assert {row["kind"] for row in report["rows"]} == {"drafter"}
    assert [row["synthetic"] for row in report["rows"]] == [False, False, True]
    assert plain["speedup"] == 1.0 and plain["mean_emitted"] == 1.0 and plain["passes"] == 3 * 11
    assert lookup["equal_to_none"] == synthetic["equal_to_none"] == 1.0
    assert synthetic["acceptance_by_depth"][0] == 1.0 and synthetic["mean_emitted"] > 1.5
    assert synthetic["acceptance_by_depth"][1:] == [0.0]
    assert lookup["speedup_interval"] is None, "three prompts are too few"
    assert set(lookup["groups"]) == {"x", "y"} and lookup["groups"]["x"]["sequences"] == 2
    assert sum(lookup["verb_shares"].values()) == pytest.approx(1)
    assert lookup["verb_shares"]["other"] > 0
    origin = report["provenance"]
    assert origin["config"]["max_new_tokens"] == 12 and origin["seeds"] == [0]
    assert origin["model"] == "tiny" and origin["dtype"] == "float32"
    assert "units: noise floor: x" in ran.err


def test_the_text_has_figures_and_caveats(outpace):
    ran = outpace(*few("--repeat", "2", "--limit", "1"))
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0].startswith("tiny, float32, ") and "2 prompts of w.jsonl" in lines[0]
    assert lines[1].startswith("noise floor: none against none")
    for words in ("Speed-up over none", "without loops", "auto", "score_pass", "each round"):
        assert words in ran.out


def test_trees_and_verifiers_are_put_into_every_method(outpace):
    ran = outpace(
        *few(
            "--drafters",
            "none,suffix,draft_model[model=tiny layers=1 tree=chain]",
            "--tree",
            "2x1",
            "--tree-size",
            "4",
            "--verifier",
            "match",
            "--limit",
            "1",
            "--json",
        )
    )
    assert ran.code == 0, ran.err
    assert [row["method"] for row in json.loads(ran.out)["rows"]] == [
        "none",
        "suffix[tree=2x1 tree_size=4 verifier=match]",
        "draft_model[layers=1 model=tiny tree=2x1 tree_size=4 verifier=match]",
    ]


def test_trees_and_verifiers_need_a_drafter_that_is_named(outpace):
    for drafters in ((), ("--drafters", "suffix,auto[add=suffix]")):
        ran = outpace("bench", "--model", "./nowhere", *drafters, "--tree", "2x1")
        assert ran.code == 2, ran.err
        assert "auto picks among several; name one, as in -d eagle3 --tree 2x1" in ran.err


def test_all_drafters_with_a_tree_are_all_but_those_that_pick(monkeypatch):
    names = ("none", "suffix", "auto")
    some = [registry.entry("drafter", name) for name in names]
    every = registry.entries
    monkeypatch.setattr(registry, "entries", lambda kind: some if kind == "drafter" else every(kind))
    notes = []
    engine = Engine.load("tiny", drafter="none", dtype="float32")
    found = gather(engine, None, notes, PlanOptions(tree_size=2))
    assert [one.name for one in found] == ["none", "suffix[tree_size=2]"]
    (note,) = notes
    assert note.startswith("auto takes no part: --tree-size 2 is for one drafter")


@pytest.mark.parametrize("fresh", [True, False])
def test_first_answers_are_told_from_later_ones(outpace, fresh):
    ran = outpace(*few("--drafters", "auto", "--limit", "1", *["--fresh"] * fresh))
    assert ran.code == 0, ran.err
    assert (", batch 1, first answers" in ran.out) == fresh and ", batch 1" in ran.out


def test_lossy_methods_are_marked(outpace):
    lossy = few("--drafters", "prompt_lookup", "--verifier", "typical", "--limit", "1")
    refused = outpace(*lossy)
    assert refused.code == 2 and "--allow-lossy" in refused.err
    ran = outpace(*lossy, "--allow-lossy")
    assert ran.code == 0, ran.err
    assert "prompt_lookup[verifier=typical] (lossy)" in ran.out
    _, row = json.loads(outpace(*lossy, "--allow-lossy", "--json").out)["rows"]
    assert row["lossless"] is False and row["equal_to_none"] is None


def test_sampling_has_rows_of_both_kinds(outpace):
    ran = outpace(*few("--temperature", "0.8", "--batch", "2", "--seed", "7", "--json"))
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert [
        (row["method"], row["reproducible"], row["equal_to_none"], row["sequences"]) for row in report["rows"]
    ] == [
        ("none", False, None, 12),
        ("auto", False, None, 12),
        ("none", True, 1.0, 12),
        ("auto", True, 1.0, 12),
    ]
    assert report["provenance"]["seeds"] == [7, 8, 9, 10]


def test_all_takes_what_needs_no_setting(outpace):
    ran = outpace(*few("--drafters", "all", "--limit", "1", "--max-new-tokens", "3", "--json"))
    report = json.loads(ran.out)
    methods = [row["method"] for row in report["rows"]]
    assert methods[0] == "none" and "prompt_lookup" in methods and "draft_model" not in methods
    (line,) = [line for line in report["notes"] if line.startswith("not trained for tiny, take no part: ")]
    assert {"draft_model", "hydra", "cascade"} <= set(line.partition(": ")[2].split(", "))
    assert not any(line.startswith("hydra ") for line in report["notes"])


def test_answers_are_one_file_per_method(outpace, tmp_path):
    pytest.importorskip("outpace.bench.answers")
    rows = [{"question_id": 81, "category": "writing", "turns": ["a b a b", "and c"]}]
    (tmp_path / "q.jsonl").write_text(json.dumps(rows[0]) + "\n")
    ran = outpace(*TINY, "--workload", "q.jsonl", "--answers", "deep/a.jsonl")
    assert ran.code == 0, ran.err
    for name in ("none", "auto"):
        (line,) = (tmp_path / "deep" / f"a-{name}.jsonl").read_text().splitlines()
        answer = json.loads(line)
        assert answer["model_id"] == name and len(answer["choices"][0]["turns"]) == 2
        assert answer["choices"][0]["new_tokens"] == [12, 12]


@pytest.fixture
def reports(outpace, tmp_path):
    for name, more in (("a", ()), ("b", ("--drafters", "none")), ("c", ("--limit", "1"))):
        (tmp_path / f"{name}.json").write_text(outpace(*few("--json", *more)).out)


def test_reports_side_by_side(outpace, reports):
    ran = outpace("bench", "compare", "a.json", "b.json")
    assert ran.code == 0, ran.err
    assert "auto" in ran.out and ran.out.startswith("A  tiny, float32")
    ran = outpace("bench", "compare", "a.json", "b.json", "--json")
    found = json.loads(ran.out)
    plain, drafted = found["rows"]
    assert plain["method"] == "none" and plain["a"]["speedup"] == plain["b"]["speedup"] == 1.0
    assert drafted["a"]["method"] == drafted["method"] and drafted["b"] is None
    ran = outpace("bench", "compare", "a.json", "c.json")
    assert ran.code == 2 and ran.out == ""
    assert "measured different things: prompts (3 and 2)" in ran.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_stops_it_keeps_what_is_measured(outpace, monkeypatch, number):
    run, count = Ours.run, []

    def stopped(self, unit, settings):
        count.append(unit)
        if len(count) == 7 + 2 + 3:  # noise floor, warm-up, one unit and a half
            if number == signal.SIGINT:  # which may be ignored here
                raise KeyboardInterrupt
            signal.raise_signal(number)
        return run(self, unit, settings)

    monkeypatch.setattr(Ours, "run", stopped)
    ran = outpace(*few("--json"))
    assert ran.code == 128 + number
    report = json.loads(ran.out)
    assert report["partial"] and [row["sequences"] for row in report["rows"]] == [1, 1]


def test_out_writes_report_and_plots(outpace, tmp_path):
    pytest.importorskip("outpace.bench.plots")
    pytest.importorskip("matplotlib")
    ran = outpace(*few("--out", "report", "--limit", "1"))
    assert ran.code == 0, ran.err
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert {"report.json", "report.md"} <= names
    assert {path.rsplit(".")[-1] for path in names} >= {"png", "svg"}
    assert outpace("bench", "compare", "report", "report").code == 0


def test_the_builtin_prompts_are_the_default(outpace, monkeypatch):
    prompt = workloads.Prompt(id="p", category="edit", messages=({"role": "user", "content": "a b a b"},))
    monkeypatch.setattr("outpace.bench.formats.builtin", lambda: [prompt])
    ran = outpace(*TINY, "--json", "--max-new-tokens", "3", "--drafters", "none")
    assert json.loads(ran.out)["rows"][0]["groups"]["edit"]["sequences"] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--limit", "0"), "--limit must be at least 1, got 0"),
        (("--batch", "0"), "--batch must be at least 1, got 0"),
        (("--repeat", "0"), "--repeat must be at least 1, got 0"),
        (("--max-repeat", "0"), "--max-repeat must be at least 1, got 0"),
        (("--repeat", "3", "--max-repeat", "2"), "--max-repeat must be at least --repeat, which is 3, got 2"),
        (("--max-new-tokens", "1"), "--max-new-tokens must be at least 2, got 1"),
        (("--temperature", "-1"), "temperature must be a finite number of at least 0, got -1"),
        (("--seed", "-1"), "seed must be"),
        (("--drafters", "none,lookup"), "unknown drafter 'lookup'"),
        (("--drafters", "none["), "cannot read method spec"),
        (("--drafters", "prompt_lookup[max=1]"), "known: max_ngram"),
        (("--synthetic-acceptance", "often"), "is not a list of rates"),
        (("--synthetic-acceptance", "2"), "acceptance must be rates in [0, 1]"),
        (("--workload", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--answers", "a.jsonl", "--batch", "2"), "--answers needs the time of every answer"),
        (("--out", "w.jsonl"), "w.jsonl: not a directory"),
        (("--answers", "w.jsonl/a.jsonl"), "cannot write w.jsonl/a.jsonl: not a directory"),
        (("compare", "nowhere", "nowhere"), "cannot read report nowhere"),
        (("compare", "w.jsonl", "w.jsonl"), "w.jsonl is not json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(outpace, arguments, says):
    ran = outpace(*(("bench",) if arguments[0] == "compare" else few()), *arguments)
    assert ran.code == 2 and ran.out == ""
    assert says in ran.err.splitlines()[-1].lower()


def test_an_unknown_peer_is_said_at_once(outpace):
    ran = outpace(*few("--peers", "hf-promt-lookup"))
    assert ran.code == 2 and "did you mean hf-prompt-lookup" in ran.err


def test_a_peer_that_is_not_there_is_left_out_with_a_line(outpace):
    ran = outpace(*few("--peers", "llamacpp,hf-assisted", "--drafters", "none", "--limit", "1", "--json"))
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert [row["method"] for row in report["rows"]] == ["none"]
    assert [line.split()[0] for line in report["notes"][:2]] == ["llamacpp", "hf-assisted"]


@pytest.mark.slow  # imports transformers
def test_a_peer_is_compared_on_the_same_prompts(outpace):
    ran = outpace(*few("--peers", "hf", "--drafters", "none", "--limit", "1", "--json"))
    assert ran.code == 0, ran.err
    plain, peer = json.loads(ran.out)["rows"]
    assert (peer["method"], peer["kind"], peer["equal_to_none"]) == ("hf", "peer", None)
    assert peer["about"]["dtype"] == "float32" and peer["speedup"] > 0
    assert peer["sequences"] == plain["sequences"] == 2


def test_a_process_takes_a_core_beside_every_unit_and_ends(outpace, monkeypatch):
    started = []
    true = disturb.subprocess.Popen

    def popen(*arguments, **options):
        started.append(true(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(disturb.subprocess, "Popen", popen)
    ran = outpace(*few("--drafters", "none", "--disturb", "--json", "--repeat", "2"))
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    cell = report["rows"][0]["disturbed"]
    assert 0 < cell["least"] <= cell["ratio"]
    assert len(started) == 2 * len(ROWS) and all(one.returncode == -9 for one in started)
    assert "Beside a process that takes a core" in tables.markdown(report)


def test_what_takes_a_core_ends_with_whoever_started_it():
    with pytest.raises(KeyboardInterrupt), disturb.spinning() as number:
        assert Path(f"/proc/{number}").exists()
        raise KeyboardInterrupt
    assert not Path(f"/proc/{number}").exists()
    script = (
        "from outpace.bench.disturb import spinning\nimport os\n"
        "with spinning() as number: print(number, flush=True); os._exit(0)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    spinning = Path(f"/proc/{int(told.stdout)}/cmdline")
    until(lambda: not spinning.exists() or spinning.read_bytes() == b"")


def test_a_full_disk_costs_files_and_no_figures(outpace, tmp_path, monkeypatch):
    """The disk is full once the benchmark has run; before, it was not."""
    from outpace.bench import tables

    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(tables, "write_whole", full)
    asked = ("--drafters", "prompt_lookup", "--out", str(tmp_path / "out"))
    ran = outpace(*few(*asked, "--answers", str(tmp_path / "elsewhere" / "a.jsonl")))
    assert ran.code == 2 and "Speed-up over none" in ran.out
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2, "answers are on no table"
    assert "report.json: No space left on device" in ran.err and not (tmp_path / "out").exists()


def test_figures_that_cannot_be_printed_are_written(outpace, tmp_path, monkeypatch):
    def gone(value):
        raise BrokenPipeError

    monkeypatch.setattr("outpace.cli.show.write_json", gone)
    asked = ("--drafters", "prompt_lookup", "--out", str(tmp_path), "--answers", str(tmp_path / "a.jsonl"))
    ran = outpace(*few(*asked, "--json"))
    assert ran.code == 141 and json.loads((tmp_path / "report.json").read_text())["rows"]
    assert len(list(tmp_path.glob("a-*.jsonl"))) == 2
