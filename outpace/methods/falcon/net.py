"""The network of `falcon`: an LSTM and one layer whose rows see their whole block.

    x_i  = lstm([emb of token i + 1, f_i])       f_i: the target's state of token i, behind its norm
    f'_i = layer(x_i)                            stands for f of token i + k
    logits of token i + 1 + k = unembedding(f'_i)

Row i sees all rows before its block and all k rows of its block, the later ones too: the relaxed causal
mask. Keys and values are made of x_i alone. So they do not depend on where blocks begin, and a row keeps
them when the next block begins elsewhere.

Paper: Gao et al. 2024 (Falcon), arXiv:2412.12639. The LSTM runs along the text here; in the released code
it runs along the batch, which makes it a layer without memory.

Shape letters: T rows of a pass, R rows wanted, F rows of a step, k rows of a block, H hidden size, S = 4H
numbers of an LSTM state, I inputs of a step; of heads, K key-value heads, G query heads of each, W width.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.drafters.one_layer import OneLayer, layer_shapes, layer_tensors
from outpace.models.attention import Span
from outpace.models.base import Target
from outpace.models.blocks import Form
from outpace.models.families import DecoderConfig
from outpace.models.passes import PassRows
from outpace.models.seen import Seen

LSTM_LAYERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class FalconShape:
    """How large it is."""

    decoder: DecoderConfig
    """Of its one layer, which has no input norm."""
    block: int
    """k: tokens guessed per pass."""
    passes: int
    """Passes that training unrolled; k times as many depths can be drafted."""

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a drafter folder besides its vocabulary."""
        hidden, shapes = self.decoder.hidden_size, dict[str, tuple[int, ...]]()
        for number in range(LSTM_LAYERS):
            reads = 3 * hidden if number == 0 else 2 * hidden
            shapes |= {f"lstm.{number}.weight": (4 * hidden, reads), f"lstm.{number}.bias": (4 * hidden,)}
        shapes |= layer_shapes(self.decoder, normed=False)
        return shapes


def lstm_step(
    product: Callable[[int, Tensor], Tensor], x_FI: Tensor, state_FS: Tensor
) -> tuple[Tensor, Tensor]:
    """One more token through all LSTM layers.

    Args:
        product: layer number and [x, h] -> the gates in, forget, new, out; [F, 4H].
        state_FS: h and c of every layer; zeros before the first token.

    Returns:
        What the last layer gives [F, H], and the state behind it [F, S].
    """
    parts = list(state_FS.chunk(2 * LSTM_LAYERS, -1))
    out = x_FI
    for number in range(LSTM_LAYERS):
        h, c = parts[2 * number], parts[2 * number + 1]
        enter, forget, new, leave = product(number, torch.cat([out, h], -1)).chunk(4, -1)
        c = forget.sigmoid() * c + enter.sigmoid() * new.tanh()
        out = leave.sigmoid() * c.tanh()
        parts[2 * number], parts[2 * number + 1] = out, c
    return out, torch.cat(parts, -1)


