"""A model of transformers on the weights of a target: what a benchmark compares with.

Quantized weights are expanded and given to the model class of transformers that computes the same.
Its own GGUF loader would keep them quantized and compute in float32. Beside bfloat16 that is slower,
and so no fair opponent. That the class computes the same is tried, not believed.
"""

from __future__ import annotations

from typing import Any

import torch

from outpace.bench.peers.hf_generate import quiet
from outpace.errors import ModelError, UnknownNameError
from outpace.files import expanded
from outpace.models.base import Target
from outpace.models.decoder import Decoder
from outpace.models.families import CLASSES, FULL, HF_ACTIVATIONS, WINDOWED, DecoderConfig
from outpace.models.fields import brief
from outpace.models.hf.compare import apart
from outpace.models.hf.target import HFTarget
from outpace.models.layout import to_transformers
from outpace.models.mixtures import mixtral_name
from outpace.models.rope import Rope
from outpace.models.weights import Checkpoint, SafetensorsCheckpoint
from outpace.models.zoo import open_checkpoint

_QUANTIZED = 0.5
"""Largest mean difference of logits that passes, in standard deviations of a logit. The target's own weights
are rounded to a few bits here, and the twin's are not."""


def transformers_twin(target: Target, dtype: torch.dtype | None = None) -> Any:
    """Give a model of transformers with the weights of a target, unrounded if it is quantized.

    Args:
        target: one of transformers, whose model comes back as it is, or our decoder.
        dtype: of the twin; None is the target's.

    Raises:
        ModelError: the target is of another kind, its model is in another dtype, or
            transformers computes something else from its weights (which is tried).

    Memory: the weights once more, unless the target is one of transformers.
    """
    dtype = dtype or target.dtype
    if isinstance(target, HFTarget):
        if target.dtype != dtype:
            raise ModelError(f"{target.name} is in memory as {target.dtype}, not {dtype}")
        return target.model
    if not isinstance(target, Decoder):
        raise ModelError(f"{target.name} ({type(target).__name__}) has no twin in transformers")
    model = _from_checkpoint(target.checkpoint, dtype).to(target.device)
    off, most = apart(model, target)
    if target.quantize is not None:
        most = _QUANTIZED
    if not off <= most:
        raise ModelError(
            f"transformers computes something else than {target.name} from the same weights: "
            f"logits differ by {off:.2g} standard deviations, rounding explains {most:g}"
        )
    return model


def load_assistant(name: str, target: Target, dtype: torch.dtype) -> Any:
    """Load a model that drafts for a twin: a short name, a folder, a GGUF file, or a hub id.

    Raises:
        ModelError: it cannot be loaded, or has another vocabulary than the target.

    Effects: a hub id that is not in the local cache of the hub is downloaded.
    """
    try:
        model = _from_checkpoint(open_checkpoint(name), dtype)
    except UnknownNameError:
        raise
    except ModelError:
        model = _from_folder(name, dtype)
    width = model.config.get_text_config().vocab_size
    if width != target.vocab_size:
        raise ModelError(
            f"assistant {name} has {width} tokens, {target.name} {target.vocab_size}; it must "
            "have the same vocabulary"
        )
    # Where the target reads on past an end, so does its assistant.
    model.generation_config.eos_token_id = None
    return model.to(target.device)


