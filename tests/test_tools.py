"""Every script of tools/ can be imported, and what it imports from the package is there."""

import ast
import importlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace import Engine
from outpace.errors import RequestError
from outpace.methods.eagle3.probe import read
from outpace.models.tiny import tiny
from outpace.train.tokens import TokenSequence
from outpace.types import Feed
from tests.train.texts import written

TOOLS = Path(__file__).parents[1] / "tools"
FILES = sorted(TOOLS.glob("*.py"))


def missing(source):
    """Names that a source imports from the package, at any depth, and that are not there."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            wanted = [(one.name, None) for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            wanted = [(node.module, one.name) for one in node.names]
        else:
            continue
        for module, name in wanted:
            if module.partition(".")[0] != "outpace":
                continue
            if not hasattr(importlib.import_module(module), name or "__name__"):
                try:
                    importlib.import_module(f"{module}.{name}")
                except ModuleNotFoundError:
                    found.append(f"{module}.{name}")
    return found


@pytest.fixture
def tool(monkeypatch):
    """Imports a script under its own name; afterwards it is forgotten."""
    monkeypatch.syspath_prepend(TOOLS)
    before = set(sys.modules)
    yield importlib.import_module
    for file in FILES:
        if file.stem not in before:
            sys.modules.pop(file.stem, None)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_tool_can_be_imported_and_finds_what_it_uses(tool, file):
    if file.stem == "ray_figures":
        pytest.importorskip("ray", reason="needs the extra ray")
    assert not missing(file.read_text(encoding="utf-8"))
    assert Path(tool(file.stem).__file__) == file


def test_a_name_that_is_gone_is_found():
    source = "def late():\n    from outpace.drafters.trained import find, checkpoint_of\n"
    assert missing(source) == ["outpace.drafters.trained.checkpoint_of"]
    assert not missing("import os\nfrom outpace import train\nfrom outpace.models import tiny\n")


@pytest.mark.parametrize("off", [0.0, 0.01])
def test_our_half_of_the_comparison_with_speculators(tool, tmp_path, monkeypatch, capsys, off):
    """With the drafter itself in the library's place, all agrees; 0.01 off, it does not."""
    check = tool("check_speculators")

    def child(command, **more):
        inputs = load_file(tmp_path / "inputs.safetensors")
        assert inputs["ids"].tolist() == check.TEXT
        assert (tmp_path / "verifier" / "model.safetensors").is_file()
        shutil.copytree(tmp_path / "head", tmp_path / "saved")
        logits, _ = check.our_logits(tiny(layers=8), tmp_path / "export")
        rows = max(row for row, _ in logits) + 1
        save_file(
            {
                f"depth{depth}": torch.stack([logits[row, depth] for row in range(rows)]) + off
                for depth in range(check.DEPTHS)
            },
            tmp_path / "outputs.safetensors",
        )

    monkeypatch.setattr(check.subprocess, "run", child)
    assert check.compare(tmp_path, "python") == (1 if off else 0)
    assert "largest difference" in capsys.readouterr().out


@pytest.mark.parametrize(("off", "lost"), [(0.0, 0), (0.01, 0), (0.0, 1)])
def test_scores_of_the_harness_are_compared_choice_by_choice(tool, capsys, off, lost):
    check = tool("check_lm_eval")
    scores = [[-float(3 * i + j) for j in range(3)] for i in range(check.QUESTIONS - lost)]
    loaded = [[one - off for one in row] for row in scores]
    assert check.compare(scores, loaded) == (1 if off or lost else 0)
    assert f"{len(scores)} questions, {3 * len(scores)} choices" in capsys.readouterr().out


