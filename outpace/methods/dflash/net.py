"""The network of block drafters: rows that guess together, from features of the target.

    text       x0  x1 ... x(n-1) | xn pending
    features   f0  f1 ... f(n-1)                   of the passes that fed x0 to x(n-1)

                masks, as the method's authors have it         seeds, of small networks
    context     c = norm(fc(features side by side))            c = fc(unit(each feature) side by side)
    rows        emb(xn), emb(mask), emb(mask) ...              c_(n-1) + token(unit(emb(xn))) + slot_i
    layer       queries of norm(x), keys and values of c and norm(x); of seeds, of norm(c) and norm(x)
                x += attention;  x += mlp(norm(x))
    guesses     row i guesses x(n+i), i >= 1; ``from_anchor`` and seeds: x(n+1+i), i >= 0
    logits      unembedding(norm(x))

The layers do not process the context. What the target knows enters each of them as keys and values,
computed once per token and kept. A row of a block sees all of it and all rows of its block, or
those before it (``causal``). The block's rows are dropped when it is drafted. Row i has position n + i,
context row t position t. ``unit`` makes the mean square 1. Seeds save a small network a layer that
finds the last context row, and a row.

Papers: DFlash, arXiv:2602.06036; causal rows: JetSpec, arXiv:2606.18394; guesses from the anchor's row:
DSpark, arXiv:2607.05147.

Shape letters: T rows of a pass, B sequences, S rows of a block, Y = B * S, H hidden size, F width
of all features side by side, X query, key and value heads, K key-value heads, G query heads of
each, W their width, M = G * S, N keys, D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.drafters.last_state import unit
from outpace.models.attention import Span
from outpace.models.base import Target
from outpace.models.blocks import Form, read_block
from outpace.models.families import DecoderConfig
from outpace.models.memory import LayersOnly
from outpace.models.plan import WANTED, Plan
from outpace.models.rope import Rotation
from outpace.models.rowwise import Norm
from outpace.models.seen import Seen

W1, W2, CONFIDENCE = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj"
"""Names of the heads' tensors."""
_CONTEXT = 2
"""Which count of rows is that of the context; see `outpace.models.plan`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """What kind of network it is."""

    decoder: DecoderConfig
    """Of its layers; without biases, windows and caps, and without head norms where rows are seeds."""
    taps: tuple[str, ...]
    """Features of the target, in the order in which they stand side by side."""
    slots: int
    """S: rows of a block."""
    mask: int | None = None
    """The token whose embedding is in the rows behind the pending token's; None: rows are seeds."""
    from_anchor: bool = True
    """Whether the pending token's own row guesses the token after it."""
    causal: bool = False
    """Whether a row sees the rows before it alone."""
    rank: int = 0
    """Of the Markov head; 0: none."""
    known: int = 0
    """Tokens after which the Markov head knows what follows."""
    draft_vocab: int = 0
    """Columns of the Markov head."""
    confident: bool = False
    """Whether a head tells how likely guesses are kept."""

    @property
    def guesses(self) -> int:
        """Tokens guessed at a time."""
        return self.slots - (not self.from_anchor)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a drafter folder besides its vocabulary."""
        hidden, rank = self.decoder.hidden_size, self.rank
        layers = {
            name.removeprefix("model."): shape
            for name, shape in self.decoder.tensor_shapes().items()
            if name.startswith("model.layers.")
        }
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(self.taps) * hidden)}
        if self.mask is None:
            shapes |= {"token.weight": (hidden, hidden), "slots.weight": (self.slots, hidden)}
        else:
            shapes["hidden_norm.weight"] = (hidden,)
        if rank:
            shapes |= {W1: (self.known, rank), W2: (self.draft_vocab, rank)}
        if self.confident:
            shapes |= {f"{CONFIDENCE}.weight": (1, hidden + rank), f"{CONFIDENCE}.bias": (1,)}
        return {**shapes, "norm.weight": (hidden,), **layers}


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
        target: its dtype and device; embeds, if ``embed`` is not given.
        packed: lay the weights out for the CPU where that works.
        quantize: round them, see ``outpace.drafters.trained.rounding``.
        embed: vectors of tokens, of the network's own.
    """

    def __init__(
        self,
        shape: BlockShape,
        tensors: Mapping[str, Tensor],
        target: Target,
        packed: bool = True,
        quantize: str | None = None,
        embed: Callable[[Sequence[int]], Tensor] | None = None,
    ) -> None:
        config, dtype, device = shape.decoder, target.dtype, target.device
        self.shape, self.dtype, self.device = shape, dtype, device
        layers = LayersOnly(config, {f"model.{name}": one for name, one in tensors.items()}, name="block")
        form = Form(dtype, device, packed, quantize)
        self._blocks = [read_block(layers, i, form) for i in range(config.num_layers)]
        self._fc = form.linear(tensors["fc.weight"])
        self._embed: Callable[[Sequence[int]], Tensor] = target.embed if embed is None else embed
        if shape.mask is None:
            self._token = form.linear(tensors["token.weight"])
            self._slot_SH = tensors["slots.weight"].to(device).float()
        else:
            self._context_norm = Norm(tensors["hidden_norm.weight"].to(device), config)
            self._mask_1H = self._embed([shape.mask]).float()
        self._norm = Norm(tensors["norm.weight"].to(device), config)
        self._rotation = Rotation(config.ropes[0], device)
        self._plan = self._listed()

    def _listed(self) -> Plan:
        """The layers as a list of operations; the first rows are context, the last ones blocks."""
        config = self.shape.decoder
        kv = config.num_kv_heads
        shape = config.head_shape
        plan = Plan(shape, self._rotation)
        stream = plan.copy(plan.lent(config.hidden_size))
        x, heads = plan.behind(stream, _CONTEXT, WANTED), plan.fresh((shape.queries + 2 * kv) * shape.width)
        # Of masks the context is normed once, for all layers.
        reads = plan.fresh(config.hidden_size) if self.shape.mask is None else plan.copy(stream)
        behind = plan.behind(reads, _CONTEXT, WANTED)
        for layer, block in enumerate(self._blocks):
            if self.shape.mask is None:
                plan.norm(block.attn_norm, stream, reads)
            else:
                plan.norm(block.attn_norm, x, behind)
            plan.product(block.qkv, reads, heads)
            mixed = plan.behind(plan.attend(heads, block.qk_norm, layer=layer), _CONTEXT, WANTED)
            normed = plan.norm(block.mlp_norm, x, add=plan.product(block.out, mixed))
            wide = plan.gate(config.activation, plan.product(block.dense.gate_up, normed))
            plan.add(plan.product(block.dense.down, wide), x)
        plan.give(plan.norm(self._norm, x))
        return plan

    def new_cache(self) -> DenseCache:
        """An empty cache for the context's keys and values."""
        config = self.shape.decoder
        return DenseCache(config.num_layers, config.num_kv_heads, config.head_dim, device=self.device)

    def feature(self, taps: Mapping[str, Tensor]) -> Tensor:
        """Features [T, F] of rows of a pass of the target, side by side; a copy."""
        parts = [taps[name] for name in self.shape.taps]
        return torch.cat([unit(one) if self.shape.mask is None else one for one in parts], -1).to(self.dtype)

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
            if self.shape.mask is not None:
                context_TH = self._context_norm(context_TH)
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
        size, start = self.shape.slots, 0
        spans: list[Span] = []
        blocks: list[Span] = []
        for part in parts:
            stored = range(part.first, part.end)
            spans.append(Span(part.slot, start, stored, part.first, (), range(len(stored)), True))
            start += len(stored)
        for part in parts if len(x_YH) else ():
            stored = range(part.end, part.end + size)
            # Every row of a block sees what its last row does, or the rows before it.
            causal = self.shape.causal
            upto = range(size) if causal else [size - 1] * size
            blocks.append(Span(part.slot, start, stored, part.end, (), upto, causal))
            start += size
        wanted = array("q", range(len(context_TH), start))
        seen = Seen(cache=cache, spans=spans + blocks, positions=array("q", positions), wanted=wanted)
        counts = start, len(x_YH), len(context_TH)
        return self._plan.run(counts, (torch.cat([context_TH, x_YH]),), seen=seen)[0]

    def _start(self, parts: Sequence[Part], pending: Sequence[int], context_TH: Tensor) -> Tensor:
        """The rows of all blocks as they enter the first layer, float32 [B * S, H]."""
        if self.shape.mask is not None:
            row_BSH = self._mask_1H.repeat(len(pending) * self.shape.slots, 1)
            row_BSH[:: self.shape.slots] = self._embed(pending).float()
            return row_BSH
        last = [stop - 1 for stop in accumulate(len(part.feature_TF) for part in parts)]
        embed_BH = unit(self._embed(pending)).to(self.dtype)
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
        if self.shape.mask is None:
            normed_TH = block.attn_norm(torch.cat([context_TH, x_YH])).to(self.dtype)
        else:
            normed_TH = torch.cat([context_TH, block.attn_norm(x_YH)]).to(self.dtype)
        head_TXW = block.qkv(normed_TH).float().view(len(normed_TH), -1, config.head_dim)
        turned = head_TXW[:, : config.num_heads + config.num_kv_heads]
        if block.qk_norm is not None:
            block.qk_norm(turned, turned)
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
        return x_YH.add_(block.dense(block.mlp_norm(x_YH).to(self.dtype), config.activation))

    def _store(self, layer: int, slot: int, first: int, cache: DenseCache, head_TXW: Tensor) -> None:
        count = self.shape.decoder.num_kv_heads
        both = head_TXW[:, -2 * count : -count], head_TXW[:, -count:]
        for store, part in zip(cache.by_row, both, strict=True):
            store[layer, slot, first : first + len(part)] = part

    def _attend(self, layer: int, part: Part, cache: DenseCache, head_SXW: Tensor) -> Tensor:
        """What the rows of a block mix: nothing that is stored so far is hidden from them, unless
        they are causal.
        """
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
        if self.shape.causal:
            later_SS = torch.ones(len(head_SXW), len(head_SXW), dtype=torch.bool, device=self.device).triu(1)
            later_MS = later_SS.repeat_interleave(score_KMN.shape[1] // len(later_SS), 0)
            score_KMN[..., part.end :].masked_fill_(later_MS, -torch.inf)
        mixed_KMW = torch.bmm(score_KMN.softmax(-1), cache.value_store[layer, part.slot, :, :end])
        return mixed_KMW.view(kv, len(head_SXW), -1).transpose(0, 1).flatten(1).to(self.dtype)
