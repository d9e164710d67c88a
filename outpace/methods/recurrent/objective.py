"""Recurrent drafters: a cell reads the text token by token, at all learning rows at once.

    row t      h_t, the target's last hidden state; tokens t + 1, t + 2, ... one after another
    depth k    the state after token t + k guesses token t + 1 + k

In training the tokens are those of the text (teacher forcing). A guess is kept only if all before
it were right, so these are the rows that count. Labels are the target's distributions of answers
that it wrote itself. `redrafter` starts with the target's distribution of the token before; the
others start from a random matrix. A ``loop.lr`` of some 1e-3 does well.

Papers: Cheng et al. 2024, arXiv:2403.09919; Wertheimer et al. 2024, arXiv:2404.19124, whose second stage
of training, on texts of the target, is the only one here.

Shape letters: B sequences, A learning rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.drafters.last_state import unit
from outpace.drafters.trained import lender, read_embedding
from outpace.law import VocabMap
from outpace.methods.recurrent.cells import LSTM, MLP, REDRAFTER, Cell, CellShape
from outpace.models.base import HEAD, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.train.ahead import AheadObjective, AheadTraining
from outpace.train.align import Aligned
from outpace.train.batches import Batch
from outpace.train.objective import LAST


@dataclass(frozen=True, kw_only=True, slots=True)
class CellTraining(AheadTraining):
    steps: int = 4
    """Depths that training unrolls, and that can be drafted."""
    inner: int | None = None
    """Width of the state; the hidden size by default."""
    seed: int = 0
    """Of the first weights."""

    def __post_init__(self) -> None:
        AheadTraining.__post_init__(self)
        self.at_least_one(steps=self.steps, inner=self.inner or 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReDrafterTraining(CellTraining):
    inner: int | None = None
    """Width of the head; twice the hidden size by default."""
    layers: int = 2
    """Blocks of the head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpTraining(CellTraining):
    tied: bool = False
    """Share one stage between all depths, but for the first projection."""


class CellNet(nn.Module):
    """The parameters of a cell, under the names of its shape."""

    def __init__(self, shape: CellShape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        coins = torch.Generator().manual_seed(seed)
        self.parts = nn.ParameterDict()
        for name, size in shape.tensor_shapes().items():
            one = torch.zeros(size)
            if len(size) == 2:
                one = torch.randn(size, generator=coins) * size[1] ** -0.5
            elif name.endswith(".weight"):
                one = torch.ones(size)
            self.parts[name.replace(".", "/")] = nn.Parameter(one)
        if shape.kind == REDRAFTER:
            self._start_from_the_target()
        self.cell = Cell(shape, self.linear, self.vector)

    @torch.no_grad()
    def _start_from_the_target(self) -> None:
        """The first distribution is the target's of the token before."""
        hidden, inner = self.shape.hidden_size, self.shape.inner
        for name, one in self.parts.items():
            if name.startswith("lm_head"):
                one.zero_()
        if inner != 2 * hidden:
            self.vector("input_proj.weight")[:, hidden:].mul_(0.1)
            self.vector("input_proj.weight")[:hidden, :hidden] = torch.eye(inner, hidden)[:hidden]
        nn.init.eye_(self.vector(self.shape.head_name(0)))

    def vector(self, name: str) -> Tensor:
        """A parameter by its name in files."""
        one: Tensor = self.parts[name.replace(".", "/")]
        return one

    def linear(self, name: str, x: Tensor) -> Tensor:
        """A product by its name, float32."""
        bias = self.parts.get(f"{name}/bias".replace(".", "/"))
        return F.linear(x, self.vector(f"{name}.weight"), bias).float()


class Recurrent(AheadObjective):
    """A cell in training."""

    Config = CellTraining
    method: ClassVar[str]
    module: CellNet

    def __init__(self, config: CellTraining, target: Decoder, vocab: VocabMap | None, net: CellNet) -> None:
        super().__init__(config, target, vocab, config.steps)
        self.module = net
        self._embed_VH = read_embedding(target)

    @classmethod
    def build(cls, config: Any, target: Target, vocab: VocabMap | None) -> Recurrent:
        lent = lender(target, cls.method, TAPS, HEAD)
        hidden = lent.hidden_size
        shape = CellShape(
            kind=cls.method,
            hidden_size=hidden,
            inner=config.inner or (2 * hidden if cls.method == REDRAFTER else hidden),
            steps=config.steps,
            layers=getattr(config, "layers", 0),
            tied=getattr(config, "tied", True),
        )
        return cls(config, lent, vocab, CellNet(shape, config.seed).to(lent.device))

    def states(self, batch: Batch, aligned: Aligned) -> list[Tensor]:
        net, shape = self.module, self.module.shape
        hidden_BAH = aligned.rows(batch.feature[LAST]).float()
        state, out = None, []
        for depth in range(self.config.steps):
            embed_BAH = unit(F.embedding(aligned.token(depth + 1), self._embed_VH))
            state, read = net.cell.step(depth, hidden_BAH, embed_BAH, state)
            name = shape.head_name(0 if shape.tied else depth)
            out.append(net.linear(name.removesuffix(".weight"), read))
        return out

    def named(self) -> Mapping[str, Tensor]:
        return {name.replace("/", "."): one.detach() for name, one in self.module.parts.items()}

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        shape = self.module.shape
        kept = {key: getattr(shape, key) for key in ("inner", "steps", "layers", "tied")}
        self.save_tree(folder, {**self.about(self.method, [LAST]), **kept}, provenance)


class ReDrafter(Recurrent):
    """A recurrent state and residual blocks, in training."""

    Config = ReDrafterTraining
    method = REDRAFTER


class Lstm(Recurrent):
    """An LSTM cell, in training."""

    method = LSTM


class MlpSpeculator(Recurrent):
    """One small layer per depth, in training."""

    Config = MlpTraining
    method = MLP
