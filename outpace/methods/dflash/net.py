"""The network of block drafters: rows that guess together, from features of the target.

    text       x0  x1 ... x(n-1) | xn pending      guesses of the block: x(n+1) ... x(n+S)
    features   f0  f1 ... f(n-1)                   of the passes that fed x0 to x(n-1)

    c_t = fc(unit(features of row t) side by side)           context, one row per token
    x_i = c_(n-1) + token(unit(emb(xn))) + slot_i            rows of a block, i = 0 ... S - 1
    every layer: keys and values of norm(c) for the context, of norm(x) for the block
                 x += attention(norm(x));  x += mlp(norm(x))
    logits = unembedding(norm(x)): row i guesses x(n+1+i)

The context is not processed by the layers: what the target knows enters each of them as keys and
values, computed once per token and kept. A row of a block sees all of it and all rows of its block,
which are dropped when the block is drafted. Row i has position n + i, context row t position t.
``unit`` makes the mean square 1; the unembedding is the target's and in no file.

Paper: DFlash, arXiv:2602.06036. There the rows are a mask's embedding, and the first is the
pending token's alone; here all start from the last context row and the pending token, which
saves a small network a layer, and the first guesses, which saves a row.

Shape letters: T rows of a pass, B sequences, S rows of a block, Y = B * S, H hidden size, F width
of all features side by side, X query, key and value heads, K key-value heads, G query heads of
each, W their width, M = G * S, N keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.cache.dense import DenseCache
from outpace.models.attention import HeadShape, Span
from outpace.models.base import Target
from outpace.models.blocks import Form, read_block
from outpace.models.families import DecoderConfig
from outpace.models.memory import MemoryCheckpoint
from outpace.models.plan import WANTED, Plan, Seen
from outpace.models.rope import Rotation
from outpace.models.rowwise import Norm, gated

EPS = 1e-6
"""Added to mean squares by ``unit``."""
_CONTEXT = 2
"""Which count of rows is that of the context; see `outpace.models.plan`."""


def unit(x: Tensor) -> Tensor:
    """Vectors of mean square 1, float32; any shape."""
    return F.rms_norm(x.float(), (x.shape[-1],), eps=EPS)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """What kind of network it is."""

    decoder: DecoderConfig
    """Of its layers; without biases, head norms, windows and caps."""
    taps: tuple[str, ...]
    """Features of the target, in the order in which they stand side by side."""
    slots: int
    """S: tokens guessed at a time."""

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a drafter folder besides its vocabulary."""
        hidden = self.decoder.hidden_size
        layers = {
            name.removeprefix("model."): shape
            for name, shape in self.decoder.tensor_shapes().items()
            if name.startswith("model.layers.")
        }
        return {
            "fc.weight": (hidden, len(self.taps) * hidden),
            "token.weight": (hidden, hidden),
            "slots.weight": (self.slots, hidden),
            "norm.weight": (hidden,),
            **layers,
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """One sequence's part of a pass."""

    slot: int
    first: int
    """Storage row of its first new context row; those before it are in the cache."""
    offset: int
    """Position of storage row 0."""
    feature_TF: Tensor
    """Of the new context rows, from ``BlockNet.feature``; at least one."""
    pending: int | None = None
    """The token behind them, from which a block is drafted. None stores keys and values only."""

    @property
    def end(self) -> int:
        """Storage row behind the context, where the block goes for a while."""
        return self.first + len(self.feature_TF)


class BlockNet:
    """One network, ready to run.

    Args:
        shape: of the network.
        tensors: all that ``shape.tensor_shapes`` names; converted, not kept.
        target: embeds; its dtype and device are used.
        packed: lay the weights out for the CPU where that works.
        quantize: round them, see ``outpace.drafters.trained.rounding``.
    """

    def __init__(
        self,
        shape: BlockShape,
        tensors: Mapping[str, Tensor],
        target: Target,
        packed: bool = True,
        quantize: str | None = None,
    ) -> None:
        config, dtype, device = shape.decoder, target.dtype, target.device
        self.shape, self.dtype, self.device, self._target = shape, dtype, device, target
        layers = _Layers(config, {f"model.{name}": one for name, one in tensors.items()})
        form = Form(dtype, device, packed, quantize)
        self._blocks = [read_block(layers, i, form) for i in range(config.num_layers)]
        self._fc, self._token = (form.linear(tensors[f"{name}.weight"]) for name in ("fc", "token"))
        self._slot_SH = tensors["slots.weight"].to(device).float()
        self._norm = Norm(tensors["norm.weight"].to(device), config)
        self._rotation = Rotation(config.ropes[0], device)
        self._plan = self._listed()

    def _listed(self) -> Plan:
        """The layers as a list of operations; the first rows are context, the last ones blocks."""
        config = self.shape.decoder
        kv = config.num_kv_heads
        shape = HeadShape(kv, config.num_heads // kv, config.head_dim, config.attention_scale, None)
        plan = Plan(shape, self._rotation)
        stream = plan.copy(plan.lent(config.hidden_size))
        x, heads = plan.behind(stream, _CONTEXT, WANTED), plan.fresh((shape.queries + 2 * kv) * shape.width)
        for layer, block in enumerate(self._blocks):
            plan.product(block.qkv, plan.norm(block.attn_norm, stream), heads)
            mixed = plan.behind(plan.attend(heads, layer=layer), _CONTEXT, WANTED)
            normed = plan.norm(block.mlp_norm, x, add=plan.product(block.out, mixed))
            wide = plan.gate(config.activation, plan.product(block.gate_up, normed))
            plan.add(plan.product(block.down, wide), x)
        plan.give(plan.norm(self._norm, x))
        return plan

    def new_cache(self) -> DenseCache:
        """An empty cache for the context's keys and values."""
        config = self.shape.decoder
        return DenseCache(config.num_layers, config.num_kv_heads, config.head_dim, device=self.device)

    def feature(self, taps: Mapping[str, Tensor], rows: slice | list[int]) -> Tensor:
        """Features [T, F] of some rows of a pass of the target, side by side; a copy."""
        return torch.cat([unit(taps[name][rows]).to(self.dtype) for name in self.shape.taps], -1)

    def run(self, parts: Sequence[Part], cache: DenseCache) -> Tensor:
        """Store the context's keys and values; draft a block for every part, or for none.

        Args:
            parts: of different slots, whose cache has room for the rows and for a block behind
                them; all with a pending token, or all without.
            cache: from ``new_cache``.

        Returns:
            What the unembedding reads, [B * S, H] in the target's dtype or float32, block by block; no
            rows without pending tokens. What a block gets does not depend on those beside it.
        """
        with torch.inference_mode():
            context_TH = self._fc(torch.cat([part.feature_TF for part in parts])).float()
            positions = [part.offset + row for part in parts for row in range(part.first, part.end)]
            pending = [part.pending for part in parts if part.pending is not None]
            x_YH = context_TH[:0]
            if pending:
                x_YH = self._start(parts, pending, context_TH)
                block = range(self.shape.slots)
                positions += [part.offset + part.end + i for part in parts for i in block]
            if self._plan.ready:
                return self._compiled(parts, cache, context_TH, x_YH, positions)
            turn = self._rotation.at(positions)
            for layer in range(len(self._blocks)):
                x_YH = self._layer(layer, parts, cache, context_TH, x_YH, turn)
            y_YH = self._norm(x_YH).to(self.dtype)
        with torch.no_grad():  # made outside of inference mode it is an ordinary tensor
            return y_YH.clone()

    def _compiled(
        self,
        parts: Sequence[Part],
        cache: DenseCache,
        context_TH: Tensor,
        x_YH: Tensor,
        positions: Sequence[int],
    ) -> Tensor:
        """The layers in one call."""
        size, spans, blocks, start = self.shape.slots, list[Span](), list[Span](), 0
        for part in parts:
            stored = range(part.first, part.end)
            spans.append(Span(part.slot, start, stored, part.first, (), range(len(stored)), True))
            start += len(stored)
        for part in parts if len(x_YH) else ():
            # Every row of a block sees what its last row does.
            stored = range(part.end, part.end + size)
            blocks.append(Span(part.slot, start, stored, part.end, (), [size - 1] * size, True))
            start += size
        seen = Seen(cache=cache, spans=spans + blocks, positions=array("q", positions), attending=blocks)
        counts = start, len(x_YH), len(context_TH)
        return self._plan.run(counts, (torch.cat([context_TH, x_YH]),), seen=seen)[0]

    def _start(self, parts: Sequence[Part], pending: Sequence[int], context_TH: Tensor) -> Tensor:
        """The rows of all blocks as they enter the first layer, float32 [B * S, H]."""
        last = [stop - 1 for stop in accumulate(len(part.feature_TF) for part in parts)]
        embed_BH = unit(self._target.embed(pending)).to(self.dtype)
        seed_BH = context_TH[last] + self._token(embed_BH).float()
        return (seed_BH[:, None] + self._slot_SH).flatten(0, 1)

    def _layer(
        self,
        layer: int,
        parts: Sequence[Part],
        cache: DenseCache,
        context_TH: Tensor,
        x_YH: Tensor,
        turn: Tensor,
    ) -> Tensor:
        block, config, rows = self._blocks[layer], self.shape.decoder, len(context_TH)
        normed_TH = block.attn_norm(torch.cat([context_TH, x_YH])).to(self.dtype)
        head_TXW = block.qkv(normed_TH).float().view(len(normed_TH), -1, config.head_dim)
        turned = head_TXW[:, : config.num_heads + config.num_kv_heads]
        turned = turned.view(*turned.shape[:2], config.head_dim // 2, 2)
        torch.view_as_complex(turned).mul_(turn)
        start, mixed = 0, []
        for number, part in enumerate(parts):
            stop = start + len(part.feature_TF)
            own = slice(rows + number * self.shape.slots, rows + (number + 1) * self.shape.slots)
            self._store(layer, part.slot, part.first, cache, head_TXW[start:stop])
            if len(x_YH):
                self._store(layer, part.slot, part.end, cache, head_TXW[own])
                mixed.append(self._attend(layer, part, cache, head_TXW[own]))
            start = stop
        if not mixed:
            return x_YH
        x_YH = x_YH + block.out(torch.cat(mixed))
        gate_up_YF = block.gate_up(block.mlp_norm(x_YH).to(self.dtype))
        return x_YH.add_(block.down(gated(config.activation, gate_up_YF)))

    def _store(self, layer: int, slot: int, first: int, cache: DenseCache, head_TXW: Tensor) -> None:
        count = self.shape.decoder.num_kv_heads
        both = head_TXW[:, -2 * count : -count], head_TXW[:, -count:]
        for store, part in zip(cache.by_row, both, strict=True):
            store[layer, slot, first : first + len(part)] = part

    def _attend(self, layer: int, part: Part, cache: DenseCache, head_SXW: Tensor) -> Tensor:
        """What the rows of a block mix: nothing that is stored so far is hidden from them."""
        config, end = self.shape.decoder, part.end + self.shape.slots
        kv, width = config.num_kv_heads, config.head_dim
        query_KMW = (
            head_SXW[:, : config.num_heads]
            .mul(config.attention_scale)
            .view(len(head_SXW), kv, -1, width)
            .transpose(0, 1)
            .reshape(kv, -1, width)
        )
        score_KMN = torch.bmm(query_KMW, cache.key_store[layer, part.slot, :, :, :end])
        mixed_KMW = torch.bmm(score_KMN.softmax(-1), cache.value_store[layer, part.slot, :, :end])
        return mixed_KMW.view(kv, len(head_SXW), -1).transpose(0, 1).flatten(1).to(self.dtype)


class _Layers(MemoryCheckpoint):
    """Layers alone, whose shapes were checked by whoever read them."""

    def __init__(self, config: DecoderConfig, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(config, tensors, name="block")

    def _check_shapes(self) -> None:
        """There are no ends."""
