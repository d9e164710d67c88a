import json
from pathlib import Path

from outpace.cli import train

MODEL = ("--model", "tiny:7", "--dtype", "float32", "--threads", "1")
SETTINGS = (
    "exit_layer=1", "kit.vocab=64", "kit.tokens_per_batch=256", "loop.steps=4",
    "loop.evaluate_every=4", "data.batch=32", "data.max_new_tokens=16",
)  # fmt: skip


def test_from_prompts_to_a_measured_adapter_by_one_command(outpace, tmp_path, monkeypatch):
    """Answers, features at the exit, training, held-out acceptance, provenance, and a draft."""
    monkeypatch.setenv("OUTPACE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(train, "MEASURED_TOKENS", 12)
    prompts, work = tmp_path / "prompts.jsonl", tmp_path / "work"
    prompts.write_text("".join(json.dumps({"prompt": f"tell {i}"}) + "\n" for i in range(120)))
    settings = [word for pair in SETTINGS for word in ("--set", pair)]
    ran = outpace("train", "kangaroo", *MODEL, *settings, "--prompts", f"{prompts}::CC0",
                  "--tokens", "1500", "--work", str(work), "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    assert len(made["held_out"]["acceptance"]) == 5 and made["steps"] == 4
    assert made["measured"]["method"] == "kangaroo" and made["measured"]["mean_emitted"] >= 1
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
