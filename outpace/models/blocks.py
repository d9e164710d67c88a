"""Weights of a decoder of the Llama family, as they are multiplied, and how they get there.

Layer by layer: read, merge what has the same input, lay out, forget the original.

Shape letters: O outputs, I inputs, H hidden size, D width of a head, V vocabulary, T rows.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.models.packed import Linear
from outpace.models.quantize import quantized
from outpace.models.rowwise import Norm
from outpace.models.weights import Checkpoint


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """Weights of one layer."""

    qkv: Linear
    """Dimensions of query and key heads are in pairs that rotate together."""
    out: Linear
    gate_up: Linear
    down: Linear
    attn_norm: Norm
    mlp_norm: Norm
    qk_norm: Norm | None
    after_attn: Norm | None
    after_mlp: Norm | None
    window: int | None
    rope: int

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its matrices."""
        return self.qkv, self.out, self.gate_up, self.down

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices."""
        return sum(one.nbytes for one in self.linears)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ends:
    """Weights before and after the layers."""

    embed: Embedding
    norm: Norm
    head: Linear


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits between -cap and cap; unchanged where a model has no cap."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


class Embedding:
    """The vectors of token ids.

    On a CPU a tied matrix is in memory once already, laid out for the head, which cannot be read
    by rows; then the rows of a pass are read from the checkpoint, some 50 us for a few of them.

    Args:
        checkpoint: where it is stored.
        dtype: of the vectors.
        device: where they are wanted.
        keep: hold the matrix in memory.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, keep: bool) -> None:
        name = "model.embed_tokens.weight"
        self.dtype, self.device = dtype, device
        self.matrix_VH = checkpoint.tensor(name, dtype).to(device) if keep else None
        self._rows = None if keep else checkpoint.rows(name, dtype)

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """Vectors [T, H], as stored."""
        if self._rows is not None:
            return self._rows(ids).to(self.device)
        assert self.matrix_VH is not None
        return self.matrix_VH[torch.tensor(ids, dtype=torch.int64).to(self.device)]


def read_ends(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool,
    quantize: str | None = None,
) -> Ends:
    """Read the embedding, the last norm and the head; the embedding is never quantized."""
    read = _Reader(checkpoint, dtype, device, packed, quantize)
    tied = checkpoint.config.tied_head
    head_VH = read.tensor("model.embed_tokens.weight" if tied else "lm_head.weight")
    head = read.lay(head_VH, None)
    embed = Embedding(checkpoint, dtype, device, keep=not (tied and head.packed))
    return Ends(embed=embed, norm=read.norm("model.norm"), head=head)


def read_block(
    checkpoint: Checkpoint,
    layer: int,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool,
    quantize: str | None = None,
) -> Block:
    """Read one layer."""
    config, read = checkpoint.config, _Reader(checkpoint, dtype, device, packed, quantize)
    at = f"model.layers.{layer}."
    attn, mlp = at + "self_attn.", at + "mlp."
    sandwich = config.sandwich_norms
    before_mlp = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    return Block(
        qkv=read.linear([f"{attn}{one}_proj" for one in "qkv"], config.qkv_bias),
        out=read.linear([f"{attn}o_proj"], config.out_bias),
        gate_up=read.linear([f"{mlp}gate_proj", f"{mlp}up_proj"], config.mlp_bias),
        down=read.linear([f"{mlp}down_proj"], config.mlp_bias),
        attn_norm=read.norm(f"{at}input_layernorm"),
        mlp_norm=read.norm(at + before_mlp),
        qk_norm=read.head_norm(attn) if config.qk_norm else None,
        after_attn=read.norm(f"{at}post_attention_layernorm") if sandwich else None,
        after_mlp=read.norm(f"{at}post_feedforward_layernorm") if sandwich else None,
        window=config.windows[layer],
        rope=config.rope_of_layer[layer],
    )


def release() -> None:
    """Hand freed memory back to the system, where the C library can (glibc).

    Tensors that come and go between others that stay leave holes, a tenth of a model's size.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True, slots=True)
class _Reader:
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    packed: bool
    quantize: str | None

    def tensor(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name, self.dtype).to(self.device)

    def norm(self, name: str) -> Norm:
        weight_H = self.checkpoint.tensor(f"{name}.weight").to(self.device)
        return Norm(weight_H, self.checkpoint.config)

    def head_norm(self, attn: str) -> Norm:
        """One norm for all query and key heads."""
        config = self.checkpoint.config
        query_D, key_D = (
            _paired(self.checkpoint.tensor(f"{attn}{one}_norm.weight"), config.head_dim) for one in "qk"
        )
        weight_XD = torch.stack([query_D] * config.num_heads + [key_D] * config.num_kv_heads)
        return Norm(weight_XD.to(self.device), config)

    def linear(self, names: Sequence[str], bias: bool) -> Linear:
        """Several projections of one input as one."""
        weight_OI = torch.cat([self._part(f"{name}.weight") for name in names])
        bias_O = torch.cat([self._part(f"{name}.bias") for name in names]) if bias else None
        return self.lay(weight_OI, bias_O)

    def lay(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        if self.quantize is not None:
            return quantized(weight_OI, bias_O, self.quantize)
        return Linear(weight_OI, bias_O, self.packed)

    def _part(self, name: str) -> Tensor:
        part = self.tensor(name)
        turned = ".q_proj." in name or ".k_proj." in name
        return _paired(part, self.checkpoint.config.head_dim) if turned else part


def _paired(part: Tensor, width: int) -> Tensor:
    """Move dimension i + D / 2 of every head beside dimension i: the two rotate together.

    Scores do not change when queries and keys are reordered alike.
    """
    pairs = part.view(-1, 2, width // 2, *part.shape[1:]).transpose(1, 2)
    return pairs.reshape(part.shape)
