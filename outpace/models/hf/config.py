"""What a model of transformers says about itself, read from its configuration."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from outpace.errors import ModelError
from outpace.models.defaults import GenerationDefaults
from outpace.models.rope import ENDS
from outpace.models.text import Tokenizer

FULL, WINDOWED, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""Layer types that keep plain keys and values, one row per token."""

_NO_LIMIT = 1 << 20
"""Context of a model that states none, such as a recurrent one."""
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")


def text_config(model: Any) -> Any:
    """Give the part of a model's configuration that describes its language model.

    Raises:
        ModelError: it is no language model of transformers.
    """
    parts = ("config", "generation_config", "get_output_embeddings")
    if not all(hasattr(model, part) for part in parts):
        raise ModelError(
            f"{type(model).__name__} is no language model of transformers; "
            "give a model name, a path, or an AutoModelForCausalLM"
        )
    return model.config.get_text_config(decoder=True)


def said_name(model: Any) -> str:
    """Give the hub id that a model was loaded from, the name of its folder, or its class."""
    source = str(model.config.name_or_path or "")
    return (Path(source).name if Path(source).exists() else source) or type(model).__name__


def digest(model: Any) -> str:
    """Hash the configuration, and the shape and a few values of every weight."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in _VOLATILE}
    lines = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        some = [] if flat.is_meta else flat[:: max(1, len(flat) // 4)].float().tolist()
        lines.update(f"{name} {tuple(weight.shape)} {some}\n".encode())
    return lines.hexdigest()[:16]


def generation_defaults(model: Any) -> GenerationDefaults:
    """Read what the model says about sampling; only settings that somebody chose count."""
    text, said = text_config(model), model.generation_config
    return GenerationDefaults.from_hf(
        said.to_diff_dict() if said is not None else {}, model.config.to_dict(), text.to_dict()
    )


def wrap_tokenizer(tokenizer: Any, defaults: GenerationDefaults | None) -> Tokenizer | None:
    """Make a tokenizer ours; every id that ends a text of the model ends one of the tokenizer."""
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    ours = Tokenizer.from_transformers(tokenizer)
    if ours.vocab_size <= len(ours.special_ids):
        # What transformers makes of a folder that lacks the files of its tokenizer.
        raise ModelError(f"tokenizer {type(tokenizer).__name__} has no vocabulary")
    ours.eos_ids |= frozenset(defaults.eos_ids if defaults else ())
    return ours


def read_tokenizer(name: str) -> Tokenizer | None:
    """The tokenizer of a folder or a hub id, ours."""
    from transformers import AutoTokenizer

    return wrap_tokenizer(AutoTokenizer.from_pretrained(name), None)


def context_length(config: Any) -> tuple[int, str | None]:
    """Tokens that the model can hold with one set of rotary frequencies, and why no more.

    Beyond the original length ``longrope`` and ``dynamic`` also change the frequencies of keys that
    are already stored. What follows would depend on how a text was cut into passes, so the context
    ends there.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or _NO_LIMIT)
    said = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for rope in (said, *(one for one in said.values() if isinstance(one, dict))):
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "dynamic":
            return longest, ENDS[kind]
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            return int(original or longest), ENDS[kind]
    return longest, None


def layer_kinds(config: Any) -> dict[str, int | None] | None:
    """Layer types with their reach in tokens; None if some layer keeps no plain keys."""
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return None  # GPT-Neo counts its window by places in the cache, whatever mask and positions say
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = [WINDOWED if window else CHUNKED if chunk else FULL]
    reach = {FULL: None, WINDOWED: window, CHUNKED: chunk}
    return {kind: reach[kind] for kind in types} if set(types) <= set(reach) else None
