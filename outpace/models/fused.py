"""Attention in one reading of keys and values, by compiled code.

`outpace.models.attention` says what is computed and what is promised; there it is done with
products of matrices, a dozen per layer and group of slots, which on a CPU read keys and values at
a quarter of the speed of its memory, and fill up shorter slots to the longest. ``attend.h`` does
the same in one call per layer. Its sums run in another order, and in a bfloat16 model it rounds
queries and weights as well, so its results differ from those of torch by rounding: a process uses
one of the two for all passes of a model.

Milliseconds of a pass over SmolLM2-135M in bfloat16, keys in float32, 2 cores with AVX-512, 512
tokens of context (more in docs/results, also of keys in bfloat16):

    sequences x rows      1 x 1   1 x 32   1 x 128   8 x 1   64 x 1
    products               15.1     39.2     119.7    27.9    136.1
    fused                  12.1     30.3      85.5    19.8     89.5
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.kernels.compiled import DTYPES, LANES, library
from outpace.models.attention import Attention, HeadShape, Span
from outpace.models.operations import Call
from outpace.models.room import Piece
from outpace.models.rope import Rotation
from outpace.models.views import Choice, KVView

BLOCK = 128
"""Positions of a unit of work."""
_CHUNK, _CHOICE, _LOOK = 14, 20, 16
"""Numbers of a ``Chunk`` and of a ``Choice`` of attend.h, and of a ``Look`` of see.h."""
_NO_VIEW, _NO_TREE = (0,) * 7, (0,) * 2
"""Of those of a ``Look``."""
_MOST, _WIDEST = 32, 256
_KEPT = 1 << 20
"""Numbers of memory more than a pass needs, with which it is kept."""
_ROWS = 24
"""Query rows of a unit that are aimed at: a key that was read serves them all."""


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

    bfloat16 for a bfloat16 model, as transformers keeps them, where compiled code reads them:
    values lose nothing, keys what their rotation would have kept. torch would have to convert
    all of them in every pass, so for its products they stay float32.
    """
    return dtype if fits(shape, dtype, device) else torch.float32


