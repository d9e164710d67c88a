"""Linear layers whose weights are laid out once for the CPU.

A plain matrix product lays its weights out anew at every call, which at few rows takes as long
as the product itself. Compiled code (`outpace.models.products`) has a layout of its own; where it
cannot be had, oneDNN can be handed weights already laid out. The plain product stays: it is the
fallback where neither works, and the oracle in the tests.

Shape letters: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.kernels.compiled import DTYPES
from outpace.models import onednn
from outpace.models.onednn import MIN_ROWS, packing_works
from outpace.models.products import Product, Stored, store_numbers, works


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
        self._weight = onednn.pack(weight_OI) if self.packed else weight_OI

    @classmethod
    def stored(cls, parts: Sequence[Stored], bias_O: Tensor | None, dtype: torch.dtype) -> Linear:
        """Some matrices of equal inputs in the layout of compiled code, one above the other.

        Args:
            bias_O: added to every row, or None.
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
            return onednn.multiply(x_TI, self._weight, self.bias_O)
        filled_TI = x_TI.new_zeros(MIN_ROWS, self.inputs)
        filled_TI[:rows] = x_TI
        return onednn.multiply(filled_TI, self._weight, self.bias_O)[:rows]

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
