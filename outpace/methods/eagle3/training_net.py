"""The network of EAGLE-3, and its start from a layer of the target.

Shape letters: B sequences, A rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from outpace.drafters.trained import head_name
from outpace.law import VocabMap
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.models.mlp import dense_weight
from outpace.train.networks import Layer, Norm

SMALL = 0.1
"""Scale of the embedding's half of queries, keys and values at the start."""
DOUBT = 0.5
"""Scale of the last norm at the start, which is sure of wrong tokens."""


class EagleLayer(Layer):
    """A block whose attention reads an embedding and a feature side by side."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, 0, 2 * config.hidden_size)
        self.hidden_norm = Norm(config.hidden_size, config)


class Eagle3Net(nn.Module):
    """The trained part; the embedding is the target's.

    Args:
        features: how many are fused.
        rows: of its head.
        each_norm: norm every feature before they are fused.
        confident: have a head that tells how likely a guess is kept; it starts at one half.
    """

    def __init__(
        self,
        config: DecoderConfig,
        features: int,
        rows: int,
        each_norm: bool = False,
        confident: bool = False,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(features * hidden, hidden, bias=False)
        self.fc_norm = nn.ModuleList([Norm(hidden, config) for _ in range(features if each_norm else 0)])
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.norm = Norm(hidden, config)
        self.lm_head = nn.Linear(hidden, rows, bias=False)
        if confident:
            self.confidence = nn.Linear(hidden, 1)
            nn.init.zeros_(self.confidence.weight)
            nn.init.zeros_(self.confidence.bias)

    @property
    def layer(self) -> EagleLayer:
        return cast(EagleLayer, self.layers[0])

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """One feature of several [B, T, H], float32."""
        if self.fc_norm:
            features = [norm(one) for norm, one in zip(self.fc_norm, features, strict=True)]
        fused: Tensor = self.fc(torch.cat(list(features), -1).to(self.fc.weight.dtype))
        return fused.float()

    def inputs(self, embed_BAH: Tensor, stream_BAH: Tensor) -> Tensor:
        """What queries, keys and values read, [B, A, 2H]."""
        layer = self.layer
        normed = layer.input_layernorm(embed_BAH), layer.hidden_norm(stream_BAH)
        return torch.cat(normed, -1)


@torch.no_grad()
def take(net: Eagle3Net, target: Decoder, layer: int, start: str, taps: int, vocab: VocabMap | None) -> None:
    """Start from a layer of the target: nothing is drawn at random.

    Args:
        net: overwritten.
        start: ``last`` of the features, or their ``mean``.
    """
    hidden = target.hidden_size
    offset, at = target.config.norm_offset, f"model.layers.{layer}."
    block = net.layer

    def read(name: str) -> Tensor:
        return dense_weight(target.checkpoint, name).to(target.device)

    share = [0.0] * (taps - 1) + [1.0] if start == "last" else [1 / taps] * taps
    net.fc.weight.copy_(torch.cat([s * torch.eye(hidden) for s in share], 1))
    for one in ("q", "k", "v"):
        weight = read(f"{at}self_attn.{one}_proj.weight")
        getattr(block.self_attn, f"{one}_proj").weight.copy_(torch.cat([SMALL * weight, weight], 1))
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        block.get_parameter(f"{name}.weight").copy_(read(f"{at}{name}.weight"))
    before_mlp = "pre_feedforward" if target.config.sandwich_norms else "post_attention"
    for norm, name in (
        (block.input_layernorm, f"{at}input_layernorm"),
        (net.norm, "model.norm"),
        (block.hidden_norm, f"{at}input_layernorm"),
        (block.post_attention_layernorm, f"{at}{before_mlp}_layernorm"),
    ):
        norm.weight.copy_(read(f"{name}.weight") + offset)
    net.norm.weight.mul_(DOUBT)
    head_VH = read(head_name(target))
    net.lm_head.weight.copy_(head_VH if vocab is None else head_VH[vocab.to_target_D])


@torch.no_grad()
def freeze(net: Eagle3Net, fc_HF: Tensor) -> None:
    """Set how features are fused, for good."""
    net.fc.weight.copy_(fc_HF)
    for one in (*net.fc.parameters(), *net.fc_norm.parameters()):
        one.requires_grad_(False)
