"""Exports, field by field, and read back."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outpace import ModelError
from outpace.law import VocabMap
from outpace.methods.draft_model.export import whole_head
from outpace.methods.draft_model.files import load_trained
from outpace.methods.draft_model.objective import DraftModelObjective, DraftModelTraining
from outpace.methods.eagle3.files import read_head
from outpace.methods.eagle3.objective import Eagle3, Eagle3Config
from outpace.models.load import load_target
from outpace.models.rope import Rope
from outpace.models.tiny import tiny
from outpace.train.export import export
from outpace.train.llama import hf_config
from outpace.types import Feed

LAYER = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 286,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def target():
    return tiny(layers=8)


def some(target):
    ids = torch.tensor([i for i in range(target.vocab_size) if i % 3 != 2])
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[ids] = torch.arange(len(ids))
    return VocabMap(ids, feed_V)


def head(target, folder, vocab=True, **options):
    vocab = some(target) if vocab else None
    Eagle3.build(Eagle3Config(**options), target, vocab).save(folder, {})
    return folder


def test_speculators_field_by_field(target, tmp_path):
    source = head(target, tmp_path / "head", taps="2,4,7")
    files = export(source, "speculators", tmp_path / "out", target, "owner/model")
    assert [file.name for file in files] == ["config.json", "model.safetensors"]
    assert json.loads(files[0].read_text()) == {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 4,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "owner/model", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": LAYER,
        "draft_vocab_size": 191,
        "target_hidden_size": None,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 7],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "verifier_digest": target.digest,
        "target_likeness": target.checkpoint.likeness.to_json(),
    }
    stored, mine = load_file(files[1]), load_file(source / "model.safetensors")
    assert stored.keys() == mine.keys()
    for name, one in mine.items():
        assert torch.equal(stored[name], one) and stored[name].dtype == one.dtype, name
    assert stored["d2t"].dtype is torch.int64 and stored["t2d"].dtype is torch.bool
    assert (stored["d2t"] + torch.arange(191)).tolist() == some(target).to_target_D.tolist()
    again, first = read_head(tmp_path / "out", target), read_head(source, target)
    assert again.shape == first.shape
    with pytest.raises(ModelError, match=r"was trained for owner/model \(.*not for tiny:1"):
        read_head(tmp_path / "out", tiny(1, layers=8))


def test_a_whole_vocabulary_has_no_maps(target, tmp_path):
    source = head(target, tmp_path / "head", vocab=False)
    export(source, "speculators", tmp_path / "out", target, "owner/model")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert not {"d2t", "t2d"} & stored.keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["draft_vocab_size"] == 286
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/model"
    assert read_head(tmp_path / "out", target).id_D is None


def test_the_layout_of_the_authors(target, tmp_path):
    source = head(target, tmp_path / "head")
    files = export(source, "eagle3", tmp_path / "out", target)
    assert json.loads(files[0].read_text()) == LAYER | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 191,
    }
    stored = load_file(files[1])
    assert {name for name in stored if name.startswith("midlayer.")} == {
        "midlayer.input_layernorm.weight",
        "midlayer.hidden_norm.weight",
        "midlayer.post_attention_layernorm.weight",
        "midlayer.mlp.gate_proj.weight",
        "midlayer.mlp.up_proj.weight",
        "midlayer.mlp.down_proj.weight",
        *(f"midlayer.self_attn.{one}_proj.weight" for one in "qkvo"),
    }
    others = {name for name in stored if not name.startswith("midlayer.")}
    assert others == {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    again, first = read_head(tmp_path / "out", target), read_head(source, target)
    assert again.shape == first.shape and torch.equal(again.id_D, first.id_D)
    for name, one in first.tensors.items():
        assert torch.equal(again.tensors[name], one), name
    odd = head(target, tmp_path / "odd", taps="1,2,3")
    with pytest.raises(ModelError, match=r"reads hidden.1, hidden.2, hidden.3; write speculators"):
        export(odd, "eagle3", tmp_path / "no", target)
    assert not (tmp_path / "no").exists()


TEXT = [5, 9, 11, 40, 7, 150, 5, 9, 12, 77, 8]


def logits(model):
    cache = model.new_cache()
    return model.score([Feed.chain(cache.open(), TEXT)], cache).logits_TV.clone()


@pytest.mark.parametrize(
    "options", [{"layers": 2}, {"layers": 2, "train_head": True}, {"layers": 1, "width": 32}]
)
def test_a_draft_model_as_a_plain_llama(target, tmp_path, options):
    """Loads as any model; says of the draft tokens what the draft model says of them."""
    objective = DraftModelObjective.build(DraftModelTraining(**options), target, some(target))
    coins = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=coins))
    objective.save(tmp_path / "draft", {})
    export(tmp_path / "draft", "hf", tmp_path / "out", target)
    plain = load_target(str(tmp_path / "out"), dtype="float32")
    assert plain.vocab_size == target.vocab_size
    assert plain.num_layers == options["layers"]
    model, id_D = load_trained(tmp_path / "draft", target)
    mine, theirs = logits(model), logits(plain)
    # Borrowed tensors are float32 here and bfloat16 in the export.
    torch.testing.assert_close(theirs[:, id_D], mine, atol=0.15, rtol=0.05)
    if "train_head" in options or "width" in options:
        assert bool((theirs.argmax(-1)[:, None] == id_D).any(1).all())
        assert not set(theirs[:, id_D].argmax(-1).tolist()) <= {0}


def test_a_head_over_all_tokens_never_prefers_those_it_lacked():
    coins = torch.Generator().manual_seed(0)
    head_DW = torch.randn(20, 8, generator=coins) - 3.0  # zero rows would win against these
    ids = torch.arange(0, 60, 3)
    state_RW = torch.randn(500, 8, generator=coins).abs()
    whole = state_RW @ whole_head(head_DW, ids, 60).T
    assert torch.equal(whole.argmax(-1), ids[(state_RW @ head_DW.T).argmax(-1)])
    planted = torch.zeros(60, 8)
    planted[ids] = head_DW
    assert not torch.equal((state_RW @ planted.T).argmax(-1), whole.argmax(-1))


def test_what_a_config_cannot_say_is_named(target, tmp_path):
    rope = Rope(
        kind="llama3",
        theta=5e5,
        dim=16,
        factor=8.0,
        original_max_positions=512,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    said = hf_config(replace(target.config, ropes=(rope,)))
    assert said["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    linear = Rope(kind="linear", theta=1e4, dim=16, factor=2.0)
    assert hf_config(replace(target.config, ropes=(linear,)))["max_position_embeddings"] == 512
    assert hf_config(replace(target.config, qk_norm=True))["model_type"] == "qwen3"
    assert hf_config(replace(target.config, qkv_bias=True))["model_type"] == "qwen2"
    for change, name in (
        ({"logit_softcap": 30.0}, "logit_softcap=30.0"),
        ({"norm_offset": 1.0}, "norm_offset=1.0"),
        ({"windows": (64,) * 8}, "windows="),
        ({"embed_scale": 8.0}, "embed_scale=8.0"),
    ):
        with pytest.raises(ModelError, match=name):
            hf_config(replace(target.config, **change))


def test_wrong_formats_and_places(target, tmp_path):
    source = head(target, tmp_path / "head")
    DraftModelObjective.build(DraftModelTraining(layers=1), target, None).save(tmp_path / "draft", {})
    for folder, form, message in (
        (source, "onnx", "eagle3 cannot be written as 'onnx'; known: speculators, eagle3"),
        (source, "hf", "eagle3 cannot be written as 'hf'; known: speculators, eagle3"),
        (tmp_path / "draft", "speculators", "draft_model cannot be written as 'speculators'; known: hf"),
        (tmp_path / "none", "speculators", "holds no model.safetensors"),
    ):
        with pytest.raises(ModelError, match=message):
            export(folder, form, tmp_path / "out", target)
    with pytest.raises(ModelError, match="is the drafter itself"):
        export(source, "speculators", source, target)
    with pytest.raises(ModelError, match="was trained for tiny"):
        export(source, "eagle3", tmp_path / "out", tiny(3, layers=8))


@pytest.mark.slow
def test_the_speculators_library_computes_the_same():
    """Named by SPECULATORS_PYTHON, an interpreter of an environment that has the library."""
    python = os.environ.get("SPECULATORS_PYTHON")
    if python is None:
        pytest.skip("SPECULATORS_PYTHON names no interpreter")
    tool = Path(__file__).parents[2] / "tools" / "check_speculators.py"
    done = subprocess.run(
        [sys.executable, str(tool), "--python", python],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(tool.parents[1])},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
