"""One decoder layer that drafts: its weights, its cache, and a pass over rows of many sequences.

Rows may be chains and trees, as in a pass of a decoder; behind the attention only the rows whose
outputs are wanted are computed. Compiled code runs the layer as part of a `Plan`. In torch,
``run`` is the same, for all other machines, and the oracle of the tests.

Shape letters: T rows of a pass (filled up to a few), H hidden size, I width of what attention reads,
R rows wanted; of heads, X = K * (G + 2) heads of all kinds, W their width, Y heads of some kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.models.blocks import Form, read_block
from outpace.models.families import DecoderConfig
from outpace.models.few_rows import attend_few, few_is_best
from outpace.models.fused import attention, stored
from outpace.models.memory import LayersOnly
from outpace.models.passes import PassRows
from outpace.models.plan import Plan
from outpace.models.rope import Rotation

LAYER = "model.layers.0."
"""What a decoder's reader calls the one layer."""


def layer_shapes(
    config: DecoderConfig, at: str = "layer.", normed: bool = True
) -> dict[str, tuple[int, ...]]:
    """The layer's tensors in a drafter folder.

    Args:
        at: what their names begin with there.
        normed: whether the layer has an input norm.
    """
    return {
        at + name.removeprefix(LAYER): shape
        for name, shape in config.tensor_shapes().items()
        if name.startswith(LAYER) and (normed or not name.endswith("input_layernorm.weight"))
    }


def layer_tensors(tensors: Mapping[str, Tensor], at: str = "layer.") -> dict[str, Tensor]:
    """The layer's tensors of a drafter folder, as a decoder's reader calls them."""
    return {LAYER + name.removeprefix(at): one for name, one in tensors.items() if name.startswith(at)}


class OneLayer:
    """The layer, ready to run.

    Args:
        config: of the one layer.
        tensors: its tensors, named as those of layer 0 of a decoder; converted, not kept. Queries,
            keys and values may read more than the hidden size. Without an input norm there is none.
        form: of the weights.
    """

    def __init__(self, config: DecoderConfig, tensors: Mapping[str, Tensor], form: Form) -> None:
        self.dtype, self.device = form.dtype, form.device
        layer = {name: one for name, one in tensors.items() if name.startswith(LAYER)}
        layer.setdefault(f"{LAYER}input_layernorm.weight", torch.ones(config.hidden_size))
        self.block = read_block(LayersOnly(config, layer, name="layer"), 0, form)
        self.heads = config.head_shape
        self.rotation = Rotation(config.ropes[config.rope_of_layer[0]], form.device)
        self.activation = config.activation

    @property
    def min_rows(self) -> int:
        """Fewer rows are not faster."""
        return self.block.qkv.min_rows

    def plan(self) -> Plan:
        """An empty plan with the layer's heads."""
        return Plan(self.heads, self.rotation)

    def new_cache(self) -> DenseCache:
        """An empty cache for this layer."""
        dtype = stored(self.heads, self.dtype, self.device)
        return DenseCache(1, self.heads.kv, self.heads.width, device=self.device, dtype=dtype)

    def run(
        self, rows: PassRows, cache: DenseCache, offsets: Sequence[int], x_TH: Tensor, u_TI: Tensor
    ) -> Tensor:
        """One pass, [R, H] filled up, of the rows wanted.

        Args:
            rows: made with this cache.
            offsets: per feed, the position of the first row of its slot.
            x_TH: the residual stream, float32; at least ``min_rows`` rows.
            u_TI: what queries, keys and values read.
        """
        block = self.block
        x_RH, mixed_RY = self.attend(rows, cache, offsets, x_TH, u_TI)
        if not rows.wanted:
            return x_RH
        normed_RH = torch.empty(x_RH.shape, dtype=self.dtype, device=self.device)
        block.mlp_norm(x_RH, normed_RH, add=block.out(mixed_RY))
        return x_RH.add_(block.dense(normed_RH, self.activation))

    def attend(
        self, rows: PassRows, cache: DenseCache, offsets: Sequence[int], x_TH: Tensor, u_TI: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The attention alone; arguments as of ``run``.

        Returns:
            The stream [R, H] and the values mixed [R, Y] of the rows wanted, filled up.
        """
        block, heads, spans = self.block, self.heads, rows.spans
        positions = [
            offset + position
            for span, offset in zip(spans, offsets, strict=True)
            for position in span.positions
        ]
        positions += [0] * (len(x_TH) - len(positions))
        alone = block.window is None and few_is_best(cache, spans, heads, self.dtype)
        if alone:
            head_TXW = block.qkv(u_TI).float().view(len(x_TH), -1, heads.width)
        else:
            attend = attention(cache, spans, len(x_TH), heads, frozenset({block.window}), self.dtype)
            head_TXW = attend.head_TXD
            head_TXW.flatten(1).copy_(block.qkv(u_TI))
        turned_TYW = head_TXW[:, : heads.queries + heads.kv]
        if block.qk_norm is not None:
            block.qk_norm(turned_TYW, turned_TYW)
        pairs = turned_TYW.view(*turned_TYW.shape[:2], heads.width // 2, 2)
        torch.view_as_complex(pairs).mul_(self.rotation.at(positions))
        if alone:
            mixed_TY = attend_few(cache, spans[0], head_TXW, heads, self.dtype)
        else:
            mixed_TY = attend(0, block.window)
        if len(rows.wanted) < len(rows.ids):
            wanted = [*rows.wanted, *[0] * (self.min_rows - len(rows.wanted))]
            if not rows.wanted:
                return x_TH, mixed_TY
            index = torch.tensor(wanted, device=self.device)
            x_TH, mixed_TY = x_TH.index_select(0, index), mixed_TY.index_select(0, index)
        return x_TH, mixed_TY
