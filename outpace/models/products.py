"""Matrices whose weights stay as they are stored, and their products, by compiled code.

``products.h`` says how they lie in memory and how rows are multiplied with them. Weights of 4 to 8
bits keep the bits that they have in the file; they are widened in registers. Nothing here is needed
where code cannot be compiled: weights are then expanded, and torch multiplies.

Shape letters: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from outpace.kernels.compiled import library
from outpace.models.pages import pages
from outpace.models.places import Place, read_portions

KINDS = ("F32", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""In the order of ``products.h``."""
CODED = frozenset(KINDS[2:])
"""Types of GGUF files that are multiplied as they are stored."""
_OF = {torch.float32: "F32", torch.bfloat16: "BF16"}
_GROUP = 16
"""Outputs whose codes lie together; of numbers twice as many."""
LARGEST = 2 * _GROUP
"""Outputs of the largest group."""
_SPAN, _PER = 32, 8
"""Inputs of a block, and blocks that share what stands before them."""
_PORTION = 1 << 22
"""Bytes of a file that are laid out at a time."""


class Matrix(ctypes.Structure):
    """``Matrix`` of products.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "outputs", "inputs")),
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
    ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stored:
    """One matrix in the layout of the compiled code."""

    kind: str
    outputs: int
    inputs: int
    memory: Tensor
    """uint8; starts at a whole line of the processor's cache."""

    @property
    def nbytes(self) -> int:
        """Bytes of its outputs, without what fills up the last group."""
        return self.memory.nbytes * self.outputs // _filled(self.kind, self.outputs)

    def dense(self) -> Tensor:
        """The numbers that it stands for: float32 [O, I]."""
        out_OI = torch.empty(self.outputs, self.inputs)
        matrix = self.matrix(None)
        _code().outpace_dense(ctypes.byref(matrix), out_OI.data_ptr(), torch.get_num_threads())
        return out_OI

    def matrix(self, bias: int | None) -> Matrix:
        """The same for compiled code; ``bias`` is the address of float32 numbers."""
        return Matrix(KINDS.index(self.kind), self.outputs, self.inputs, self.memory.data_ptr(), bias)


