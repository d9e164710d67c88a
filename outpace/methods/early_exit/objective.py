"""A layer that makes a head's input of the state after an early layer: EESD's draft head.

    h_t after layer e (``exit_layer``);  z_t = h_t + attention(input_norm(h_t))
    y_t = norm(z_t + mlp(mlp_norm(z_t)))
    logits = W y_t, W the rows of the target's head for the draft vocabulary, frozen and not stored

One whole layer of the target's shape where `kangaroo` has the attention alone; all else is as
there: its rows, its losses, its measurement. The texts are the target's own answers and the labels
its distributions, so the first layers learn from the whole model: self-distillation.

The layer starts as the one that reads h in the target, before the last norm of the target; nothing
is drawn at random. ``early_exit`` finds what was trained by its name.

With ``states`` (a) the layer also learns from the target's last states themselves, as FREE's shallow module
from deep layers. The loss gets a times the mean squared distance of y from them. The layers below are
frozen, so it is one state that learns from one; ``outpace train target`` has all of them.

Papers: EESD, Liu et al. 2024, arXiv:2406.03853 (h^N is h_t; there W is a copy that is trained, too);
FREE, arXiv:2310.05424.

Shape letters: A learning rows, B sequences, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from outpace.methods.early_exit.kangaroo_objective import AdapterNet, KangarooObjective, KangarooTraining
from outpace.models.families import DecoderConfig
from outpace.train.align import DRAFT_MODEL, Aligned
from outpace.train.batches import Batch
from outpace.train.losses import state_loss
from outpace.train.networks import Mlp, Norm
from outpace.train.objective import LAST, LossTraining, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyExitTraining(KangarooTraining):
    """Options of ``outpace train early_exit``: those of ``kangaroo``, and one more."""

    states: float = 0.0
    """Weight of the distance of the layer's states from the target's last ones (FREE has 0.5)."""

    def __post_init__(self) -> None:
        LossTraining.__post_init__(self)
        if self.states < 0:
            raise ValueError(f"states must be 0 or more, got {self.states}")


class Behind(Norm):
    """What stands between attention and head: an MLP around the stream, then the norm."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__(shape.hidden_size, shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape)
        self.mlp = Mlp(shape)

    def forward(self, z_BAH: Tensor) -> Tensor:
        return super().forward(z_BAH + self.mlp(self.post_attention_layernorm(z_BAH)))


class LayerNet(AdapterNet):
    """An adapter with an MLP; arithmetic is that of `outpace.methods.early_exit.adapter`."""

    def __init__(self, shape: DecoderConfig, device: torch.device) -> None:
        super().__init__(shape, device)
        self.norm: Norm = Behind(shape)

    def stored(self) -> dict[str, Tensor]:
        return {
            name if name == "norm.weight" else name.removeprefix("norm."): one
            for name, one in super().stored().items()
        }

    def in_layer(self, name: str, config: DecoderConfig) -> str:
        if config.sandwich_norms and name == "post_attention_layernorm.weight":
            return "pre_feedforward_layernorm.weight"
        return name


class EarlyExitObjective(KangarooObjective):
    """One layer behind an exit in training."""

    Config = EarlyExitTraining
    config: EarlyExitTraining
    method: ClassVar[str] = "early_exit"
    Net: ClassVar[type[AdapterNet]] = LayerNet

    def loss(self, batch: Batch) -> Step:
        if not self.config.states:
            return super().loss(batch)
        aligned = Aligned(batch, DRAFT_MODEL)
        y_BAH, teaches_BA = self.outputs(batch, aligned), aligned.teaches(DRAFT_MODEL)
        step = self.learn([y_BAH], batch, aligned, DRAFT_MODEL, self.head())
        last_NH = aligned.laws_of(batch.feature[LAST])
        goal_RH = last_NH[aligned.law(DRAFT_MODEL)[teaches_BA]]
        near = state_loss([y_BAH[teaches_BA]], [goal_RH])
        return replace(step, loss=step.loss + self.config.states * near)
