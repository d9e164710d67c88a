"""Attention in one reading of keys and values, by compiled code.

`outpace.models.attention` says what is computed and what is promised. There it takes a dozen products
of matrices per layer and group of slots. On a CPU these read keys and values at a quarter of the
memory's speed, and fill up shorter slots to the longest. ``attend.h`` does the same in one call per
layer. Its sums run in another order, and in a bfloat16 model it rounds queries and weights as well.
So its results differ from torch's by rounding: a process uses one of the two for all passes of a model.

Milliseconds of a pass over SmolLM2-135M in bfloat16, 512 tokens of context, keys in float32, 2 cores
with AVX-512 (docs/results has more):

    sequences x rows      1 x 1   1 x 32   1 x 128   8 x 1   64 x 1
    products               15.1     39.2     119.7    27.9    136.1
    fused                  12.1     30.3      85.5    19.8     89.5
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from operator import lt
from typing import Any

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache, Layout
from outpace.kernels.compiled import DTYPES, LANES, library
from outpace.models.attention import BLOCK, Attention, HeadShape, Span
from outpace.models.operations import Call
from outpace.models.room import Piece
from outpace.models.rope import Rotation
from outpace.models.views import Choice, KVView

_CHUNK, _CHOICE, _LOOK = 14, 20, 16
"""Numbers of a ``Chunk`` and of a ``Choice`` of attend.h, and of a ``Look`` of see.h."""
_NO_VIEW, _NO_TREE = (0,) * 7, (0,) * 2
"""Of those of a ``Look``."""
_WIDEST = 256
_KEPT, _SLACK = 1 << 20, 1 << 14
"""Numbers of memory more than a pass needs, with which it is kept, and with which it is made."""
_AHEAD = 64
"""Rows by which texts grow before levels are looked at anew."""
UNIT_ROWS = 32
"""Query rows of a unit at most, as in attend.h: a key that was read serves them all."""


def attention(
    cache: DenseCache,
    spans: Sequence[Span],
    rows: int,
    shape: HeadShape,
    windows: frozenset[int | None],
    dtype: torch.dtype,
) -> Attention | FusedAttention:
    """The fastest attention that this machine has, for a pass; arguments as of `Attention`."""
    fused = fits(shape, dtype, cache.key_store.device)
    one = FusedAttention if fused else Attention
    return one(cache, spans, rows, shape, windows, dtype)


def stored(shape: HeadShape, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What keys and values of a model are best kept in, so that reading them takes least.

    Compiled code reads bfloat16: values lose nothing, keys what their rotation would have kept. For
    products of torch they stay float32, or each pass would convert all of them.
    """
    return dtype if fits(shape, dtype, device) else torch.float32


def fits(shape: HeadShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether compiled code attends to these heads there."""
    return (
        device.type == "cpu"
        and dtype in DTYPES
        and shape.group <= UNIT_ROWS
        and shape.width <= _WIDEST
        and shape.width % LANES == 0
        and library() is not None
    )


class FusedAttention:
    """What `Attention` is, with the same arguments, effects and results but for rounding."""

    def __init__(
        self,
        cache: DenseCache,
        spans: Sequence[Span],
        rows: int,
        shape: HeadShape,
        windows: frozenset[int | None],
        dtype: torch.dtype,
    ) -> None:
        code = library()
        assert code is not None
        self._attend = code.outpace_attend
        self._threads = torch.get_num_threads()
        kv, queries, width = shape.kv, shape.queries, shape.width
        self.head_TXD = torch.zeros(rows, queries + 2 * kv, width)
        self.turned_TXE = torch.view_as_complex(
            self.head_TXD[:, : queries + kv].view(rows, queries + kv, width // 2, 2)
        )
        self._out = torch.zeros(rows, queries * width, dtype=dtype)
        self._layout = cache.layout
        self._views = {window: View(shape, window, dtype == torch.bfloat16) for window in windows}
        for view in self._views.values():
            view.look(cache, spans, self.head_TXD.data_ptr(), self._out.data_ptr())

    def __call__(self, layer: int, window: int | None) -> Tensor:
        """Store keys and values, attend; as ``Attention.__call__``."""
        at, steps = self._layout[:2], self._layout[2:4]
        self._attend(ctypes.byref(self._views[window].told), layer, *at, *steps, self._threads)
        return self._out


class Told(ctypes.Structure):
    """``Pass`` of attend.h."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "kv",
                "group",
                "width",
                "capacity",
                "tile",
                "key_stride",
                "value_stride",
                "bfloat16",
                "half",
                "news",
                "units",
                "chunks",
                "parts",
                "choices",
                "whole",
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("head", "out", "place", "unit", "chunk", "sight", "path", "part", "tops", "choice")
        ),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    ]


