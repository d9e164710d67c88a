"""Block drafters in other programs' formats: written, read back, and refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace.drafters.features import TrainedConfig
from outpace.errors import ModelError
from outpace.methods.dflash.drafter import Dflash
from outpace.methods.dflash.dspark import Dspark
from outpace.methods.dflash.dspark_objective import DsparkObjective, DsparkTraining
from outpace.methods.dflash.files import read_block_drafter
from outpace.methods.dflash.jetspec import Jetspec
from outpace.methods.dflash.net import W1
from outpace.methods.dflash.objective import DflashObjective, DflashTraining
from outpace.models.tiny import tiny
from outpace.train.export import export
from outpace.train.llama import hf_config
from tests.methods.dflash.oracle import half

OWN = {"taps": "1,2", "slots": 4, "layers": 2, "mask": 7}


@pytest.fixture(scope="module")
def target():
    return tiny(dtype=torch.bfloat16)


def saved(target, folder, kind=DflashObjective, config=DflashTraining, **options):
    objective = kind.build(config(**OWN, **options), target, half(target))
    coins = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=coins))
    objective.save(folder, {})
    return folder


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_what_is_exported_is_read_back(target, tmp_path, method):
    kind = {"dflash": (), "dspark": (DsparkObjective, DsparkTraining)}[method]
    source = saved(target, tmp_path / "own", *kind)
    export(source, "speculators", tmp_path / "out", target, "owner/model")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["speculators_model_type"] == method and said["mask_token_id"] == 7
    assert said["aux_hidden_state_layer_ids"] == [1, 2] and said["block_size"] == 4
    assert said["sample_from_anchor"] is (method == "dspark")
    assert said["sliding_window_non_causal"] is True  # or vLLM's rows of a block see no later ones
    methods = said["speculators_config"]["proposal_methods"]
    assert methods[0]["speculative_tokens"] == (4 if method == "dspark" else 3)
    assert said["transformer_layer_config"]["model_type"] == "qwen3"
    first, again = (read_block_drafter(one, target, method) for one in (source, tmp_path / "out"))
    assert again.embed_VH is None and again.head_DH is None, "they are the target's"
    assert torch.equal(again.vocab.to_target_D, first.vocab.to_target_D)
    tensors = {name: one for name, one in first.tensors.items() if name != W1}
    assert all(torch.equal(again.tensors[name], one) for name, one in tensors.items())
    if method == "dspark":
        assert len(again.tensors[W1]) == target.vocab_size > len(first.tensors[W1])
        assert torch.equal(again.after(target.vocab_size), first.after(target.vocab_size))
        Dspark.load(TrainedConfig(model=str(tmp_path / "out")), target)
    other = {"dflash": "dspark", "dspark": "dflash"}[method]
    with pytest.raises(ModelError, match=f"of type '{method}', not '{other}'"):
        read_block_drafter(tmp_path / "out", target, other)


def test_what_no_format_can_say_is_refused(target, tmp_path):
    seeds = saved(target, tmp_path / "seeds", rows="seeds")
    with pytest.raises(ModelError, match="takes rows of masks alone; train it with --set rows=masks"):
        export(seeds, "speculators", tmp_path / "out", target, "owner/model")


@pytest.mark.parametrize("causal", [False, True])
def test_checkpoints_of_the_authors(target, tmp_path, causal):
    """A flat config, layers counted from 0, and neither vocabulary, embedding nor head."""
    own = read_block_drafter(saved(target, tmp_path / "own"), target)
    config = hf_config(own.shape.decoder) | {
        "block_size": 4,
        "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 7, "causal_head": causal},
    }
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: one.contiguous() for name, one in own.tensors.items()}, folder / "model.safetensors")
    kind, wrong = (Jetspec, Dflash) if causal else (Dflash, Jetspec)
    shape = kind.load(TrainedConfig(model=str(folder)), target).file.shape
    assert (shape.taps, shape.slots, shape.mask, shape.causal) == (("hidden.1", "hidden.2"), 4, 7, causal)
    assert not shape.from_anchor and shape.draft_vocab == target.vocab_size
    with pytest.raises(ModelError, match=f"not '{wrong.method}'"):
        wrong.load(TrainedConfig(model=str(folder)), target)


def test_a_head_of_its_own_is_used(target, tmp_path):
    source = saved(target, tmp_path / "own")
    export(source, "speculators", tmp_path / "out", target, "owner/model")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"] * 2}, file)
    read = read_block_drafter(tmp_path / "out", target)
    y_TH = torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(1))
    wanted = 2 * target.head(y_TH.to(target.dtype), read.vocab).float()
    torch.testing.assert_close(read.head(target)(y_TH).float(), wanted, atol=0.05, rtol=0.05)
    for wrong, message in (
        ({"mask_token_id": None}, "need the id of the mask token"),
        ({"aux_hidden_state_layer_ids": [1, 9]}, "reads features of layers"),
        ({"projector_type": "domino"}, "Markov heads are vanilla or none"),
    ):
        said = json.loads((tmp_path / "out" / "config.json").read_text())
        place = tmp_path / "wrong"
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps({**said, **wrong}))
        (place / "model.safetensors").write_bytes(file.read_bytes())
        with pytest.raises(ModelError, match=message):
            read_block_drafter(place, target)
