"""GGUF checkpoints: their metadata as a config, their tensors under Hugging Face names.

Key and tensor names follow the conversion scripts of llama.cpp.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.errors import ModelError, shown
from outpace.models.families import (
    FAMILIES,
    FULL,
    WINDOWED,
    DecoderConfig,
    GenerationDefaults,
    share,
    unsupported,
)
from outpace.models.fields import Fields
from outpace.models.gguf.file import PLAIN, read_header, read_rows, read_tensor
from outpace.models.gguf.text import build_tokenizer, end_ids
from outpace.models.measured import dtype_name
from outpace.models.mixtures import from_gguf, places_apart
from outpace.models.places import Place
from outpace.models.products import CODED
from outpace.models.rope import Rope
from outpace.models.text import Tokenizer
from outpace.models.weights import Checkpoint

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_IN_GEMMA_LAYER = _IN_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
"""Files of the first months of Mixtral have every expert apart."""
_FAMILIES = {family.replace("_", ""): family for family in FAMILIES if family != "mixtral"}
"""By the names of architectures; Mixtral has that of Llama."""


class GGUFCheckpoint(Checkpoint):
    """One GGUF file of a supported architecture."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Read the file's header; no weights are read.

        Raises:
            ModelError: a truncated or corrupt file, an unsupported architecture, tensor type or
                feature, or a tensor that does not fit; the message names the file.
        """
        header = read_header(path)
        self.path, self.name = path, name or path.stem
        self.files, self.metadata = (path,), header.metadata
        if Fields(str(path), {}, header.metadata).whole("split.count") not in (None, 1):
            raise ModelError(f"{path} is one part of a set; merge it with llama-gguf-split first")
        family = header.metadata.get("general.architecture")
        if not isinstance(family, str) or family not in _FAMILIES:
            raise ModelError(f"{path}: {unsupported(family)}")
        stretched = header.places.get("rope_freqs.weight")
        divisors = [] if stretched is None else read_tensor(stretched).tolist()
        with _naming(path):
            named = {_hf_name(name, family): place for name, place in header.places.items()}
            self.places = places_apart({name: place for name, place in named.items() if name})
            shapes = {name: place.shape for name, place in self.places.items()}
            self.config = read_config(header.metadata, shapes, divisors)
            self.defaults = _defaults(header.metadata)
        self._check_shapes()

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer from the file's metadata."""
        with _naming(self.path):
            return build_tokenizer(self.metadata)

    def note(self, dtype: torch.dtype, stored: bool = False) -> str | None:
        """Say what is stored, and what it becomes; see the base class."""
        sizes: dict[str, int] = {}
        kept = expanded = 0
        for place in self.places.values():
            sizes[place.kind] = sizes.get(place.kind, 0) + place.size
            if stored and place.kind in CODED:
                kept += place.size
            else:
                expanded += torch.Size(place.shape).numel() * dtype.itemsize
        kinds = sorted((k for k in sizes if k not in PLAIN), key=lambda kind: -sizes[kind])
        if not kinds:
            return None
        start = f"{' and '.join(kinds)} GGUF, {sum(sizes.values()) / 1e6:.0f} MB on disk"
        name = dtype_name(dtype)
        if not kept:
            return f"{start}, expanded to {name}: {expanded / 1e6:.0f} MB"
        if CODED.issuperset(kinds):
            return f"{start}, multiplied as stored"
        but = " and ".join(kind for kind in kinds if kind not in CODED)
        return f"{start}, multiplied as stored but for {but}, expanded to {name}: {expanded / 1e6:.0f} MB"

    def blocks(self, name: str) -> tuple[Place, Tensor | None] | None:
        """Blocks of a matrix; see the base class."""
        place = self.places[name]
        if place.kind not in CODED or len(place.shape) != 2:
            return None
        heads = self._interleaved(name)
        return place, split_halves(torch.arange(place.shape[0]), heads) if heads else None

    def rows(self, name: str, dtype: torch.dtype) -> Callable[[Sequence[int]], Tensor]:
        """Read and expand rows from the file; see the base class."""
        if "_proj" in name:
            raise ModelError(f"rows of {shown(name)} are not stored in order")
        return read_rows(self.places[name], dtype)

    def _read(self, name: str, place: Place, dtype: torch.dtype | None) -> Tensor:
        tensor, heads = read_tensor(place, dtype), self._interleaved(name)
        return split_halves(tensor, heads) if heads else tensor

    def _interleaved(self, name: str) -> int:
        """Heads of a tensor whose rows are in the order of ``split_halves``; 0: they are not."""
        if self.metadata["general.architecture"] != "llama":
            return 0
        if "q_proj" in name:
            return self.config.num_heads
        return self.config.num_kv_heads if "k_proj" in name else 0