class Product:
    """Rows times some matrices of equal inputs, whose outputs stand side by side.

    Args:
        bias_O: added to every row, or None.
    """

    def __init__(self, parts: Sequence[Stored], bias_O: Tensor | None) -> None:
        self.parts = tuple(parts)
        self.outputs = sum(part.outputs for part in parts)
        self.nbytes = sum(part.nbytes for part in parts)
        self._biases: list[Tensor] = []
        first, matrices = 0, []
        for part in parts:
            address = None
            if bias_O is not None:
                filled_O = torch.zeros(_filled(part.kind, part.outputs))
                filled_O[: part.outputs] = bias_O[first : first + part.outputs]
                self._biases.append(filled_O)
                address = filled_O.data_ptr()
            matrices.append(part.matrix(address))
            first += part.outputs
        self.matrices = (Matrix * len(matrices))(*matrices)
        """For compiled code; the memory is held here."""

    def behind(self, outputs: int) -> ctypes.Array[Matrix]:
        """Its matrices without the first outputs, which are whole groups; in the same memory."""
        found = []
        for part, whole in zip(self.parts, self.matrices, strict=True):
            left_out, size = min(outputs, part.outputs), _group_size(part.kind)
            outputs -= left_out
            if left_out < part.outputs:
                assert left_out % size == 0, (left_out, part.kind)
                at = whole.weights + left_out // size * _group_bytes(part.kind, part.inputs)
                bias = None if whole.bias is None else whole.bias + 4 * left_out
                found.append(Matrix(whole.kind, part.outputs - left_out, part.inputs, at, bias))
        return (Matrix * len(found))(*found)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Give [T, O] in the dtype of ``x_TI``, float32 or bfloat16."""
        if x_TI.stride(-1) != 1:
            x_TI = x_TI.contiguous()
        rows, code, count = len(x_TI), _code(), len(self.parts)
        out_TO = x_TI.new_empty(rows, self.outputs)
        room = torch.empty(code.outpace_room(self.matrices, count, rows), dtype=torch.uint8)
        half = x_TI.dtype is torch.bfloat16
        code.outpace_product(
            self.matrices,
            count,
            x_TI.data_ptr(),
            x_TI.stride(0),
            half,
            rows,
            out_TO.data_ptr(),
            self.outputs,
            half,
            room.data_ptr(),
            torch.get_num_threads(),
        )
        return out_TO

    def dense(self) -> Tensor:
        """The numbers that the weights stand for: float32 [O, I]."""
        return torch.cat([part.dense() for part in self.parts])


def tile_rows() -> int | None:
    """Rows for which quantized weights are widened once; None where no code is compiled."""
    return int(_code().outpace_tile()) if works() else None


@cache
def works(device: str = "cpu") -> bool:
    """Whether compiled code multiplies matrices that are there."""
    return device == "cpu" and library() is not None


def stored_bytes(kind: str, outputs: int, inputs: int) -> int:
    """What ``Stored.nbytes`` of such a matrix is; needs neither the matrix nor compiled code."""
    size = _group_size(kind)
    if kind in _OF.values():
        group = 4 * size * (inputs if kind == "F32" else -(-inputs // 2))
    else:
        blocks = -(-inputs // _SPAN)
        bits, least = int(kind[1]), kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
        two_levels = kind.endswith("_K")
        own = 2 * size * (2 if least and not two_levels else 1)
        head = 2 * size * (2 if least else 1) if two_levels else 0
        group = blocks * (bits * size * _SPAN // 8 + own) + -(-blocks // _PER) * head
    return group * outputs // size


def store_numbers(weight_OI: Tensor) -> Stored:
    """Lay out float32 or bfloat16 numbers; they are copied."""
    return store_rows(_OF[weight_OI.dtype], weight_OI.detach().contiguous(), weight_OI.shape[1])


def store_rows(kind: str, rows: Tensor, inputs: int, order_O: Tensor | None = None) -> Stored:
    """Lay out a matrix whose rows are in memory.

    Args:
        rows: [rows, ...] as they lie in a file: whole blocks, or numbers.
        order_O: which row each output is; None takes all of them, one after the other.
    """
    outputs = len(rows) if order_O is None else len(order_O)
    memory = _memory(kind, outputs, inputs)
    _lay(kind, rows, order_O, outputs, inputs, memory.data_ptr())
    return Stored(kind=kind, outputs=outputs, inputs=inputs, memory=memory)


def store_place(place: Place, order_O: Tensor | None = None) -> Stored:
    """Lay out a matrix of a GGUF file, portion by portion unless its rows change order.

    Raises:
        ModelError: the file changed since it was opened.
    """
    count, inputs = place.shape
    row_bytes = place.size // count
    if order_O is not None:
        (whole,) = read_portions(place, place.size)
        return store_rows(place.kind, whole.view(count, row_bytes), inputs, order_O)
    memory, done = _memory(place.kind, count, inputs), 0
    size = _group_size(place.kind)
    portion = max(1, _PORTION // (row_bytes * size)) * row_bytes * size
    for packed in read_portions(place, portion):
        rows = packed.view(-1, row_bytes)
        at = memory.data_ptr() + done // size * _group_bytes(place.kind, inputs)
        _lay(place.kind, rows, None, len(rows), inputs, at)
        done += len(rows)
    return Stored(kind=place.kind, outputs=count, inputs=inputs, memory=memory)


def _memory(kind: str, outputs: int, inputs: int) -> Tensor:
    return pages().take(_filled(kind, outputs) // _group_size(kind) * _group_bytes(kind, inputs))


def _group_size(kind: str) -> int:
    return _GROUP if kind in CODED else 2 * _GROUP


def _filled(kind: str, outputs: int) -> int:
    """Outputs of whole groups."""
    size = _group_size(kind)
    return -(-outputs // size) * size


def _group_bytes(kind: str, inputs: int) -> int:
    bytes_: int = _code().outpace_group_bytes(KINDS.index(kind), inputs)
    return bytes_


def _lay(kind: str, rows: Tensor, order_O: Tensor | None, outputs: int, inputs: int, to: int) -> None:
    if order_O is not None:
        order_O = order_O.long().contiguous()
        if len(order_O) and not 0 <= int(order_O.min()) <= int(order_O.max()) < len(rows):
            raise IndexError(f"rows are numbered 0 to {len(rows) - 1}")
    _code().outpace_store(
        KINDS.index(kind),
        rows.data_ptr(),
        rows.stride(0) * rows.element_size(),
        None if order_O is None else order_O.data_ptr(),
        outputs,
        inputs,
        to,
        torch.get_num_threads(),
    )


def _code() -> ctypes.CDLL:
    code = library()
    assert code is not None
    return code
