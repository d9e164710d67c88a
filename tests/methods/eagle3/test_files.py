"""EAGLE heads in every format that can be read, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from outpace import Engine, ModelError
from outpace.drafters.features import TrainedConfig
from outpace.drafters.trained import read_embedding
from outpace.law import VocabMap
from outpace.methods.eagle3.drafter import Eagle3
from outpace.methods.eagle3.files import read_head
from outpace.methods.eagle3.objective import Eagle3 as Objective
from outpace.methods.eagle3.objective import Eagle3Config as Training
from outpace.models.tiny import TableTarget, tiny
from tests.methods.eagle3.foreign import ids, offsets, plain, speculators, write
from tests.methods.eagle3.oracle import random_tensors, shape_for


@pytest.fixture(scope="module")
def target():
    return tiny()


def same(head, shape, tensors, target):
    assert head.shape == shape
    assert head.tensors.keys() == shape.tensor_shapes().keys()
    for name, one in head.tensors.items():
        assert torch.equal(one, tensors[name]), name
    if shape.fused:
        assert head.id_D.tolist() == ids(target).tolist()


def test_what_the_kit_writes(target, tmp_path):
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[ids(target)] = torch.arange(len(ids(target)))
    objective = Objective.build(Training(), target, VocabMap(ids(target), feed_V))
    objective.save(tmp_path, {})
    head = read_head(tmp_path, target)
    assert head.shape.taps == ("hidden.2", "hidden.1", "hidden.1") and head.embed_VH is None
    assert head.shape.decoder == objective.shape
    stored = load_file(tmp_path / "model.safetensors")
    same(head, head.shape, stored, target)


@pytest.mark.parametrize(
    "theirs,ours",
    [
        ({}, {}),
        ({"norm_before_residual": True}, {"residual_normed": True}),
        ({"norm_output": True, "fc_norm": True}, {"output_normed": True, "each_norm": True}),
        ({"norm_before_fc": True}, {"joint_norm": True}),
    ],
)
def test_speculators(target, tmp_path, theirs, ours):
    shape = shape_for(target, draft_vocab=len(ids(target)), **ours)
    tensors = random_tensors(shape)
    write(tmp_path, speculators(target, **theirs), tensors | offsets(target))
    same(read_head(tmp_path, target), shape, tensors, target)


@pytest.mark.parametrize("pickled", [False, True])
def test_eagle_3_of_its_authors(target, tmp_path, pickled):
    shape = shape_for(target, draft_vocab=len(ids(target)))
    tensors = random_tensors(shape)
    named = {name.replace("layers.0.", "midlayer."): one for name, one in tensors.items()}
    config = plain(target, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 0, -1]})
    write(tmp_path, config, named | offsets(target), pickled)
    same(read_head(tmp_path, target), shape, tensors, target)
    # Without numbers: behind layers 2, L / 2 and L - 3, which a model of two layers lacks.
    (tmp_path / "config.json").write_text(json.dumps(plain(target)))
    deep = tiny(layers=8)
    taps = ("hidden.2", "hidden.4", "hidden.5")
    same(read_head(tmp_path, deep), replace(shape, taps=taps), tensors, deep)


@pytest.mark.parametrize("bias", [False, True])
def test_eagle_1_and_2(target, tmp_path, bias):
    shape = shape_for(target, taps=("hidden.-1",), draft_vocab=target.vocab_size, fused=False, fc_bias=bias)
    tensors = random_tensors(shape)
    embed = {"embed_tokens.weight": read_embedding(target)}
    config = plain(target, architectures=["LlamaForCausalLM"])
    config.pop("draft_vocab_size")
    write(tmp_path, config, tensors | embed, pickled=True)
    head = read_head(tmp_path, target)
    same(head, shape, tensors, target)
    assert head.id_D is None and head.embed_VH is None, "the target's own embedding is borrowed"
    engine = Engine(target, drafter="none")
    settings = {"max_new_tokens": 20, "ignore_eos": True}
    spec = f"eagle3[model={tmp_path} tree=3x2]"
    fast = engine.generate([5, 9, 11, 5], drafter=spec, **settings)
    assert fast.tokens == engine.generate([5, 9, 11, 5], drafter="none", **settings).tokens
    assert fast.counters.drafted > 20


def test_an_embedding_of_its_own(target, tmp_path):
    shape = shape_for(target, draft_vocab=len(ids(target)))
    tensors = random_tensors(shape)
    own = read_embedding(target).flip(0).contiguous()
    write(tmp_path, speculators(target), tensors | offsets(target) | {"embed_tokens.weight": own})
    drafter = Eagle3.load(TrainedConfig(model=str(tmp_path)), target)
    assert torch.equal(drafter.net._embed([3, 4]), own[[3, 4]].float())
    write(tmp_path, speculators(target), tensors | offsets(target) | {"embed_tokens.weight": own[:9]})
    with pytest.raises(ModelError, match=r"'embed_tokens.weight' has shape \[9, 64\]"):
        read_head(tmp_path, target)


def broken(target, change):
    """Config and tensors of a head with one fault."""
    shape = shape_for(target, draft_vocab=len(ids(target)))
    config, tensors = speculators(target), random_tensors(shape) | offsets(target)
    change(config, tensors)
    return config, tensors


def layer(config, **changes):
    config["transformer_layer_config"] = config["transformer_layer_config"] | changes


FAULTS = [
    (lambda c, t: t.pop("fc.weight"), "no tensor 'fc.weight', which its config needs"),
    (
        lambda c, t: t.update({"norm.weight": torch.ones(9)}),
        r"'norm.weight' has shape \[9\], its config needs \[64\]",
    ),
    (lambda c, t: layer(c, hidden_size=32), "made for some/model with hidden size 32, but tiny"),
    (lambda c, t: c.update(target_hidden_size=128), "with hidden size 128, but tiny has 64"),
    (lambda c, t: layer(c, vocab_size=999), "with vocabulary size 999, but tiny has 286"),
    (lambda c, t: layer(c, num_hidden_layers=2), "has 2 layers; heads of one can be read"),
    (lambda c, t: layer(c, model_type="mamba"), "architecture 'mamba' is not supported"),
    (lambda c, t: c.update(speculators_model_type="dflash"), "of type 'dflash', not 'eagle3'"),
    (lambda c, t: c.update(verifier_digest="abc"), r"for some/model \(abc\), not for tiny \("),
    (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[2, 1, 9]), "tiny has 2 layers"),
    (lambda c, t: t.pop("d2t"), "143 draft tokens, but no 'd2t' to 286"),
    (lambda c, t: t.update(d2t=t["d2t"] + 900), "d2t does not map 143 draft ids"),
    (lambda c, t: t.update(d2t=t["d2t"][:9]), "143 draft tokens, but 'd2t' of 9"),
]


@pytest.mark.parametrize("change,message", FAULTS)
def test_faults_are_named_in_one_line(target, tmp_path, change, message):
    write(tmp_path, *broken(target, change))
    with pytest.raises(ModelError, match=message) as caught:
        Eagle3.load(TrainedConfig(model=str(tmp_path)), target)
    assert "\n" not in str(caught.value)


def test_files_that_are_missing_or_corrupt(target, tmp_path):
    with pytest.raises(ModelError, match="no trained eagle3 for tiny; make one with: "):
        Eagle3.load(TrainedConfig(), target)
    with pytest.raises(ModelError, match=r"holds no config.json"):
        Eagle3.load(TrainedConfig(model=str(tmp_path)), target)
    write(tmp_path, *broken(target, lambda c, t: None))
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="truncated or corrupt"):
        read_head(tmp_path, target)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no model.safetensors"):
        read_head(tmp_path, target)
    (tmp_path / "pytorch_model.bin").write_bytes(whole[:50])
    with pytest.raises(ModelError, match=r"pytorch_model.bin is truncated or corrupt"):
        read_head(tmp_path, target)
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="does not hold tensors by name"):
        read_head(tmp_path, target)


def test_a_head_for_another_target(target, tmp_path):
    Objective.build(Training(), tiny(1), None).save(tmp_path, {})
    with pytest.raises(ModelError, match=r"was trained for tiny:1 \(.*not for tiny \("):
        Eagle3.load(TrainedConfig(model=str(tmp_path)), target)
    with pytest.raises(ModelError, match="drafter 'eagle3' needs head, taps"):
        Engine(TableTarget.random(0), drafter="eagle3")
    assert target.checkpoint.name == "tiny"
