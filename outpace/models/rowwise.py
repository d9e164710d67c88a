"""What happens row by row between two products of matrices: sums, norms, gates.

On a CPU every operation of torch costs some microseconds and a reading of its rows, and there are a
dozen of these per layer. ``rowwise.h`` does them in two calls, compiled when first needed as
attention is; torch does it everywhere else, and is the oracle of the tests. Either way a row's
numbers depend on that row alone. They differ in the last bits, since compiled code rounds once
where torch rounds after each operation. A process uses one of the two for all passes of a model.

Shape letters: T rows, H hidden size, F width of an MLP, D width of a head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.kernels.compiled import DTYPES, LANES, library
from outpace.models.families import DecoderConfig

ACTIVATION: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""By its name in ``DecoderConfig.activation``."""
KINDS = {"silu": 0, "gelu_tanh": 1}  # rowwise.h has the same numbers


class Norm:
    """x / sqrt(mean(x^2) + eps) * weight, row by row, in float32.

    Args:
        weight_H: as stored; [heads, D] norms every head by itself.
        config: for eps and the offset of the weights.
    """

    def __init__(self, weight_H: Tensor, config: DecoderConfig) -> None:
        size = weight_H.shape[-1]
        self.weight_H = ((weight_H.float() + config.norm_offset) * size**0.5).contiguous()
        """Times the root of the width: what compiled code multiplies by."""
        self.least = (size * config.norm_eps) ** 0.5
        """Added to a row's length as another coordinate."""
        self.scale = config.residual_scale
        """Of what is added to rows before."""
        self.wide = 0
        """How many heads of queries are normed as one, and keys as another; 0: every head by itself."""
        self._floor = torch.tensor(self.least, device=weight_H.device)
        self._simple = weight_H.dim() == 1 and weight_H.is_cpu and size % LANES == 0

    def __call__(self, x_TH: Tensor, out: Tensor | None = None, add: Tensor | None = None) -> Tensor:
        """Norm rows.

        Args:
            x_TH: float32.
            out: where to write, in its dtype; None makes a float32 tensor.
            add: its ``scale`` is added to ``x_TH`` first, in place.
        """
        code = _code() if self._simple else None
        if code is None or not x_TH.is_contiguous() or x_TH.requires_grad:
            if add is not None:
                x_TH.add_(add, alpha=self.scale)
            # sqrt(|x|^2 + H * eps) as a hypotenuse: one small operation instead of four.
            length_T1 = torch.linalg.vector_norm(x_TH, dim=-1, keepdim=True).hypot_(self._floor)
            return torch.mul(x_TH / length_T1, self.weight_H, out=out)
        out = torch.empty_like(x_TH) if out is None else out
        rows, width = x_TH.shape
        code.outpace_norm(
            x_TH.data_ptr(),
            None if add is None else add.data_ptr(),
            self.scale,
            self.weight_H.data_ptr(),
            self.least,
            out.data_ptr(),
            out.stride(0),
            rows,
            width,
            add is not None and add.dtype is torch.bfloat16,
            out.dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
        return out


class NoNorm(Norm):
    """Rows as they are, with what is added to them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(torch.empty(0), config)

    def __call__(self, x_TH: Tensor, out: Tensor | None = None, add: Tensor | None = None) -> Tensor:
        if add is not None:
            x_TH.add_(add, alpha=self.scale)
        return x_TH.clone() if out is None else out.copy_(x_TH)


class WideNorm(Norm):
    """A norm over all heads of queries, and one over all heads of keys.

    Args:
        weight_XD: of all these heads.
        queries: how many are queries.
    """

    def __init__(self, weight_XD: Tensor, queries: int, config: DecoderConfig) -> None:
        super().__init__(weight_XD, config)
        self._parts = slice(queries), slice(queries, len(weight_XD))
        for part in self._parts:
            self.weight_H[part] *= len(weight_XD[part]) ** 0.5
        self.wide = queries
        self.least *= queries**0.5  # of queries

    def __call__(self, x_TXD: Tensor, out: Tensor | None = None, add: Tensor | None = None) -> Tensor:
        assert add is None
        out = torch.empty_like(x_TXD) if out is None else out
        for part in self._parts:
            own_TYD = x_TXD[:, part]
            floor = self._floor * own_TYD.shape[1] ** 0.5
            length_T11 = torch.linalg.vector_norm(own_TYD, dim=(-2, -1), keepdim=True).hypot_(floor)
            torch.mul(own_TYD / length_T11, self.weight_H[part], out=out[:, part])
        return out


def heads_norm(query: Tensor, key: Tensor, config: DecoderConfig) -> Norm:
    """One norm for all heads of queries and keys.

    Args:
        query: weights of one head, or of all heads of queries; ``key`` likewise.
    """
    counts = zip((query, key), (config.num_heads, config.num_kv_heads), strict=True)
    weight_XD = torch.cat([one.view(-1, config.head_dim).expand(count, -1) for one, count in counts])
    return WideNorm(weight_XD, config.num_heads, config) if config.wide_qk_norm else Norm(weight_XD, config)


def gated(activation: str, gate_up_TF: Tensor) -> Tensor:
    """The activation of the first half of every row, times the second half.

    Args:
        gate_up_TF: [T, 2 F], contiguous.

    Returns:
        [T, F].
    """
    rows, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    code = _code() if gate_up_TF.is_cpu and width % LANES == 0 else None
    if code is None or gate_up_TF.dtype not in DTYPES or gate_up_TF.requires_grad:
        gate_TF, up_TF = gate_up_TF.chunk(2, 1)
        return ACTIVATION[activation](gate_TF).mul_(up_TF)
    out_TF = gate_up_TF.new_empty(rows, width)
    code.outpace_gate(
        gate_up_TF.data_ptr(),
        out_TF.data_ptr(),
        rows,
        width,
        gate_up_TF.dtype is torch.bfloat16,
        KINDS[activation],
        torch.get_num_threads(),
    )
    return out_TF


def _code() -> ctypes.CDLL | None:
    return library()
