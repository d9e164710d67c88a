"""``outpace export``: by folder and by method."""

import json

import pytest
from safetensors import SafetensorError

from outpace.drafters.trained import home
from outpace.methods.eagle3.objective import Eagle3, Eagle3Config
from outpace.models.tiny import tiny
from outpace.train import llama


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTPACE_DATA", str(tmp_path / "data"))


@pytest.mark.parametrize("by_name", [True, False])
def test_a_head_by_folder_and_by_method(outpace, tmp_path, by_name):
    target = tiny()
    folder = home("eagle3", target) if by_name else tmp_path / "head"
    Eagle3.build(Eagle3Config(), target, None).save(folder, {})
    source = "eagle3" if by_name else str(folder)
    ran = outpace(
        "export",
        source,
        "--model",
        "tiny",
        "--format",
        "speculators",
        "--out",
        str(tmp_path / "out"),
        "--verifier",
        "owner/model",
    )
    assert ran.code == 0, ran.err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/model"
    assert "model.safetensors: " in ran.out and " bytes" in ran.out
    again = (
        "export",
        source,
        "--model",
        "tiny",
        "-f",
        "speculators",
        "-o",
        str(tmp_path / "again"),
        "--json",
    )
    nameless = outpace(*again)
    assert nameless.code == 2 and "add --verifier" in nameless.err and not (tmp_path / "again").exists()
    again = outpace(*again, "--verifier", "owner/model")
    found = json.loads(again.out)
    assert found["format"] == "speculators" and found["written"] == {
        str(path): path.stat().st_size for path in (tmp_path / "again").iterdir()
    }


def test_bad_input(outpace, tmp_path):
    out = ("--out", str(tmp_path / "out"), "--model", "tiny")
    ran = outpace("export", "eagle3", "--format", "speculators", *out)
    assert ran.code == 2 and "no trained eagle3 for tiny" in ran.err
    Eagle3.build(Eagle3Config(), tiny(), None).save(tmp_path / "head", {})
    ran = outpace("export", str(tmp_path / "head"), "--format", "gguf", *out)
    assert ran.code == 2 and "cannot be written as 'gguf'; known: speculators, eagle3, hf" in ran.err
    assert ran.err.count("\n") == 1


def test_names_are_checked_before_a_model_is_loaded(outpace, tmp_path, monkeypatch):
    def load(*args, **more):
        raise AssertionError("nothing is to be loaded")

    monkeypatch.setattr("outpace.models.load.load_target", load)
    out = ("--out", str(tmp_path / "out"))
    ran = outpace("export", "eagle3", "--format", "foo", *out)
    assert ran.code == 2 and "eagle3 cannot be written as 'foo'; known: speculators, eagle3" in ran.err
    ran = outpace("export", "eagle4", "--format", "hf", *out)
    assert ran.code == 2 and "unknown method to export 'eagle4'; did you mean eagle3" in ran.err


def test_a_full_disk_leaves_no_half_of_a_folder(outpace, tmp_path, monkeypatch):
    def full(*args, **more):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    Eagle3.build(Eagle3Config(), tiny(), None).save(tmp_path / "head", {})
    monkeypatch.setattr(llama, "save_file", full)
    out = tmp_path / "more" / "out"
    ran = outpace(
        *("export", str(tmp_path / "head"), "--model", "tiny", "-f", "speculators", "-o", str(out)),
        *("--verifier", "owner/model"),
    )
    assert ran.code == 2 and ran.err.count("\n") == 1 and "No space left on device" in ran.err
    assert f"{out}/model.safetensors: No space" in ran.err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["head"]


@pytest.mark.parametrize("by_name", [True, False])
def test_what_no_other_program_reads_is_refused_at_once(outpace, tmp_path, by_name):
    """And not first for want of a drafter, then for its format."""
    source = "medusa"
    if not by_name:
        (tmp_path / "heads").mkdir()
        (tmp_path / "heads" / "config.json").write_text('{"method": "medusa"}')
        source = str(tmp_path / "heads")
    known = ("--format", "hf")
    for form in (known, ()) if by_name else (known,):
        ran = outpace("export", source, "--model", "tiny", *form, "--out", str(tmp_path / "out"))
        assert ran.code == 2 and ran.err.count("\n") == 1
        assert "no format of another program can say a drafter of medusa; those of" in ran.err
    ran = outpace("export", "eagle3", "--out", str(tmp_path / "out"))
    assert ran.code == 2 and "no --format for eagle3; give " in ran.err
