"""The layers of a decoder, run by torch: one operation after another over all rows of a pass.

Compiled code runs the same from a list (`outpace.models.program`); this is what it is tested against.

Shape letters: T rows of a pass, H hidden size, E half of the width of a head. X heads of all kinds, D their
width, Y all of them side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.models.attention import Attention, HeadShape, Span
from outpace.models.blocks import Block
from outpace.models.families import DecoderConfig
from outpace.models.fused import FusedAttention, attention
from outpace.models.graphs import PaddedAttention
from outpace.models.rope import Rotation
from outpace.models.taps import tap


class Layers:
    """Blocks, one above the other.

    Args:
        config: whose activation and residual scale they have.
        between: dtype of rows between products.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        turns: Sequence[Rotation],
        shape: HeadShape,
        config: DecoderConfig,
        between: torch.dtype,
    ) -> None:
        self._blocks, self._turns, self._shape = blocks, turns, shape
        self._activation, self._scale = config.activation, config.residual_scale
        self._between = between
        self.windows = frozenset(block.window for block in blocks)

    def run(
        self,
        x_TH: Tensor,
        layers: range,
        spans: Sequence[Span],
        cache: DenseCache,
        taps: frozenset[str],
        seen: dict[str, Tensor],
    ) -> None:
        """Run some layers on the residual stream, in place."""
        positions = [position for span in spans for position in span.positions]
        positions += [0] * (len(x_TH) - len(positions))
        turn = [rotation.at(positions) for rotation in self._turns]
        attend = attention(cache, spans, len(x_TH), self._shape, self.windows, self._between)
        self.run_layers(x_TH, layers, turn, attend, taps, seen)

    def run_layers(
        self,
        x_TH: Tensor,
        layers: range,
        turn: Sequence[Tensor],
        attend: Attention | FusedAttention | PaddedAttention,
        taps: frozenset[str],
        seen: dict[str, Tensor],
    ) -> None:
        """Run some layers on the residual stream, in place; nothing here looks at a value.

        Args:
            x_TH: float32.
            turn: per rotary table, complex factors [T, 1, E].
            attend: where the rows write, and what they see.
            seen: name -> feature, of all rows.
        """
        qkv_TY, turned_TXE = attend.head_TXD.flatten(1), attend.turned_TXE
        qk_TXD = attend.head_TXD[:, : turned_TXE.shape[1]]
        normed_TH = torch.empty(x_TH.shape, dtype=self._between, device=x_TH.device)
        y_TH: Tensor | None = None  # of the layer before
        for layer in layers:
            block = self._blocks[layer]
            if block.attends:
                block.attn_norm(x_TH, normed_TH, add=y_TH)
            elif y_TH is not None:
                x_TH.add_(y_TH, alpha=self._scale)
            if taps:
                tap(taps, seen, f"hidden.{layer}", x_TH)
                tap(taps, seen, f"attn_in.{layer}", normed_TH)
            y_TH = None
            if block.attends:
                qkv_TY.copy_(block.qkv(normed_TH))
                if block.qk_norm is not None:
                    block.qk_norm(qk_TXD, qk_TXD)
                turned_TXE.mul_(turn[block.rope])
                y_TH = block.out(attend(layer, block.window))
                if block.after_attn is not None:
                    y_TH = block.after_attn(y_TH.float())
                tap(taps, seen, f"attn_out.{layer}", y_TH)
            if not block.has_mlp:
                continue
            block.mlp_norm(x_TH, normed_TH, add=y_TH)
            y_TH = block.mlp(normed_TH, self._activation)
            if block.after_mlp is not None:
                y_TH = block.after_mlp(y_TH.float())
        if y_TH is not None:
            x_TH.add_(y_TH, alpha=self._scale)
