"""Linear layers whose weights are rounded to 8 or 4 bits, so that a pass has less to read.

Weights are rounded to blocks that GGUF files have as well (Q8_0 and Q4_1) and multiplied as these
are. Where code cannot be compiled, torch multiplies what they stand for, in the model's dtype.

Shape letters: O outputs, I inputs, F inputs filled up to whole blocks, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from outpace.errors import ModelError, UnknownNameError
from outpace.models.gguf.blocks import expand
from outpace.models.measured import dtype_name
from outpace.models.packed import Linear
from outpace.models.products import store_rows, works

BLOCK = 32
"""Inputs that share a scale."""
_PORTION = 8192
"""Outputs rounded at once: rounding needs several times their memory."""


def check_kind(kind: str, device: torch.device) -> None:
    """Find out before anything is read whether weights can be quantized.

    Raises:
        UnknownNameError: no such kind.
        ModelError: another device than a CPU.
    """
    if kind not in KINDS:
        raise UnknownNameError("quantization", kind, tuple(KINDS))
    if device.type != "cpu":
        raise ModelError(f"quantize={kind!r} works on the CPU, not on {device}; leave one out")


def quantized(weight_OI: Tensor, bias_O: Tensor | None, kind: str) -> Linear:
    """Round a matrix.

    Args:
        weight_OI: float32 or bfloat16; not kept.
    """
    inputs, dtype = weight_OI.shape[1], weight_OI.dtype
    if not works():
        return Linear(rounded(weight_OI, kind, dtype), bias_O)
    portions = [_codes(part_OI, kind) for part_OI in torch.split(weight_OI, _PORTION)]
    return Linear.stored([store_rows(KINDS[kind][0], torch.cat(portions), inputs)], bias_O, dtype)


def rounded(weight_OI: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """The matrix that a rounded one stands for. Every row is rounded by itself."""
    portions = [_codes(part_OI, kind) for part_OI in torch.split(weight_OI, _PORTION)]
    dense_OF = expand(torch.cat(portions).view(-1), KINDS[kind][0]).view(len(weight_OI), -1)
    return dense_OF[:, : weight_OI.shape[1]].to(dtype)


def _codes(weight_OI: Tensor, kind: str) -> Tensor:
    return KINDS[kind][1](_blocks(weight_OI.float()))


def note(linears: Sequence[Linear], kind: str) -> str:
    """Say in one line what quantizing did to the bytes of a model."""
    before = sum(one.plain_nbytes() for one in linears)
    after = sum(one.nbytes for one in linears)
    dtype = dtype_name(linears[0].dtype)
    return (
        f"weights rounded to {kind}, the model is another one now: "
        f"{before / 1e6:,.1f} MB of {dtype} before, {after / 1e6:,.1f} MB after"
    )


def _blocks(weight_OI: Tensor) -> Tensor:
    """Blocks [O, B, 32]; the last one is filled up with the last weight."""
    missing = -weight_OI.shape[1] % BLOCK
    filled_OF = torch.cat([weight_OI, weight_OI[:, -1:].expand(-1, missing)], 1)
    return filled_OF.view(len(weight_OI), -1, BLOCK)


def _eight(weight_OBI: Tensor) -> Tensor:
    """Q8_0: a scale, and codes from -127 to 127."""
    scale_OB1 = (weight_OBI.abs().amax(-1, keepdim=True) / 127).half()
    code_OBI = _divided(weight_OBI, scale_OB1).clamp_(-127, 127).to(torch.int8)
    return _rows(scale_OB1, code_OBI)


def _four(weight_OBI: Tensor) -> Tensor:
    """Q4_1: a scale, the least value, and codes from 0 to 15. Scale and least value are fitted to the
    codes by least squares, twice: the squared error falls by a ninth.
    """
    low_OB1, high_OB1 = weight_OBI.aminmax(dim=-1, keepdim=True)
    scale_OB1, least_OB1 = ((high_OB1 - low_OB1) / 15).half(), low_OB1.half()
    for _ in range(2):
        code_OBI = _divided(weight_OBI - least_OB1.float(), scale_OB1).clamp_(0, 15)
        middle_OB1 = code_OBI.mean(-1, keepdim=True)
        off_OBI = code_OBI - middle_OB1
        spread_OB1 = off_OBI.square().sum(-1, keepdim=True).clamp_min_(1.0)
        scale_OB1 = ((off_OBI * weight_OBI).sum(-1, keepdim=True) / spread_OB1).half()
        least_OB1 = (weight_OBI.mean(-1, keepdim=True) - scale_OB1.float() * middle_OB1).half()
    code_OBI = _divided(weight_OBI - least_OB1.float(), scale_OB1).clamp_(0, 15).to(torch.uint8)
    half = BLOCK // 2
    return _rows(scale_OB1, least_OB1, code_OBI[..., :half] | code_OBI[..., half:] << 4)


def _divided(x_OBI: Tensor, scale_OB1: Tensor) -> Tensor:
    """Whole numbers of scales; 0 where a scale is 0."""
    wide_OB1 = scale_OB1.float()
    return torch.where(wide_OB1 > 0, x_OBI / wide_OB1, 0.0).round_()


def _rows(*parts: Tensor) -> Tensor:
    """The bytes of all parts of a block, block after block: uint8, a row per output."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1).flatten(1)


KINDS: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "int8": ("Q8_0", _eight),
    "int4": ("Q4_1", _four),
}
"""By name the type of the blocks, and what makes them. int8: a scale per block of inputs. int4: a
scale and a least value."""
