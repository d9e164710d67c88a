"""A layer that makes a head's input of the state after an early layer: EESD's draft head.

    h_t after layer e (``exit_layer``);  z_t = h_t + attention(input_norm(h_t))
    y_t = norm(z_t + mlp(mlp_norm(z_t)))
    logits = W y_t, W the rows of the target's head for the draft vocabulary, frozen and not stored

One whole layer of the target's shape where `kangaroo` has the attention alone; all else is as
there: its rows, its losses, its measurement. The texts are the target's own answers and the labels
its laws, so the first layers learn from the whole model: self-distillation.

The layer starts as the one that reads h in the target, before the last norm of the target; nothing
is drawn at random. ``early_exit`` finds what was trained by its name.

Paper: EESD, Liu et al. 2024, arXiv:2406.03853 (h^N is h_t; there W is a copy that is trained, too).

Shape letters: A learning rows, B sequences, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.trained import decoder_to_json, lender
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.models.base import EMBEDDINGS, LAYERS, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.train.objectives.base import LAST, write_drafter
from outpace.train.objectives.kangaroo import (
    DOUBT,
    AdapterNet,
    KangarooObjective,
    KangarooTraining,
)
from outpace.train.objectives.networks import Mlp, Norm


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyExitTraining(KangarooTraining):
    """Options of ``outpace train early_exit``: those of ``kangaroo``."""


class Behind(Norm):
    """What stands between attention and head: an MLP around the stream, then the norm."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__(shape.hidden_size, shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape)
        self.mlp = Mlp(shape)

    def forward(self, z_BAH: Tensor) -> Tensor:
        return super().forward(z_BAH + self.mlp(self.post_attention_layernorm(z_BAH)))


class LayerNet(AdapterNet):
    """An adapter with an MLP; arithmetic is that of `outpace.models.adapter`."""

    def __init__(self, shape: DecoderConfig, device: torch.device) -> None:
        super().__init__(shape, device)
        self.norm: Norm = Behind(shape)

    def stored(self) -> dict[str, Tensor]:
        """Its weights by the names that files have."""
        return {
            name if name == "norm.weight" else name.removeprefix("norm."): one
            for name, one in self.named_parameters()
        }

    @torch.no_grad()
    def take(self, target: Decoder, layer: int) -> None:
        """Start as a layer of the target, read by its head."""
        config, at = target.config, f"model.layers.{layer}."
        theirs = {"norm.weight": "model.norm.weight"}
        if config.sandwich_norms:
            theirs["post_attention_layernorm.weight"] = f"{at}pre_feedforward_layernorm.weight"
        for name, parameter in self.stored().items():
            own = theirs.get(name, f"{at}{name}")
            parameter.copy_(target.checkpoint.tensor(own, torch.float32))
        offset = config.norm_offset
        self.norm.weight.add_(offset).mul_(DOUBT).sub_(offset)


class EarlyExitObjective(KangarooObjective):
    """One layer behind an exit in training."""

    Config = EarlyExitTraining
    module: LayerNet

    @classmethod
    def taps(cls, config: KangarooTraining, target: Target) -> tuple[str, ...]:
        return (f"hidden.{_exit_layer(config, target)}", LAST)

    @classmethod
    def build(
        cls, config: KangarooTraining, target: Target, vocab: VocabMap | None
    ) -> EarlyExitObjective:
        target.require(frozenset({LAYERS, TAPS, EMBEDDINGS}), "early_exit")
        lent, layer = lender(target, "early_exit"), _exit_layer(config, target)
        # The shape is the adapter's: what an MLP has of its own is in it already.
        shape = KangarooObjective.build(config, target, vocab).shape
        net = LayerNet(shape, lent.device).to(lent.device)
        net.take(lent, layer)
        return cls(config, lent, vocab, net, shape)

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        target = self.target
        config = {
            "method": "early_exit", "target": target.name, "target_digest": target.digest,
            "hidden_size": target.hidden_size, "vocab_size": target.vocab_size,
            "draft_vocab_size": len(self.head()), "layer": self.layer,
            "taps": [f"hidden.{self.layer}"], "decoder": decoder_to_json(self.shape),
        }  # fmt: skip
        write_drafter(folder, config, self.module.stored(), self.vocab, provenance)


def _exit_layer(config: KangarooTraining, target: Target) -> int:
    """How many layers draft.

    Raises:
        ModelError: none, or all of them.
    """
    last = target.num_layers - 1
    layer = max(1, (last + 1) // 5) if config.exit_layer is None else config.exit_layer
    if not 0 < layer <= last:
        raise ModelError(
            f"early_exit: exit_layer={layer} of {target.name}'s {last + 1} layers; leave after "
            f"layer 1 to {last}"
        )
    return layer
