"""Trained drafters for other programs: heads as vLLM and SGLang read them, draft models as Llamas.

    speculators   config.json of the speculators library and model.safetensors; vLLM reads it
    eagle3        the layout of EAGLE-3's authors: config.json of a Llama, ``midlayer.*``
    hf            a draft model as a plain folder of transformers, with the whole vocabulary

What a config of transformers cannot say is refused by name: each config is read back and compared
before anything is written. Heads hold no embedding: their readers share the target's.

Loaded and compared: speculators 0.9.0 computes the same logits from an export, and a head that it
saved is read here (``tools/check_speculators.py``). vLLM and SGLang: checked by format alone.

Shape letters: V vocabulary, D draft vocabulary, W width.
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

from outpace.drafters.trained import (
    CONFIG,
    WEIGHTS,
    decoder_from_json,
    head_name,
    lender,
    read_config,
    read_embedding,
    read_tensors,
    vocab_map,
)
from outpace.errors import ModelError
from outpace.files import replaced, write_whole
from outpace.methods.eagle3.files import VERIFIER_DIGEST, Head, default_taps, read_head
from outpace.models.base import Target
from outpace.models.families import HF_ACTIVATIONS, DecoderConfig
from outpace.models.fields import read_json
from outpace.models.rope import Rope

FORMATS = ("speculators", "eagle3", "hf")
_DTYPE = torch.bfloat16
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def export(source: Path, form: str, out: Path, target: Target, verifier: str | None = None) -> list[Path]:
    """Write a drafter in another program's format.

    Args:
        source: drafter folder; for the formats of heads any that can be read.
        form: one of ``FORMATS``.
        out: folder to write to; files of the same names are replaced.
        target: what it was trained for.
        verifier: how the other program calls the target, a hub id as a rule; None: its name here.

    Returns:
        The files written.

    Raises:
        ModelError: an unknown format, a drafter of another kind, or a shape that the format
            cannot say.
    """
    check_format(form)
    if out.resolve() == source.resolve():
        raise ModelError(f"{out} is the drafter itself; write the export to another folder")
    method = read_json(source / CONFIG).get("method", "eagle3")
    if (method == "draft_model") != (form == "hf"):
        fits = "hf" if method == "draft_model" else "speculators or eagle3"
        raise ModelError(f"{source} holds a drafter of method {method!r}; write it as {fits}")
    if form == "hf":
        config, tensors = _plain_llama(source, target)
    else:
        head = read_head(source, target)
        if not head.shape.fused:
            raise ModelError(f"{source} is an EAGLE-1 or EAGLE-2 head; {form} is for EAGLE-3")
        if form == "speculators":
            config, tensors = _speculators(head, target, verifier or target.name)
        else:
            config, tensors = _authors(head, target)
    return _write(out, config, tensors)


def check_format(form: str) -> None:
    """Raise ModelError unless a format is one of ``FORMATS``."""
    if form not in FORMATS:
        raise ModelError(f"format {form!r} is not one of {', '.join(FORMATS)}")


def hf_config(decoder: DecoderConfig) -> dict[str, Any]:
    """A decoder's shape as the config.json of a Llama, Qwen2 or Qwen3.

    Raises:
        ModelError: it has what none of them has; named.
    """
    rope = decoder.ropes[decoder.rope_of_layer[0]]
    positions = float(decoder.max_positions)
    if rope.kind in ("linear", "dynamic"):
        positions /= rope.factor
    kind = "llama"
    if decoder.qk_norm or (decoder.qkv_bias and not decoder.out_bias):
        kind = "qwen3" if decoder.qk_norm else "qwen2"
    said: dict[str, Any] = {
        "architectures": [f"{_CLASSES[kind]}ForCausalLM"],
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
        "torch_dtype": str(_DTYPE).removeprefix("torch."),
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


def _scaling(rope: Rope) -> dict[str, Any] | None:
    """``rope_scaling`` as transformers 4 and 5 read it."""
    if rope.kind == "default":
        return None
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


def _head_tensors(head: Head, target: Target) -> dict[str, Tensor]:
    """All tensors of a head by the names of speculators, the vocabulary's maps with them."""
    tensors = {name: one.to(_DTYPE) for name, one in head.tensors.items()}
    if head.embed_VH is not None:
        tensors["embed_tokens.weight"] = head.embed_VH.to(_DTYPE)
    if head.id_D is not None:
        known_V = torch.zeros(target.vocab_size, dtype=torch.bool)
        known_V[head.id_D] = True
        tensors["d2t"] = head.id_D - torch.arange(len(head.id_D))
        tensors["t2d"] = known_V
    return tensors


