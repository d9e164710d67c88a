"""Matrix products of oneDNN with weights that are laid out once, for CPUs without compiled code.

A plain matrix product lays its weights out anew at every call, which at few rows takes as long
as the product itself. Weights already laid out can be handed to oneDNN.

Shape letters: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

MIN_ROWS = 4
"""Fewer rows are filled up to this many. With oneDNN 4 rows take no longer than 1. One row in
float32 takes another kernel, whose sums are rounded otherwise."""


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
        packed = pack(weight_OI.to(dtype))
        out_TO = multiply(ones.to(dtype), packed, None)
        same = torch.equal(out_TO.float(), ones @ weight_OI.T)
        return same and torch.equal(packed.to_dense().float(), weight_OI)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


def pack(weight_OI: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous())
    return packed


def multiply(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    out_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, packed, bias_O, "none", [], "")
    return out_TO
