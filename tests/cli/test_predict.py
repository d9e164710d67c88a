import json
import sys

import pytest

from outpace.analysis.prediction import calibration
from outpace.analysis.prediction.calibration import Timed, ops_of
from outpace.analysis.prediction.model import read
from outpace.analysis.roofline import Device, seconds
from outpace.cli import show
from outpace.cli.predict import speeds
from outpace.cli.predict_plots import by_rows, roofline
from outpace.models import measured
from tests.analysis.test_scaling import made

TINY = ("predict", "--config", "tiny", "--prompt", "32")
HERE = Device(name="here", peak=100e9, bandwidth=20e9, attend=80e9, traffic=15e9, call=2e-4, overlaps=())


@pytest.fixture
def here(monkeypatch, tmp_path):
    """This machine, with times that are computed."""
    monkeypatch.setattr(measured, "cache_folder", lambda: tmp_path / "cache")

    def times(target, points):
        shape = read(target.name, dtype="float32")
        spent = [seconds(ops_of(shape, point), HERE) for point in points]
        return Timed(model=target.name, passes=tuple(zip(points, spent, strict=True)), host=1e-4)

    monkeypatch.setattr(calibration, "time_passes", times)
    return ("--device", "cpu-here", "--dtype", "float32", "--calibrate-with", "tiny")


def test_json_holds_the_whole_prediction(outpace):
    ran = outpace(*TINY, "--device", "h100", "--batch", "2", "--rows", "3,5", "--json")
    assert ran.code == 0, ran.err
    got = json.loads(ran.out)
    assert got["verify"]["rows"] == [1, 3, 5] and got["verify"]["ratios"][0] == 1
    assert got["prefill"]["prompt"] == got["decode"]["context"] == 32 and got["drafter"] is None
    assert got["device"]["calibration"] is None and "datasheet" in got["device"]["source"]
    assert got["memory"]["total_bytes"] == got["memory"]["resident_bytes"] + got["memory"]["kv_bytes"]
    assert [one["batch"] for one in got["batches"]] == [1, 2, 4, 16]
    shape = read("tiny", kind="cuda")
    device = Device(name="h", peak=got["device"]["record"]["peak"]["bfloat16"], bandwidth=3350e9)
    assert got["decode"]["seconds"] == pytest.approx(shape.seconds(device, context=32, batch=2))


def test_this_machine_is_timed_once(outpace, here):
    first, again = (outpace(*TINY, *here, "--json") for _ in range(2))
    assert first.code == again.code == 0, first.err + again.err
    one, two = (json.loads(ran.out)["device"] for ran in (first, again))
    assert one["calibration"].pop("timed_now") and not two["calibration"].pop("timed_now")
    assert one == two and one["calibration"]["misfit"] < 0.01
    assert len(one["calibration"]["passes"]) == 7


def test_a_fitted_device_predicts_elsewhere_what_it_predicts_here(outpace, here, tmp_path):
    ran = outpace(*TINY, *here, "--json", "--out", str(tmp_path / "o"))
    file = tmp_path / "o" / "device.json"
    other = outpace(*TINY, "--dtype", "float32", "--device", str(file), "--json")
    assert other.code == 0, other.err
    mine, theirs = json.loads(ran.out), json.loads(other.out)
    assert mine["decode"]["operators"] == theirs["decode"]["operators"]


def test_the_text_says_what_a_drafter_gains(outpace, here):
    ran = outpace(*TINY, *here, "--acceptance", "0.9,0.8", "--drafter-cost", "0.1", "--tree", "2x1")
    assert ran.code == 0, ran.err
    for words in ("decode, context 32", "bound by", "best tree", "tree asked for", "One guess gains up to"):
        assert words in ran.out
    rows = [line.split() for line in ran.out.splitlines()]
    (two,) = [row for row in rows if row[:3] == ["chain", "2", "2"]]
    assert two[3] == f"{1 + 0.9 + 0.9 * 0.8:.2f}"


def test_a_drafters_cost_is_predicted_from_its_config(outpace, here):
    ran = outpace(*TINY, *here, "--acceptance", "0.5", "--draft-config", "tiny", "--json")
    assert ran.code == 0, ran.err
    # The target itself, which costs a step of its own.
    assert json.loads(ran.out)["drafter"]["cost"] == pytest.approx(1.0)