def _speculators(head: Head, target: Target, verifier: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    shape = head.shape
    config = {
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
            "verifier": {"name_or_path": verifier, "architectures": [_class_of(target)]},
        },
        "transformer_layer_config": hf_config(shape.decoder),
        "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": None,
        # Readers differ in what they take when it is absent.
        "norm_before_residual": shape.residual_normed,
        "norm_before_fc": shape.joint_norm,
        "fc_norm": shape.each_norm,
        "norm_output": shape.output_normed,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": _layers(shape.taps),
        "tie_word_embeddings": False,
        "torch_dtype": str(_DTYPE).removeprefix("torch."),
        VERIFIER_DIGEST: target.digest,
    }
    return config, _head_tensors(head, target)


def _authors(head: Head, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    shape = head.shape
    if shape.residual_normed or shape.output_normed or shape.joint_norm or shape.each_norm:
        raise ModelError("the layout of EAGLE-3's authors has no extra norms; write speculators")
    if shape.taps != default_taps(target):
        # Engines that read this layout count explicit layers differently, by one.
        raise ModelError(
            f"the layout of EAGLE-3's authors has features {', '.join(default_taps(target))}, "
            f"this head reads {', '.join(shape.taps)}; write speculators"
        )
    config = hf_config(shape.decoder) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": shape.draft_vocab,
    }
    if config["model_type"] != "llama":
        raise ModelError(
            f"the layout of EAGLE-3's authors is a Llama's, this head is a "
            f"{config['model_type']}; write speculators"
        )
    tensors = {
        name.replace("layers.0.", "midlayer."): one for name, one in _head_tensors(head, target).items()
    }
    return config, tensors


def _layers(taps: tuple[str, ...]) -> list[int]:
    numbers = [tap.removeprefix("hidden.") for tap in taps]
    if not all(number.isdecimal() for number in numbers):
        raise ModelError(f"no format can say the features {', '.join(taps)}")
    return [int(number) for number in numbers]


def _class_of(target: Target) -> str:
    family = lender(target, "the export").config.family
    return f"{_CLASSES.get(family, 'Llama')}ForCausalLM"


def _plain_llama(source: Path, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A draft model with all it borrows, and a head over the whole vocabulary."""
    said = read_config(source, target, "draft_model")
    lent, tensors = lender(target, "the export"), read_tensors(source)
    vocab = vocab_map(tensors, target.vocab_size)
    decoder = decoder_from_json(said.get("decoder", {}), source / CONFIG)
    borrows = [name for name in (_EMBED, _HEAD) if name not in tensors]
    tied = borrows == [_EMBED, _HEAD] and lent.config.tied_head
    if _EMBED in borrows:
        tensors[_EMBED] = read_embedding(lent).cpu()
    if _HEAD in borrows and not tied:
        tensors[_HEAD] = lent.checkpoint.tensor(head_name(lent))
    elif vocab is not None and not tied:
        tensors[_HEAD] = whole_head(tensors[_HEAD], vocab.to_target_D, target.vocab_size)
    config = hf_config(dataclasses.replace(decoder, tied_head=tied))
    defaults = lent.defaults
    if defaults is not None:
        ends = list(defaults.eos_ids)
        config |= {"bos_token_id": defaults.bos_id, "eos_token_id": ends or None}
    kept = {name for name in tensors if name not in ("d2t", "t2d")}
    return config, {name: tensors[name].to(_DTYPE) for name in kept}


def whole_head(head_DW: Tensor, to_target_D: Tensor, vocab_size: int) -> Tensor:
    """A head over all tokens [V, W] that ranks the draft tokens as before.

    The rows of the others are the mean of the rows there are. Their logit is then the mean of
    all logits whatever the state, so that none of them is ever the likeliest token.
    """
    whole_VW = head_DW.float().mean(0, keepdim=True).repeat(vocab_size, 1)
    whole_VW[to_target_D] = head_DW.float()
    return whole_VW


def _write(out: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    with replaced(out / WEIGHTS) as fresh:
        save_file(
            {name: one.detach().contiguous() for name, one in sorted(tensors.items())},
            fresh,
            metadata={"format": "pt"},
        )
    write_whole(out / CONFIG, json.dumps(dict(config), indent=2) + "\n")
    return [out / CONFIG, out / WEIGHTS]