def fits(shape: HeadShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether compiled code attends to these heads there."""
    return (
        device.type == "cpu"
        and dtype in DTYPES
        and shape.softcap is None
        and shape.group <= _MOST
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
                "key_stride",
                "value_stride",
                "bfloat16",
                "half",
                "news",
                "units",
                "chunks",
                "parts",
                "choices",
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("head", "out", "place", "unit", "chunk", "sight", "path", "part", "tops", "choice")
        ),
        ("scale", ctypes.c_float),
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
        )
        self.looks = array("q")
        self._noted, self._choice, self._part = array("q"), array("q"), Piece(0)
        self._held: list[object] = []

    def look(
        self,
        cache: DenseCache,
        spans: Sequence[Span],
        head: int,
        out: int,
        attending: Sequence[Span] | None = None,
        levels: int = 0,
    ) -> None:
        """Look at the rows of a pass.

        Args:
            cache: keys and values; room for the rows is reserved already.
            spans: rows of the pass, in order, without gaps.
            head: address of float32 [T, X, D], queries, keys and values of a layer.
            out: address of what attention gives.
            attending: spans of the rows that attend; keys and values of the others are stored
                only. None: all.
            levels: that the rows, one per span, go down: there is room for all of them, and whoever runs
                them looks.
        """
        shape, told = self._shape, self.told
        self._held, layout = [], cache.layout
        tall = 1 if levels else max(1, _ROWS // shape.group)
        attending = spans if attending is None else attending
        self.looks = attends = self._looks(spans, cache)
        if attending is not spans:
            attends = self._looks(attending, cache)
        rows = paths = chunks = units = 0
        for span in spans:
            rows += len(span.stored)
            if not span.chain:
                paths += len(span.stored) * len(span.parents)
        for span in attending:
            cut, stop = -(-len(span.stored) // tall), span.stored.stop + levels
            if not span.chain:
                stop = span.base + len(span.depths)
            listed = 0 if span.view is None else span.view.row_LKN.shape[2]
            chunks += cut
            units += cut * (stop // BLOCK + listed // BLOCK + 2)
        room = 6 * rows + _CHUNK * chunks + 2 * units + paths
        if not room <= len(self._noted) <= room + _KEPT:
            self._noted = array("q", bytes(8 * room))
        told.capacity, told.half = layout.capacity, layout.half
        told.key_stride, told.value_stride = layout.key_stride, layout.value_stride
        told.head, told.out = head, out
        place = _address(self._noted)
        sight = place + 16 * rows
        chunk = sight + 32 * rows
        unit = chunk + 8 * _CHUNK * chunks
        told.place, told.sight, told.chunk, told.unit, told.path = (
            place,
            sight,
            chunk,
            unit,
            unit + 16 * units,
        )
        self._choices(cache, attending)
        parts = units * shape.queries
        if not levels:
            code = library()
            assert code is not None
            all_rows = _address(self.looks), len(self.looks) // _LOOK
            some_rows = _address(attends), len(attends) // _LOOK
            code.outpace_see(ctypes.addressof(told), *all_rows, *some_rows, self._window or 0, tall)
            parts = told.parts
        room = parts * (shape.width + 2)  # and the largest and the sum of each
        if not room <= self._part.size <= room + _KEPT:
            self._part = Piece(room)
        part = self._part.address
        told.part, told.tops = part, part + 4 * parts * shape.width

    def _choices(self, cache: DenseCache, attending: Sequence[Span]) -> None:
        """Have spans choose which rows they see, where a view asks for that."""
        self._choice = array("q")
        for span in attending if self._window is None else ():
            if span.view is not None and span.view.choice is not None:
                self._choose(span, span.view.choice, _copies(span.view, cache)[1])
        self.told.choices = len(self._choice) // _CHOICE
        self.told.choice = _address(self._choice)

    def _looks(self, spans: Sequence[Span], cache: DenseCache) -> array[int]:
        """``Look`` of see.h for every span."""
        looks = array("q")
        for span in spans:
            stored, view = span.stored, span.view if self._window is None else None
            looks.extend((span.slot, span.start, len(stored), stored.start, span.base))
            if view is None:
                looks.extend(_NO_VIEW)
            else:
                self._held.append(view)
                looks.extend((view.rule.start(span.base), view.row_LKN.shape[2]))
                looks.extend((*_list(view.row_LKN), *_copies(view, cache)))
            looks.extend(cache.twin(span.slot))
            if span.chain:
                looks.extend(_NO_TREE)
            else:
                tree = array("q", span.parents), array("q", span.depths)
                looks.extend((_address(tree[0]) if span.parents else 0, _address(tree[1])))
                self._held.append(tree)
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
    seen: Sequence[Told],
    turns: Sequence[Rotation],
    positions: array[int],
    last: int,
) -> object:
    """Tell a call what its rows see, and where they stand.

    Args:
        seen: per window, as its operations number them.
        turns: rotary tables, likewise.
        positions: of all rows.
        last: the highest of them.

    Returns:
        Memory that the call reads; keep it, and views, until the call has ended.
    """
    tables = [rotation.table(last + 1) for rotation in turns]
    told = (ctypes.c_void_p * len(seen))(*map(ctypes.addressof, seen))
    turn = (ctypes.c_void_p * len(tables))(*(table.data_ptr() for table in tables))
    call.positions = positions.buffer_info()[0]
    call.pass_, call.turn = ctypes.addressof(told), ctypes.addressof(turn)
    layout = cache.layout
    call.keys, call.values = layout.keys, layout.values
    call.key_layer, call.value_layer = layout.key_layer, layout.value_layer
    call.heads, call.turned = shape.queries + 2 * shape.kv, shape.queries + shape.kv
    return seen, tables, told, turn, positions


def _copies(view: KVView, cache: DenseCache) -> tuple[int, int]:
    """Addresses of what was chosen side by side, and of which blocks are there; the view holds them."""
    if view.copies is None:
        return 0, 0
    kept, blocks = view.copies.room(cache.key_store)
    return kept.data_ptr(), blocks.data_ptr()


def _list(row_LKN: Tensor) -> tuple[int, int, int]:
    """Address of lists of rows, and the steps from layer to layer and from head to head."""
    return row_LKN.data_ptr(), *(0 if row_LKN.shape[i] == 1 else row_LKN.stride(i) for i in range(2))  # type: ignore[return-value]


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
