"""What a decoder of the Llama family is made of, and how a config.json says it.

One record, ``DecoderConfig``, says everything that differs between the families, so that the
decoder has one block and no family names in it. Whatever a config asks for that the record cannot
say is refused by name.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from outpace.errors import ModelError, shown
from outpace.models import mixtures
from outpace.models.attention import HeadShape
from outpace.models.by_layer import FULL, WINDOWED, hf_ropes, layer_types, reach, share, turning
from outpace.models.fields import MOST, MOST_LAYERS, Fields
from outpace.models.mixtures import Mixture
from outpace.models.rope import Rope

__all__ = [
    "CLASSES",
    "FAMILIES",
    "FULL",
    "HF_ACTIVATIONS",
    "WINDOWED",
    "DecoderConfig",
    "Rope",
    "share",
    "unsupported",
]

CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "granite": "Granite",
    "smollm3": "SmolLM3",
    "phi3": "Phi3",
    "olmo2": "Olmo2",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
}
"""Family -> with what the names of its classes in transformers begin."""
FAMILIES = tuple(CLASSES)

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
_GEMMA = _COMMON | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
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
    "gemma2": _GEMMA | {"vocab_size": 256_000, "max_position_embeddings": 8192},
    "gemma3": _GEMMA
    | {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    "granite": _COMMON
    | {
        "max_position_embeddings": 2048,
        **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), 1.0),
        "logits_scaling": 1.0,
    },
    "smollm3": _COMMON
    | {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    "phi3": _COMMON
    | {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "olmo2": _COMMON | {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
}
_GEMMA_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""What a config of Gemma 2 leaves out; there ``null`` means none."""
_COUNTS = (
    *("vocab_size", "hidden_size", "ffn_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    "max_positions",
)
_NUMBERS = (
    *("norm_eps", "norm_offset", "embed_scale", "attention_scale", "attention_softcap", "logit_softcap"),
    *("residual_scale", "logit_scale"),
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
    """Added to every norm weight: 1.0 for safetensors of Gemma, whose GGUF files hold the sum."""
    sandwich_norms: bool = False
    """Gemma: a norm after each sublayer too, and ``pre_feedforward_layernorm`` before the MLP."""
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
    residual_scale: float = field(default=1.0, repr=False)
    """Multiplies what a sublayer adds to the residual stream (Granite)."""
    logit_scale: float = field(default=1.0, repr=False)
    """Multiplies logits (Granite): weights of the last norm hold it, see `outpace.models.layout`."""
    pre_norms: bool = field(default=True, repr=False)
    """Whether sublayers have norms before them; OLMo 2 has those of ``sandwich_norms`` alone."""
    wide_qk_norm: bool = field(default=False, repr=False)
    """One RMS norm over all heads of q, and one over those of k (OLMo 2)."""
    mixture: Mixture | None = field(default=None, repr=False)
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
    def text(self) -> str:
        """All that it says, for digests: fields that came later only where they say something."""
        later = {
            one.name: value
            for one in fields(self)
            if not one.repr and (value := getattr(self, one.name)) != one.default
        }
        still = [rope.still for rope in self.ropes]
        return repr(self) + (f"{later} {still}" if later or any(still) else "")

    @property
    def head_shape(self) -> HeadShape:
        """Heads of its attentions, and how their scores become weights."""
        group = self.num_heads // self.num_kv_heads
        return HeadShape(
            self.num_kv_heads, group, self.head_dim, self.attention_scale, self.attention_softcap
        )

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
        norms = ["input_layernorm"] * self.pre_norms + ["post_attention_layernorm"]
        if self.sandwich_norms:
            norms += ["pre_feedforward_layernorm"] * self.pre_norms + ["post_feedforward_layernorm"]
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
                wide = (query, key) if self.wide_qk_norm else (head, head)
                shapes |= {
                    f"{at}self_attn.{one}_norm.weight": (n,) for one, n in zip("qk", wide, strict=True)
                }
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
        gemma, granite, olmo = family in ("gemma2", "gemma3"), family == "granite", family == "olmo2"
        activation = read.get("hidden_activation") if gemma else None
        activation = activation or read.get("hidden_act")
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            raise ModelError(
                f"activation {shown(activation)} is not supported; supported: {', '.join(_ACTIVATIONS)}"
            )
        kinds = layer_types(family, read, layers)
        by_kind = hf_ropes(family, read, head_dim)
        turns = zip(kinds, turning(family, read, layers), strict=True)
        ropes, rope_of_layer = share([by_kind[kind] if turn else Rope.none(head_dim) for kind, turn in turns])
        window = read.count("sliding_window") if WINDOWED in kinds else None
        bias = family not in ("mistral", "mixtral", "phi3") and bool(read.get("attention_bias"))
        caps = {key: read.maybe(key) for key in _GEMMA_CAPS if gemma}
        if family == "gemma2":
            caps |= {key: cap for key, cap in _GEMMA_CAPS.items() if key not in config}
        embed_scale, attention_scale = hidden**0.5 if gemma else 1.0, head_dim**-0.5
        if gemma:
            attention_scale = read.number("query_pre_attn_scalar") ** -0.5
        elif granite:
            embed_scale = read.number("embedding_multiplier")
            attention_scale = read.number("attention_multiplier")
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
            max_positions=reach(by_kind[FULL], read.count("max_position_embeddings"), gemma),
            tied_head=bool(read.get("tie_word_embeddings")),
            qkv_bias=bias if family != "qwen2" else True,
            out_bias=bias if family != "qwen2" else False,
            mlp_bias=family in ("llama", "granite", "smollm3") and bool(read.get("mlp_bias")),
            qk_norm=family in ("qwen3", "qwen3_moe", "gemma3", "olmo2"),
            norm_offset=1.0 if gemma else 0.0,
            sandwich_norms=gemma or olmo,
            embed_scale=embed_scale,
            attention_scale=attention_scale,
            attention_softcap=caps.get("attn_logit_softcapping"),
            logit_softcap=caps.get("final_logit_softcapping"),
            windows=tuple(window if kind == WINDOWED else None for kind in kinds),
            ropes=ropes,
            rope_of_layer=rope_of_layer,
            residual_scale=read.number("residual_multiplier") if granite else 1.0,
            logit_scale=1.0 / read.number("logits_scaling") if granite else 1.0,
            pre_norms=not olmo,
            wide_qk_norm=olmo,
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
