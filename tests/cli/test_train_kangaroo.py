import json
from pathlib import Path

from tests.cli.support import trained_by_command

MODEL = ("--model", "tiny:7", "--dtype", "float32", "--threads", "1")


def test_from_prompts_to_a_measured_adapter_by_one_command(outpace, tmp_path, monkeypatch):
    """Answers, features at the exit, training, held-out acceptance, provenance, and a draft."""
    work = tmp_path / "work"
    made = trained_by_command(outpace, monkeypatch, tmp_path, "kangaroo", MODEL)
    told = json.loads((Path(made["folder"]) / "provenance.json").read_text())
    assert told["settings"]["options"]["exit_layer"] == 1 and told["vocab"]["size"] == 64
    assert [one.name for one in (work / "tokens" / "features").iterdir()] == ["hidden.-1+hidden.1"]
    texts = [
        outpace("generate", *MODEL, "--drafter", spec, "--max-new-tokens", "9", "--ignore-eos", "a")
        for spec in ("kangaroo[threshold=0]", "none")
    ]
    assert texts[0].code == 0 and texts[0].out == texts[1].out
    refused = outpace("train", "kangaroo", *MODEL, "--set", "exit_layer=2", "--work", str(work))
    assert refused.code == 2 and "exit_layer=2, but tiny:7 has 2 layers" in refused.err
