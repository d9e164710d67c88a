import json

import pytest

from outpace import Engine, RequestError
from outpace.analysis import judge
from outpace.analysis.acceptance import MOST, RULES, measure
from outpace.analysis.scenarios import scenarios
from outpace.bench import formats, workloads
from outpace.cli import analyze

DRAFTER = "draft_model[model=tiny layers=1]"
FEW = (
    "analyze",
    "acceptance",
    "--model",
    "tiny",
    "--dtype",
    "float32",
    "--limit",
    "2",
    "--max-new-tokens",
    "6",
)
PROMPTS = [
    workloads.Prompt(
        id=f"p{i}", category="edit", messages=({"role": "user", "content": "abc abd abe " + "xyz"[:i]},)
    )
    for i in range(4)
]


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch):
    monkeypatch.setattr(formats, "builtin", lambda: PROMPTS)


def test_json_holds_every_verifier_below_its_bound(outpace, tmp_path):
    ran = outpace(*FEW, "--drafter", DRAFTER, "--json", "--out", str(tmp_path / "new" / "report"))
    assert ran.code == 0, ran.err
    got = json.loads(ran.out)
    assert json.loads((tmp_path / "new/report/acceptance.json").read_text()) == got
    assert got["drafter"] == "draft_model[layers=1 model=tiny]" and got["model"] == "tiny"
    assert (got["positions"], got["prompts"], got["temperature"]) == (2 * (6 - 2), 2, 1.0)
    assert sorted(rule for part in got["drafts"].values() for rule in part["verifiers"]) == sorted(RULES)
    for drawn, part in got["drafts"].items():
        for rule, curve in part["verifiers"].items():
            assert all(0 <= value <= 1 + 1e-9 for value in curve)
            if drawn == "coupled" or rule == "typical":
                continue
            assert len(part["bound"]) == MOST
            slack = 0.03 if drawn == "distinct" else 1e-6
            for value, limit in zip(curve, part["bound"], strict=False):
                assert value <= limit + slack
    chain = got["drafts"]["iid"]["verifiers"]["chain"]
    assert 0.05 < chain[0] < 0.999, "p and q differ, and overlap"
    assert got["drafts"]["distinct"]["verifiers"]["tree"][0] == pytest.approx(chain[0])


def test_the_table_and_the_plot(outpace, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    assert matplotlib
    ran = outpace(*FEW, "--drafter", DRAFTER, "--out", str(tmp_path))
    assert ran.code == 0, ran.err
    assert "mean over 8 positions of 2 texts" in ran.out
    for words in ("at most", "typical (lossy)", "greedy_plus_one", "k_seq", "spechub", "without replacement"):
        assert words in ran.out
    assert {file.name for file in tmp_path.iterdir()} == {
        "acceptance.json",
        "acceptance.png",
        "acceptance.svg",
    }
    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_line_says_so(outpace, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    ran = outpace(*FEW, "--drafter", DRAFTER, "--out", str(tmp_path))
    assert ran.code == 0 and "no plots: matplotlib is not installed" in ran.err
    assert [file.name for file in tmp_path.iterdir()] == ["acceptance.json"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "missing option '--drafter'"),
        (("-d", DRAFTER, "-t", "0"), "give a temperature above 0"),
        (("-d", "prompt_lookup"), "name one that samples"),
        (("-d", DRAFTER, "--max-new-tokens", "2"), "must be at least 3, got 2"),
        (("-d", DRAFTER, "--limit", "0"), "--limit must be at least 1, got 0"),
        (("-d", DRAFTER, "-w", "nowhere.jsonl"), "no workload 'nowhere.jsonl'"),
        (("-d", "draft_modle[model=tiny]"), "did you mean draft_model"),
    ],
)
def test_bad_input_is_one_line(outpace, arguments, says):
    ran = outpace(*FEW, *arguments)
    assert ran.code == 2
    assert says in ran.err.splitlines()[-1].lower()


