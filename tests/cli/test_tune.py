import json
import re
from pathlib import Path

import pytest

from outpace.analysis import cost, profile
from outpace.cli import tune
from outpace.errors import OutpaceError
from outpace.models import measured
from outpace.types import CostCurve

ROWS = [
    {"prompt": "a b c a b c a b", "category": "x"},
    {"prompt": "the cat sat on the mat, the cat", "category": "x"},
    {"prompt": "one two one two", "category": "y", "reference": "one two"},
]
FEW = (
    "tune",
    "--model",
    "tiny",
    "--dtype",
    "float32",
    "--threads",
    "1",
    "--workload",
    "w.jsonl",
    "--max-new-tokens",
    "12",
)
CURVE = CostCurve(
    model="tiny",
    dtype="float32",
    threads=1,
    device="a machine",
    rows_R=(1, 4, 8, 16),
    context_C=(64,),
    seconds_CR=((0.010, 0.010, 0.014, 0.020),),
)
KEYS = {
    "model",
    "digest",
    "dtype",
    "threads",
    "device",
    "workload",
    "prompts",
    "max_new_tokens",
    "plain_tokens_per_second",
    "pass_factor",
    "drafters",
    "left_out",
    "passes_measured_now",
    "profile",
    "plots",
}


@pytest.fixture(autouse=True)
def _nothing_disturbs(monkeypatch):
    """Tests run beside each other; tests/analysis/test_profile.py says what is made of that."""
    monkeypatch.setattr("outpace.analysis.profile._disturbed", lambda own, plain: False)


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(measured, "cache_folder", lambda: tmp_path / "cache")


@pytest.fixture
def timed(monkeypatch):
    """Counts how often passes are measured, and takes no time for it."""
    count = []
    monkeypatch.setattr(cost, "measure", lambda *a, **k: (count.append(1), CURVE)[1])
    return count


def test_it_learns_once_and_says_what(outpace, timed, tmp_path):
    two = (*FEW, "--drafters", "none,prompt_lookup,draft_model[model=tiny layers=1]")
    ran = outpace(*two)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert len(lines) <= 10 and timed == [1]
    assert lines[0].startswith("tiny, float32, ") and "2 prompts of w.jsonl" in lines[0]
    assert "10.00 ms for 1 row, 1.00 x for 4, 1.40 x for 8, 2.00 x for 16" in lines[1]
    assert "measured now" in lines[1] and "plain decoding" in lines[2]
    assert {line.split()[0] for line in lines[3:5]} == {"prompt_lookup", "draft_model[layers=1"}
    assert "kept by depth" in lines[3] and "mean emitted" in lines[3]
    kept = next((tmp_path / "cache" / "costs").glob("profile-*.json"))
    specs = {one["spec"] for one in json.loads(kept.read_text())["value"]["drafters"]}
    assert specs == {"prompt_lookup", "draft_model[layers=1 model=tiny]"}
    for path in (kept, kept.with_suffix(".png"), kept.with_suffix(".svg")):
        assert str(path) in lines[-1] and path.stat().st_size > 100
    again = outpace(*two)
    assert again.code == 0 and timed == [1], "passes that are known are not measured again"
    assert "measured before" in again.out


def test_json_and_a_file_of_ones_own(outpace, timed, tmp_path):
    ran = outpace(*FEW, "--drafters", "suffix", "--json", "--out", "deep/mine.json", "--limit", "9")
    assert ran.code == 0, ran.err
    got = json.loads(ran.out)
    assert set(got) == KEYS and got["prompts"] == 3 and got["passes_measured_now"]
    (one,) = got["drafters"]
    glossary = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    words = set(re.findall(r"`([A-Za-z_]+)`", glossary))
    assert not {*got, *one, *one["known"]} - words, "every key is on the page"
    assert one["spec"] == "suffix" and one["previewed"] and one["known"]["level"] == 0.0
    assert got["plots"] == ["deep/mine.png", "deep/mine.svg"]
    mine = json.loads((tmp_path / "deep" / "mine.json").read_text())
    kept = next((tmp_path / "cache" / "costs").glob("profile-*.json"))
    assert mine == json.loads(kept.read_text())["value"]
    drawn = (tmp_path / "deep" / "mine.svg").read_text()
    for words in ("none = 1.0", "suffix", "Speed-up by draft budget", "longest draft"):
        assert words in drawn