def _from_checkpoint(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    if isinstance(checkpoint, SafetensorsCheckpoint):
        return _from_folder(str(checkpoint.folder), dtype)
    import transformers

    config = checkpoint.config
    windowed = config.family == "llama" and any(config.windows)
    kind = CLASSES["mistral" if windowed else config.family]
    text = "Text" if config.family == "gemma3" else ""
    shape = getattr(transformers, f"{kind}{text}Config")(dtype=dtype, **_settings(config))
    # Gemma's norms add 1 to weights that a GGUF file stores with the 1 in them.
    extra = 1.0 if config.family in ("gemma2", "gemma3") and config.norm_offset == 0 else 0.0

    def read(name: str) -> torch.Tensor:
        if extra and "norm" in name:
            return (checkpoint.tensor(name, torch.float32) - extra).to(dtype)
        return checkpoint.tensor(name, dtype)

    weights = to_transformers(config, read)
    if config.family == "mixtral":
        weights = {mixtral_name(name): weight for name, weight in weights.items()}
    made = getattr(transformers, f"{kind}ForCausalLM")
    with quiet():
        model, told = made.from_pretrained(
            None, config=shape, state_dict=weights, dtype=dtype, output_loading_info=True
        )
    for what in ("missing", "unexpected", "mismatched"):
        if names := sorted(str(name) for name in told[f"{what}_keys"]):
            raise ModelError(f"{checkpoint.name} has no twin in transformers: {what} {', '.join(names[:3])}")
    for rope in config.ropes:
        if rope.kind == "divided":
            inverse, _ = rope.frequencies()
            turner = model.model.rotary_emb
            turner.inv_freq.copy_(inverse)
            turner.original_inv_freq.copy_(inverse)
    return model.requires_grad_(False)


def _from_folder(name: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    path = expanded(name)
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(str(path) if path.exists() else name, dtype=dtype)
    except Exception as error:  # every architecture has its own kinds
        raise ModelError(f"transformers cannot load {name}: {brief(error)}") from error
    return model.requires_grad_(False)


def _settings(config: DecoderConfig) -> dict[str, Any]:
    """Arguments of the config class of transformers.

    They need not be right for every checkpoint that our decoder can read: the twin is tried.
    """
    first = next((one for one in config.ropes if one.still < one.dim), config.ropes[0])
    out: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_head,
        "rope_parameters": _rope(first),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    window = next((one for one in config.windows if one), None)
    kinds = [WINDOWED if one else FULL for one in config.windows]
    if config.family == "gemma3":
        ropes = zip(kinds, config.rope_of_layer, strict=True)
        return out | {
            "layer_types": kinds,
            "sliding_window": window,
            "rope_parameters": {kind: _rope(config.ropes[index]) for kind, index in ropes},
            "query_pre_attn_scalar": round(config.attention_scale**-2),
            "attention_bias": config.qkv_bias,
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap,
        }
    if config.family == "gemma2":
        return out | {
            "layer_types": kinds,
            "sliding_window": window,
            "hidden_activation": HF_ACTIVATIONS[config.activation],
            "query_pre_attn_scalar": round(config.attention_scale**-2),
            "attention_bias": config.qkv_bias,
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap,
        }
    out["hidden_act"] = HF_ACTIVATIONS[config.activation]
    if config.family == "qwen3_moe":
        out |= {"sliding_window": window, "use_sliding_window": window is not None}
    elif config.family in ("qwen2", "qwen3"):
        out |= {"layer_types": kinds, "sliding_window": window}
        out["use_sliding_window"] = window is not None
    elif window or config.family in ("mistral", "mixtral"):
        out["sliding_window"] = window
    if config.family in ("llama", "granite", "smollm3"):
        out["mlp_bias"] = config.mlp_bias
    if config.family in ("llama", "qwen3", "qwen3_moe", "granite", "smollm3", "olmo2"):
        out["attention_bias"] = config.qkv_bias
    if config.family == "granite":
        out["embedding_multiplier"] = config.embed_scale
        out["attention_multiplier"] = config.attention_scale
        out["residual_multiplier"] = config.residual_scale
        out["logits_scaling"] = 1 / config.logit_scale
    if config.family == "smollm3":
        turning = [config.ropes[number].still < config.head_dim for number in config.rope_of_layer]
        out |= {"no_rope_layers": [int(one) for one in turning], "layer_types": kinds}
        out["use_sliding_window"] = window is not None
    if config.family == "phi3":
        out["original_max_position_embeddings"] = first.original_max_positions or config.max_positions
    return out | _mixture(config)


def _mixture(config: DecoderConfig) -> dict[str, Any]:
    """What is said of experts, by the names of either family."""
    mixture = config.mixture
    if mixture is None:
        return {}
    out = {"num_experts_per_tok": mixture.chosen}
    if config.family == "mixtral":
        return out | {"num_local_experts": mixture.experts}
    dense = [layer for layer, sparse in enumerate(mixture.sparse) if not sparse]
    return out | {
        "num_experts": mixture.experts,
        "moe_intermediate_size": mixture.width,
        "norm_topk_prob": mixture.normed,
        "mlp_only_layers": dense,
    }


def _rope(rope: Rope) -> dict[str, Any]:
    """What transformers calls rope parameters; divisors are put in afterwards."""
    kind = "default" if rope.kind == "divided" else rope.kind
    out: dict[str, Any] = {"rope_type": kind, "rope_theta": rope.theta}
    if kind != "default":
        out["factor"] = rope.factor
    if rope.still:
        out["partial_rotary_factor"] = 1 - rope.still / rope.dim
    if kind == "longrope":
        out |= {name: list(rope.divisors) for name in ("short_factor", "long_factor")}
        out["attention_factor"] = rope.attention_factor
    if kind in ("llama3", "yarn", "dynamic", "longrope"):
        out["original_max_position_embeddings"] = rope.original_max_positions
    if kind == "llama3":
        out["low_freq_factor"] = rope.low_freq_factor
        out["high_freq_factor"] = rope.high_freq_factor
    if kind == "yarn":
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        out["truncate"] = rope.truncate
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(rope, key) is not None:
                out[key] = getattr(rope, key)
    return out