def split_halves(tensor: Tensor, num_heads: int) -> Tensor:
    """Undo the row order of q and k in files of architecture ``llama``.

    There rotation pairs neighbours, (0, 1), (2, 3), ...; here it pairs the two halves of a head.

    Args:
        tensor: ``[num_heads * head_dim, ...]``, each head's rows interleaved.

    Returns:
        The same rows, in each head the even ones first. A copy.
    """
    head_dim = tensor.shape[0] // num_heads
    pairs = tensor.reshape(num_heads, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()


def read_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], divisors: Sequence[float]
) -> DecoderConfig:
    """Read the metadata of a GGUF file.

    Args:
        metadata: key to value; the architecture is a supported one.
        shapes: the file's tensors under their Hugging Face names; biases and a separate head
            are recognised by their presence.
        divisors: content of ``rope_freqs.weight``, empty if the file has none.

    Raises:
        ModelError: a feature that is not supported (named), a value missing or impossible.
    """
    architecture = str(metadata["general.architecture"])
    start, family = architecture + ".", _FAMILIES[architecture]
    said = {key[len(start) :]: value for key, value in metadata.items() if key.startswith(start)}
    read = Fields("GGUF metadata", {"rope.freq_base": 10_000.0}, said)
    if family == "llama" and read.get("expert_count"):
        family = "mixtral"
    if "model.embed_tokens.weight" not in shapes:
        raise ModelError("it has no tensor token_embd.weight, so it is not a whole model")
    heads, hidden = read.count("attention.head_count"), read.count("embedding_length")
    layers = read.count("block_count")
    if layers > len(shapes):
        raise ModelError(f"block_count {layers} does not fit a file of {len(shapes)} tensors")
    head_dim = read.count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := read.count(key, head_dim)) != head_dim:
            raise ModelError(f"{key} {other} with heads of width {head_dim} is not supported")
    gemma = family == "gemma3"
    window = read.whole("attention.sliding_window")
    pattern = read.get("attention.sliding_window_pattern", 6 if gemma else 0)
    kinds = _layer_types(window, pattern, layers)
    positions = read.count("context_length")
    full = _rope(read, head_dim, positions, divisors)
    local = full
    if gemma:
        theta = read.number("rope.freq_base_swa", 10_000.0)
        local = Rope(kind="default", theta=theta, dim=head_dim)
    ropes, rope_of_layer = share([local if kind == WINDOWED else full for kind in kinds])
    # The 27B model, the only one of 62 layers, scales by hidden / heads instead of head_dim.
    scaled = hidden // heads if gemma and layers == 62 else head_dim
    layer = "model.layers.0."
    return DecoderConfig(
        family=family,
        vocab_size=int(shapes["model.embed_tokens.weight"][0]),
        hidden_size=hidden,
        ffn_size=read.count("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=read.number("attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh" if gemma else "silu",
        max_positions=positions,
        tied_head="lm_head.weight" not in shapes,
        qkv_bias=f"{layer}self_attn.q_proj.bias" in shapes,
        out_bias=f"{layer}self_attn.o_proj.bias" in shapes,
        mlp_bias=f"{layer}mlp.gate_proj.bias" in shapes,
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3"),
        sandwich_norms=gemma,
        embed_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=read.number("attention.scale", scaled**-0.5),
        attention_softcap=read.maybe("attn_logit_softcapping"),
        logit_softcap=read.maybe("final_logit_softcapping"),
        windows=tuple(window if kind == WINDOWED else None for kind in kinds),
        ropes=ropes,
        rope_of_layer=rope_of_layer,
        mixture=from_gguf(family, read, layers, shapes),
    )


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def _hf_name(name: str, family: str) -> str | None:
    """Give a tensor's Hugging Face name; None for tables that are not weights."""
    if name in _WHOLE:
        return _WHOLE[name]
    table = _IN_GEMMA_LAYER if family == "gemma3" else _IN_LAYER
    found = _BLOCK.fullmatch(name)
    if found and found[2] in table:
        return f"model.layers.{found[1]}.{table[found[2]]}.{found[3]}"
    if found := _EXPERT.fullmatch(name):
        return f"model.layers.{found[1]}.mlp.experts.{found[3]}.{found[2]}_proj.weight"
    if name.startswith("rope_") or ".rope_" in name or ".attn_rot_embd" in name:
        return None
    raise ModelError(f"tensor {shown(name)} has no place in a model of architecture {shown(family)}")


def _layer_types(window: int | None, pattern: Any, layers: int) -> list[str]:
    """Give each layer's type; every ``pattern``-th sees all, or those the pattern says do not."""
    if isinstance(pattern, list) and len(pattern) == layers:
        windowed = [bool(one) for one in pattern]
    elif isinstance(pattern, int) and pattern >= 0:
        windowed = [not pattern or (layer + 1) % pattern > 0 for layer in range(layers)]
    else:
        raise ModelError(f"sliding_window_pattern {shown(pattern)} does not fit {layers} layers")
    return [WINDOWED if window and one else FULL for one in windowed]


def _rope(read: Fields, dim: int, positions: int, divisors: Sequence[float]) -> Rope:
    theta = read.number("rope.freq_base")
    kind = read.text("rope.scaling.type", "none")
    if divisors:
        if len(divisors) != dim // 2 or kind not in ("none", "linear"):
            raise ModelError(f"rope_freqs.weight of {len(divisors)} values cannot be applied")
        return Rope(kind="divided", theta=theta, dim=dim, divisors=tuple(divisors))
    factor = read.maybe("rope.scaling.factor", zero=True) or 1.0
    said: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "factor": factor}
    if kind == "yarn":
        original = read.whole("rope.scaling.original_context_length")
        said["original_max_position_embeddings"] = original or int(positions / factor)
        said["beta_fast"] = read.maybe("rope.scaling.yarn_beta_fast")
        said["beta_slow"] = read.maybe("rope.scaling.yarn_beta_slow")
    return Rope.from_hf(said, theta=theta, dim=dim, max_positions=positions)


def _defaults(metadata: Mapping[str, Any]) -> GenerationDefaults:
    start = "general.sampling."
    said = {key[len(start) :]: value for key, value in metadata.items() if key.startswith(start)}
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    read = Fields("GGUF metadata", {}, said)
    taken = ("temp", "top_p", "top_k", "min_p", "penalty_repeat")
    return GenerationDefaults(
        eos_ids=tuple(sorted(end_ids(metadata))),
        bos_id=bos if isinstance(bos, int) else None,
        temperature=read.maybe("temp", zero=True),
        top_p=read.maybe("top_p"),
        top_k=read.whole("top_k"),
        min_p=read.maybe("min_p", zero=True),
        repetition_penalty=read.maybe("penalty_repeat"),
        unsupported=tuple(f"{key}={value}" for key, value in said.items() if key not in taken),
    )
