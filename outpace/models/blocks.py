"""Weights of a decoder of the Llama family, as they are multiplied, and how they get there.

Layer by layer: read, merge what has the same input, lay out, forget the original.

Shape letters: O outputs, I inputs, H hidden size, D width of a head, V vocabulary, T rows.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from outpace.models.embedding import Embedding
from outpace.models.families import DecoderConfig
from outpace.models.mlp import Dense, Experts, read_mlp
from outpace.models.packed import Linear
from outpace.models.products import Stored, store_numbers, store_place
from outpace.models.quantize import quantized, rounded
from outpace.models.rowwise import Norm
from outpace.models.weights import Checkpoint


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    qkv: Linear
    """Dimensions of query and key heads are in pairs that rotate together."""
    out: Linear
    mlp: Dense | Experts
    attn_norm: Norm
    mlp_norm: Norm
    qk_norm: Norm | None
    after_attn: Norm | None
    after_mlp: Norm | None
    window: int | None
    rope: int
    attends: bool = True
    """Whether its attention runs; else it adds nothing."""
    has_mlp: bool = True
    """Whether its MLP runs."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Projections of which a pass reads some or all."""
        return (self.qkv, self.out) * self.attends + self.mlp.linears * self.has_mlp

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over one row reads."""
        return self.attends * (self.qkv.nbytes + self.out.nbytes) + self.has_mlp * self.mlp.nbytes

    @property
    def dense(self) -> Dense:
        """Its MLP, where that is no mixture of experts."""
        assert isinstance(self.mlp, Dense)
        return self.mlp


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ends:
    embed: Embedding
    norm: Norm
    head: Linear


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits between -cap and cap; unchanged where a model has no cap."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


@dataclass(frozen=True, slots=True)
class Form:
    dtype: torch.dtype
    device: torch.device
    packed: bool = True
    """Lay them out for the CPU."""
    quantize: str | None = None
    """Round projections and head."""
    stored: bool = False
    """Leave quantized matrices as they are stored, where compiled code multiplies them."""

    def linear(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        """A matrix and its bias in this form."""
        weight_OI = weight_OI.to(self.device, self.dtype)
        bias_O = None if bias_O is None else bias_O.to(self.device, self.dtype)
        if self.quantize is not None:
            return quantized(weight_OI, bias_O, self.quantize)
        return Linear(weight_OI, bias_O, self.packed)


def head_name(config: DecoderConfig) -> str:
    """Name of the tensor that holds the rows of the head."""
    return "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"


def read_ends(checkpoint: Checkpoint, form: Form) -> Ends:
    """Read the embedding, the last norm and the head. An embedding is rounded if the head is tied to it."""
    read = _Reader(checkpoint, form)
    name, dtype = head_name(checkpoint.config), form.dtype
    head = read.linear([name.removesuffix(".weight")], False)
    tied = checkpoint.config.tied_head
    by_rows = tied and head.packed
    if form.stored and checkpoint.blocks("model.embed_tokens.weight"):
        by_rows, dtype = True, torch.float32
    given = dtype if head.product is None else torch.float32  # as compiled code reads them off the head
    rounding = partial(rounded, kind=form.quantize, dtype=given) if tied and form.quantize else None
    embed = Embedding(checkpoint, dtype, form.device, keep=not by_rows, rounding=rounding)
    if tied and head.product is not None and len(head.product.matrices) == 1:
        embed.vectors = head
    return Ends(embed=embed, norm=read.norm("model.norm"), head=head)


def read_head(checkpoint: Checkpoint, form: Form, order_D: Tensor) -> Linear | None:
    """Some rows of the head as they are stored; None where ``read_ends`` expands it."""
    part = _Reader(checkpoint, form).stored(head_name(checkpoint.config), order_D)
    return None if part is None else Linear.stored([part], None, form.dtype)


def read_block(checkpoint: Checkpoint, layer: int, form: Form) -> Block:
    config, read = checkpoint.config, _Reader(checkpoint, form)
    at = f"model.layers.{layer}."
    attn, exact = at + "self_attn.", replace(form, dtype=torch.float32, quantize=None)
    sandwich = config.sandwich_norms
    before_mlp = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    return Block(
        qkv=read.linear([f"{attn}{one}_proj" for one in "qkv"], config.qkv_bias),
        out=read.linear([f"{attn}o_proj"], config.out_bias),
        mlp=read_mlp(checkpoint, layer, read.linear, exact.linear),
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
    form: Form

    def tensor(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name, self.form.dtype).to(self.form.device)

    def norm(self, name: str) -> Norm:
        weight_H = self.checkpoint.tensor(f"{name}.weight").to(self.form.device)
        return Norm(weight_H, self.checkpoint.config)

    def head_norm(self, attn: str) -> Norm:
        """One norm for all query and key heads."""
        config = self.checkpoint.config
        query_D, key_D = (
            paired(self.checkpoint.tensor(f"{attn}{one}_norm.weight"), config.head_dim) for one in "qk"
        )
        weight_XD = torch.stack([query_D] * config.num_heads + [key_D] * config.num_kv_heads)
        return Norm(weight_XD.to(self.form.device), config)

    def linear(self, names: Sequence[str], bias: bool) -> Linear:
        """Several projections of one input as one."""
        form, weights = self.form, [f"{name}.weight" for name in names]
        bias_O = torch.cat([self._part(f"{name}.bias") for name in names]) if bias else None
        parts = [self.stored(name) for name in weights]
        if any(parts):
            whole = [
                part or store_numbers(self._part(name)) for part, name in zip(parts, weights, strict=True)
            ]
            return Linear.stored(whole, bias_O, form.dtype)
        read = [self._part(name) for name in weights]
        return form.linear(torch.cat(read) if len(read) > 1 else read[0], bias_O)

    def stored(self, name: str, chosen_D: Tensor | None = None) -> Stored | None:
        """A matrix, or some of its rows, as stored; None where it is to be expanded."""
        blocks = self.checkpoint.blocks(name) if self.form.stored else None
        if blocks is None:
            return None
        place, order_O = blocks
        straight_O = torch.arange(place.shape[0])
        order_O = self._turned(name, straight_O if order_O is None else order_O)
        if chosen_D is not None:
            order_O = order_O[chosen_D]
        return store_place(place, None if torch.equal(order_O, straight_O) else order_O)

    def _part(self, name: str) -> Tensor:
        return self._turned(name, self.tensor(name))

    def _turned(self, name: str, part: Tensor) -> Tensor:
        turned = ".q_proj." in name or ".k_proj." in name
        return paired(part, self.checkpoint.config.head_dim) if turned else part


def paired(part: Tensor, width: int) -> Tensor:
    """Move dimension i + D / 2 of every head beside dimension i: the two rotate together.

    Scores do not change when queries and keys are reordered alike.
    """
    pairs = part.view(-1, 2, width // 2, *part.shape[1:]).transpose(1, 2)
    return pairs.reshape(part.shape)
