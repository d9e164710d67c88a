"""Kangaroo: an adapter that makes a head's input of the state after an early layer.

    h_t after layer e (``exit_layer``);  y_t = norm(h_t + attention(input_norm(h_t)))
    logits = W y_t, W the rows of the target's head for the draft vocabulary, frozen and not stored

Row t guesses token t + 1 from states alone, so all rows of a text are learned in one go. A draft of any
depth meets nothing that training has not seen. Labels are the target's distributions: ``kl`` has the
gradients of the paper's soft cross entropy.

The adapter starts as the attention of the layer that reads h in the target. It stands between that
layer's norm and the last norm of the target. Nothing is drawn at random.

Paper: Liu et al. 2024, arXiv:2404.18911 (l is e).

Shape letters: B sequences, T tokens, A learning rows, R rows, N distributions, H hidden size, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from outpace.drafters.trained import decoder_to_json, head_rows, lender, trained_exits
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.models.base import HEAD, LAYERS, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.models.mlp import dense_weight
from outpace.train.align import DRAFT_MODEL, Aligned, places
from outpace.train.batches import Batch
from outpace.train.networks import Attention, Norm, Turns, rotating
from outpace.train.objective import LAST, LossTraining, Objective, Step, judge_rows, write_drafter

DOUBT = 0.5
"""Scale of the last norm at the start, which is sure of wrong tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KangarooTraining(LossTraining):
    exit_layer: int | None = None
    """Layers of the target that draft. Without it the first exit that it was trained with, or a fifth of
    them."""


class AdapterNet(nn.Module):
    """What is trained; names and arithmetic are those of `outpace.methods.early_exit.adapter`."""

    def __init__(self, shape: DecoderConfig, device: torch.device) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape)
        self.self_attn = Attention(shape, None)
        self.norm = Norm(shape.hidden_size, shape)
        self._turns = Turns(shape.ropes[0], device)

    def forward(self, x_BTH: Tensor, place_BT: Tensor, aligned: Aligned) -> Tensor:
        """Outputs y of the learning rows, [B, A, H]; all rows give keys."""
        longest = place_BT.shape[1]
        u_BTH = self.input_layernorm(x_BTH)
        text = self.self_attn.keys(u_BTH, self._turns.at(place_BT, longest))
        place_BA = aligned.place_BA
        turn = self._turns.at(place_BA, longest)
        query = self.self_attn.queries(aligned.rows(u_BTH), turn)
        mixed_BAH = self.self_attn(query, text, (), place_BA)
        return cast(Tensor, self.norm(aligned.rows(x_BTH) + mixed_BAH))

    def stored(self) -> dict[str, Tensor]:
        """Its weights by the names that files have; parts are views."""
        return self.state_dict()

    @torch.no_grad()
    def take(self, target: Decoder, layer: int) -> None:
        """Start as the same parts of a layer of the target, read by its head."""
        config = target.config
        for name, tensor in self.stored().items():
            own = f"model.layers.{layer}.{self.in_layer(name, config)}"
            if name == "norm.weight":
                own = "model.norm.weight"
            if "layernorm" in own and own not in target.checkpoint:
                continue  # it starts as ones
            writes = config.residual_scale if own.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            tensor.copy_(writes * dense_weight(target.checkpoint, own))
        offset = config.norm_offset
        self.norm.weight.add_(offset).mul_(DOUBT).sub_(offset)

    def in_layer(self, name: str, config: DecoderConfig) -> str:
        """What a layer of the target calls a weight that is stored."""
        return name


class KangarooObjective(Objective):
    Config = KangarooTraining
    method: ClassVar[str] = "kangaroo"
    Net: ClassVar[type[AdapterNet]] = AdapterNet
    module: AdapterNet

    def __init__(
        self,
        config: KangarooTraining,
        target: Decoder,
        vocab: VocabMap | None,
        net: AdapterNet,
        shape: DecoderConfig,
    ) -> None:
        self.config, self.target, self.vocab, self.module = config, target, vocab, net
        self.shape, self.layer = shape, self.exit_layer(config, target)
        self._head_DH: Tensor | None = None

    @classmethod
    def taps(cls, config: KangarooTraining, target: Target) -> tuple[str, ...]:
        return (f"hidden.{cls.exit_layer(config, target)}", LAST)

    @classmethod
    def build(cls, config: KangarooTraining, target: Target, vocab: VocabMap | None) -> KangarooObjective:
        lent, layer = lender(target, cls.method, LAYERS, TAPS, HEAD), cls.exit_layer(config, target)
        theirs = lent.config
        shape = replace(
            theirs,
            num_layers=1,
            windows=(None,),
            ropes=(rotating(theirs, layer),),
            rope_of_layer=(0,),
            mixture=None,
            sandwich_norms=False,
            embed_scale=1.0,
            attention_softcap=None,
            residual_scale=1.0,
            logit_scale=1.0,
            pre_norms=True,
        )
        net = cls.Net(shape, lent.device).to(lent.device)
        net.take(lent, layer)
        return cls(config, lent, vocab, net, shape)

    @classmethod
    def exit_layer(cls, config: KangarooTraining, target: Target) -> int:
        """How many layers draft.

        Raises:
            ModelError: none, or all of them.
        """
        layers = target.num_layers
        trained = trained_exits(target) or (max(1, layers // 5),)
        layer = trained[0] if config.exit_layer is None else config.exit_layer
        if not 0 < layer < layers:
            raise ModelError(
                f"{cls.method}: exit_layer={layer}, but {target.name} has {layers} layers; leave "
                f"after layer 1 to {layers - 1}"
            )
        return layer

    def named(self) -> Mapping[str, Tensor]:
        return self.module.stored()

    def head(self) -> Tensor:
        """The target's rows for the draft vocabulary, [D, H], read once."""
        if self._head_DH is None:
            self._head_DH = head_rows(self.target, self.vocab)
        return self._head_DH

    def outputs(self, batch: Batch, aligned: Aligned) -> Tensor:
        """What the head reads at the learning rows, [B, A, H]."""
        x_BTH = batch.feature[f"hidden.{self.layer}"].float()
        place_BT = places(batch).expand(x_BTH.shape[:2])
        return cast(Tensor, self.module(x_BTH, place_BT, aligned))

    def loss(self, batch: Batch) -> Step:
        aligned = Aligned(batch, DRAFT_MODEL)
        return self.learn([self.outputs(batch, aligned)], batch, aligned, DRAFT_MODEL, self.head())

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        y_BAH = self.outputs(batch, Aligned(batch, DRAFT_MODEL))
        return judge_rows(batch, self.target, self.vocab, y_BAH, self.head())

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        config = {
            **self.about(self.method, [f"hidden.{self.layer}"]),
            "layer": self.layer,
            "decoder": decoder_to_json(self.shape),
        }
        write_drafter(folder, config, self.named(), self.vocab, provenance)
