"""A decoder of ours as the config.json and weights of a Llama, for exporters.

What a config of transformers cannot say is refused by name: each config is read back and compared
before anything is written.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outpace.drafters.trained import CONFIG, WEIGHTS, lender
from outpace.errors import ModelError
from outpace.files import filled, replaced, write_whole
from outpace.models.base import Target
from outpace.models.families import CLASSES, HF_ACTIVATIONS, DecoderConfig
from outpace.models.measured import dtype_name
from outpace.models.rope import Rope

DTYPE = torch.bfloat16
"""Of everything that is written."""


def hf_config(decoder: DecoderConfig) -> dict[str, Any]:
    """A decoder's shape as the config.json of a Llama, Qwen2 or Qwen3.

    Raises:
        ModelError: it has what none of them has; named.
    """
    rope = decoder.ropes[decoder.rope_of_layer[0]]
    positions = float(decoder.max_positions)
    if rope.kind == "linear":
        positions /= rope.factor
    kind = "llama"
    if decoder.qk_norm or (decoder.qkv_bias and not decoder.out_bias):
        kind = "qwen3" if decoder.qk_norm else "qwen2"
    said: dict[str, Any] = {
        "architectures": [f"{CLASSES[kind]}ForCausalLM"],
        "model_type": kind,
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.ffn_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": HF_ACTIVATIONS[decoder.activation],
        "rms_norm_eps": decoder.norm_eps,
        "max_position_embeddings": round(positions),
        "rope_theta": rope.theta,
        "rope_scaling": _scaling(rope),
        "attention_bias": decoder.qkv_bias,
        "mlp_bias": decoder.mlp_bias,
        "tie_word_embeddings": decoder.tied_head,
        "torch_dtype": dtype_name(DTYPE),
    }
    again = dataclasses.replace(DecoderConfig.from_hf(said), family=decoder.family)
    lost = [
        f"{one.name}={getattr(decoder, one.name)!r}"
        for one in dataclasses.fields(decoder)
        if getattr(decoder, one.name) != getattr(again, one.name)
    ]
    if lost:
        raise ModelError(f"no {kind} config of transformers can say {', '.join(lost)}")
    return said


def class_of(target: Target) -> str:
    family = lender(target, "the export").config.family
    return f"{CLASSES.get(family, 'Llama')}ForCausalLM"


def write(out: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Path]:
    stored = {name: one.detach().contiguous() for name, one in sorted(tensors.items())}
    with filled(out) as folder:
        with replaced(folder / WEIGHTS) as fresh:
            save_file(stored, fresh, metadata={"format": "pt"})
        write_whole(folder / CONFIG, json.dumps(dict(config), indent=2) + "\n")
    return [out / CONFIG, out / WEIGHTS]


def _scaling(rope: Rope) -> dict[str, Any] | None:
    """``rope_scaling`` as transformers 4 and 5 read it."""
    if rope.kind == "default":
        return None
    if rope.kind == "longrope":
        raise ModelError("no config can say longrope here: its factors for longer texts are not read")
    out: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        out["low_freq_factor"] = rope.low_freq_factor
        out["high_freq_factor"] = rope.high_freq_factor
    if rope.kind == "yarn":
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(rope, key) is not None:
                out[key] = getattr(rope, key)
    return out
