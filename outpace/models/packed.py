"""Linear layers whose weights are laid out once for the CPU.

A plain matrix product lays its weights out anew at every call, which at few rows takes as long
as the product itself. Compiled code (`outpace.models.products`) has a layout of its own; where it
cannot be had, oneDNN can be handed weights already laid out. The plain product stays: it is the
fallback where neither works, and the oracle in the tests.

Shape letters: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.kernels.compiled import DTYPES
from outpace.models.products import Product, Stored, store_numbers, works

MIN_ROWS = 4
"""Fewer rows are filled up to this many. oneDNN is no slower at 4 rows than at 1, and 1 row in
float32 takes another kernel, whose sums are rounded otherwise."""

ROOM = 512
"""Most rows of logits whose memory is kept."""


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this machine multiplies packed weights of ``dtype``, and gets them right.

    Tried once per process, on a small matrix; any failure means no.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    ones = torch.ones(MIN_ROWS, 48)
    weight_OI = torch.arange(96 * 48).remainder(7).sub(3).reshape(96, 48).float()
    try:
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        # Sums of small whole numbers: exact in either dtype, whatever the order.
        packed = _pack(weight_OI.to(dtype))
        out_TO = _multiply(ones.to(dtype), packed, None)
        same = torch.equal(out_TO.float(), ones @ weight_OI.T)
        return same and torch.equal(packed.to_dense().float(), weight_OI)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


class Linear:
    """``x @ weight.T + bias`` with weights that never change.

    Compiled code multiplies where there is any, then rows are float32 or bfloat16, and what comes
    out is of the same dtype. Elsewhere rows have the dtype of the weights.

    Args:
        weight_OI: the matrix; not kept if it is laid out.
        bias_O: added to every row, or None.
        packed: lay the weights out for the CPU, if this machine can; False keeps them as
            they are.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None, packed: bool = True):
        self.outputs, self.inputs = weight_OI.shape
        self.dtype = weight_OI.dtype
        self.bias_O = bias_O
        self.packed = packed and weight_OI.device.type == "cpu"
        self.product: Product | None = None
        """The same for compiled code, if there is any."""
        if self.packed and self.dtype in DTYPES and works():
            self.product = Product([store_numbers(weight_OI)], bias_O)
            return
        self.packed = self.packed and packing_works(self.dtype)
        self._weight = _pack(weight_OI) if self.packed else weight_OI

    @classmethod
    def stored(cls, parts: Sequence[Stored], bias_O: Tensor | None, dtype: torch.dtype) -> Linear:
        """Some matrices of equal inputs in the layout of compiled code, one above the other.

        Args:
            parts: the matrices.
            bias_O: added to every row, or None.
            dtype: of ``dense``.
        """
        self = cls.__new__(cls)
        self.product = Product(parts, bias_O)
        self.outputs, self.inputs = self.product.outputs, parts[0].inputs
        self.dtype, self.bias_O, self.packed = dtype, bias_O, True
        return self

    @property
    def min_rows(self) -> int:
        """Fewer rows are not faster."""
        return MIN_ROWS if self.packed and self.product is None else 1

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Give [T, O]. A packed row comes out the same, bit for bit, whatever rows are beside it.

        Of compiled products that holds by the order of their sums. Of others it is measured, not
        proved: `outpace check` measures it on the user's machine.
        """
        if self.product is not None:
            return self.product(x_TI)
        if not self.packed:
            return F.linear(x_TI, self._weight, self.bias_O)
        rows = x_TI.shape[0]
        if rows >= MIN_ROWS:
            return _multiply(x_TI, self._weight, self.bias_O)
        filled_TI = x_TI.new_zeros(MIN_ROWS, self.inputs)
        filled_TI[:rows] = x_TI
        return _multiply(filled_TI, self._weight, self.bias_O)[:rows]

    def dense(self) -> Tensor:
        """The matrix [O, I] as it was given; a copy if packed."""
        if self.product is not None:
            return self.product.dense().to(self.dtype)
        return self._weight.to_dense() if self.packed else self._weight

    @property
    def nbytes(self) -> int:
        """Bytes read by a product, bias included."""
        bias = 0 if self.bias_O is None else self.bias_O.nbytes
        if self.product is not None:
            return self.product.nbytes + bias
        return self.plain_nbytes()

    def plain_nbytes(self) -> int:
        """Bytes of the matrix in ``dtype``, bias included."""
        bias = 0 if self.bias_O is None else self.bias_O.nbytes
        return self.outputs * self.inputs * self.dtype.itemsize + bias


class Room:
    """Memory for the logits of one pass after another, on a CPU.

    Logits of a batch are many megabytes. Taken anew for every pass, of another size each time, they
    come from the system and go back to it, page by page: 70 to 130 rows over 49152 tokens take 13
    to 23 ms on average, of which 9 are left where memory stays. So a result holds until the next.
    """

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def widened(self, x_TV: Tensor) -> Tensor:
        """The same in float32. Memory: the largest number of rows so far, up to `ROOM`."""
        rows = len(x_TV)
        fresh = x_TV.dtype == torch.float32 or x_TV.device.type != "cpu" or rows > ROOM
        if fresh or not torch.is_inference_mode_enabled():  # where autograd runs it may be kept
            return x_TV.float()
        if self._kept is None or len(self._kept) < rows:
            self._kept = x_TV.new_empty(rows, x_TV.shape[1], dtype=torch.float32)
        return self._kept[:rows].copy_(x_TV)


def _pack(weight_OI: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous())
    return packed


def _multiply(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    out_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, packed, bias_O, "none", [], "")
    return out_TO
