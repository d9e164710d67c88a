import json
from pathlib import Path

from outpace.cli import train
from outpace.methods.draft_model.acceptance_objective import Acceptance, AcceptanceTraining

MODEL = ("--model", "tiny:7", "--dtype", "float32", "--threads", "1")
SETTINGS = (
    "draft=tiny:7",
    "draft_layers=1",
    "pipeline.vocab=none",
    "pipeline.tokens_per_batch=256",
    "loop.steps=4",
    "loop.evaluate_every=2",
    "data.batch=32",
    "data.max_new_tokens=16",
)


def test_from_prompts_to_drafts_that_end_by_a_head(outpace, tmp_path, monkeypatch):
    """Answers, features, training, a measurement with the draft model it belongs to, a draft."""
    monkeypatch.setenv("OUTPACE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(train, "MEASURED_TOKENS", 12)
    prompts, work = tmp_path / "prompts.jsonl", tmp_path / "work"
    prompts.write_text("".join(json.dumps({"prompt": f"tell {i}"}) + "\n" for i in range(50)))
    settings = [word for pair in SETTINGS for word in ("--set", pair)]
    ran = outpace(
        "train",
        "acceptance",
        *MODEL,
        *settings,
        "--prompts",
        f"{prompts}::CC0",
        "--tokens",
        "600",
        "--work",
        str(work),
        "--json",
    )
    assert ran.code == 0, ran.err
    made, own = json.loads(ran.out), "model=tiny:7 layers=1"
    assert made["steps"] == 4 and 0.75 <= made["held_out"]["acceptance"][0] < 1
    spec = f"draft_model[{own} policy=specdecpp tree_size=20]"
    assert made["measured"]["method"] == spec and made["measured"]["mean_emitted"] >= 1
    said = json.loads((Path(made["folder"]) / "config.json").read_text())
    assert said["method"] == "acceptance" and said["draft_digest"].startswith(said["target_digest"])
    told = json.loads((Path(made["folder"]) / "provenance.json").read_text())
    assert told["held_out"]["acceptance"] and told["settings"]["options"]["weight"] == 6.0
    elsewhere = f"draft_model[{own} acceptance={made['folder']} policy=specdecpp tree_size=20]"
    options = AcceptanceTraining(draft="tiny:7", draft_layers=1)
    assert Acceptance.spec(options, Path(made["folder"])) == elsewhere
    texts = [
        outpace("generate", *MODEL, "--drafter", one, "--max-new-tokens", "9", "--ignore-eos", "a")
        for one in (elsewhere, spec, "none")
    ]
    assert texts[0].code == 0 and texts[0].out == texts[1].out == texts[2].out
