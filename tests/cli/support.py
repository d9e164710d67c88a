"""What tests of several commands share: a drafter behind an early layer, trained by one command."""

import json

from outpace.cli import train

SETTINGS = (
    "exit_layer=1",
    "pipeline.vocab=64",
    "pipeline.tokens_per_batch=256",
    "loop.steps=4",
    "loop.evaluate_every=4",
    "data.batch=32",
    "data.max_new_tokens=16",
)


def trained_by_command(outpace, monkeypatch, folder, method, model):
    """Answers, features, a few steps and a measurement; gives what the command tells as JSON.

    User data lie in ``folder/data`` from now on, all that is kept for later in ``folder/work``.
    """
    monkeypatch.setenv("OUTPACE_DATA", str(folder / "data"))
    monkeypatch.setattr(train, "MEASURED_TOKENS", 12)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"tell {i}"}) + "\n" for i in range(120)))
    settings = [word for pair in SETTINGS for word in ("--set", pair)]
    ran = outpace(
        "train",
        method,
        *model,
        *settings,
        "--prompts",
        f"{prompts}::CC0",
        "--tokens",
        "1500",
        "--work",
        str(folder / "work"),
        "--json",
    )
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    assert len(made["held_out"]["acceptance"]) == 5 and made["steps"] == 4
    assert made["measured"]["method"] == method and made["measured"]["mean_emitted"] >= 1
    return made
