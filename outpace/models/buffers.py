"""Memory that the operations of a decoder's pass read and write."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.kernels.compiled import library
from outpace.models.attention import HeadShape
from outpace.models.families import DecoderConfig
from outpace.models.fused import View
from outpace.models.operations import Call, Op
from outpace.models.packed import Linear
from outpace.models.room import Lasting

STREAM, NORMED, HEADS, ATTENDED, ADDED, WIDE, GATED, PICKED, LAST, LOGITS, OPERANDS, FOUND = range(12)
SCORES, ROUTES, GIVEN = range(12, 15)
"""Of mixtures: scores of experts, which rows go where, and what experts give."""
TAP = 15
"""Buffers; the first feature wanted has this number."""
_CALLS = 256


class Buffers:
    """Memory of a pass, and the addresses of it and of what is lent to it."""

    def __init__(self, config: DecoderConfig, shape: HeadShape, windows: Sequence[int | None]) -> None:
        hidden, head = config.hidden_size, shape.width * (shape.queries + 2 * shape.kv)
        self._widths = {
            STREAM: hidden,
            NORMED: hidden,
            HEADS: head,
            ATTENDED: shape.width * shape.queries,
            ADDED: hidden,
            WIDE: 2 * config.ffn_size,
            GATED: config.ffn_size,
            PICKED: hidden,
            LAST: hidden,
        }
        if (mixture := config.mixture) is not None:
            times, experts = mixture.chosen, mixture.experts
            self._widths[WIDE] = max(self._widths[WIDE], 2 * times * mixture.width)
            self._widths |= {SCORES: experts, GIVEN: times * hidden}
            self._widths[ROUTES] = 2 * (7 * times + experts + 2)  # see `Routes` of experts.h
        self.views, self.below = ([View(shape, window) for window in windows] for _ in range(2))
        """Of passes, and of levels that follow one in the same call."""
        self.lasting = Lasting()
        self.most = 0
        """Rows that there is room for."""
        self.lent: dict[int, Tensor] = {}
        self._found = array("d")
        self._calls: dict[tuple[int, tuple[int, ...]], tuple[Call, object]] = {}
        self.address = (ctypes.c_void_p * (TAP + 3 * config.num_layers + 2))()

    def fit(self, rows: int, linears: Sequence[tuple[Linear, int]]) -> None:
        """Make room for so many rows, each of which these matrices multiply so many times."""
        self.most = max(rows, 2 * self.most, 16)
        # They outlive a pass, so they are ordinary tensors also where inference mode is on.
        with torch.inference_mode(False):
            for buffer, width in self._widths.items():
                self.lend(buffer, torch.zeros(self.most, width))
        code = library()
        assert code is not None
        products = [(one.product.matrices, times) for one, times in linears if one.product is not None]
        most = self.most * max(times * code.outpace_room(parts, len(parts), 1) for parts, times in products)
        self.lend(OPERANDS, torch.zeros(most, dtype=torch.uint8))

    def found(self, rows: int) -> array[float]:
        """Memory for the best of so many rows of logits: index and value of each."""
        if len(self._found) < 2 * rows:
            self._found = array("d", bytes(16 * rows))
            self.address[FOUND] = self._found.buffer_info()[0]
        return self._found

    def call(self, ops: ctypes.Array[Op], counts: tuple[int, ...]) -> Call:
        """A call of operations, which stay, over so many rows: the same every time."""
        known = self._calls.get((id(ops), counts))
        if known is None:
            if len(self._calls) >= _CALLS:
                self._calls.clear()
            rows_C, at, size = array("q", counts), ctypes.addressof(ops), len(ops)
            call = Call(op=at, ops=size, buffer=ctypes.addressof(self.address), rows=rows_C.buffer_info()[0])
            known = self._calls[id(ops), counts] = call, (ops, rows_C)
        return known[0]

    def lend(self, buffer: int, memory: Tensor) -> None:
        """Use this as a buffer, from now on."""
        if self.lent.get(buffer) is not memory:
            self.lent[buffer], self.address[buffer] = memory, memory.data_ptr()
