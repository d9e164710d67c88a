import json

from outpace.methods.early_exit.drafter import EarlyExit, EarlyExitConfig
from outpace.models.load import load_target
from tests.cli.support import trained_by_command

MODEL = ("--model", "tiny:8", "--dtype", "float32", "--threads", "1")


def test_what_was_trained_is_found_by_its_name(outpace, tmp_path, monkeypatch):
    made = trained_by_command(outpace, monkeypatch, tmp_path, "early_exit", MODEL)
    assert made["provenance"]["vocab"]["size"] == 64
    runs = {
        spec: outpace(
            "generate", *MODEL, "--drafter", spec, "--max-new-tokens", "9", "--ignore-eos", "--json", "a"
        )
        for spec in ("early_exit", "early_exit[layer=1]", "none")
    }
    said = {spec: json.loads(ran.out) for spec, ran in runs.items()}
    assert len({str(one["tokens"]) for one in said.values()}) == 1
    target = load_target("tiny:8", dtype="float32")
    by_name, by_layer = (
        EarlyExit.load(config, target) for config in (EarlyExitConfig(), EarlyExitConfig(layer=1))
    )
    assert by_name.rows is not None and by_name.layers == (1,)
    assert by_layer.rows is None, "a layer that is named is the target's own exit"
