"""Configs against transformers: rotary tables, every family, every feature refused by name."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outpace.errors import ModelError
from outpace.models.defaults import GenerationDefaults
from outpace.models.families import DecoderConfig
from outpace.models.rope import KINDS, Rope
from tests.models.making import HF_SIZES, LATER, hf_config

LLAMA: dict[str, Any] = {"model_type": "llama", **HF_SIZES}
PHI3: dict[str, Any] = {"model_type": "phi3", **HF_SIZES}

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.5},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, every knob": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "truncate": False,
    },
    "yarn, attention factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.8},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("legacy", [False, True])
def test_scaled_frequencies_are_those_of_transformers(name: str, legacy: bool) -> None:
    scaling = {"rope_type": name} | SCALINGS[name]
    theirs = LlamaConfig(**HF_SIZES | {"head_dim": 32}, rope_parameters=dict(scaling) | {"rope_theta": 5e5})
    want, want_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"), seq_len=256)
    said = LLAMA | {"head_dim": 32}
    if legacy:
        # transformers 4 wrote two keys, and for a while called the kind "type".
        old = dict(scaling)
        said |= {"rope_theta": 5e5, "rope_scaling": old | {"type": old.pop("rope_type")}}
    else:
        said |= {"rope_parameters": scaling | {"rope_theta": 5e5}}
    rope = DecoderConfig.from_hf(said).ropes[0]
    got, factor = rope.frequencies()
    assert got.dtype == torch.float32
    # Both are float32 formulas of some ten operations; they may round differently.
    torch.testing.assert_close(got, want, rtol=2e-6, atol=0)
    assert factor == pytest.approx(want_factor, rel=1e-12)


def test_plain_and_divided_frequencies() -> None:
    plain = Rope(kind="default", theta=10_000.0, dim=8).frequencies()[0]
    torch.testing.assert_close(plain, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    divided = Rope(kind="divided", theta=10_000.0, dim=8, divisors=(1.0, 2.0, 4.0, 8.0))
    torch.testing.assert_close(divided.frequencies()[0], torch.tensor([1.0, 0.05, 0.0025, 0.000125]))
    still = Rope(kind="default", theta=10_000.0, dim=8, still=4)
    torch.testing.assert_close(still.frequencies()[0], torch.tensor([1.0, 0.01]))
    with pytest.raises(ModelError, match=r"'mrope'.*" + ", ".join(KINDS[:-1])):
        DecoderConfig.from_hf(LLAMA | {"rope_scaling": {"type": "mrope", "factor": 2}})


@pytest.mark.parametrize(
    ("family", "changes", "want"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, {"out_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}, {"tied_head": True, "qkv_bias": False}),
        ("mistral", {"sliding_window": 16}, {"windows": (16,) * 4}),
        ("mistral", {"sliding_window": None}, {"windows": (None,) * 4}),
        ("qwen2", {}, {"qkv_bias": True, "out_bias": False, "windows": (None,) * 4}),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            {"windows": (None, None, None, 8)},
        ),
        ("qwen3", {"head_dim": 16}, {"qk_norm": True, "head_dim": 16, "attention_scale": 0.25}),
        (
            "granite",
            {"mlp_bias": True},
            {"embed_scale": 12.0, "residual_scale": 0.22, "attention_scale": 0.2, "logit_scale": 0.125}
            | {"mlp_bias": True},
        ),
        ("smollm3", {}, {"rope_of_layer": (0, 1, 0, 1), "windows": (None,) * 4}),
        (
            "smollm3",
            {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [1, 1, 0, 1]},
            {"rope_of_layer": (0, 0, 1, 0), "windows": (None, None, 8, None)},
        ),
        ("phi3", {}, {"windows": (24,) * 4, "qkv_bias": False, "max_positions": 256}),
        (
            "gemma2",
            {},
            {"windows": (16, None) * 2, "attention_softcap": 5.0, "logit_softcap": 30.0, "norm_offset": 1.0},
        ),
        ("olmo2", {}, {"pre_norms": False, "sandwich_norms": True, "qk_norm": True, "wide_qk_norm": True}),
        (
            "gemma3",
            {"sliding_window": 8, "query_pre_attn_scalar": 16, "final_logit_softcapping": 30.0},
            {
                "windows": (8,) * 4,
                "attention_scale": 0.25,
                "logit_softcap": 30.0,
                "norm_offset": 1.0,
                "embed_scale": 32**0.5,
                "sandwich_norms": True,
                "tied_head": True,
                "activation": "gelu_tanh",
            },
        ),
    ],
)
def test_configs_saved_by_transformers(
    family: str, changes: dict[str, Any], want: dict[str, Any], tmp_path: Any
) -> None:
    hf_config(family, **changes).save_pretrained(tmp_path)
    config = DecoderConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert config.family == family
    sizes = (config.vocab_size, config.hidden_size, config.ffn_size, config.num_kv_heads)
    assert sizes == (96, 32, 48, 2)
    assert config.norm_eps == 1e-5
    for field, value in want.items():
        assert getattr(config, field) == value, field


def test_gemma_ropes_and_layer_types_old_and_new(tmp_path: Any) -> None:
    scaled = {"rope_type": "linear", "factor": 8.0}
    sizes = HF_SIZES | {"num_hidden_layers": 7, "sliding_window": 64}
    old = sizes | {"rope_scaling": scaled, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    old_way = DecoderConfig.from_hf({"model_type": "gemma3", "text_config": old})
    hf_config("gemma3", **old).save_pretrained(tmp_path)
    new_way = DecoderConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert old_way == new_way
    assert new_way.rope_of_layer == (0, 0, 0, 0, 0, 1, 0)
    assert new_way.windows == (64, 64, 64, 64, 64, None, 64)
    local, full = new_way.ropes
    assert (local.kind, local.theta) == ("default", 1e4)
    assert (full.kind, full.theta, full.factor) == ("linear", 1e6, 8.0)
    assert new_way.max_positions == 256


def test_what_stretching_does_to_the_context() -> None:
    def reach(**scaling: Any) -> int:
        return DecoderConfig.from_hf(LLAMA | {"rope_scaling": scaling}).max_positions

    assert reach(type="linear", factor=4.0) == 1024
    assert reach(type="yarn", factor=8.0, original_max_position_embeddings=64) == 512
    assert reach(**{"rope_type": "llama3"} | SCALINGS["llama3"]) == 256


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported: llama, mistral"),
        ({}, "architecture None"),
        (LLAMA | {"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClass"),
        (LLAMA | {"hidden_act": "relu"}, "'relu'"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        (LLAMA | {"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        (LLAMA | {"hidden_size": "big"}, "'hidden_size' must be a positive whole number, got 'big'"),
        (LLAMA | {"vocab_size": None}, "lacks 'vocab_size'"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": "x"}}, "'factor' must be"),
        (LLAMA | {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        (PHI3 | {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
        (
            PHI3 | {"rope_scaling": {"type": "su", "short_factor": [1.0]}},
            "4 numbers as short_factor, got [1.0]",
        ),
        (HF_SIZES | {"model_type": "smollm3", "no_rope_layers": [1, 2]}, "no_rope_layers must hold 4 times"),
        ({"model_type": "gemma3_text", **HF_SIZES, "use_bidirectional_attention": True}, "not causal"),
    ],
)
def test_bad_configs_are_one_line(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        DecoderConfig.from_hf(config)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensor_shapes_are_what_transformers_saves() -> None:
    import transformers

    for family in ("llama", "qwen2", "qwen3", "gemma3", *LATER):
        if family == "phi3":
            continue  # which fuses some
        theirs = hf_config(family)
        model = transformers.AutoModelForCausalLM.from_config(theirs)
        want = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert DecoderConfig.from_hf(theirs.to_dict()).tensor_shapes() == want


def test_digests_of_older_families_stay() -> None:
    """What later families added is said only where it says something."""
    config = DecoderConfig.from_hf(LLAMA)
    assert config.text == repr(config) and "residual" not in config.text
    for later in ({"residual_scale": 0.5}, {"ropes": (replace(config.ropes[0], still=2),)}):
        assert replace(config, **later).text != config.text


def test_generation_defaults() -> None:
    said = {
        "eos_token_id": [5, 2],
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 0,
        "do_sample": True,
        "num_beams": 4,
        "typical_p": 1.0,
    }
    got = GenerationDefaults.from_hf(said, {"eos_token_id": 7, "bos_token_id": 1})
    assert (got.eos_ids, got.bos_id) == ((2, 5, 7), 1)
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.6, 0.9, None, None)
    assert got.unsupported == ("num_beams=4",)
    assert GenerationDefaults.from_hf({"do_sample": False, "temperature": 0.6}).temperature == 0.0
    assert GenerationDefaults.from_hf({}) == GenerationDefaults()
    with pytest.raises(ModelError, match="'eos_token_id' must be a token id"):
        GenerationDefaults.from_hf({"eos_token_id": "</s>"})