def test_a_full_disk_costs_files_and_no_figures(outpace, tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(show, "write_whole", full)
    ran = outpace(*TINY, "--device", "a100", "--json", "--out", str(tmp_path / "o"))
    assert ran.code == 2 and "No space left on device" in ran.err and not (tmp_path / "o").exists()
    assert json.loads(ran.out)["decode"]["seconds"] > 0


def test_figures_that_cannot_be_printed_are_written(outpace, tmp_path, monkeypatch):
    def gone(value):
        raise BrokenPipeError

    monkeypatch.setattr(show, "write_json", gone)
    ran = outpace(*TINY, "--device", "a100", "--json", "--out", str(tmp_path))
    assert ran.code == 141 and {"predict.json", "device.json"} <= {one.name for one in tmp_path.iterdir()}


def test_pictures_are_drawn(outpace, tmp_path):
    ran = outpace(*TINY, "--device", "a100", "--acceptance", "0.7", "--out", str(tmp_path / "o"))
    assert ran.code == 0, ran.err
    for name in ("roofline", "rows", "speedup"):
        assert (tmp_path / "o" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "prediction" in (tmp_path / "o" / f"{name}.svg").read_text(encoding="utf-8")
    assert "gate, up" in (tmp_path / "o" / "roofline.svg").read_text(encoding="utf-8")


def test_no_label_lies_over_another(outpace):
    report = json.loads(outpace(*TINY, "--device", "h100", "--json").out)
    for phase in (report["decode"], report["prefill"]):
        for index, one in enumerate(phase["operators"]):
            one.update(flops=1e9, bytes=1e9, seconds=phase["seconds"] * 1.4**-index)
    figure = drawn(roofline, report)
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) > 3
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_limit_that_no_pass_showed_is_no_speed(outpace):
    assert speeds(3.02e11, 2e10) == "302 GFLOP/s, 20.0 GB/s"
    assert speeds(3.02e11, calibration.FREE) == "302 GFLOP/s, reading weights limited no pass"
    report = json.loads(outpace(*TINY, "--device", "a100", "--dtype", "float32", "--json").out)
    report["device"]["record"]["bandwidth"] = calibration.FREE
    low, _ = drawn(roofline, report).axes[0].get_xlim()
    assert low > 1e-4  # operators are in sight, no ridge is


def drawn(picture, report):
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    assert picture(figure, report)
    figure.draw_without_rendering()
    return figure


def test_the_times_of_a_pass_can_be_read_off(outpace):
    report = json.loads(outpace(*TINY, "--device", "a100", "--json").out)
    report["batches"] = [dict(batch=1, pass_seconds=[(2.2 + i / 10) * 1e-3 for i in range(7)])]
    figure = drawn(by_rows, report)
    low, high = figure.axes[0].get_ylim()
    ticks = figure.axes[0].yaxis.get_ticklabels()
    assert "2.5" in [one.get_text() for one in ticks if low <= one.get_position()[1] <= high]


def test_without_matplotlib_there_are_no_pictures(outpace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = outpace(*TINY, "--device", "a100", "--out", str(tmp_path / "o"))
    assert ran.code == 0 and "matplotlib is not installed" in ran.err
    assert sorted(file.name for file in (tmp_path / "o").iterdir()) == ["device.json", "predict.json"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "b200"), "unknown device 'b200'"),
        (("--out", "/dev/null"), "/dev/null: Not a directory"),
        (("--config", "./nowhere"), "no model at ./nowhere: no such file or folder"),
        (("--rows", "1,x"), "--rows '1,x' is no list of whole numbers above 0"),
        (("--rows", "0"), "--rows '0' is no list of whole numbers above 0"),
        (("--batch", "0"), "--batch must be at least 1, got 0"),
        (("--context", "5000"), "more than the 1024 positions of tiny; give --context 960 or less"),
        (("--rows", "1,1025"), "1025 rows behind it are more than the 1024 positions of tiny; give fewer"),
        (("--prompt", "1025"), "--prompt must be at most 1024, the positions of tiny, got 1025"),
        (("--dtype", "int7"), "unknown dtype 'int7'"),
        (("--kv-dtype", "int4"), "unknown KV cache dtype 'int4'"),
        (("--drafter-cost", "0.1"), "needs --acceptance"),
        (("--acceptance", "1.5"), "--acceptance '1.5' is no list of shares from 0 to 1"),
        (("--acceptance", "0.5", "--drafter-cost", "-1"), "--drafter-cost must be from 0"),
        (("--acceptance", "0.5", "--sibling", "2"), "--sibling must be from 0 to 1, got 2"),
        (("--acceptance", "0.5", "--tree", "dynamic"), "give children per level"),
        (("--acceptance", "0.5", "--drafter-cost", "1", "--draft-config", "tiny"), "give one"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(outpace, arguments, said):
    ran = outpace("predict", "--config", "tiny", "--prompt", "32", "--device", "a100", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err.splitlines()[-1]


def test_a_model_in_another_form_does_not_calibrate(outpace):
    ran = outpace("predict", "--config", "smollm2-135m", "--dtype", "stored", "--calibrate-with", "tiny")
    assert ran.code == 2 and "its weights would be" in ran.err


# ---- outpace analyze scaling ----


@pytest.fixture
def points(tmp_path):
    rows = [
        {"weights": p.weights, "tokens": p.tokens, "loss": p.loss, "acceptance": [1 - 0.12 * p.loss]}
        for p in made(noise=0.002)
    ]
    file = tmp_path / "points.json"
    file.write_text(json.dumps(rows))
    return file


def test_a_law_is_fitted_and_drawn(outpace, points, tmp_path):
    asked = ("analyze", "scaling", str(points), "--samples", "20", "--at", "1e9,1e11")
    ran = outpace(*asked, "--json", "--out", str(tmp_path / "o"))
    assert ran.code == 0, ran.err
    got = json.loads(ran.out)
    low, high = got["law"]["power"]["interval"]
    assert low <= got["law"]["power"]["value"] <= high and got["left_out_error"] < 0.05
    assert len(got["points"]) == 6 and got["plan"] is None
    (one,) = got["predictions"]
    assert one["interval"][0] <= one["loss"] <= one["interval"][1]
    assert (tmp_path / "o" / "scaling.png").read_bytes().startswith(b"\x89PNG")
    text = outpace(*asked)
    assert "points left out are off by" in text.out and "1e+09 weights, 1e+11 tokens: loss" in text.out


def test_a_plan_needs_shapes(outpace, points, tmp_path):
    asked = ("analyze", "scaling", str(points), "--samples", "20", "--plan", "tiny", "--device", "a100")
    ran = outpace(*asked)
    assert ran.code == 2 and "no point has the shape of its drafter" in ran.err
    from outpace.drafters.trained import decoder_to_json

    shape = decoder_to_json(read("tiny").config)
    rows = [row | {"shape": shape} for row in json.loads(points.read_text())]
    points.write_text(json.dumps(rows))
    ran = outpace(*asked, "--json", "--context", "64", "--out", str(tmp_path / "o"))
    assert ran.code == 0, ran.err
    plan = json.loads(ran.out)["plan"]
    assert plan["bridge"]["v"] == pytest.approx(1.0, abs=0.05)
    speedups = [one["speedup"] for one in plan["choices"]]
    assert speedups == sorted(speedups, reverse=True) and len(speedups) == 4 * (6 + 2)
    assert "drafters for tiny" in outpace(*asked, "--context", "64").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--at", "5"), "--at '5' is no pair of weights and tokens"),
        (("--tokens", "x"), "--tokens 'x' is no list of numbers above 0"),
        (("--samples", "1"), "--samples must be at least 20, got 1"),
    ],
)
def test_bad_input_of_a_law_is_one_line(outpace, points, arguments, said):
    ran = outpace("analyze", "scaling", str(points), *arguments)
    assert ran.code == 2 and said in ran.err


def test_a_file_of_points_that_is_not_there(outpace):
    ran = outpace("analyze", "scaling", "nothing.csv")
    assert ran.code == 2 and "nothing.csv" in ran.err
