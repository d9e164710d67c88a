import json

from outpace.cli import train
from outpace.drafters.own.early_exit import EarlyExit, EarlyExitConfig
from outpace.models.load import load_target

MODEL = ("--model", "tiny:8", "--dtype", "float32", "--threads", "1")
SETTINGS = (
    "exit_layer=1", "kit.vocab=64", "kit.tokens_per_batch=256", "loop.steps=4",
    "loop.evaluate_every=4", "data.batch=32", "data.max_new_tokens=16",
)  # fmt: skip


def test_what_was_trained_is_found_by_its_name(outpace, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTPACE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(train, "MEASURED_TOKENS", 12)
    prompts, work = tmp_path / "prompts.jsonl", tmp_path / "work"
    prompts.write_text("".join(json.dumps({"prompt": f"tell {i}"}) + "\n" for i in range(120)))
    settings = [word for pair in SETTINGS for word in ("--set", pair)]
    ran = outpace("train", "early_exit", *MODEL, *settings, "--prompts", f"{prompts}::CC0",
                  "--tokens", "1500", "--work", str(work), "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    assert len(made["held_out"]["acceptance"]) == 5 and made["steps"] == 4
    assert made["measured"]["method"] == "early_exit" and made["measured"]["mean_emitted"] >= 1
    assert made["provenance"]["vocab"]["size"] == 64
    runs = {
        spec: outpace("generate", *MODEL, "--drafter", spec, "--max-new-tokens", "9",
                      "--ignore-eos", "--json", "a")
        for spec in ("early_exit", "early_exit[layer=1]", "none")
    }  # fmt: skip
    said = {spec: json.loads(ran.out) for spec, ran in runs.items()}
    assert len({str(one["tokens"]) for one in said.values()}) == 1
    target = load_target("tiny:8", dtype="float32")
    by_name, by_layer = (EarlyExit.load(config, target) for config in (
        EarlyExitConfig(), EarlyExitConfig(layer=1)
    ))  # fmt: skip
    assert by_name.rows is not None and by_name.layers == (1,)
    assert by_layer.rows is None, "a layer that is named is the target's own exit"
