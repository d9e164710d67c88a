"""Settings of a training at equal steps, on the smallest model: rows, tables, a page, and nothing twice."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.test_tools import tool  # noqa: F401
from tests.test_trained_table import SHARED, work  # noqa: F401


@pytest.fixture
def ablations(tool, monkeypatch):  # noqa: F811
    """The tool, whose stages run in this process; it notes them."""
    loaded = tool("ablations")
    loaded.done = []

    def alone(stage, asked, *row):
        loaded.done.append((stage.__name__, *row))
        stage(asked, *row)

    monkeypatch.setattr(loaded.trained_table, "alone", alone)
    monkeypatch.setattr(loaded.signal, "signal", lambda *_: None)
    return loaded


def given(work, out):  # noqa: F811
    shared = [word for one in SHARED for word in ("--set", one)]
    return ["--work", str(work), "--out", str(out), "--model", "tiny", *shared]


def test_settings_of_a_method_are_compared_with_its_own(ablations, work, tmp_path, capsys):  # noqa: F811
    asked = [*given(work, tmp_path), "--steps", "6"]
    rows = ["--try", "layers=1", "--try", "layers=1 loss=tv"]
    assert ablations.main(["draft_model", *asked, *rows]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[4:7]] == [
        "as it is",
        "`layers=1`",
        "`layers=1 loss=tv`",
    ]
    names = ["draft_model", "draft_model layers=1", "draft_model layers=1 loss=tv"]
    assert ablations.done == [("trained", name) for name in names]
    assert ablations.main(["draft_model", *asked, *rows, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["draft_model"]
    assert told["steps"] == 6 and [row["steps"] for row in told["rows"]] == [6, 6, 6]
    assert len({row["losses"][-1][1] for row in told["rows"]}) == 3
    assert len(ablations.done) == 3
    # Rows of other steps are other rows.
    assert (
        ablations.main(["draft_model", *given(work, tmp_path), "--steps", "2", "--page-only", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out) == {}


def test_a_study_of_a_probe_trains_three_rows_and_makes_a_page(
    ablations,
    work,  # noqa: F811
    tmp_path,
    capsys,
    monkeypatch,
):
    def probed(command, **more):
        digest = ablations.trained_table.Engine.load("tiny", drafter="none").target
        about = {"target_digest": digest.digest, "layers": "0,2"}
        save_file(
            {"fc.weight": torch.eye(digest.hidden_size).repeat(1, 2)}, tmp_path / "probe.safetensors", about
        )
        return type("Ended", (), {"returncode": 0})

    monkeypatch.setattr(ablations.subprocess, "run", probed)
    page = tmp_path / "docs" / "results" / "ablations.md"
    asked = ["two_stage", *given(work, tmp_path), "--steps", "2", "--page", str(page)]
    assert ablations.main(asked) == 0
    text = page.read_text()
    for row in ("as it is", "`taps=0,2`", "`two_stage=probe.safetensors`"):
        assert f"| {row} |" in text
    assert str(tmp_path) not in text and "`eagle3`, 2 steps" in text
    assert (tmp_path / "docs" / "images" / "ablations.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    "wrong", (["nonsense"], ["fspad", "--try", "steps=1"], ["fspad", "falcon", "--try", "a=1"])
)
def test_what_cannot_be_compared_is_said(ablations, work, tmp_path, capsys, wrong):  # noqa: F811
    assert ablations.main([*given(work, tmp_path), *wrong]) == 2
    assert "one method with --steps and --try" in capsys.readouterr().err


def test_every_study_can_be_read(ablations):
    from outpace.train.options import read_options

    for study in ablations.STUDIES:
        for row in study.rows:
            read_options(study.method, row.format(probe="p", layers="1,2").split())
        assert study.about and len(set(study.rows)) == len(study.rows)
