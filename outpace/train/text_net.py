"""The target over whole texts at once, as suits a GPU: one product per matrix for all rows of a batch.

A pass of `outpace.models.decoder` keeps rows apart and asks slots what they hold. Here texts are padded to
one length. Features are those of a pass, up to rounding.

Shape letters: B texts, T tokens of the longest, A rows, R rows, H hidden size, V vocabulary; K key heads,
G query heads per key head, D width of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.drafters.trained import head_rows
from outpace.models.base import Target
from outpace.models.decoder import Decoder
from outpace.train.networks import Embed, KeyValue, Layer, Norm, Turn, Turns

Attend = Callable[[int, Tensor, KeyValue], Tensor]
"""(layer, queries [B, K, G, A, D], keys and values [B, K, A, D]) -> mixed values [B, K, G, A, D]."""
_Part = TypeVar("_Part", Layer, Norm)


class TextNet:
    """A decoder's layers, with matrices in its dtype and on its device.

    Args:
        target: one that ``fits``.
    """

    def __init__(self, target: Decoder) -> None:
        config = target.config
        self.config, self.device, self.dtype = config, target.device, target.dtype
        self._embed, self._turns = Embed(target), Turns(config.ropes[0], target.device)
        # All of the table at once: what is recorded on its memory must find it there.
        self._turns.at(torch.zeros(1, 1, dtype=torch.int64, device=target.device), config.max_positions)
        self._layers = [
            _loaded(Layer(config, i), target, f"model.layers.{i}.") for i in range(config.num_layers)
        ]
        self._norm = _loaded(Norm(config.hidden_size, config), target, "model.norm.")
        self._head_VH = head_rows(target, None, target.dtype)

    @staticmethod
    def fits(target: Decoder) -> bool:
        """Whether its layers are all alike: no experts, windows or caps, and one rotary table."""
        config = target.config
        whole = config.mixture is None and target.quantize is None
        capless = config.attention_softcap is None and config.logit_softcap is None
        return whole and capless and len(config.ropes) == 1 and not any(config.windows)

    @classmethod
    def on_gpu(cls, target: Target) -> TextNet | None:
        """The net of a target on a GPU; None where passes serve better, or it does not fit."""
        served = target.device.type == "cuda" and isinstance(target, Decoder) and cls.fits(target)
        return cls(cast(Decoder, target)) if served else None

    def turn(self, place_BA: Tensor) -> Turn:
        """Rotary factors of rows at some places."""
        return self._turns.at(place_BA, 0)

    def run(
        self, token_BA: Tensor, turn: Turn, attend: Attend, taps: Sequence[str] = ()
    ) -> dict[str, Tensor]:
        """Run all layers on some rows.

        Returns:
            The taps asked for, and ``hidden.-1`` always, [B, A, H].
        """
        found: dict[str, Tensor] = {}

        def tap(layer: int, x_BAH: Tensor) -> None:
            if (name := f"hidden.{layer}") in taps:
                found[name] = x_BAH.to(torch.bfloat16)

        with torch.no_grad(), self._products():
            x_BAH = self._embed(token_BA)
            for i, layer in enumerate(self._layers):
                tap(i, x_BAH)
                attn, u_BAH = layer.self_attn, layer.input_layernorm(x_BAH).to(self.dtype)
                mixed = attend(i, attn.queries(u_BAH, turn), attn.keys(u_BAH, turn))
                x_BAH = layer.after(x_BAH, attn.o_proj(mixed.permute(0, 3, 1, 2, 4).flatten(2)))
            tap(len(self._layers), x_BAH)
            found["hidden.-1"] = self._norm(x_BAH).to(self.dtype)
        return found

    def logits(self, last_RH: Tensor) -> Tensor:
        """Logits [R, V] of normed rows, float32."""
        return (last_RH @ self._head_VH.T).float()

    def features(self, token_BT: Tensor, length_B: Tensor, taps: Sequence[str]) -> dict[str, Tensor]:
        """Taps of padded texts: tap -> bfloat16 [B, T, H], 0 behind each end."""
        token_BT, place_1T = token_BT.to(self.device), self._places(token_BT)
        found = self.run(token_BT, self.turn(place_1T), _causal, taps)
        real_BT1 = (place_1T < length_B.to(self.device)[:, None])[..., None]
        return {tap: found[tap].to(torch.bfloat16) * real_BT1 for tap in taps}

    def read(self, token_BT: Tensor, keep: Callable[[int, KeyValue], None]) -> None:
        """Read padded texts, and hand over keys and values [B, K, T, D] of every layer."""

        def attend(layer: int, q_BKGTD: Tensor, own: KeyValue) -> Tensor:
            keep(layer, own)
            return _causal(layer, q_BKGTD, own)

        self.run(token_BT, self.turn(self._places(token_BT)), attend)

    def _places(self, token_BT: Tensor) -> Tensor:
        return torch.arange(token_BT.shape[1], device=self.device)[None]

    def _products(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is torch.bfloat16)


def _causal(layer: int, q_BKGTD: Tensor, own: KeyValue) -> Tensor:
    """Attention within a text; nothing that counts sees what is behind its end."""
    k, v = (one.repeat_interleave(q_BKGTD.shape[2], 1).to(q_BKGTD.dtype) for one in own)
    mixed = F.scaled_dot_product_attention(q_BKGTD.flatten(1, 2), k, v, is_causal=True, scale=1.0)
    return mixed.view(q_BKGTD.shape)


def _loaded(part: _Part, target: Decoder, at: str) -> _Part:
    """A part with its weights: matrices in the target's dtype, vectors in float32."""
    part.to(target.device).requires_grad_(False)
    for name, one in part.named_parameters():
        dtype = target.dtype if one.dim() == 2 else torch.float32
        one.data = target.checkpoint.tensor(at + name, dtype).to(target.device)
    return part
