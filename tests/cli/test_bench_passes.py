import json
import sys

import pytest
import torch
import typer

from outpace.analysis import cost, roofline
from outpace.bench import plots
from outpace.cli import bench_passes
from outpace.cli.main import main
from outpace.cli.options import add
from outpace.models import measured
from outpace.models.tiny import tiny
from outpace.types import CostCurve

FEW = (
    "--model",
    "tiny",
    "--dtype",
    "float32",
    "--repeat",
    "1",
    "--rows",
    "1,4",
    "--contexts",
    "10,60",
    "--batches",
    "2",
)
KEYS = {
    "model",
    "digest",
    "dtype",
    "device",
    "threads",
    "weight_bytes",
    "bandwidth",
    "floor_seconds",
    "one_row_seconds",
    "floor_ratio",
    "rows",
    "contexts",
    "pass_seconds",
    "batches",
    "batch_seconds",
    "drafters",
    "roofline",
    "repeats",
}


@pytest.fixture
def passes(capsys, monkeypatch, tmp_path):
    """Runs the command as the only one of an application, with numbers that do not take time."""
    app = typer.Typer()
    app.callback()(lambda: None)
    add(app, bench_passes.passes, bench_passes.EXAMPLES)
    monkeypatch.setattr("outpace.cli.main.app", app)
    monkeypatch.setattr(measured, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(roofline, "read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(roofline, "flop_rate", lambda dtype, device: 2e9)

    def run(*arguments):
        capsys.readouterr()
        code = main(("passes", *arguments))
        return code, *capsys.readouterr()

    return run


def test_json_holds_all_that_was_measured(passes):
    drafters = "none,draft_model[model=tiny layers=1 tree=chain]"
    code, out, err = passes(*FEW, "--json", "--drafters", drafters)
    assert code == 0, err
    got = json.loads(out)
    assert set(got) == KEYS
    assert got["rows"] == [1, 4] and got["contexts"] == [10, 60] and got["batches"] == [1, 2]
    assert [len(line) for line in got["pass_seconds"] + got["batch_seconds"]] == [2] * 4
    assert got["weight_bytes"] == tiny(dtype=torch.float32).weight_bytes
    assert got["floor_seconds"] == got["weight_bytes"] / got["bandwidth"] == (got["weight_bytes"] / 1e9)
    assert got["one_row_seconds"] == got["pass_seconds"][0][0]
    assert got["floor_ratio"] == got["one_row_seconds"] / got["floor_seconds"]
    drafts = got["drafters"]["draft_model[layers=1 model=tiny tree=chain]"]
    assert drafts["draft_passes"] == drafts["depths"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert drafts["level_share"] == drafts["level_seconds"] / got["one_row_seconds"] > 0
    assert got["drafters"]["none"]["level_share"] == 0
    assert got["roofline"]["measured"]["peak"] == 2e9
    # Timings of a tiny model: which of the two fits better is chance.
    assert all(0 <= got["roofline"][way]["error"] < 10 for way in ("fitted", "measured"))


def curve(**changes):
    return CostCurve(
        **{
            "model": "tiny",
            "dtype": "float32",
            "threads": 1,
            "device": "a machine",
            "rows_R": (1, 4),
            "context_C": (10, 60),
            "seconds_CR": ((0.01, 0.015), (0.02, 0.05)),
            "batch_B": (1, 2),
            "seconds_CB": ((0.01, 0.0125), (0.02, 0.03)),
            **changes,
        }
    )


def test_the_text_says_floor_ratios_and_shares(passes, monkeypatch):
    drafts = cost.DraftCost(
        spec="x", seconds_L=(0.001, 0.002), pass_seconds_L=(0.0005, 0.0015), passes_L=(1, 2), depth_L=(1, 2)
    )
    monkeypatch.setattr(cost, "measure", lambda target, **settings: curve())
    monkeypatch.setattr(cost, "measure_drafter", lambda method, target, repeat: drafts)
    code, out, _ = passes(*FEW, "--drafters", "none")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "tiny, float32, a machine, 1 thread; medians of 1"
    floor = tiny(dtype=torch.float32).weight_bytes / 1e9
    assert f"one row 10.00 ms at context 10: {0.01 / floor:.2f} x the floor" in lines
    assert any(line.startswith("roofline 2 GFLOP/s, 1.0 GB/s: one row") for line in lines)
    for row in (
        "1 10.00 1.00 20.00 1.00",
        "4 15.00 1.50 50.00 2.50",
        "2 12.50 1.25 30.00 1.50",
        "x 2 2.00 75% 1.00 0.100",
    ):
        assert row in lines


def test_only_the_default_points_are_kept_for_policies(passes, monkeypatch):
    monkeypatch.setattr(cost, "measure", lambda target, **settings: curve())
    target = tiny(dtype=torch.float32)
    assert passes(*FEW)[0] == 0
    assert cost.curve_for(target, measure_if_missing=False) is None
    threads = torch.get_num_threads()
    assert passes("--model", "tiny", "--dtype", "float32", "--threads", str(threads))[0] == 0
    assert cost.curve_for(target, measure_if_missing=False) == curve()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rows", "1,x"), "--rows '1,x' is no list of whole numbers from 1; give some, such as 1,2,4"),
        (("--rows", "0"), "--rows '0' is no list of whole numbers from 1"),
        (("--batches", "0"), "--batches '0' is no list of whole numbers from 1"),
        (("--contexts", "-1"), "--contexts '-1' is no list of whole numbers from 0"),
        (("--contexts", "5000"), "contexts must be between 0 and 896"),
        (("--repeat", "0"), "--repeat must be at least 1, got 0"),
        (("--drafters", "nobody_knows"), "unknown drafter 'nobody_knows'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(passes, arguments, said):
    code, out, err = passes("--model", "tiny", *arguments)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


def test_out_gets_json_and_plots(passes, tmp_path):
    folder = tmp_path / "a" / "b"
    code, out, err = passes(*FEW, "--json", "--out", str(folder))
    assert code == 0, err
    assert json.loads((folder / "passes.json").read_text()) == json.loads(out)
    assert (folder / "passes.png").read_bytes().startswith(b"\x89PNG")
    drawn = (folder / "passes.svg").read_text(encoding="utf-8")
    for words in ("context 10", "context 60", "floor: reading the weights", "fitted roofline"):
        assert words in drawn
    plots.draw({"passes": json.loads(out)}, tmp_path)
    assert (tmp_path / "passes.svg").read_text(encoding="utf-8") == drawn


def test_without_matplotlib_there_is_a_line_and_no_plot(passes, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(cost, "measure", lambda target, **settings: curve())
    code, _, err = passes(*FEW, "--out", str(tmp_path / "o"))
    assert code == 0 and err.splitlines()[-1] == (
        "no plots: matplotlib is not installed; try pip install 'outpace[plots]'"
    )
    assert [file.name for file in (tmp_path / "o").iterdir()] == ["passes.json"]
