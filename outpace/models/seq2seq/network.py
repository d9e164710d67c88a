"""The two stacks of an encoder-decoder: an encoder over one source, a decoder over rows of trees.

Shape letters: T rows, S source tokens, H hidden size, A width of the heads together, K heads, D
width of a head. B sequences, J rows of the longest, C keys, R relative distances, V vocabulary,
P positions, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.errors import ModelError
from outpace.models.blocks import Form
from outpace.models.packed import Linear
from outpace.models.seq2seq.config import LEARNED, RELATIVE, SINUSOIDAL, Seq2SeqConfig, StackConfig

Read = Callable[[str], Tensor]
"""Name of a tensor -> the tensor; ModelError where there is none."""

_ACTIVATION: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
_T5_PARTS = {"self": "SelfAttention", "cross": "EncDecAttention"}
_BART_PARTS = {"self": "self_attn", "cross": "encoder_attn"}


@dataclass(frozen=True, slots=True)
class Names:
    """Where a family keeps the tensors of a stack."""

    family: str
    side: str
    """``encoder`` or ``decoder``."""

    def attention(self, layer: int, part: str) -> tuple[str, str]:
        """Prefixes of an attention's projections and of its norm; ``part`` is self or cross."""
        if self.family == "t5":
            at = f"{self.side}.block.{layer}.layer.{0 if part == 'self' else 1}."
            return f"{at}{_T5_PARTS[part]}.", f"{at}layer_norm."
        at = f"model.{self.side}.layers.{layer}.{_BART_PARTS[part]}"
        return f"{at}.", f"{at}_layer_norm."

    def projections(self) -> tuple[str, str, str, str]:
        """Names of the projections of an attention: queries, keys, values, output."""
        return ("q", "k", "v", "o") if self.family == "t5" else ("q_proj", "k_proj", "v_proj", "out_proj")

    def mlp(self, layer: int, gated: bool) -> tuple[Sequence[str], str, str]:
        """Names of the projections into the MLP, of the one out of it, and of its norm."""
        if self.family == "t5":
            at = f"{self.side}.block.{layer}.layer.{1 if self.side == 'encoder' else 2}."
            into = ("wi_0", "wi_1") if gated else ("wi",)
            inner = f"{at}DenseReluDense."
            return [inner + one for one in into], f"{inner}wo", f"{at}layer_norm."
        at = f"model.{self.side}.layers.{layer}."
        return [f"{at}fc1"], f"{at}fc2", f"{at}final_layer_norm."


class Norm:
    """A layer norm, or a root-mean-square norm, in float32."""

    def __init__(self, read: Read, at: str, config: Seq2SeqConfig, device: torch.device) -> None:
        self.weight_H = read(f"{at}weight").float().to(device)
        self.bias_H = None if config.rms else read(f"{at}bias").float().to(device)
        self.eps, self.rms = config.eps, config.rms

    def __call__(self, x_TH: Tensor) -> Tensor:
        if self.rms:
            return F.rms_norm(x_TH, x_TH.shape[-1:], self.weight_H, self.eps)
        return F.layer_norm(x_TH, x_TH.shape[-1:], self.weight_H, self.bias_H, self.eps)


def _linear(read: Read, names: Sequence[str], config: Seq2SeqConfig, form: Form) -> Linear:
    """Some projections of equal inputs, side by side."""
    weight_OH = torch.cat([read(f"{name}.weight") for name in names])
    bias_O = torch.cat([read(f"{name}.bias") for name in names]) if config.bias else None
    return form.linear(weight_OH, bias_O)


class Attention:
    """The projections of one attention, and its norm."""

    def __init__(
        self, read: Read, names: Names, layer: int, part: str, config: Seq2SeqConfig, form: Form
    ) -> None:
        at, norm = names.attention(layer, part)
        q, k, v, out = (f"{at}{one}" for one in names.projections())
        self.norm = Norm(read, norm, config, form.device)
        self.out = _linear(read, [out], config, form)
        if part == "self":
            self.query = _linear(read, [q, k, v], config, form)
            """Of a self-attention, keys and values too."""
        else:
            self.query = _linear(read, [q], config, form)
            self.keys_and_values = _linear(read, [k, v], config, form)


class Layer:
    """One layer of a stack; ``cross`` is None in an encoder."""

    def __init__(self, read: Read, names: Names, layer: int, config: Seq2SeqConfig, form: Form) -> None:
        self.attention = Attention(read, names, layer, "self", config, form)
        crosses = names.side == "decoder"
        self.cross = Attention(read, names, layer, "cross", config, form) if crosses else None
        into, out, norm = names.mlp(layer, config.gated)
        self.into, self.out = _linear(read, into, config, form), _linear(read, [out], config, form)
        self.norm = Norm(read, norm, config, form.device)
        self._act, self._gated = _ACTIVATION[config.activation], config.gated

    def mlp(self, x_TH: Tensor) -> Tensor:
        inner = self.into(x_TH)
        if self._gated:
            gate, up = inner.chunk(2, -1)
            return self.out(self._act(gate) * up)
        return self.out(self._act(inner))


