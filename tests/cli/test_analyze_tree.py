import io
import json
import sys

import pytest

from outpace.analysis import cost, siblings
from outpace.bench import formats, workloads
from outpace.cli import analyze_tree
from outpace.types import CostCurve

DRAFTER = "draft_model[model=tiny layers=1]"
MODEL = ("--model", "tiny", "--dtype", "float32")
TREE = ("analyze", "tree", *MODEL, "-d", DRAFTER, "--tree", "3x2", "--max-new-tokens", "12")
SHAPE = ("analyze", "shape", *MODEL, "-d", DRAFTER, "--limit", "2", "--max-new-tokens", "12", "-t", "0.8")
PROMPTS = [
    workloads.Prompt(
        id=f"p{i}", category="edit", messages=({"role": "user", "content": "abc abd abe " + "xyz"[:i]},)
    )
    for i in range(4)
]


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch):
    monkeypatch.setattr(formats, "builtin", lambda: PROMPTS)


def test_it_draws_every_pass(outpace):
    ran = outpace(*TREE, "abc abc", "--steps", "2")
    assert ran.code == 0, ran.err
    assert ran.out.count("\npass ") == 2 and "\x1b[" not in ran.out
    assert "draft_model[layers=1 model=tiny tree=3x2]" in ran.out
    for words in ("of 9 guesses accepted", "pending", "refused", "the target's own"):
        assert words in ran.out
    assert outpace(*TREE, "abc abc", "--steps", "2").out == ran.out, "the seed is fixed"


def test_json_and_a_drawing(outpace, tmp_path):
    ran = outpace(*TREE, "abc abc", "--json", "-t", "0.8", "--out", str(tmp_path / "new/a.html"))
    assert ran.code == 0, ran.err
    got = json.loads(ran.out)
    assert got["temperature"] == 0.8 and len(got["passes"]) >= 4
    first = got["passes"][0]
    assert len(first["guesses"]) == 9
    assert set(first["guesses"][0]) == {"token", "text", "parent", "q", "p", "fate"}
    emitted = sum(len(one["emitted"]) for one in got["passes"])
    assert emitted == 12 - 1 and got["mean_emitted"] == pytest.approx(emitted / len(got["passes"]))
    assert (tmp_path / "new/a.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    ran = outpace(*TREE, "abc abc", "--out", str(tmp_path / "a.svg"), "--steps", "1")
    assert ran.code == 0
    assert (tmp_path / "a.svg").read_text(encoding="utf-8").startswith("<svg ")


def test_a_drawing_is_written_after_its_reader_left(outpace, monkeypatch, tmp_path):
    def gone(text):
        raise BrokenPipeError

    monkeypatch.setattr("outpace.cli.show.write", gone)
    outpace(*TREE, "abc abc", "--out", str(tmp_path / "a.svg"), "--steps", "1")
    assert (tmp_path / "a.svg").read_text(encoding="utf-8").startswith("<svg ")


class Stream(io.TextIOWrapper):
    """A terminal of some encoding."""

    def __init__(self, encoding, terminal):
        super().__init__(io.BytesIO(), encoding=encoding)
        self.terminal = terminal

    def isatty(self):
        return self.terminal

    def written(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


@pytest.mark.parametrize(("encoding", "terminal"), [("ascii", False), ("utf-8", True)])
def test_streams(monkeypatch, encoding, terminal):
    from outpace.analysis.picture import Added, Picture, Trace

    picture = Picture(before="", pending="a", guesses=(), kept=(), added=Added(token=1, text=" [b]", p=0.5))
    trace = Trace(model="m", drafter="d", temperature=1.0, prompt="", first="a", passes=(picture,))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Stream(encoding, terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    analyze_tree.show_trace(trace)
    text = stream.written()
    assert ("\x1b[" in text) is terminal
    assert ("`- ' [b]'" in text) is (encoding == "ascii")
    assert ("\u00b7[b]" in text) is (encoding == "utf-8")


def curve(target, **_):
    return CostCurve(
        model=target.name,
        dtype="float32",
        threads=1,
        device="cpu",
        rows_R=(1, 128),
        context_C=(64,),
        seconds_CR=((1.0, 1.0),),
    )


def test_shape_writes_a_tree_that_other_commands_take(outpace, tmp_path):
    file = tmp_path / "new" / "tree.json"
    ran = outpace(*SHAPE, "--nodes", "6", "--depth", "3", "--out", str(file))
    assert ran.code == 0, ran.err
    got = json.loads(file.read_text())
    assert 1 <= len(got["parents"]) <= 6 and got["positions"] > 4
    assert got["mean_emitted"] > 1 and 1 < got["expected_emitted"] <= 4
    assert f"{got['expected_emitted']:.2f} tokens per pass" in ran.out
    assert f"measured {got['mean_emitted']:.2f}" in ran.out
    ran = outpace(
        "generate", *MODEL, "-d", DRAFTER, "--tree", str(file), "--max-new-tokens", "8", "--json", "abc abc"
    )
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["drafted"] > len(got["parents"])
    ran = outpace("generate", *MODEL, "-d", DRAFTER, "--tree", "none.json", "abc")
    assert ran.code == 2 and "cannot read tree file none.json" in ran.err


def test_shape_takes_the_size_that_pays(outpace, monkeypatch):
    monkeypatch.setattr(siblings, "curve_for", curve)

    def report(per_level):
        draft = cost.DraftCost(
            spec="d", seconds_L=(per_level,), pass_seconds_L=(0.0,), passes_L=(1,), depth_L=(1,)
        )
        monkeypatch.setattr(siblings, "draft_cost_for", lambda *_, **__: draft)
        ran = outpace(*SHAPE, "--json")
        assert ran.code == 0, ran.err
        return json.loads(ran.out)

    free, dear = report(1e-6), report(1e6)
    assert len(free["parents"]) > 20, "guesses cost nothing"
    assert free["expected_tokens_per_second"] == pytest.approx(free["expected_emitted"], rel=1e-3)
    assert dear["parents"] == [] and dear["mean_emitted"] == 1.0, "no tree pays"
    assert "No tree pays here" in outpace(*SHAPE).out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*TREE,), "no prompt"),
        ((*TREE, "a", "--steps", "0"), "--steps must be at least 1, got 0"),
        ((*TREE, "a", "--out", "tree.png"), "ends in .svg or .html"),
        ((*TREE, "a", "--out", "/dev/null/a.svg"), "cannot write /dev/null/a.svg: not a directory"),
        ((*SHAPE, "--out", "/dev/null/a.json"), "cannot write /dev/null/a.json: not a directory"),
        ((*TREE, "a", "--max-new-tokens", "0"), "max_new_tokens must be"),
        ((*TREE, "a", "-t", "-1"), "temperature must be a finite number of at least 0, got -1"),
        ((*SHAPE, "--nodes", "0"), "--nodes must be at least 1, got 0"),
        ((*SHAPE, "--nodes", "5000"), "need 1 to 1024 nodes and 1 level or more, got 5000"),
        ((*SHAPE, "--depth", "0"), "--depth must be at least 1, got 0"),
        ((*SHAPE, "--max-new-tokens", "2"), "must be at least 3, got 2"),
        ((*SHAPE, "--out", "tree.txt"), "ends in .json"),
        ((*SHAPE, "-d", "prompt_lookup", "--nodes", "4"), "no two siblings"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(outpace, arguments, says):
    ran = outpace(*arguments)
    assert ran.code == 2 and ran.out == ""
    assert says in ran.err.splitlines()[-1].lower()
