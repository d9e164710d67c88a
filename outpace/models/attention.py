"""Attention of all rows of a pass over the dense cache, trees and ragged batches included.

What a row gets does not depend on the rows beside it, bit for bit. Nor does it on whether its ancestors
stand in a chain or in a tree. So greedy text can be equal token for token with and without guesses.
Products of CPU libraries add up to 192 terms in order. Given that, three rules keep the promise:

- Products have at least 4 rows and a multiple of 64 keys; what a row may not see weighs 0.
- Weighted values are summed in blocks of 128 positions, not of storage rows: a guess stored across
  a border is counted where its position belongs.
- The sum of the weights is split by lanes of the processor. It is taken in float64, so that its
  rounding to float32 does not tell how it was split.

Shape letters: T rows of the pass (filled up), B slots of a group, R rows per slot, K key-value
heads, G query heads per key-value head, M = R * G or 4 if that is more, D width of a head,
N keys, Y rows of the pass that are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.models.views import KVView, NarrowGroup

BLOCK = 128
"""Positions whose values are summed in one product."""
_STEP = 64
"""Keys come in multiples of this."""
_LONGEST = 192
"""Most terms of a product that are known to be added in order."""
LEAST = 4
"""Fewest rows of a product."""
_LANES = 16
"""Columns that a processor handles at once, at most."""
_ROWS = 64
"""Most rows of one slot in one product; longer feeds are cut, and early rows see fewer keys."""
LOG2E = 1 / math.log(2)

_GROUP_COST, _ROW_COST = 700, 0.25
"""Time of a group of products, and of one more row per key, in units of reading a key: measured, and
rough. Results do not depend on them."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a pass that belong to one slot, one after another."""

    slot: int
    start: int
    """First row in the pass."""
    stored: range
    """Storage rows that they occupy."""
    base: int
    """Committed length of the slot."""
    parents: Sequence[int]
    """Of the whole tail, rows of earlier passes and riders included; none: rows see up to their depth."""
    depths: Sequence[int]
    chain: bool
    """Whether the tail is one chain, so that storage rows are positions."""
    view: KVView | None = None
    """What its rows see of the committed text; None: all of it."""

    @property
    def positions(self) -> Sequence[int]:
        return self.stored if self.chain else [self.base + self.depths[i - self.base] for i in self.stored]

    def pieces(self) -> list[Span]:
        """The same rows in spans of at most ``_ROWS``."""
        return [
            replace(self, start=self.start + i, stored=self.stored[i : i + _ROWS])
            for i in range(0, len(self.stored), _ROWS)
        ]

    def strays(self) -> Iterator[tuple[int, int]]:
        """Storage rows of the tail that lie outside their block, each with the block's start."""
        for i, depth in enumerate(self.depths):
            row, home = self.base + i, (self.base + depth) // BLOCK * BLOCK
            if home != row // BLOCK * BLOCK and row < home + _LONGEST:
                yield row, home

    @property
    def reach(self) -> int:
        return -(-self.stored.stop // _STEP) * _STEP


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of a decoder, and how scores become weights."""

    kv: int
    """K."""
    group: int
    """G."""
    width: int
    """D."""
    scale: float
    """Multiplies q.k."""
    softcap: float | None
    """c: scores become c * tanh(score / c)."""

    @property
    def queries(self) -> int:
        return self.kv * self.group


class Attention:
    """The rows of one pass (or of its first layers): where they write, and what they see.

    Everything that does not depend on the layer is made here, once.

    Args:
        cache: keys and values; room for the rows is reserved already.
        spans: rows of the pass, in order, without gaps.
        rows: T, at least the rows of all spans.
        windows: the distinct sliding windows of its layers.
    """

    def __init__(
        self,
        cache: DenseCache,
        spans: Sequence[Span],
        rows: int,
        shape: HeadShape,
        windows: frozenset[int | None],
        dtype: torch.dtype,
    ) -> None:
        self.shape, self.windows, self.device = shape, windows, cache.key_store.device
        kv, width, queries = shape.kv, shape.width, shape.queries
        self.head_TXD = torch.zeros(rows, queries + 2 * kv, width, dtype=torch.float32, device=self.device)
        """float32 queries, keys and values of the layer at hand; the decoder fills them in."""
        self.turned_TXE = torch.view_as_complex(
            self.head_TXD[:, : queries + kv].view(rows, queries + kv, width // 2, 2)
        )
        """Queries and keys as complex numbers, to be rotated in place."""
        self.query_TKGD = self.head_TXD[:, :queries].view(rows, kv, shape.group, width)
        self.out_TKGD = torch.zeros(rows, kv, shape.group, width, dtype=dtype, device=self.device)
        self._out = self.out_TKGD.flatten(1)
        new_YXD = self.head_TXD[: sum(len(span.stored) for span in spans), queries:]
        self._new = new_YXD[:, :kv], new_YXD[:, kv:]
        stores: Sequence[Tensor] = cache.by_row
        self._index: tuple[Tensor, Tensor] | None = None
        if len(spans) == 1:  # a copy takes half the time of writing row by row
            slot, stored = spans[0].slot, spans[0].stored
            stores = [store[:, slot, stored.start : stored.stop] for store in stores]
        else:
            slot_Y = torch.tensor([span.slot for span in spans for _ in span.stored])
            row_Y = torch.tensor([row for span in spans for row in span.stored])
            self._index = slot_Y.to(self.device), row_Y.to(self.device)
        self._places = list(zip(*(store.unbind(0) for store in stores), strict=True))
        groups = list(_grouped([piece for span in spans if not span.view for piece in span.pieces()]))
        narrow = [(span, [[piece] for piece in span.pieces()]) for span in spans if span.view]
        every = [*groups, *(group for _, pieces in narrow for group in pieces)]
        largest = max(
            len(group) * kv * _height(group, shape) * max(span.reach for span in group) for group in every
        )
        self.scratch = self.head_TXD.new_empty(largest)
        """Scores of one group; the next one overwrites them."""
        self._groups: list[_Group | NarrowGroup] = [_Group(self, cache, group) for group in groups]
        for span, pieces in narrow:
            self._groups.append(NarrowGroup(self, cache, span, [_Group(self, cache, one) for one in pieces]))

    def __call__(self, layer: int, window: int | None) -> Tensor:
        """Store keys and values, attend.

        Args:
            layer: whose keys and values ``head_TXD`` holds, queries and keys rotated.

        Returns:
            [T, K * G * D], overwritten by the next call. Filling rows hold anything finite.
        """
        for place, new_YKD in zip(self._places[layer], self._new, strict=True):
            place[... if self._index is None else self._index] = new_YKD
        for group in self._groups:
            group.attend(layer, window)
        return self._out


class _Group:
    """Spans of consecutive slots that share their products, filled up to equal length."""

    def __init__(self, whole: Attention, cache: DenseCache, spans: list[Span]) -> None:
        shape = self.shape = whole.shape
        batch, longest = len(spans), max(len(span.stored) for span in spans)
        count, first = longest, spans[0].start
        total, height = batch * count, _height(spans, shape)
        dims = (batch, count, shape.kv, shape.group, shape.width)
        in_order = all(s.start == first + i * longest for i, s in enumerate(spans))
        even = in_order and all(len(s.stored) == longest for s in spans)
        self.queries, self.outputs = whole.query_TKGD, whole.out_TKGD
        self.index: Tensor | None = None
        if even:
            query, result = whole.query_TKGD[first:], whole.out_TKGD[first:]
        else:
            # A row stands in for those that its slot lacks; equal rows give equal results.
            self.index = torch.tensor(
                [s.start + min(i, len(s.stored) - 1) for s in spans for i in range(count)],
                device=whole.device,
            )
            query = self.picked = whole.query_TKGD.new_empty(total, *dims[2:])
            result = self.given = whole.out_TKGD.new_empty(total, *dims[2:])
        self.source = query[:total].view(dims).transpose(1, 2)
        self.result = result[:total].view(dims).transpose(1, 2)
        self.query = whole.head_TXD.new_zeros(batch * shape.kv, height, shape.width)
        self.sum = torch.empty_like(self.query)
        self.top = self.query.new_empty(batch * shape.kv, height, 1)
        self.total = torch.empty_like(self.top, dtype=torch.float64)
        self.shares = torch.empty_like(self.top)

        def asked(rows: Tensor) -> Tensor:
            own = rows[:, : count * shape.group]
            return own.view(batch, shape.kv, count, shape.group, -1)

        self.query_view, self.sum_view = asked(self.query), asked(self.sum)
        self.shares_view = asked(self.shares)
        # Scores are powers of 2: exp2 takes half the time of exp.
        self.scale = shape.scale * (LOG2E if shape.softcap is None else 1.0)
        self.sights = {w: _Sight(whole, cache, spans, count, w) for w in whole.windows}

    def attend(self, layer: int, window: int | None) -> None:
        """Softmax of the scores times the values, unnormalized until the last line."""
        sight, cap = self.sights[window], self.shape.softcap
        if self.index is not None:
            torch.index_select(self.queries, 0, self.index, out=self.picked)
        torch.mul(self.source, self.scale, out=self.query_view)
        weight = sight.weight
        torch.bmm(self.query, sight.keys[layer], out=weight)
        if cap is not None:
            weight.div_(cap).tanh_().mul_(cap * LOG2E)
        sight.masked.add_(sight.mask)
        torch.amax(weight, -1, keepdim=True, out=self.top)
        weight.sub_(self.top).exp2_()
        torch.sum(weight, -1, keepdim=True, dtype=torch.float64, out=self.total)
        for i, (part, member, values) in enumerate(sight.blocks):
            counted = part if member is None else part * member
            if i == 0:
                torch.bmm(counted, values[layer], out=self.sum)
            else:
                self.sum.baddbmm_(counted, values[layer])
        self.shares.copy_(self.total)
        torch.div(self.sum_view, self.shares_view, out=self.result)
        if self.index is not None:
            self.outputs.index_copy_(0, self.index, self.given)


def _height(spans: list[Span], shape: HeadShape) -> int:
    """M of a group: enough for a product that keeps its order."""
    return max(LEAST, shape.group * max(len(span.stored) for span in spans))


def _grouped(spans: list[Span]) -> Iterator[list[Span]]:
    """Group spans of consecutive slots where filling them up costs less than another group."""

    def cost(group: list[Span]) -> float:
        rows = max(len(span.stored) for span in group)
        keys = max(span.reach for span in group)
        return _GROUP_COST + len(group) * keys * (1 + rows * _ROW_COST)

    group: list[Span] = []
    for span in sorted(spans, key=lambda span: span.slot):
        follows = bool(group) and span.slot == group[-1].slot + 1
        if follows and cost([*group, span]) <= cost(group) + cost([span]):
            group.append(span)
            continue
        if group:
            yield group
        group = [span]
    if group:
        yield group


class _Sight:
    """What the rows of a group see through one window."""

    def __init__(
        self, whole: Attention, cache: DenseCache, spans: list[Span], count: int, window: int | None
    ) -> None:
        shape = whole.shape
        stop, start = max(span.reach for span in spans), 0
        if window is not None:
            lowest = min(min(span.positions) for span in spans) - window + 1
            start = max(0, lowest) // BLOCK * BLOCK
        columns, slots = range(start, stop), range(spans[0].slot, spans[-1].slot + 1)
        self.keys = cache.keys(slots, columns)
        size = (len(spans) * shape.kv, _height(spans, shape), stop - start)
        self.weight = whole.scratch[: math.prod(size)].view(size)
        # Without a window all committed text is seen, and needs no mask.
        first = start
        if window is None:
            first = min(span.base for span in spans) // _LANES * _LANES
        masks = [_mask(span, range(first, stop), count, window) for span in spans]
        mask = torch.stack(masks).repeat_interleave(shape.group, 1)
        self.mask = _per_head(mask, shape).to(whole.device)
        """float32 [B * K or 1, R * G, .]: 0 or minus infinity, of the last columns."""
        self.masked = self.weight[:, : count * shape.group, first - start :]
        self.blocks: list[tuple[Tensor, Tensor | None, list[Tensor]]] = []
        """Weights of a block, which of them count there (None: all), and its values."""
        for block, member in _blocks(spans, columns):
            if member is not None:
                member = _per_head(member, shape).to(whole.device)
            part = self.weight[:, :, block.start - start : block.stop - start]
            self.blocks.append((part, member, cache.values(slots, block)))


def _per_head(mask: Tensor, shape: HeadShape) -> Tensor:
    """Repeat [B, ...] for the heads of each slot; a single slot is left to broadcasting."""
    return mask if len(mask) == 1 else mask.repeat_interleave(shape.kv, 0)


def _mask(span: Span, columns: range, count: int, window: int | None) -> Tensor:
    """Give [R, N]: 0 where a row sees a key, else minus infinity; the last row fills up."""
    column_N = torch.arange(columns.start, columns.stop)
    filled = [*span.stored, *[span.stored[-1]] * (count - len(span.stored))]
    if span.chain:
        unseen = column_N > torch.tensor(filled)[:, None]
    else:
        unseen = (column_N >= span.base).repeat(count, 1)
        seen: list[list[int]] = []
        for row, parent in enumerate(span.parents):
            seen.append([*(seen[parent] if parent >= 0 else []), row])
        offset = span.base - columns.start
        pairs = [(i, offset + other) for i, row in enumerate(filled) for other in seen[row - span.base]]
        index = torch.tensor([pair for pair in pairs if pair[1] >= 0]).T
        unseen[index[0], index[1]] = False
    if window is not None:
        position_N = column_N.clone()
        tail = torch.tensor(span.depths)[max(0, columns.start - span.base) :] + span.base
        first = max(span.base - columns.start, 0)
        position_N[first : first + len(tail)] = tail[: len(columns) - first]
        position_R = torch.tensor([span.base + span.depths[row - span.base] for row in filled])
        unseen |= position_N <= position_R[:, None] - window
    return torch.zeros(unseen.shape, dtype=torch.float32).masked_fill_(unseen, -torch.inf)


def _blocks(spans: list[Span], columns: range) -> Iterator[tuple[range, Tensor | None]]:
    """Give the columns of each product, and bool [B, 1, N] where some belong to another block.

    A tree stores a guess behind its uncles, so a guess whose position ends one block may lie
    among the rows of the next. More than 64 rows behind, it is counted where it lies.
    """
    moved = [
        (i, row - columns.start, home)
        for i, span in enumerate(spans)
        if not span.chain
        for row, home in span.strays()
        if row in columns
    ]
    homes = None
    if moved:
        homes = torch.arange(columns.start, columns.stop).repeat(len(spans), 1)
        homes.sub_(homes % BLOCK)
        for i, column, home in moved:
            homes[i, column] = home
    for low in range(columns.start, columns.stop, BLOCK):
        high, member = min(low + BLOCK, columns.stop), None
        if homes is not None:
            own = (homes == low).any(0).nonzero()
            if len(own) == 0:
                continue
            end = columns.start + int(own.max()) + 1
            high = max(high, min(-(-end // _STEP) * _STEP, columns.stop))
            member = homes[:, None, low - columns.start : high - columns.start] == low
        yield range(low, high), member
