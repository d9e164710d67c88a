"""What a decoder of the Llama family is made of, and how a config.json says it.

One record, ``DecoderConfig``, says everything that differs between Llama, Mistral, Mixtral, Qwen2,
Qwen3, Qwen3-MoE and Gemma 3, so that the decoder has one block and no family names in it. Whatever
a config asks for that the record cannot say is refused by name.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outpace.errors import ModelError, shown
from outpace.models import mixtures
from outpace.models.attention import HeadShape
from outpace.models.fields import MOST, MOST_LAYERS, Fields, token_ids
from outpace.models.mixtures import Mixture
from outpace.models.rope import Rope
from outpace.params import Defaults

__all__ = [
    "FAMILIES",
    "FULL",
    "HF_ACTIVATIONS",
    "WINDOWED",
    "DecoderConfig",
    "GenerationDefaults",
    "Rope",
    "share",
    "unsupported",
]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe")

_ALIASES = {family: family for family in FAMILIES} | {"gemma3_text": "gemma3", "mimo": "qwen2"}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
HF_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
"""``DecoderConfig.activation`` -> its name in config files, the first if it has several."""

# What a config.json may leave out, as the model classes of transformers fill it in.
_COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"max_position_embeddings": 2048},
    "mistral": _COMMON | {"max_position_embeddings": 131_072, "num_key_value_heads": 8},
    "qwen2": _COMMON | {"max_position_embeddings": 32_768, "max_window_layers": 28},
    "qwen3": _COMMON | {"max_position_embeddings": 32_768, "max_window_layers": 28, "head_dim": 128},
    "mixtral": _COMMON
    | {"max_position_embeddings": 131_072, "num_key_value_heads": 8}
    | {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": _COMMON
    | {"max_position_embeddings": 32_768, "num_experts": 128, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 768, "decoder_sparse_step": 1},
    "gemma3": _COMMON
    | {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
}
WINDOWED, FULL = "sliding_attention", "full_attention"
"""Layer types as config files name them."""


_COUNTS = (
    *("vocab_size", "hidden_size", "ffn_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    "max_positions",
)
_NUMBERS = (
    *("norm_eps", "norm_offset", "embed_scale", "attention_scale", "attention_softcap", "logit_softcap"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    family: str
    """One of ``FAMILIES``; for reports, never to branch on."""
    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_size: int
    """Width between the projections of a dense MLP."""
    num_layers: int
    """Blocks."""
    num_heads: int
    """Query heads of a layer."""
    num_kv_heads: int
    """Key and value heads of a layer; divides ``num_heads``."""
    head_dim: int
    """Width of a head; ``num_heads * head_dim`` need not be ``hidden_size``."""
    norm_eps: float
    """Added to the mean square in every RMS norm."""
    activation: str
    """``silu`` or ``gelu_tanh``, on the gate projection."""
    max_positions: int
    """Longest context, in tokens, rope stretching included."""
    tied_head: bool
    """Whether the head is the embedding; then there is no ``lm_head.weight``."""
    qkv_bias: bool = False
    """Whether the q, k and v projections have a bias."""
    out_bias: bool = False
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool = False
    """Whether the gate, up and down projections have a bias."""
    qk_norm: bool = False
    """RMS norm over each head of q and k, before rotation (Qwen3, Gemma 3)."""
    norm_offset: float = 0.0
    """Added to every norm weight: 1.0 for Gemma 3 safetensors, whose GGUF files hold the sum."""
    sandwich_norms: bool = False
    """Gemma 3: a norm after each sublayer too, and ``pre_feedforward_layernorm`` before the MLP."""
    embed_scale: float = 1.0
    """Multiplies embeddings, itself first rounded to the dtype of the embedding weights (Gemma)."""
    attention_scale: float
    """Multiplies q.k."""
    attention_softcap: float | None = None
    """c: scores become c * tanh(score / c), before the mask."""
    logit_softcap: float | None = None
    """c: logits become c * tanh(logit / c)."""
    windows: tuple[int | None, ...]
    """Per layer: a query at position i sees keys at positions > i - window; None sees all."""
    ropes: tuple[Rope, ...]
    """The distinct rotary tables."""
    rope_of_layer: tuple[int, ...]
    """Per layer: index into ``ropes``."""
    mixture: Mixture | None = None
    """Its sparse MLPs; None: all are dense."""

    def __post_init__(self) -> None:
        """Refuse values of another type, and shapes that cannot be built."""
        for name in _COUNTS:
            value, most = getattr(self, name), MOST_LAYERS if name == "num_layers" else MOST
            if type(value) is not int or not 0 < value <= most:
                raise ModelError(f"{name} must be a whole number from 1 to {most}, got {shown(value)}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and not (type(value) in (int, float) and math.isfinite(value)):
                raise ModelError(f"{name} must be a number, got {shown(value)}")
        if self.activation not in _ACTIVATIONS.values():
            raise ModelError(f"activation {shown(self.activation)} is not supported")
        fits = all(window is None or (type(window) is int and window > 0) for window in self.windows)
        fits &= all(type(i) is int and 0 <= i < len(self.ropes) for i in self.rope_of_layer)
        if not fits or not len(self.windows) == len(self.rope_of_layer) == self.num_layers:
            raise ModelError(f"windows and rope_of_layer do not fit {self.num_layers} layers")
        if self.mixture is not None and len(self.mixture.sparse) != self.num_layers:
            raise ModelError(f"a mixture of {len(self.mixture.sparse)} layers does not fit {self.num_layers}")
        if self.num_kv_heads <= 0 or self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"head width {self.head_dim} is odd and cannot be rotated")

    @property
    def head_shape(self) -> HeadShape:
        """Heads of its attentions, and how their scores become weights."""
        group = self.num_heads // self.num_kv_heads
        return HeadShape(
            self.num_kv_heads, group, self.head_dim, self.attention_scale, self.attention_softcap
        )

    @property
    def text(self) -> str:
        """All that it says, for digests; as before there were mixtures where there is none."""
        return repr(self).replace(", mixture=None", "")

    def of_layers(self, layers: Sequence[int]) -> "DecoderConfig":
        """That of some layers."""
        return replace(
            self,
            num_layers=len(layers),
            windows=tuple(self.windows[i] for i in layers),
            rope_of_layer=tuple(self.rope_of_layer[i] for i in layers),
            mixture=self.mixture and self.mixture.of_layers(layers),
        )

    def sparse(self, layer: int) -> Mixture | None:
        """What the MLP of a layer is; None: it is dense."""
        return self.mixture if self.mixture is not None and self.mixture.sparse[layer] else None

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Give every tensor the decoder reads, by Hugging Face name, with its shape."""
        hidden, ffn, head = self.hidden_size, self.ffn_size, self.head_dim
        query, key = self.num_heads * head, self.num_kv_heads * head
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied_head:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.sandwich_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        attention = (
            ("self_attn.q_proj", query, hidden, self.qkv_bias),
            ("self_attn.k_proj", key, hidden, self.qkv_bias),
            ("self_attn.v_proj", key, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, query, self.out_bias),
        )
        dense = (
            ("mlp.gate_proj", ffn, hidden, self.mlp_bias),
            ("mlp.up_proj", ffn, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, ffn, self.mlp_bias),
        )
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}."
            shapes |= {f"{at}{norm}.weight": (hidden,) for norm in norms}
            if self.qk_norm:
                shapes |= {f"{at}self_attn.{one}_norm.weight": (head,) for one in "qk"}
            mlp = dense if (sparse := self.sparse(layer)) is None else sparse.linears(hidden)
            for name, rows, columns, bias in (*attention, *mlp):
                shapes[f"{at}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{at}{name}.bias"] = (rows,)
        return shapes

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DecoderConfig":
        """Read the content of a config.json, in the layout of transformers 4 or 5.

        Raises:
            ModelError: the architecture or one of its features is not supported (named), or a
                value is missing or impossible.
        """
        family, config = _text_part(config)
        read = Fields("config.json", _DEFAULTS[family], config)
        heads, hidden = read.count("num_attention_heads"), read.count("hidden_size")
        layers = read.count("num_hidden_layers", most=MOST_LAYERS)
        head_dim = read.count("head_dim", hidden // heads)
        gemma = family == "gemma3"
        activation = read.get("hidden_activation") if gemma else None
        activation = activation or read.get("hidden_act")
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            raise ModelError(
                f"activation {shown(activation)} is not supported; supported: {', '.join(_ACTIVATIONS)}"
            )
        kinds = _layer_types(family, read, layers)
        by_kind = _hf_ropes(family, read, head_dim)
        ropes, rope_of_layer = share([by_kind[kind] for kind in kinds])
        window = read.count("sliding_window") if WINDOWED in kinds else None
        bias = family not in ("mistral", "mixtral") and bool(read.get("attention_bias"))
        return cls(
            family=family,
            vocab_size=read.count("vocab_size"),
            hidden_size=hidden,
            ffn_size=read.count("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=read.count("num_key_value_heads", heads),
            head_dim=head_dim,
            norm_eps=read.number("rms_norm_eps"),
            activation=_ACTIVATIONS[activation],
            max_positions=_reach(by_kind[FULL], read.count("max_position_embeddings"), gemma),
            tied_head=bool(read.get("tie_word_embeddings")),
            qkv_bias=bias if family != "qwen2" else True,
            out_bias=bias if family != "qwen2" else False,
            mlp_bias=family == "llama" and bool(read.get("mlp_bias")),
            qk_norm=family in ("qwen3", "qwen3_moe", "gemma3"),
            norm_offset=1.0 if gemma else 0.0,
            sandwich_norms=gemma,
            embed_scale=hidden**0.5 if gemma else 1.0,
            attention_scale=(read.number("query_pre_attn_scalar") if gemma else head_dim) ** -0.5,
            attention_softcap=read.maybe("attn_logit_softcapping") if gemma else None,
            logit_softcap=read.maybe("final_logit_softcapping") if gemma else None,
            windows=tuple(window if kind == WINDOWED else None for kind in kinds),
            ropes=ropes,
            rope_of_layer=rope_of_layer,
            mixture=mixtures.from_hf(family, read, layers),
        )


def unsupported(name: object) -> ModelError:
    """Give the error for an architecture that is not in ``FAMILIES``."""
    return ModelError(f"architecture {shown(name)} is not supported; supported: {', '.join(FAMILIES)}")


def _text_part(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Give the family, and the mapping that describes the language model."""
    read = Fields("config.json", {}, config)
    architectures = read.texts("architectures")
    kind = config.get("model_type")
    for name in architectures:
        if not name.endswith(("ForCausalLM", "ForConditionalGeneration")):
            raise unsupported(name)
    if not isinstance(kind, str) or kind not in _ALIASES:
        raise unsupported(kind or ", ".join(architectures) or None)
    if quantization := read.mapping("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise ModelError(f"weights quantized by {shown(method)} are not supported, only plain and GGUF")
    inner = read.mapping("text_config")
    if inner:
        tied = config.get("tie_word_embeddings")
        config = ({} if tied is None else {"tie_word_embeddings": tied}) | dict(inner)
    if config.get("use_bidirectional_attention"):
        raise ModelError("bidirectional attention is not supported: this model is not causal")
    return _ALIASES[kind], config


def _layer_types(family: str, read: Fields, layers: int) -> list[str]:
    types: Sequence[str] | None = read.texts("layer_types") if read.get("layer_types") is not None else None
    window = read.get("sliding_window")
    if family in ("qwen2", "qwen3", "qwen3_moe") and not read.get("use_sliding_window"):
        window = None
    if types is None:
        if family in ("mistral", "mixtral", "qwen3_moe"):
            types = [WINDOWED] * layers
        elif family == "gemma3":
            every = read.count("sliding_window_pattern")
            types = [WINDOWED if (i + 1) % every else FULL for i in range(layers)]
        elif family in ("qwen2", "qwen3"):
            first = read.number("max_window_layers", zero=True)
            types = [WINDOWED if i >= first else FULL for i in range(layers)]
        else:
            types = [FULL] * layers
    if len(types) != layers or not set(types) <= {WINDOWED, FULL}:
        raise ModelError(f"layer_types must name {layers} layers as {FULL} or {WINDOWED}, got {shown(types)}")
    # Gemma 3 picks a layer's rotary table by its type, so the type stays even without a window.
    if window is None and family != "gemma3":
        return [FULL] * layers
    return list(types)


def _hf_ropes(family: str, read: Fields, head_dim: int) -> dict[str, Rope]:
    """Give the rotary table of each layer type."""
    positions, theta = read.count("max_position_embeddings"), read.number("rope_theta")
    said = dict(read.mapping("rope_scaling") or read.mapping("rope_parameters"))
    nested = {kind: said[kind] for kind in (FULL, WINDOWED) if isinstance(said.get(kind), dict)}
    outer = {"partial_rotary_factor": read.get("partial_rotary_factor")}
    thetas = {FULL: theta, WINDOWED: theta}
    if family == "gemma3":
        thetas[WINDOWED] = read.number("rope_local_base_freq")
        nested = nested or {FULL: said}
    elif not nested:
        nested = {FULL: said, WINDOWED: said}
    return {
        kind: Rope.from_hf(
            outer | dict(nested.get(kind) or {}), theta=thetas[kind], dim=head_dim, max_positions=positions
        )
        for kind in (FULL, WINDOWED)
    }


def _reach(rope: Rope, positions: int, said_in_full: bool) -> int:
    """Give the longest context; most configs state the length before stretching."""
    if rope.kind == "yarn":
        return max(positions, int(rope.original_max_positions * rope.factor))
    if rope.kind == "linear" and not said_in_full:
        return int(positions * rope.factor)
    return positions


def share(ropes: Sequence[Rope]) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """Give the distinct tables, and for each layer the index of its own."""
    distinct = tuple(dict.fromkeys(ropes))
    return distinct, tuple(distinct.index(rope) for rope in ropes)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults(Defaults):
    """How a model's authors sample from it, and which tokens begin and end its texts."""

    eos_ids: tuple[int, ...] = ()
    """Every token that ends a text, ascending."""
    bos_id: int | None = None
    """The token that begins a text."""
    unsupported: tuple[str, ...] = ()
    """Sampling settings of the file that are not honoured, as ``key=value``."""

    @classmethod
    def from_hf(cls, *files: Mapping[str, Any]) -> "GenerationDefaults":
        """Read generation_config.json and config.json, best source first.

        End-of-sequence ids are collected from all of them; of the rest the first file that
        says something wins. Settings are read from the first file only.

        Raises:
            ModelError: a value has the wrong type.
        """
        settings = Fields("generation_config.json", {}, files[0])
        do_sample = settings.get("do_sample")
        temperature = settings.maybe("temperature", zero=True)
        return cls(
            eos_ids=tuple(sorted({i for file in files for i in token_ids(file, "eos_token_id")})),
            bos_id=_first_id(files, "bos_token_id"),
            do_sample=do_sample,
            temperature=0.0 if do_sample is False else temperature,
            top_p=settings.maybe("top_p"),
            top_k=settings.whole("top_k"),
            min_p=settings.maybe("min_p", zero=True),
            repetition_penalty=settings.maybe("repetition_penalty"),
            unsupported=tuple(
                f"{key}={settings.get(key)}"
                for key, neutral in _NEUTRAL.items()
                if settings.get(key, neutral) != neutral
            ),
        )


# Settings of transformers that change what is generated, with the value that switches them off.
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}


def _first_id(files: Sequence[Mapping[str, Any]], key: str) -> int | None:
    return next((i for file in files for i in token_ids(file, key)), None)
