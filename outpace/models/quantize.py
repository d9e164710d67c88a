"""Linear layers whose weights are rounded to 8 or 4 bits, so that a pass has less to read.

torchao rounds them; torch's own kernels multiply what torchao's tensors hold, and expand weights
on their way into the registers. (torchao's product of int8 weights expands the whole matrix in
memory at every call.) These kernels sum a row in one order whatever rows are beside it, so rows
stay bit-equal; docs/results has the figures, and for how many rows this pays.

Shape letters: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.errors import ModelError, UnknownNameError
from outpace.models.packed import Linear

KINDS = ("int8", "int4")
"""int8: a scale per output. int4: a scale and a zero per group of inputs."""

_GROUP = 32
"""Inputs of an int4 matrix that share a scale and a zero."""
_LANES = 16
"""The int8 kernel reads so many inputs at once, past the end if they are no multiple of it."""
_BLOCK = 16
"""The int4 layout holds outputs in this multiple."""
_PORTION = 8192
"""Outputs rounded at once: rounding needs several times their memory."""


def check_kind(kind: str, device: torch.device) -> None:
    """Find out before anything is read whether weights can be quantized.

    Raises:
        UnknownNameError: no such kind.
        ModelError: another device than a CPU, or torchao is missing or does not fit.
    """
    if kind not in KINDS:
        raise UnknownNameError("quantization", kind, KINDS)
    if device.type != "cpu":
        raise ModelError(f"quantize={kind!r} works on the CPU, not on {device}; leave one out")
    _tensor_class(kind)


def quantized(weight_OI: Tensor, bias_O: Tensor | None, kind: str) -> Linear:
    """Round a matrix; one whose inputs do not fit the kernel stays as it is.

    Args:
        weight_OI: not kept, if it fits.
        bias_O: stays as it is.
        kind: one of ``KINDS``.
    """
    if weight_OI.shape[1] % (_LANES if kind == "int8" else _GROUP):
        return Linear(weight_OI, bias_O)
    return Int8Linear(weight_OI, bias_O) if kind == "int8" else Int4Linear(weight_OI, bias_O)


def note(linears: Sequence[Linear], kind: str) -> str:
    """Say in one line what quantizing did to the bytes of a model."""
    left = sum(not isinstance(one, _Rounded) for one in linears)
    before = sum(Linear.plain_nbytes(one) for one in linears)
    after = sum(one.nbytes for one in linears)
    dtype = str(linears[0].dtype).removeprefix("torch.")
    but = f"; {left} of {len(linears)} matrices do not fit and stay {dtype}" if left else ""
    return (
        f"weights rounded to {kind} by torchao, the model is another one now: "
        f"{before / 1e6:,.1f} MB of {dtype} before, {after / 1e6:,.1f} MB after{but}"
    )


class _Rounded(Linear):
    """``x @ weight.T + bias`` with rounded weights."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.outputs, self.inputs = weight_OI.shape
        self.dtype, self.bias_O = weight_OI.dtype, bias_O
        self.packed = True

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Give [T, O]. A row comes out the same, bit for bit, whatever rows are beside it."""
        out_TO = self._multiply(x_TI.contiguous())
        return out_TO if self.bias_O is None else out_TO.add_(self.bias_O)

    def _multiply(self, x_TI: Tensor) -> Tensor:
        raise NotImplementedError


class Int8Linear(_Rounded):
    """Weights as 8-bit whole numbers, symmetric, with a scale for each output."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        super().__init__(weight_OI, bias_O)
        make, per_row = _tensor_class("int8"), _granularity()
        parts = [make.from_hp(part, per_row) for part in _portions(weight_OI)]
        self._weight = torch.cat([part.qdata for part in parts])
        self._scale_O = torch.cat([part.scale.flatten() for part in parts]).to(self.dtype)

    def _multiply(self, x_TI: Tensor) -> Tensor:
        out_TO: Tensor = torch.ops.aten._weight_int8pack_mm(x_TI, self._weight, self._scale_O)
        return out_TO

    def dense(self) -> Tensor:
        """The matrix [O, I] that the whole numbers stand for; a copy."""
        return (self._weight.float() * self._scale_O.float()[:, None]).to(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes read by a product, bias included."""
        bias = 0 if self.bias_O is None else self.bias_O.nbytes
        return self._weight.nbytes + self._scale_O.nbytes + bias


class Int4Linear(_Rounded):
    """Weights as 4-bit whole numbers, with a scale and a zero for each group of inputs."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        super().__init__(weight_OI, bias_O)
        make = _tensor_class("int4")
        filled_OI = F.pad(weight_OI, (0, 0, 0, -self.outputs % _BLOCK))
        parts = [make.from_hp(part, [1, _GROUP]) for part in _portions(filled_OI)]
        self._weight = torch.cat([part.qdata for part in parts])
        self._scale_zero = torch.cat([part.scale_and_zero for part in parts], 1)
        """[I / group, O, 2]."""

    def _multiply(self, x_TI: Tensor) -> Tensor:
        out_TO: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_TI, self._weight, _GROUP, self._scale_zero
        )
        return out_TO if out_TO.shape[1] == self.outputs else out_TO[:, : self.outputs].contiguous()

    def dense(self) -> Tensor:
        """The matrix [O, I] that the whole numbers stand for; a copy, slow."""
        return self._multiply(torch.eye(self.inputs, dtype=self.dtype)).T.contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes read by a product, bias included."""
        bias = 0 if self.bias_O is None else self.bias_O.nbytes
        return self._weight.nbytes + self._scale_zero.nbytes + bias


def _tensor_class(kind: str) -> Any:
    """Torchao's tensor of that kind; imported only here, as it takes two seconds."""
    where = "torchao.quantization" if kind == "int8" else "torchao.prototype.quantization.int4"
    name = "Int8Tensor" if kind == "int8" else "Int4OpaqueTensor"
    try:
        with _silence():
            return getattr(import_module(where), name)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"quantize={kind!r} needs torchao 0.18, and {where}.{name} cannot be had ({error}); "
            "install it with: pip install 'outpace[quantize]'"
        ) from error


def _portions(weight_OI: Tensor) -> list[Tensor]:
    return [weight_OI[i : i + _PORTION] for i in range(0, len(weight_OI), _PORTION)]


def _granularity() -> Any:
    return import_module("torchao.quantization").PerRow()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep to itself what torchao logs when it is imported: kernels of GPUs that are not here."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