class View:
    """What the rows of a pass see through one window, cut into units of work.

    It holds the memory that ``told`` points to, and serves one pass after another.

    Args:
        window: of the layers that use it.
        bfloat16: whether results are of that type, or float32.
    """

    def __init__(self, shape: HeadShape, window: int | None, bfloat16: bool = False) -> None:
        self._shape, self._window = shape, window
        self.told = Told(
            kv=shape.kv,
            group=shape.group,
            width=shape.width,
            bfloat16=bfloat16,
            scale=shape.scale / math.log(2),
            cap=0.0 if shape.softcap is None else shape.softcap / math.log(2),
        )
        self.looks = array("q")
        self._noted, self._choice, self._part = array("q"), array("q"), Piece(0)
        self._room = 0, 0, 0, 0
        """Rows, chunks, units and numbers of paths that are noted at most."""
        self._parts = 0
        self._layout: Layout | None = None
        self._levels: tuple[object, ...] = ()
        """What was looked at for levels."""
        self._reach: list[int] = []
        """How far each of their rows may go before that is done again."""
        self._held: list[Any] = []

    def look(
        self,
        cache: DenseCache,
        spans: Sequence[Span],
        head: int,
        out: int,
        wanted: array[int] | None = None,
        levels: int = 0,
    ) -> None:
        """Look at the rows of a pass.

        Args:
            cache: keys and values; room for the rows is reserved already.
            spans: rows of the pass, in order, without gaps.
            head: address of float32 [T, X, D], queries, keys and values of a layer.
            out: address of what attention gives.
            wanted: rows of the pass that attend, ascending; keys and values of the others are stored
                only. None: all.
            levels: that the rows, one per span, go down: there is room for all of them, and whoever runs
                them looks.
        """
        shape, told, layout = self._shape, self.told, cache.layout
        self._held, self._levels = [], ()
        tall = 1 if levels else UNIT_ROWS // shape.group
        self.looks = self._looks(spans, cache)
        rows = paths = chunks = units = widest = 0
        viewed = bool(self._choice)
        for span in spans:
            stored = span.stored
            count, stop, listed = len(stored), stored.stop + levels, 0
            rows += count
            if not span.chain:
                paths += count * len(span.parents)
                stop = span.base + len(span.depths)
            if span.view is not None:
                listed, viewed = span.view.row_LKN.shape[2], True
            cut, blocks = -(-count // tall), stop // BLOCK + listed // BLOCK + 2
            chunks += cut
            units += cut * blocks
            widest = max(widest, blocks)
        if wanted is not None:
            chunks, units = len(wanted), len(wanted) * widest
        self._fit(rows, chunks, units, paths)
        if layout is not self._layout:
            told.capacity, told.half, self._layout = layout.capacity, layout.half, layout
            told.tile = layout.tile
            told.key_stride, told.value_stride = layout.key_stride, layout.value_stride
        told.head, told.out = head, out
        if viewed:
            self._choices(cache, spans)
        parts = units * shape.queries
        if not levels:
            code = library()
            assert code is not None
            some = (0, -1) if wanted is None else wanted.buffer_info()
            looks = _address(self.looks), len(spans)
            code.outpace_see(ctypes.addressof(told), *looks, *some, self._window or 0, tall)
            parts = told.parts
        if not parts <= self._parts <= parts + _KEPT // shape.width:
            self._parts = parts + parts // 4
            self._part = Piece(self._parts * (shape.width + 2))  # and the largest and the sum of each
            told.part = self._part.address
            told.tops = self._part.address + 4 * self._parts * shape.width

    def follow(
        self, cache: DenseCache, slot_B: Sequence[int], row_B: Sequence[int], head: int, out: int, levels: int
    ) -> None:
        """Look at rows of chains, one per slot, that go down levels; nearly nothing while texts grow."""
        known = cache.layout, head, out, len(slot_B)
        if self._levels != known or any(map(lt, self._reach, [row + levels for row in row_B])):
            at = zip(slot_B, row_B, strict=True)
            spans = [Span(slot, i, range(row, row + 1), 0, (), (), True) for i, (slot, row) in enumerate(at)]
            self.look(cache, spans, head, out, levels=levels + _AHEAD)
            self._levels, self._reach = known, [row + levels + _AHEAD for row in row_B]
        for i, slot in enumerate(slot_B):
            self.looks[_LOOK * i], self.looks[_LOOK * i + 3] = slot, row_B[i]
            self.looks[_LOOK * i + 12], self.looks[_LOOK * i + 13] = cache.twin(slot)

    def branch(
        self,
        cache: DenseCache,
        slot_B: Sequence[int],
        row_B: Sequence[int],
        head: int,
        out: int,
        beam_B: Sequence[int],
        seats_B: Sequence[int],
    ) -> None:
        """Look at rows of trees below tails that are chains; nearly nothing while texts grow.

        Args:
            row_B: behind the tail of each slot.
            beam_B: most rows of a slot in a level.
            seats_B: most rows of a slot in all levels.
        """
        base_B = [cache.length(slot) for slot in slot_B]
        lead_B = [row - base for row, base in zip(row_B, base_B, strict=True)]
        known = cache.layout, head, out, beam_B, seats_B
        if self._levels != known or max(lead_B) > _AHEAD or any(map(lt, self._reach, row_B)):
            longest, spans, first = max(_AHEAD, *lead_B), list[Span](), 0
            for slot, row, beam, seats in zip(slot_B, row_B, beam_B, seats_B, strict=True):
                tail, stored = range(longest + seats), range(row + _AHEAD, row + _AHEAD + beam)
                parents = [node - 1 for node in tail]
                spans.append(Span(slot, first, stored, row + _AHEAD, parents, tail, False))
                first += beam
            self.look(cache, spans, head, out, levels=1)
            self._levels, self._reach = known, [row + _AHEAD for row in row_B]
        for i, (slot, lead) in enumerate(zip(slot_B, lead_B, strict=True)):
            at, (parents, depths) = _LOOK * i, self._held[i]
            parents[:lead], depths[:lead] = array("q", range(-1, lead - 1)), array("q", range(lead))
            self.looks[at], self.looks[at + 3], self.looks[at + 4] = slot, row_B[i], base_B[i]
            self.looks[at + 12], self.looks[at + 13] = cache.twin(slot)
            self.looks[at + 14], self.looks[at + 15] = _address(parents), _address(depths)

    def _fit(self, *need: int) -> None:
        """Have room for so many rows, chunks, units and numbers of paths, and not for far more."""
        rows, chunks, units, paths = need
        size = 6 * rows + _CHUNK * chunks + 2 * units + paths
        if not any(map(lt, self._room, need)) and len(self._noted) <= size + _KEPT:
            return
        self._room = rows, chunks, units, paths = tuple(n + min(n // 4, _SLACK) for n in need)  # type: ignore[assignment]
        self._noted = array("q", bytes(8 * (6 * rows + _CHUNK * chunks + 2 * units + paths)))
        told, place = self.told, _address(self._noted)
        sight = place + 16 * rows
        chunk = sight + 32 * rows
        unit = chunk + 8 * _CHUNK * chunks
        told.place, told.sight, told.chunk, told.unit = place, sight, chunk, unit
        told.path = unit + 16 * units

    def _choices(self, cache: DenseCache, spans: Sequence[Span]) -> None:
        """Have spans choose which rows they see, where a view asks for that."""
        chosen = self._choice = array("q")
        for span in spans if self._window is None else ():
            if span.view is not None and span.view.choice is not None:
                self._choose(span, span.view.choice, _copies(span.view, cache)[1])
        self.told.choices = len(chosen) // _CHOICE
        self.told.choice = _address(chosen)

    def _looks(self, spans: Sequence[Span], cache: DenseCache) -> array[int]:
        """``Look`` of see.h for every span."""
        looks = array("q")
        for span in spans:
            stored, view = span.stored, span.view if self._window is None else None
            seen, tree = _NO_VIEW, _NO_TREE
            if view is not None:
                self._held.append(view)
                first = view.rule.start(span.base), view.row_LKN.shape[2]
                seen = (*first, *_list(view.row_LKN), *_copies(view, cache))
            if not span.chain:
                held = array("q", span.parents), array("q", span.depths)
                tree = _address(held[0]) if span.parents else 0, _address(held[1])
                self._held.append(held)
            at = span.slot, span.start, len(stored), stored.start, span.base
            looks.extend((*at, *seen, *cache.twin(span.slot), *tree))
        return looks

    def _choose(self, span: Span, choice: Choice, copied: int) -> None:
        """Have the first row of a span choose what follows the sinks."""
        shape = self._shape
        rule, low, high = choice.rule, choice.rule.sinks, choice.rule.start(span.base)
        position = span.positions[0]
        turn_PE = choice.rotation.table(position + 1)
        scores = torch.empty((shape.queries + shape.kv) * (high - low))
        tops = torch.empty(2 * shape.queries)
        at, *steps = _list(choice.row_LKN)
        self._held += [turn_PE, scores, tops, choice]
        self._choice.extend((span.slot, span.start, low, high, rule.kind, rule.run, rule.count // rule.run))
        self._choice.extend((at + 4 * low, *steps, scores.data_ptr(), tops.data_ptr()))
        turn = turn_PE.data_ptr() + position * turn_PE.stride(0) * turn_PE.element_size()
        self._choice.extend((choice.query_LX.data_ptr(), turn, choice.anew_L.data_ptr()))
        self._choice.extend((round(1e6 * rule.least), copied, -(-rule.listed // BLOCK)))
        which = array("i", bytes(4 * shape.kv * rule.read))
        self._held.append(which)
        self._choice.extend((rule.read if rule.read < shape.width else 0, _address(which)))


def tell(
    call: Call,
    shape: HeadShape,
    cache: DenseCache,
    views: Sequence[View],
    turns: Sequence[Rotation],
    positions: array[int],
    last: int,
) -> None:
    """Tell a call what its rows see, and where they stand.

    Args:
        views: per window, as its operations number them.
        turns: rotary tables, likewise.
        positions: of all rows; keep them until the call has ended.
        last: the highest of them.
    """
    tables, layout = [rotation.lying(last + 1) for rotation in turns], cache.layout
    call.positions = _address(positions)
    known = layout, *views, *[at for _, at in tables]
    if known == call.known:
        return
    told = array("q", [ctypes.addressof(view.told) for view in views])
    turn = array("q", [at for _, at in tables])
    call.pass_, call.turn = _address(told), _address(turn)
    call.keys, call.values = layout.keys, layout.values
    call.key_layer, call.value_layer = layout.key_layer, layout.value_layer
    call.heads, call.turned = shape.queries + 2 * shape.kv, shape.queries + shape.kv
    call.known, call.held = known, (tables, told, turn)


def _copies(view: KVView, cache: DenseCache) -> tuple[int, int]:
    """Addresses of what was chosen side by side, and of which blocks are there; the view holds them."""
    if view.copies is None:
        return 0, 0
    kept, blocks = view.copies.room(cache.value_store)
    return kept.data_ptr(), blocks.data_ptr()


def _list(row_LKN: Tensor) -> tuple[int, int, int]:
    """Address of lists of rows, and the steps from layer to layer and from head to head."""
    return row_LKN.data_ptr(), *(0 if row_LKN.shape[i] == 1 else row_LKN.stride(i) for i in range(2))  # type: ignore[return-value]


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
