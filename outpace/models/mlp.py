"""MLPs of a decoder: dense ones, and mixtures of experts.

A mixture computes each expert once, for all rows of a pass that chose it, and adds up what they gave.
A row's experts and its sum depend on that row alone, bit for bit. Compiled code does the same as part
of a pass (``experts.h``); what is here is its oracle.

Shape letters: T rows of a pass, H hidden size, E experts, K experts that a row goes through, N rows of
an expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.kernels.compiled import LANES
from outpace.models.families import DecoderConfig
from outpace.models.mixtures import ROUTER, Mixture
from outpace.models.packed import Linear
from outpace.models.products import Matrix
from outpace.models.rowwise import gated
from outpace.models.weights import Checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over one row reads."""
        return self.gate_up.nbytes + self.down.nbytes

    @property
    def width(self) -> int:
        return self.gate_up.outputs // 2

    @property
    def in_one_call(self) -> bool:
        """Whether compiled code can run it as part of a pass."""
        return self.width % LANES == 0 and all(one.product is not None for one in self.linears)

    def operands(self) -> list[tuple[Linear, int]]:
        """Matrices, and how many times they multiply a row of the pass."""
        return [(self.gate_up, 1), (self.down, 1)]

    def __call__(self, x_TH: Tensor, activation: str) -> Tensor:
        return self.down(gated(activation, self.gate_up(x_TH)))


@dataclass(frozen=True, eq=False, repr=False)
class Experts:
    """A mixture of experts."""

    mixture: Mixture
    router: Linear
    """Gives a score per expert; float32, whatever the others are."""
    gate_up: tuple[Linear, ...]
    down: tuple[Linear, ...]
    _listed: dict[str, ctypes.Array[Matrix]] = field(default_factory=dict)

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        return self.router, *self.gate_up, *self.down

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over one row reads."""
        each = self.gate_up[0].nbytes + self.down[0].nbytes
        return self.router.nbytes + self.mixture.chosen * each

    @cached_property
    def in_one_call(self) -> bool:
        """Whether compiled code can run it as part of a pass: all experts are of the same types."""
        products = [one.product for one in self.linears if one.product is not None]
        kinds = [tuple(part.kind for part in one.parts) for one in products[1:]]
        alike = all(len(set(some)) == 1 for some in (kinds[: len(self.down)], kinds[len(self.down) :]))
        return alike and self.mixture.width % LANES == 0 and len(products) == len(self.linears)

    def operands(self) -> list[tuple[Linear, int]]:
        """Matrices, and how many times they multiply a row of the pass."""
        times = self.mixture.chosen
        return [(self.router, 1), (self.gate_up[0], times), (self.down[0], times)]

    def matrices(self, which: str) -> tuple[int, int]:
        """For compiled code: where the matrices of all experts are listed, and how many an expert has."""
        listed = self._listed.get(which)
        if listed is None:
            parts = [matrix for one in getattr(self, which) for matrix in one.product.matrices]
            listed = self._listed[which] = (Matrix * len(parts))(*parts)
        return ctypes.addressof(listed), len(listed) // len(self.down)

    def __call__(self, x_TH: Tensor, activation: str) -> Tensor:
        """Give [T, H], float32."""
        id_TK, share_TK = self.route(x_TH)
        part_TKH = torch.zeros(*id_TK.shape, x_TH.shape[1], device=x_TH.device)
        for number in sorted(set(id_TK.flatten().tolist())):
            row_N, nth_N = (id_TK == number).nonzero(as_tuple=True)
            y_NH = self.down[number](gated(activation, self.gate_up[number](x_TH[row_N])))
            part_TKH[row_N, nth_N] = y_NH.float()
        part_TKH *= share_TK[..., None]
        sum_TH = part_TKH[:, 0].clone()
        for nth in range(1, id_TK.shape[1]):
            sum_TH += part_TKH[:, nth]
        return sum_TH

    def route(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each row [T, K] and their weights."""
        return chosen(self.router(x_TH.float()), self.mixture)


def chosen(score_TE: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """The experts of each row [T, K], highest score first, then lowest number; and their weights."""
    id_TK = score_TE.sort(dim=-1, descending=True, stable=True).indices[:, : mixture.chosen]
    if mixture.normed:
        return id_TK, score_TE.gather(1, id_TK).softmax(-1)
    return id_TK, score_TE.softmax(-1).gather(1, id_TK)


def read_mlp(
    checkpoint: Checkpoint,
    layer: int,
    linear: Callable[[Sequence[str], bool], Linear],
    router: Callable[[Tensor], Linear],
) -> Dense | Experts:
    """Read the MLP of a layer.

    Args:
        linear: reads projections of one input, which may have biases, as one matrix.
        router: lays out a matrix of float32.
    """
    config: DecoderConfig = checkpoint.config
    at, mixture = f"model.layers.{layer}.", config.sparse(layer)
    if mixture is None:
        names = [f"{at}mlp.{one}_proj" for one in ("gate", "up", "down")]
        return Dense(linear(names[:2], config.mlp_bias), linear(names[2:], config.mlp_bias))
    starts = [f"{at}mlp.experts.{number}." for number in range(mixture.experts)]
    return Experts(
        mixture,
        router(checkpoint.tensor(f"{at}{ROUTER}", torch.float32)),
        tuple(linear([f"{one}gate_proj", f"{one}up_proj"], False) for one in starts),
        tuple(linear([f"{one}down_proj"], False) for one in starts),
    )


def dense_weight(checkpoint: Checkpoint, name: str) -> Tensor:
    """A weight, float32, with which a drafter's dense layer may begin.

    Where the layer's MLP is a mixture, there is no such weight. Then the first experts stand side by side, as
    many as fill the width of a dense MLP, and share what they add.
    """
    at, found, part = name.partition(".mlp.")
    mixture, width = checkpoint.config.mixture, checkpoint.config.ffn_size
    if mixture is None or not found or name in checkpoint:
        return checkpoint.tensor(name, torch.float32)
    count = min(mixture.experts, -(-width // mixture.width))
    experts = [checkpoint.tensor(f"{at}.mlp.experts.{i}.{part}", torch.float32) for i in range(count)]
    if part.startswith("down"):
        return F.pad(torch.cat(experts, 1)[:, :width] / count, (0, max(0, width - count * mixture.width)))
    return F.pad(torch.cat(experts)[:width], (0, 0, 0, max(0, width - count * mixture.width)))