class FalconNet:
    """The network, ready to run.

    Args:
        shape: of the network.
        tensors: all that ``shape.tensor_shapes`` names; converted, not kept.
        target: embeds; its dtype and device are used.
        quantize: round them, see ``outpace.drafters.trained.rounding``.
    """

    def __init__(
        self, shape: FalconShape, tensors: Mapping[str, Tensor], target: Target, quantize: str | None = None
    ) -> None:
        self.shape, self._target = shape, target
        form = Form(target.dtype, target.device, quantize=quantize)
        self._layer = OneLayer(shape.decoder, layer_tensors(tensors), form)
        self._gates = [
            form.linear(tensors[f"lstm.{number}.weight"], tensors[f"lstm.{number}.bias"])
            for number in range(LSTM_LAYERS)
        ]
        self._plan = self._layer.plan()
        stream = self._plan.lent(shape.decoder.hidden_size)
        block, activation = self._layer.block, self._layer.activation
        self._plan.give(self._plan.layer(block, activation, stream, stream))

    @property
    def start(self) -> Tensor:
        """The LSTM's state before the first token, [S]."""
        return torch.zeros(2 * LSTM_LAYERS * self.shape.decoder.hidden_size, device=self._target.device)

    def new_cache(self) -> DenseCache:
        """An empty cache for its one layer."""
        return self._layer.new_cache()

    def read(self, ids: Sequence[int], given_FH: Tensor, state_FS: Tensor) -> tuple[Tensor, Tensor]:
        """One token more for every row: x [F, H], and the LSTM's state behind it [F, S]."""
        x_FI = torch.cat([self._target.embed(ids), given_FH.float()], -1)
        return lstm_step(self._product, x_FI, state_FS)

    def _product(self, number: int, u_FI: Tensor) -> Tensor:
        matrix = self._gates[number]
        return matrix(u_FI if matrix.product is not None else u_FI.to(self._target.dtype)).float()

    def run(
        self, rows: PassRows, cache: DenseCache, offsets: Sequence[int], x_TH: Tensor, ends: Sequence[int]
    ) -> Tensor:
        """The layer, f' of the rows wanted [R, H], float32.

        Args:
            rows: of feeds of which the rows of blocks are wanted. Keys and values are written for all.
            cache: from ``new_cache``; the one that ``rows`` was made with.
            offsets: per feed, the position of the first row of its slot.
            x_TH: from ``read``.
            ends: per row wanted, the row of the pass that ends its block: it sees what that one does.
        """
        spans: list[Span] = []
        of: list[Span] = []
        for span in rows.spans:
            of += [
                replace(span, start=span.start + i, stored=span.stored[i : i + 1])
                for i in range(len(span.stored))
            ]
        end_of = dict(zip(rows.wanted, ends, strict=True))
        for row, span in enumerate(of):
            spans.append(_seeing(span, of[end_of[row]].stored.start) if row in end_of else span)
        positions = array("q")
        for span, offset in zip(rows.spans, offsets, strict=True):
            positions.extend([offset + position for position in span.positions])
        if self._plan.ready:
            wanted = array("q", rows.wanted)
            seen = Seen(cache=cache, spans=spans, positions=positions, wanted=wanted)
            return self._plan.run((len(rows.ids), len(rows.wanted)), (x_TH,), rows.wanted, seen)[0]
        with torch.no_grad():
            return self._by_torch(rows, cache, positions, x_TH, [spans[row] for row in rows.wanted])

    def _by_torch(
        self,
        rows: PassRows,
        cache: DenseCache,
        positions: Sequence[int],
        x_TH: Tensor,
        attending: Sequence[Span],
    ) -> Tensor:
        layer, dtype = self._layer, self._target.dtype
        block, heads = layer.block, layer.heads
        x_TH, count = x_TH.float(), len(x_TH)
        filled_TH = x_TH.new_zeros(max(count, layer.min_rows), x_TH.shape[1])
        filled_TH[:count] = x_TH
        head_TXW = block.qkv(filled_TH.to(dtype)).float()[:count].view(count, -1, heads.width)
        turned = head_TXW[:, : heads.queries + heads.kv]
        pairs = turned.reshape(*turned.shape[:2], heads.width // 2, 2)
        turned.copy_(
            torch.view_as_real(torch.view_as_complex(pairs) * layer.rotation.at(positions)).flatten(2)
        )
        start = 0
        for span in rows.spans:
            stored = slice(span.stored.start, span.stored.stop)
            part = head_TXW[start : start + len(span.stored), heads.queries :]
            for store, new in zip(cache.by_row, (part[:, : heads.kv], part[:, heads.kv :]), strict=True):
                store[0, span.slot, stored] = new
            start += len(span.stored)
        mixed = [self._mixed(cache, span, head_TXW[span.start, : heads.queries]) for span in attending]
        if not mixed:
            return x_TH[:0]
        least = max(len(mixed), layer.min_rows)
        mixed_RY = torch.zeros(least, heads.queries * heads.width, dtype=dtype, device=x_TH.device)
        mixed_RY[: len(mixed)] = torch.stack(mixed)
        stream_RH = x_TH.new_zeros(least, x_TH.shape[1])
        stream_RH[: len(mixed)] = x_TH[list(rows.wanted)]
        normed_RH = torch.empty(stream_RH.shape, dtype=dtype, device=x_TH.device)
        block.mlp_norm(stream_RH, normed_RH, add=block.out(mixed_RY))
        return stream_RH.add_(block.dense(normed_RH, layer.activation))[: len(mixed)]

    def _mixed(self, cache: DenseCache, span: Span, query_YW: Tensor) -> Tensor:
        """What one row mixes of the committed text and of the tail above the end of its block."""
        heads, at = self._layer.heads, span.stored.start - span.base
        seen: list[int] = []
        if not span.parents or span.chain:
            seen += range(span.base + span.depths[at], span.base - 1, -1)
            at = -1
        while at >= 0:
            seen.append(span.base + at)
            at = span.parents[at]
        index = torch.tensor([*range(span.base), *reversed(seen)], device=query_YW.device)
        key_KWN = cache.key_store[0, span.slot][..., index].float()
        value_KNW = cache.value_store[0, span.slot][:, index].float()
        query_KGW = query_YW.view(heads.kv, heads.group, heads.width) * heads.scale
        return ((query_KGW @ key_KWN).softmax(-1) @ value_KNW).flatten().to(self._target.dtype)


def _seeing(span: Span, end: int) -> Span:
    """A row of a block, which sees what the row at the storage place ``end`` does, and that one."""
    own, last = span.stored.start - span.base, end - span.base
    if own == last:
        return span
    if span.chain:
        depths = list(span.depths)
        depths[own] = depths[last]
        return replace(span, parents=(), depths=depths, chain=False)
    # The way up begins at the row itself, goes on at its block's last row, and leaves the row out there.
    parents = list(span.parents)
    parents[own + 1] = parents[own]
    parents[own] = last
    return replace(span, parents=parents)
