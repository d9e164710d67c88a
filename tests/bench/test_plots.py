"""Plots: what a report holds is in the pictures, and what it lacks is left out."""

import random

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from matplotlib.image import imread

from outpace.bench import plots
from outpace.bench.records import VERBS

LONG = "draft_model[model=/a/very/long/path/to/some/model/in/a/folder tree=dynamic tree_size=64]"
PASSES = {
    "rows": [1, 2, 4],
    "contexts": [100, 500],
    "floor_seconds": 0.012,
    "pass_seconds": [[0.02, 0.021, 0.022], [0.022, 0.024, 0.027]],
}


def row(method, kind="drafter", speedup=1.5, **more):
    cell = {"speedup": speedup, "speedup_interval": [speedup - 0.1, speedup + 0.2]}
    return {
        "method": method,
        "kind": kind,
        **cell,
        "groups": {"code": dict(cell), "edit": dict(cell)},
        "acceptance_by_depth": None,
        "verb_shares": None,
        **more,
    }


def shares(**some):
    return dict.fromkeys(VERBS, 0.0) | some


def report(**more):
    return {
        "rows": [
            row("none", speedup=1.0, verb_shares=shares(score_pass=0.95, other=0.05)),
            row(
                "prompt_lookup",
                acceptance_by_depth=[0.7, 0.4, 0.0],
                verb_shares=shares(draft_host=0.2, score_pass=0.8),
            ),
            row("eagle3[tree=dynamic tree_size=32]", acceptance_by_depth=[0.9, 0.5], reproducible=True),
            row("openvino", "peer", 1.1),
            row("cost$of$x", synthetic=True, speedup_interval=None),
            row("hf", "peer") | {"speedup": None, "groups": {}},
            row(LONG, verb_shares=shares(draft_pass=0.5, score_pass=0.5)),
        ],
        "noise_floor": {"speedup_interval": [0.99, 1.02]},
        "provenance": {"model": "tiny", "dtype": "float32", "threads": 2},
        **more,
    }


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plots") / "new"
    return folder, plots.draw(report(passes=PASSES), folder)


def svg(drawn, name):
    return (drawn[0] / f"{name}.svg").read_text(encoding="utf-8")


def test_every_picture_is_written_as_png_and_svg(drawn):
    folder, paths = drawn
    names = ["speedup", "acceptance", "verbs", "passes"]
    assert paths == [folder / f"{name}.{kind}" for name in names for kind in ("png", "svg")]
    for path in paths:
        start = path.read_bytes()[:8]
        assert start == b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else start[:5] == b"<?xml"


def test_speedup_names_methods_categories_and_the_reference(drawn):
    text = svg(drawn, "speedup")
    for words in (
        "prompt_lookup",
        "eagle3[tree=dynamic",
        "reproducible",
        "openvino (peer)",
        "cost$of$x (synthetic)",
        "all",
        "code",
        "edit",
        "none = 1.0",
        "none against none",
        "tiny, float32, 2 threads",
    ):
        assert words in text, words
    assert ">hf (peer)<" not in text  # it has no speed-up


def test_the_line_at_one_is_in_view_whatever_the_speedups():
    for speedup in (0.3, 4.0):
        figure = Figure()
        assert plots._speedup(figure, {"rows": [row("x", speedup=speedup)]})
        low, high = figure.axes[0].get_xlim()
        assert low < 1.0 < high
        assert low < speedup - 0.1
        assert high > speedup + 0.2


def test_methods_differ_in_colour_or_marker_and_peers_are_hollow():
    rows = [row(f"m{i}", "peer" if i == 3 else "drafter") for i in range(20)]
    figure = Figure()
    plots._speedup(figure, {"rows": rows})
    lines = [box.lines[0] for box in figure.axes[0].containers]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 20
    assert [line.get_markerfacecolor() == "white" for line in lines].index(True) == 3


def test_acceptance_shows_the_figures_by_depth():
    figure = Figure()
    assert plots._acceptance(figure, report())
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert lines["prompt_lookup"] == [[1, 0.7], [2, 0.4], [3, 0.0]]
    assert len(lines) == 2


def test_verbs_are_stacked_to_one():
    figure = Figure()
    rng = random.Random(0)
    parts = [rng.random() for _ in VERBS]
    told = {verb: part / sum(parts) for verb, part in zip(VERBS, parts, strict=True)}
    assert plots._verbs(figure, {"rows": [row("a", verb_shares=told), row("hf", "peer")]})
    bars = figure.axes[0].patches
    assert [bar.get_width() for bar in bars] == pytest.approx(list(told.values()))
    ends = [bar.get_x() + bar.get_width() for bar in bars]
    assert [bar.get_x() for bar in bars][1:] == pytest.approx(ends[:-1])
    assert ends[-1] == pytest.approx(1.0)


def test_passes_show_milliseconds_and_the_floor(drawn):
    text = svg(drawn, "passes")
    for words in ("context 100", "context 500", "floor: reading the weights", "milliseconds"):
        assert words in text, words
    figure = Figure()
    plots._passes(figure, {"rows": [], "passes": PASSES})
    assert figure.axes[0].lines[0].get_ydata().tolist() == [20, 21, 22]


def test_what_a_report_lacks_is_left_out(tmp_path):
    assert plots.draw({"rows": [row("none", speedup=1.0)]}, tmp_path / "a") == []
    assert not (tmp_path / "a").exists()


def test_nothing_is_clipped(drawn):
    """Ink that reached the edge of a picture would have been cut there."""
    for path in drawn[1]:
        if path.suffix == ".png":
            image = imread(path)[..., :3]
            edges = (image[:2], image[-2:], image[:, :2], image[:, -2:])
            assert all((edge == 1.0).all() for edge in edges), path.name
            assert image.min() < 0.2, path.name


def test_equal_reports_give_equal_files(drawn, tmp_path):
    for path in plots.draw(report(), tmp_path):
        if path.suffix == ".svg":
            assert path.read_bytes() == (drawn[0] / path.name).read_bytes()


def test_without_matplotlib_there_is_one_line(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(plots, "import_module", missing)
    told = []
    assert plots.draw(report(), tmp_path, note=told.append) == []
    assert told == ["no plots: matplotlib is not installed; try pip install 'outpace[plots]'"]


def test_few_drafts_are_dotted_and_titles_say_what_was_asked():
    figure = Figure()
    rows = [row("suffix", acceptance_by_depth=[0.7, 0.4, 1.0], drafted_by_depth=[200, 30, 3])]
    about = {"model": "tiny", "prompts": 8, "config": {"workload": "builtin", "temperature": 0.7}}
    assert plots._acceptance(figure, {"rows": rows, "provenance": about})
    (axes,) = figure.axes
    sure, few = axes.lines
    assert sure.get_xydata().tolist() == [[1, 0.7], [2, 0.4]] and sure.get_linestyle() == "-"
    assert few.get_xydata().tolist() == [[2, 0.4], [3, 1.0]] and few.get_linestyle() == ":"
    assert "fewer than 20 drafts" in axes.get_xlabel()
    assert "n = 8 prompts of builtin, temperature 0.7" in axes.get_title(loc="left").replace("\n", " ")
