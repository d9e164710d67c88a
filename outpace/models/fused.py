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
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.kernels.compiled import DTYPES, LANES, library
from outpace.models.attention import Attention, HeadShape, Span
from outpace.models.operations import Call
from outpace.models.rope import Rotation
from outpace.models.views import Choice, KVView

BLOCK = 128
"""Positions of a unit of work."""
_CHUNK, _CHOICE, _LOOK = 12, 18, 14
"""Numbers of a ``Chunk`` and of a ``Choice`` of attend.h, and of a ``Look`` of see.h."""
_NO_VIEW, _NO_TREE = (0,) * 7, (0,) * 2
"""Of those of a ``Look``."""
_MOST, _WIDEST = 32, 256
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
        self._stores = cache.key_store, cache.value_store
        self._passes = views(cache, spans, shape, windows, self.head_TXD.data_ptr(), self._out)

    def __call__(self, layer: int, window: int | None) -> Tensor:
        """Store keys and values, attend; as ``Attention.__call__``."""
        at = [store.data_ptr() for store in self._stores]
        steps = [store.stride(0) * store.element_size() for store in self._stores]
        self._attend(ctypes.byref(self._passes[window].told), layer, *at, *steps, self._threads)
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


def views(
    cache: DenseCache,
    spans: Sequence[Span],
    shape: HeadShape,
    windows: Iterable[int | None],
    head: int,
    out: Tensor,
) -> dict[int | None, View]:
    """What the rows of a pass see, by window.

    Args:
        cache: keys and values; room for the rows is reserved already.
        spans: rows of the pass, in order, without gaps.
        windows: the distinct sliding windows of its layers.
        head: address of float32 [T, X, D], queries, keys and values of a layer.
    """
    stores = cache.key_store, cache.value_store
    at, bfloat16 = out.data_ptr(), out.dtype == torch.bfloat16
    return {window: View(head, at, bfloat16, stores, spans, shape, window) for window in windows}


class View:
    """What the rows of a pass see through one window, cut into units of work.

    It holds the memory that ``told`` points to.
    """

    def __init__(
        self,
        head: int,
        out: int,
        bfloat16: bool,
        stores: tuple[Tensor, Tensor],
        spans: Sequence[Span],
        shape: HeadShape,
        window: int | None,
        attending: Sequence[Span] | None = None,
        levels: int = 0,
    ) -> None:
        """Look at all rows.

        Args:
            bfloat16: whether they are of that type, or float32.
            stores: keys and values of the cache.
            window: of the layers that use it.
            attending: spans of the rows that attend; keys and values of the others are stored
                only. None: all.
            levels: that the rows, one per span, go down: there is room for all of them, and whoever runs
                them looks.
        """
        tall = 1 if levels else max(1, _ROWS // shape.group)
        attending = spans if attending is None else attending
        self._held: list[object] = []
        self._choice = array("q")
        self.look = self._looks(spans, stores, window)
        attends = self.look if attending is spans else self._looks(attending, stores, window)
        for span in attending if window is None else ():
            if span.view is not None and span.view.choice is not None:
                self._choose(span, shape, span.view.choice, _copies(span.view, stores)[1])
        rows = sum(len(span.stored) for span in spans)
        paths = sum(len(span.stored) * len(span.parents) for span in spans if not span.chain)
        chunks = units = 0
        for span in attending:
            cut = -(-len(span.stored) // tall)
            stop = (span.stored.stop if span.chain else span.base + len(span.parents)) + levels
            listed = 0 if span.view is None else span.view.row_LKN.shape[2]
            chunks += cut
            units += cut * (stop // BLOCK + listed // BLOCK + 2)
        self._noted = array("q", bytes(8 * (6 * rows + _CHUNK * chunks + 2 * units + paths)))
        keys, values = stores
        place = _address(self._noted)
        sight = place + 16 * rows
        chunk = sight + 32 * rows
        unit = chunk + 8 * _CHUNK * chunks
        self.told = Told(
            kv=shape.kv,
            group=shape.group,
            width=shape.width,
            capacity=keys.shape[4],
            key_stride=keys.stride(1),
            value_stride=values.stride(1),
            bfloat16=bfloat16,
            half=keys.dtype == torch.bfloat16,
            choices=len(self._choice) // _CHOICE,
            head=head,
            out=out,
            place=place,
            unit=unit,
            chunk=chunk,
            sight=sight,
            path=unit + 16 * units,
            choice=_address(self._choice),
            scale=shape.scale / math.log(2),
        )
        parts = units * shape.queries
        if not levels:
            code = library()
            assert code is not None
            at, count = _address(self.look), len(self.look) // _LOOK
            code.outpace_see(
                ctypes.addressof(self.told),
                at,
                count,
                _address(attends),
                len(attends) // _LOOK,
                window or 0,
                tall,
            )
            parts = self.told.parts
        self._part = torch.empty(parts * (shape.width + 2))  # and the largest and the sum of each
        self.told.part = self._part.data_ptr()
        self.told.tops = self.told.part + 4 * parts * shape.width

    def _looks(self, spans: Sequence[Span], stores: tuple[Tensor, Tensor], window: int | None) -> array[int]:
        """``Look`` of see.h for every span."""
        looks = array("q")
        for span in spans:
            stored, view = span.stored, span.view if window is None else None
            looks.extend((span.slot, span.start, len(stored), stored.start, span.base))
            if view is None:
                looks.extend(_NO_VIEW)
            else:
                self._held.append(view)
                looks.extend((view.rule.start(span.base), view.row_LKN.shape[2]))
                looks.extend((*_list(view.row_LKN), *_copies(view, stores)))
            if span.chain:
                looks.extend(_NO_TREE)
            else:
                tree = array("q", span.parents), array("q", span.depths)
                looks.extend(map(_address, tree))
                self._held.append(tree)
        return looks

    def _choose(self, span: Span, shape: HeadShape, choice: Choice, copied: int) -> None:
        """Have the first row of a span choose what follows the sinks."""
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
    keys, values = cache.key_store, cache.value_store
    call.keys, call.values = keys.data_ptr(), values.data_ptr()
    call.key_layer = keys.stride(0) * keys.element_size()
    call.value_layer = values.stride(0) * values.element_size()
    call.heads, call.turned = shape.queries + 2 * shape.kv, shape.queries + shape.kv
    return seen, tables, told, turn, positions


def _copies(view: KVView, stores: tuple[Tensor, Tensor]) -> tuple[int, int]:
    """Addresses of what was chosen side by side, and of which blocks are there; the view holds them."""
    if view.copies is None:
        return 0, 0
    kept, blocks = view.copies.room(stores[0])
    return kept.data_ptr(), blocks.data_ptr()


def _list(row_LKN: Tensor) -> tuple[int, int, int]:
    """Address of lists of rows, and the steps from layer to layer and from head to head."""
    return row_LKN.data_ptr(), *(0 if row_LKN.shape[i] == 1 else row_LKN.stride(i) for i in range(2))  # type: ignore[return-value]


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
