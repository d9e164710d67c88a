"""The page of predictions comes from figures, and the tools count what they say."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool():
    return load("predict_figures")


def row(tool, point, predicted, **more):
    return {
        "model": tool.FIRST,
        "form": "stored",
        "calibrated_with": tool.FIRST,
        "kind": tool.kind(point),
        "rows": point.rows,
        "context": point.context,
        "batch": point.batch,
        "measured": 0.010,
        "predicted": predicted,
        **more,
    }


@pytest.fixture
def figures(tool):
    off = [0.0108 if point.rows % 2 else 0.0095 for point in tool.points()]
    drafter = {
        "drafter": "draft_model",
        "guesses": 2,
        "acceptance": [0.5, 0.25],
        "cost": 0.2,
        "emitted_predicted": 1.6,
        "emitted_measured": 1.55,
        "predicted": 1.2,
        "measured": 1.0,
        "interval": [0.9, 1.1],
        "form": "stored",
        "prompts": 8,
    }
    return {
        "cpu": "a processor",
        "threads": 2,
        "date": "2026-01-02T03:04:05+00:00",
        "repeat": 7,
        "cpu_time": False,
        "command": "python tools/predict_figures.py --threads 2",
        "passes": [row(tool, p, one) for p, one in zip(tool.points(), off, strict=True)],
        "drafters": [drafter],
    }


def test_nothing_that_calibrates_is_predicted(tool):
    assert not set(tool.points()) & set(tool.POINTS) and len(set(tool.points())) == len(tool.points())
    assert {tool.kind(point) for point in tool.points()} == {"verification", "batches", "prompts"}


def test_the_block_holds_errors_and_the_command(tool, figures):
    block = tool.render(figures)
    lines = block.splitlines()
    assert lines[0] == tool.BEGIN and lines[-1] == tool.END
    assert f"over {len(tool.points()) + 1} figures" in block and "a processor, 2 threads, 2026-01-02" in block
    assert "| smollm2-135m | stored | smollm2-135m | speed-ups | 1 | 20.0% | 20% | 0% |" in lines
    (found,) = [line for line in lines if "| verification |" in line]
    assert found.endswith(" | 21 | 5.0% | 8% | 100% |")
    assert "python tools/predict_figures.py --threads 2" in lines
    assert any(
        line.startswith("| draft_model | 2 | 0.50 0.25 | 0.20 | 1.60 | 1.55 | 1.20 | 1.00") for line in lines
    )


def test_the_page_takes_a_block_and_no_other_page_does(tool, figures):
    page = tool.PAGE.read_text(encoding="utf-8")
    block = tool.render(figures)
    assert tool.replaced(tool.replaced(page, block), block) == tool.replaced(page, block)
    with pytest.raises(ValueError, match="must hold"):
        tool.replaced("# A page\n", block)


def test_a_page_is_written_from_figures_that_are_there(tool, figures, tmp_path, capsys, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n{tool.BEGIN}\n{tool.END}\n\nMore.\n")
    monkeypatch.setattr(tool, "PAGE", page)
    file = tmp_path / "figures.json"
    file.write_text(json.dumps(figures))
    assert tool.main(["--from", str(file), "--print"]) == 0 and "Median" not in page.read_text()
    assert tool.main(["--from", str(file)]) == 0
    assert "**Median error" in page.read_text() and page.read_text().endswith("More.\n")
    assert tool.main(["--from", str(tmp_path / "nothing.json")]) == 1
    assert "error: " in capsys.readouterr().err


def test_a_size_that_was_kept_out_is_predicted(capsys):
    from tests.analysis.test_scaling import TRUE, made

    drafters = load("scaling_drafters")
    points = [{"weights": p.weights, "tokens": p.tokens, "loss": p.loss} for p in made(noise=0.001)]
    other = {"weights": 2e8, "tokens": 1e10, "loss": TRUE.loss(2e8, 1e10)}
    found = drafters.check(points, other)
    assert found["predicted_loss"] == pytest.approx(other["loss"], rel=0.01)
    assert "off by" in capsys.readouterr().out