def test_losses_of_exits_and_reports_make_one_page(tool, tmp_path):
    figures = tool("exit_figures")
    target, window = tiny(layers=3), [1, 5, 9, 2, 7]
    early, whole = figures.losses(target, [1], [window, window])
    cache = target.new_cache()
    feed = Feed.chain(cache.open(), window, want=range(4))
    log_TV = target.score([feed], cache).logits_TV.log_softmax(-1)
    wanted = -log_TV.gather(1, torch.tensor(window[1:])[:, None]).mean().item()
    assert whole.loss == pytest.approx(wanted, abs=1e-5)
    assert (whole.layer, whole.same, whole.overlap) == (3, 1.0, pytest.approx(1.0, abs=1e-5))
    assert early.layer == 1 and early.overlap < 0.999

    def row(method, **more):
        calm = {"units": 3, "speedup": 1.6}
        shares = {"draft_pass": 0.2, "draft_host": 0.1}
        plain = {"method": method, "reproducible": False, "speedup": 1.0, "speedup_interval": None}
        counts = {
            "mean_emitted": 1.0,
            "acceptance_rate": None,
            "drafted": 0,
            "passes": 9,
            "equal_to_none": 1.0,
        }
        looping = {"looping": 0.1, "units": 4, "sequences": 4, "without_loops": calm, "verb_shares": shares}
        return {**plain, **counts, **looping, **more}

    config = {"max_new_tokens": 8, "temperature": 0.0}
    command = "outpace bench --model /somewhere/OUT --workload /somewhere/OUT/prompts.jsonl --out r"
    said = {"cpu": "a processor", "threads": 1, "date": "2026-11-23T1", "dtype": "bfloat16", "config": config}
    fast = row("early_exit[layer=1]", speedup=1.7, mean_emitted=3.4, acceptance_rate=0.8, drafted=27)
    report = {
        "paired": True,
        "rows": [row("none"), row("early_exit[layer=2]", speedup=1.2), fast],
        "noise_floor": {"speedup": 1.0, "speedup_interval": [0.99, 1.01]},
        "provenance": {**said, "command": command},
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert figures.load_report(tmp_path) == report
    made = {"weights": 19_000_000, "tokens": 5, "texts": ["a.txt"], "steps": 7, "exits": [1]}
    text = "\n".join(figures.page(made, [early, whole], [report], "outpace train target"))
    assert "/somewhere" not in text and "--model OUT --workload prompts.jsonl" in text
    assert f"| 3 | {wanted:.3f} |" in text
    assert "| `early_exit[layer=1]` | 1.70 | 1.60 | 3.40 | 0.80 | 3.0 | 100% |" in text
    assert "1.70 x, 3.40 per pass | 2.00 | 20%, 10% |" in text and "1 of 4 prompts" in text
    assert "| `early_exit[layer=1]` | 3.0 | 2.00 | 0.89 | 0.54 | 0.89 |" in text
    assert figures.chance_of(2.5, 1.0) is None and figures.chance_of(1.5, 1.0) == pytest.approx(0.5, abs=1e-3)
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(RequestError, match="is no report of outpace bench"):
        figures.load_report(tmp_path)


def test_a_probe_of_all_layers_is_a_table_a_picture_and_a_file(tool, tmp_path, capsys, monkeypatch):
    probe_layers = tool("probe_layers")
    ids = written(tiny(), 4, seed=1, new=30).token_BT.numpy().astype("int32")

    class Answers(list):
        held_out_S = (False, False, False, True)

    held = Answers(TokenSequence(number=i, prompt=6, temperature=0.0, ids=one) for i, one in enumerate(ids))
    monkeypatch.setattr(probe_layers.TokenStore, "open", lambda folder: held)
    out, plot = tmp_path / "probe.safetensors", tmp_path / "probe.png"
    asked = ["--work", "w", "--out", str(out), "--model", "tiny", "--rows", "60", "--vocab", "100000"]
    assert probe_layers.main([*asked, "--layers", "2", "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("|---|---|")
    assert [line.split("|")[1].strip() for line in lines[at + 1 : -1]] == ["0", "1", "2"]
    assert "together" in lines[-1] and plot.stat().st_size > 1000
    assert probe_layers.main([*asked, "--layers", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["alone"]) == 3 and told["agreement"] == max(told["alone"])
    assert list(read(out, tiny())[0]) == told["layers"]


def test_what_ending_texts_saves_and_keeps_is_counted_by_hand(tool):
    stop = tool("stop_figures")
    one = stop.Completion((1,), (5, 6, 7, 8), 3, {"classifier": [0.0, 0.1, 0.6, 0.9]})
    two = stop.Completion((1,), (5, 6), 0, {"classifier": [0.0, 0.7]})
    assert one.shown("classifier", 0.5) == (3, 2) and one.shown("classifier", 0.9) == (4, 4)
    found = stop.figures([one, two], "classifier", 0.5)
    # Written: 3 of 4 and 2 of 2; shown: 2 and 1; right among the shown: 2 of 3 and 0.
    assert found == {"saved": pytest.approx(1 / 6), "kept": 2 / 3, "right": 2 / 3, "ended": 1.0}
    never = stop.figures([one, two], "classifier", 1.0)
    assert never["saved"] == 0 and never["kept"] == 1 and never["ended"] == 0


def view_rows(gain):
    """Rows of five texts at three contexts; ``gain`` is the speed-up by context."""
    return [
        {
            "text": f"{i}.txt",
            "context": context,
            "task": task,
            "method": method,
            "speedup": 1.0 if method == "none" else speed + 0.01 * i,
            "accepted": 0.5,
            "emitted": 1.8,
            "same": True,
            "found": i > 2,
        }
        for i in range(5)
        for context, speed in gain.items()
        for task in ("continue", "fact")
        for method in ("none", "window_self")
    ]


def test_a_view_pays_from_the_context_on_above_which_it_always_does(tool, tmp_path):
    report = tool("view_report")
    rows = view_rows({1024: 1.3, 2048: 0.9, 4096: 1.2, 8000: 1.4})
    assert report.pays_from(rows, "window_self", [1024, 2048, 4096, 8000]) == 4096
    assert report.pays_from(rows, "none", [1024, 2048, 4096, 8000]) is None
    rows.append({"pass_at": 4096, "cpu_ms": {"full, 1 rows": 12.0}})
    rows.append({**rows[0], "method": "lossy 512", "context": 4096, "kl": 0.01, "agree": 0.9})
    text = "\n".join(report.page(rows))
    assert "pays from 4096 tokens" in text and "| `window_self` | 1.32 (1.31 to 1.33) | 0.92" in text
    assert "40 of 40 texts are those of plain decoding" not in text and "80 of 80 texts" in text
    assert "| full, 1 rows | 12.0 |" in text and "| 4096 | 512 | 0.0100 | 0.900 |" in text
    assert "says the hidden fact in 2 of 5" in text
    assert "What it tells of the truth" not in text
    score = {**rows[0], "method": "score 512", "context": 4096, "truth": 2.0, "truth_seen": 2.5, "kl": 0.5}
    rule = {**score, "method": "rule every=2", "task": "continue", "agree": 0.9}
    text = "\n".join(
        report.page([*rows, {**score, "task": "continue"}, {**score, "task": "fact", "truth": 1}, rule])
    )
    assert "| 4096 | 512 | 2.00 | 2.50 | 0.5000 | 1.00 | 2.50 | 0.5000 |" in text
    assert "| `every=2` | 0.5000 | 0.900 |" in text and "80 of 80 texts" in text
    pytest.importorskip("matplotlib")
    assert {path.name for path in report.paint_views(rows, tmp_path)} == {"views.png", "views.svg"}


def test_rows_that_were_measured_are_there_for_the_next_run(tool, tmp_path):
    views = tool("view_figures")
    rows = views.Rows(tmp_path / "rows.jsonl")
    rows.add({"text": "a", "context": 1024, "task": "fact", "method": "none"})
    again = views.Rows(tmp_path / "rows.jsonl")
    assert again.has(text="a", context=1024, task="fact", method="none")
    assert not again.has(text="a", context=2048, task="fact", method="none")


def test_views_are_measured_beside_plain_decoding(tool, monkeypatch):
    """On the small model of the tests: texts are equal, and a slot goes on with what it holds."""
    views = tool("view_figures")
    engine = Engine.load("tiny", drafter="none", dtype="float32", allow_lossy=True)
    bench = views.Bench(engine, 8)
    prompt = [5 + i % 50 for i in range(300)]
    bench.read(prompt[:-1])
    base = bench.run("none", prompt)
    fast = bench.run("window_self[sinks=1 window=20 tree_size=2]", prompt)
    assert fast["tokens"] == base["tokens"] and fast["emitted"] > 1
    fed = []
    score = engine.target.score
    monkeypatch.setattr(
        engine.target, "score", lambda feeds, *a, **k: (fed.append(feeds), score(feeds, *a, **k))[1]
    )
    bench.read([*prompt[:200], 9, 9])
    assert [feed.token_J for feeds in fed for feed in feeds] == [(9, 9)]
    whole = bench.lossy("budget=140 run=1", [*prompt[:200], 9, 9, 9], base["tokens"])
    assert whole["kl"] > 0 and 0 <= whole["agree"] <= 1
    asked, following, count = views.true(engine, prompt, "continue", 6)
    assert (asked, following, count) == (prompt[:-6], prompt[-6:], 6)
    bench.read(asked[:-1])
    told = bench.lossy("budget=140 run=1", asked, following, 2)
    cache = engine.target.new_cache()
    feed = Feed.chain(cache.open(), prompt[:-1], want=range(len(prompt) - 1))
    log_TV = engine.target.score([feed], cache).logits_TV.log_softmax(-1)
    wanted = [-log_TV[i - 1, prompt[i]].item() for i in (298, 299)]
    assert told["truth"] == pytest.approx(sum(wanted) / 2, abs=1e-4) != told["truth_seen"]
    asked, following, count = views.true(engine, prompt, "fact", 6)
    assert (
        asked == prompt
        and engine.target.tokenizer.decode(following).endswith(views.NUMBER)
        and count < len(following)
    )
