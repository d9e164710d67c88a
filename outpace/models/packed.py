"""Linear layers whose weights are laid out once for the CPU.

A plain matrix product lays its weights out anew at every call, which at few rows takes as long
as the product itself. oneDNN can be handed weights already laid out. The plain product stays:
it is the fallback where packing does not work, and the oracle in the tests.

Shape letters: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.kernels.compiled import DTYPES, library

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


def _can(dtype: torch.dtype) -> bool:
    return (dtype in DTYPES and library() is not None) or packing_works(dtype)


class Matrix(ctypes.Structure):
    """``Matrix`` of products.h."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class Linear:
    """``x @ weight.T + bias`` with weights that never change.

    Args:
        weight_OI: the matrix; not kept if it is packed.
        bias_O: added to every row, or None.
        packed: lay the weights out for the CPU, if this machine can; False keeps them as
            they are.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None, packed: bool = True):
        self.outputs, self.inputs = weight_OI.shape
        self.dtype = weight_OI.dtype
        self.bias_O = bias_O
        self.packed = packed and weight_OI.device.type == "cpu" and _can(self.dtype)
        self.parts: ctypes.Array[Matrix] | None = None
        """Its matrices as compiled code multiplies them; None: torch multiplies."""
        code = library() if self.packed and self.dtype in DTYPES else None
        if code is not None:
            self._lay(code, weight_OI.contiguous())
            return
        self._weight = _pack(weight_OI) if self.packed else weight_OI

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Give [T, O]. A packed row comes out the same, bit for bit, whatever rows are beside it.

        That is measured, not proved: `outpace check` measures it on the user's machine.
        """
        if self.parts is not None:
            return self._compiled(x_TI)
        if not self.packed:
            return F.linear(x_TI, self._weight, self.bias_O)
        rows = x_TI.shape[0]
        if rows >= MIN_ROWS:
            return _multiply(x_TI, self._weight, self.bias_O)
        filled_TI = x_TI.new_zeros(MIN_ROWS, self.inputs)
        filled_TI[:rows] = x_TI
        return _multiply(filled_TI, self._weight, self.bias_O)[:rows]

    def _lay(self, code: ctypes.CDLL, weight_OI: Tensor) -> None:
        kind, groups = int(self.dtype is torch.bfloat16), -(-self.outputs // 16)
        size, threads = code.outpace_group_bytes(kind, self.inputs), torch.get_num_threads()
        self._weight = torch.empty(groups * size, dtype=torch.uint8)
        bias = 0
        if self.bias_O is not None:
            self._bias = F.pad(self.bias_O.float(), (0, groups * 16 - self.outputs))
            bias = self._bias.data_ptr()
        row_bytes = self.inputs * weight_OI.element_size()
        numbers = [weight_OI.data_ptr(), row_bytes, None, self.outputs, self.inputs]
        code.outpace_store(kind, *numbers, self._weight.data_ptr(), threads)
        self.parts = (Matrix * 1)(Matrix(kind, self.outputs, self.inputs, self._weight.data_ptr(), bias))

    def _compiled(self, x_TI: Tensor) -> Tensor:
        code, parts = library(), self.parts
        assert code is not None and parts is not None
        x_TI = x_TI.detach().contiguous()
        rows = len(x_TI)
        y_TO = torch.empty(rows, self.outputs, dtype=self.dtype)
        operands = torch.empty(code.outpace_room(parts, len(parts), rows), dtype=torch.uint8)
        at = [one.data_ptr() for one in (x_TI, y_TO, operands)]
        half = [int(one.dtype is torch.bfloat16) for one in (x_TI, y_TO)]
        threads = torch.get_num_threads()
        code.outpace_product(
            parts, len(parts), at[0], self.inputs, half[0], rows, at[1], self.outputs, half[1], at[2], threads
        )
        return y_TO

    def dense(self) -> Tensor:
        """The matrix [O, I] as it was given; a copy if packed."""
        code = library()
        if self.parts is not None and code is not None:
            out = torch.empty(self.outputs, self.inputs)
            code.outpace_dense(self.parts, out.data_ptr(), torch.get_num_threads())
            return out.to(self.dtype)
        return self._weight.to_dense() if self.packed else self._weight

    @property
    def nbytes(self) -> int:
        """Bytes read by a product, bias included."""
        return self.plain_nbytes()

    def plain_nbytes(self) -> int:
        """Bytes of the matrix as it was given, bias included."""
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
        if x_TV.dtype == torch.float32 or x_TV.device.type != "cpu":
            return x_TV.float()
        return self.rows(*x_TV.shape).copy_(x_TV)

    def rows(self, count: int, width: int) -> Tensor:
        """Memory for float32 [count, width], to be written; holds until the next call."""
        if count > ROOM or not torch.is_inference_mode_enabled():  # where autograd runs it may be kept
            return torch.empty(count, width)
        if self._kept is None or len(self._kept) < count:
            self._kept = torch.empty(count, width)
        return self._kept[:count]


def _pack(weight_OI: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous())
    return packed


def _multiply(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    out_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, packed, bias_O, "none", [], "")
    return out_TO