def _sinusoids(count: int, width: int) -> Tensor:
    """Sines in the first half, cosines in the second, as Marian has them: float32 [P, H]."""
    rate_H = 10000.0 ** -(2 * (torch.arange(width) // 2) / width).double()
    angle_PH = torch.arange(count).double()[:, None] * rate_H
    return torch.cat([angle_PH[:, 0::2].sin(), angle_PH[:, 1::2].cos()], 1).float()


def bucket(distance_R: Tensor, buckets: int, reach: int, *, both_ways: bool) -> Tensor:
    """Buckets of T5 for distances key - query: exact when near, logarithmic when far."""
    first_R = torch.zeros_like(distance_R)
    if both_ways:
        buckets //= 2
        first_R = (distance_R > 0) * buckets
        away_R = distance_R.abs()
    else:
        away_R = (-distance_R).clamp_min(0)
    exact = buckets // 2
    ratio_R = (away_R.clamp_min(1).float() / exact).log() / math.log(reach / exact)
    far_R = (exact + (ratio_R * (buckets - exact)).long()).clamp_max(buckets - 1)
    return first_R + torch.where(away_R < exact, away_R, far_R)


class Stack:
    """One side of the model: how its rows begin and end, and its layers."""

    def __init__(self, read: Read, side: str, config: Seq2SeqConfig, form: Form) -> None:
        names = Names(config.family, side)
        self.config, self.side, self.form = config, side, form
        shape: StackConfig = config.encoder if side == "encoder" else config.decoder
        self.heads = shape.heads
        self.layers = [Layer(read, names, i, config, form) for i in range(shape.layers)]
        self.position_PH: Tensor | None = None
        self.last: Norm | None = None
        self.first: Norm | None = None
        if config.positions == RELATIVE:
            at = names.attention(0, "self")[0]
            self._bias_RK = read(f"{at}relative_attention_bias.weight").float().to(form.device)
            self.last = Norm(read, f"{side}.final_layer_norm.", config, form.device)
        elif config.positions == LEARNED:
            table = read(f"model.{side}.embed_positions.weight").float()
            self.position_PH = table[config.position_offset :].to(form.device)
        else:
            assert config.positions == SINUSOIDAL
            self.position_PH = _sinusoids(config.source_positions, config.hidden_size).to(form.device)
        if config.embed_norm:
            self.first = Norm(read, f"model.{side}.layernorm_embedding.", config, form.device)

    def enter(self, embedded_TH: Tensor, position_T: Tensor) -> Tensor:
        """Rows as the first layer reads them, float32."""
        x_TH = embedded_TH.float() * self.config.embed_scale
        if self.position_PH is not None:
            # Only a draft model may be asked for more positions than it has; its guess is then poor.
            x_TH = x_TH + self.position_PH[position_T.clamp_max(len(self.position_PH) - 1)]
        return x_TH if self.first is None else self.first(x_TH)

    def bias(self, distance: Tensor) -> Tensor | None:
        """What relative positions add to scores, [..., K]; None where they add nothing.

        Args:
            distance: position of the key - position of the query.
        """
        if self.config.positions != RELATIVE:
            return None
        which = bucket(distance, self.config.buckets, self.config.reach, both_ways=self.side == "encoder")
        return self._bias_RK[which]

    def sublayer(self, x_TH: Tensor, norm: Norm, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Add what a sublayer makes of the rows."""
        if self.config.norm_first:
            return x_TH + run(norm(x_TH).to(self.form.dtype)).float()
        return norm(x_TH + run(x_TH.to(self.form.dtype)).float())

    def leave(self, x_TH: Tensor) -> Tensor:
        return x_TH if self.last is None else self.last(x_TH)


def mix(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Attention of queries [..., J, D] over keys [..., D, C] and values [..., C, D]; sums in float32."""
    score = q.float() @ k.float()
    if scale != 1.0:
        score = score * scale
    if bias is not None:
        score = score + bias
    return score.softmax(-1) @ v.float()


def encode(stack: Stack, embedded_SH: Tensor) -> Tensor:
    """Run the encoder over one source; float32 [S, H]. Cost: one pass over S rows."""
    size, heads, width = len(embedded_SH), stack.heads, stack.config.head_dim
    place_S = torch.arange(size, device=embedded_SH.device)
    bias_SSK = stack.bias(place_S[None] - place_S[:, None])
    bias_KSS = None if bias_SSK is None else bias_SSK.permute(2, 0, 1)
    x_SH = stack.enter(embedded_SH, place_S)
    for layer in stack.layers:
        own = layer.attention

        def attend(u_SH: Tensor, own: Attention = own) -> Tensor:
            q, k, v = own.query(u_SH).view(size, 3, heads, width).unbind(1)
            mixed_KSD = mix(
                q.transpose(0, 1),
                k.permute(1, 2, 0),
                v.transpose(0, 1),
                stack.config.attention_scale,
                bias_KSS,
            )
            return own.out(mixed_KSD.transpose(0, 1).flatten(1).to(u_SH.dtype))

        x_SH = stack.sublayer(x_SH, own.norm, attend)
        x_SH = stack.sublayer(x_SH, layer.norm, layer.mlp)
    return stack.leave(x_SH)


def check_tensors(config: Seq2SeqConfig, names: frozenset[str], shape: Callable[[str], Sequence[int]]) -> str:
    """Name of the embedding; ModelError where the two tables of a checkpoint do not fit its config."""
    name = "shared.weight" if config.family == "t5" else "model.shared.weight"
    if name not in names:
        raise ModelError(f"there is no tensor {name!r}, which its config needs")
    if tuple(shape(name)) != (config.vocab_size, config.hidden_size):
        want = [config.vocab_size, config.hidden_size]
        raise ModelError(f"{name!r} has shape {list(shape(name))}, its config needs {want}")
    return name