def test_all_takes_what_is_there_and_names_the_rest(outpace, timed, monkeypatch):
    monkeypatch.setattr(profile, "available", lambda engine: (["suffix"], {"eagle3": "no"}))
    ran = outpace(*FEW, "--limit", "1")
    assert ran.code == 0 and "not measured          eagle3" in ran.out


def test_auto_starts_from_it(outpace, timed):
    auto = (
        "generate",
        "--model",
        "tiny",
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--raw",
        "--ignore-eos",
        "--max-new-tokens",
        "8",
        "--drafter",
        "auto",
        "--explain",
        "--json",
        "a b",
    )
    before = json.loads(outpace(*auto).out)
    assert outpace(*FEW, "--drafters", "suffix", "--limit", "1").code == 0
    after = json.loads(outpace(*auto).out)
    assert after["tokens"] == before["tokens"]
    first, then = (run["explain"]["stretches"][0] for run in (before, after))
    # The curve says 10 ms: the first step is expected in seconds already.
    assert then["first_step"] == first["first_step"] == 1
    assert then["plain_tokens_per_second"] is not None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--limit", "0"), "--limit must be at least 1, got 0"),
        (("--max-new-tokens", "7"), "--max-new-tokens must be at least 8, got 7"),
        (("--drafters", "none"), "names nobody who drafts"),
        (("--drafters", "auto"), "name its members"),
        (("--drafters", "sufix"), "did you mean suffix"),
        (("--drafters", "suffix["), "cannot read method spec"),
        (("--drafters", "eagle3"), "no trained eagle3"),
        (("--workload", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--out", "w.jsonl/x.json"), "w.jsonl"),
        (("--out", "."), "cannot write .: Is a directory"),
        (("--out", "x.png"), "give a file such as profile.json"),
        (("--model", "smollm2-135n"), "did you mean smollm2-135m"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(outpace, timed, arguments, says):
    ran = outpace(*FEW, *arguments)
    assert ran.code == 2 and ran.out == "" and not timed
    assert says in ran.err.splitlines()[-1]


def test_a_profile_that_cannot_be_kept_is_said_and_fails(outpace, timed, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    ran = outpace(*FEW, "--drafters", "suffix", "--limit", "1")
    assert ran.code == 2, ran.err
    assert "cannot be written" in ran.err and "no plots beside" in ran.err
    assert ran.out.splitlines()[-1].endswith("the profile is not kept")
    ran = outpace(*FEW, "--drafters", "suffix", "--limit", "1", "--json")
    assert ran.code == 2 and json.loads(ran.out)["profile"] is None


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_full_disk_costs_files_and_no_figures(outpace, timed, monkeypatch, form):
    def full(path, text):
        raise OutpaceError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(tune.show, "save", full)
    ran = outpace(*FEW, "--drafters", "suffix", "--limit", "1", "--out", "mine.json", *form)
    assert ran.code == 2
    assert ran.err.splitlines()[-1].endswith("mine.json: No space left on device; make room on that disk")
    assert "suffix" in ran.out and "policies start from" not in ran.out


@pytest.mark.parametrize(("form", "prints"), [((), "write"), (("--json",), "write_json")])
def test_figures_that_cannot_be_printed_are_written(outpace, timed, tmp_path, monkeypatch, form, prints):
    def gone(value):
        raise BrokenPipeError

    monkeypatch.setattr(tune.show, prints, gone)
    mine = tmp_path / "mine.json"
    ran = outpace(*FEW, "--drafters", "suffix", "--limit", "1", "--out", str(mine), *form)
    assert ran.code == 141 and json.loads(mine.read_text())["drafters"]


def test_names_are_checked_before_anything_is_loaded():
    assert tune.check_names(["none", "suffix[tree_size=4]"]) == ["suffix[tree_size=4]"]
