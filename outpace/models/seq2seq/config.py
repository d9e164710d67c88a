"""What an encoder-decoder is made of, and how a config.json of T5, BART or Marian says it.

One record, ``Seq2SeqConfig``, says everything that differs between the families, so that the
network has one layer and no family names in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outpace.errors import ModelError, shown
from outpace.models.fields import MOST_LAYERS, Fields, token_ids

FAMILIES = ("t5", "bart", "marian")
RELATIVE, LEARNED, SINUSOIDAL = "relative", "learned", "sinusoidal"
"""How a family tells positions apart."""

_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
_T5 = {"feed_forward_proj": "relu", "layer_norm_epsilon": 1e-6, "n_positions": 512, "eos_token_id": 1}
_BART = {"activation_function": "gelu", "max_position_embeddings": 1024, "eos_token_id": 2}
_MARIAN = {"activation_function": "gelu", "max_position_embeddings": 1024, "eos_token_id": 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class StackConfig:
    """One of the two stacks of layers."""

    layers: int
    heads: int
    ffn_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Seq2SeqConfig:
    family: str
    """One of ``FAMILIES``; names of tensors follow from it, arithmetic does not."""
    vocab_size: int
    hidden_size: int
    head_dim: int
    encoder: StackConfig
    decoder: StackConfig
    activation: str
    gated: bool
    """Whether the MLP multiplies two projections."""
    rms: bool
    """Norms divide by the root mean square and have no bias; otherwise they are layer norms."""
    eps: float
    norm_first: bool
    """Whether a sublayer's input is normed, or the sum behind it."""
    embed_scale: float
    embed_norm: bool
    bias: bool
    """Whether projections and logits have a bias."""
    positions: str
    """RELATIVE, LEARNED or SINUSOIDAL."""
    position_offset: int = 0
    """Row of the first position in a learned table."""
    buckets: int = 0
    """Of relative distances, per stack."""
    reach: int = 0
    """Distance from which on all share a bucket."""
    attention_scale: float
    """Multiplies q.k."""
    logit_scale: float
    """Multiplies the last hidden states."""
    source_positions: int
    """Most tokens of a source, and of an answer."""
    eos_id: int
    """Ends a source, and an answer."""
    start_ids: tuple[int, ...]
    """What every answer begins with, unprinted."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> Seq2SeqConfig:
        """Read the content of a config.json and a generation_config.json.

        Raises:
            ModelError: a family or a setting that is not supported, or a bad value.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ModelError(
                f"encoder-decoder {shown(family)} is not supported; supported: {', '.join(FAMILIES)}"
            )
        files = (generation or {}, config)
        start = next((i for file in files for i in token_ids(file, "decoder_start_token_id")), None)
        if start is None:
            start = next(iter(token_ids(config, "pad_token_id")), 0)
        forced = next((i for file in files for i in token_ids(file, "forced_bos_token_id")), None)
        starts = (start,) if forced is None else (start, forced)
        return _t5(config, starts) if family == "t5" else _bart(family, config, starts)


def is_seq2seq(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of an encoder-decoder."""
    return bool(config.get("is_encoder_decoder")) or config.get("model_type") in FAMILIES


def _t5(config: Mapping[str, Any], starts: tuple[int, ...]) -> Seq2SeqConfig:
    read = Fields("config.json", _T5, config)
    kind = read.text("feed_forward_proj")
    gated = kind.startswith("gated-")
    name = kind.removeprefix("gated-")
    layers, heads = read.count("num_layers", most=MOST_LAYERS), read.count("num_heads")
    size, hidden = read.count("d_ff"), read.count("d_model")
    # Models whose head is tied scale what it reads; transformers 5 writes that down by itself.
    scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    return Seq2SeqConfig(
        family="t5",
        vocab_size=read.count("vocab_size"),
        hidden_size=hidden,
        head_dim=read.count("d_kv"),
        encoder=StackConfig(layers=layers, heads=heads, ffn_size=size),
        decoder=StackConfig(
            layers=read.count("num_decoder_layers", layers, most=MOST_LAYERS), heads=heads, ffn_size=size
        ),
        activation=_activation("gelu_new" if kind == "gated-gelu" else name),
        gated=gated,
        rms=True,
        eps=read.number("layer_norm_epsilon"),
        norm_first=True,
        embed_scale=1.0,
        embed_norm=False,
        bias=False,
        positions=RELATIVE,
        buckets=read.count("relative_attention_num_buckets", 32),
        reach=read.count("relative_attention_max_distance", 128),
        attention_scale=1.0,
        logit_scale=hidden**-0.5 if scaled else 1.0,
        source_positions=read.count("n_positions"),
        eos_id=_eos(read),
        start_ids=starts,
    )


def _bart(family: str, config: Mapping[str, Any], starts: tuple[int, ...]) -> Seq2SeqConfig:
    read = Fields("config.json", _BART if family == "bart" else _MARIAN, config)
    hidden = read.count("d_model")
    encoder, decoder = (
        StackConfig(
            layers=read.count(f"{side}_layers", most=MOST_LAYERS),
            heads=read.count(f"{side}_attention_heads"),
            ffn_size=read.count(f"{side}_ffn_dim"),
        )
        for side in ("encoder", "decoder")
    )
    if encoder.heads != decoder.heads or hidden % decoder.heads:
        raise ModelError(
            f"config.json: {encoder.heads} and {decoder.heads} heads of a width {hidden} do not fit"
        )
    if family == "marian" and config.get("share_encoder_decoder_embeddings") is False:
        raise ModelError("config.json: embeddings of encoder and decoder that differ are not supported")
    vocab = read.count("vocab_size")
    if read.count("decoder_vocab_size", vocab) != vocab:
        raise ModelError("config.json: a decoder with a vocabulary of its own is not supported")
    return Seq2SeqConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        head_dim=hidden // decoder.heads,
        encoder=encoder,
        decoder=decoder,
        activation=_activation(read.text("activation_function")),
        gated=False,
        rms=False,
        eps=1e-5,
        norm_first=False,
        embed_scale=hidden**0.5 if read.get("scale_embedding") else 1.0,
        embed_norm=family == "bart",
        bias=True,
        positions=LEARNED if family == "bart" else SINUSOIDAL,
        position_offset=2 if family == "bart" else 0,
        attention_scale=(hidden // decoder.heads) ** -0.5,
        logit_scale=1.0,
        source_positions=read.count("max_position_embeddings"),
        eos_id=_eos(read),
        start_ids=starts,
    )


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ModelError(f"config.json: activation {shown(name)} is not supported")
    return _ACTIVATIONS[name]


def _eos(read: Fields) -> int:
    ids = token_ids({"eos_token_id": read.get("eos_token_id")}, "eos_token_id")
    if len(ids) != 1:
        raise ModelError(f"config.json: an encoder-decoder needs one eos_token_id, got {shown(ids)}")
    return ids[0]