def test_the_text_is_the_plain_one_and_the_method_is_left_as_it_was():
    engine = Engine.load("tiny", drafter="none", dtype="float32")
    prompt, said = [5, 9, 11, 5, 9, 11], []
    single = "draft_model[layers=1 model=tiny tree_size=1]"
    usual = engine.method(single).verifier
    generate = engine.generate

    def listening(*arguments, **settings):
        said.append(generate(*arguments, **settings))
        return said[-1]

    engine.generate = listening
    report = measure(engine, DRAFTER, [prompt], max_new_tokens=8, temperature=0.8)
    assert report.positions == 6
    plain = generate(prompt, drafter="none", temperature=0.8, seed=0, max_new_tokens=8, reproducible=False)
    assert said[0].tokens == plain.tokens
    assert engine.method(single).verifier is usual
    with pytest.raises(RequestError, match="name one that samples"):
        measure(engine, "prompt_lookup", [prompt], max_new_tokens=8, temperature=0.8)


def test_equal_curves_all_show():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    curves = {"bound": [0.5, 0.6], "verifiers": {"match": [0.5, 0.6], "tree": [0.5, 0.6]}}
    names = list(analyze._NAMES)
    about = {"model": "tiny", "drafter": "draft_model", "temperature": 1.0, "positions": 9}
    assert analyze._picture(figure, {**about, "drafts": dict.fromkeys(names[:4], curves)})
    below, above = figure.axes[0].lines[1:]
    assert below.get_linewidth() > above.get_linewidth() and below.get_markersize() > above.get_markersize()
    assert above.get_markerfacecolor() == "none"


def test_a_wrong_policy_is_said_before_anything_is_recorded(outpace, tmp_path):
    ran = outpace("analyze", "policy", "--texts", str(tmp_path / "t.gz"), "--policies", "auto,nosuch")
    assert ran.code == 2 and "unknown policy 'nosuch'" in ran.err and ran.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


RECORDS = ("analyze", "policy", "--model", "tiny", "--drafters", "prompt_lookup", "--limit", "1", "--json")


def test_a_recording_that_cannot_be_kept_is_refused_before_it_is_made(outpace, tmp_path, monkeypatch):
    monkeypatch.setattr("outpace.models.load.load_target", None)
    (tmp_path / "file").write_text("x")
    ran = outpace(*RECORDS, "--texts", str(tmp_path / "file" / "t.gz"))
    assert ran.code == 2 and ran.err.count("\n") == 1 and "t.gz: Not a directory" in ran.err


def test_a_disk_that_is_full_by_then_costs_the_recording_alone(outpace, tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    given = (*RECORDS, "--policies", "goodput", "--max-new-tokens", "16", "--only", "cpu")
    with monkeypatch.context() as disk:
        disk.setattr("outpace.analysis.recording.write_whole", full)
        ran = outpace(*given, "--texts", str(tmp_path / "t.gz"), "--out", str(tmp_path / "out"))
    assert ran.code == 2 and ran.err.count("t.gz: No space left") == 1
    count = len(json.loads(ran.out)["scenarios"])
    assert count > 1 and f"0/{count} scenarios: cpu" in ran.err and f"{count}/{count} scenarios" in ran.err
    assert json.loads(ran.out) == json.loads((tmp_path / "out" / "policy.json").read_text())
    made = []
    monkeypatch.setattr(judge, "scenarios", lambda *given: made.append(given) or scenarios(*given))
    again = outpace(*given, "--texts", str(tmp_path / "t.gz"))
    assert len(made) == 1, "the list of scenarios is built once"
    none = outpace(*given, "--texts", str(tmp_path / "t.gz"), "--only", "abacus")
    assert none.code == 2 and "--only 'abacus' is part of no scenario's name" in none.err
    assert again.code == 0 and json.loads(again.out).keys() == json.loads(ran.out).keys()
