"""One layer, or its attention alone, as a model: what stands between an early layer and the head.

    z = x + attention(input_norm(x))
    y = norm(z), or with an MLP norm(z + mlp(mlp_norm(z)));  logits = head(y)

x is the residual stream of the target after its first layers. Heads, rotation and norms are those
of the target's layers; every row sees the whole text before it.

Names of the tensors in files: ``input_layernorm``, ``self_attn.{q,k,v,o}_proj`` and ``norm``, with
biases and head norms where the target has them. With an MLP there are ``post_attention_layernorm``
and ``mlp.{gate,up,down}_proj`` too.

Papers: Kangaroo, Liu et al. 2024, arXiv:2404.18911, without an MLP (x is h_l, y is A(h_l)); EESD,
arXiv:2406.03853, with one (x is h^N).

Shape letters: T rows of a pass (filled up to a few), H hidden size, R rows wanted; of heads, X
queries, keys and values, W their width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.models.base import Target
from outpace.models.blocks import Form, paired
from outpace.models.families import DecoderConfig
from outpace.models.few_rows import attend_few, few_is_best
from outpace.models.fused import attention
from outpace.models.packed import Linear
from outpace.models.passes import PassRows
from outpace.models.plan import Plan
from outpace.models.rope import Rotation
from outpace.models.rowwise import Norm, gated, heads_norm
from outpace.models.seen import Seen

_LAYER = "model.layers.0."


def adapter_shapes(config: DecoderConfig, mlp: bool = False) -> dict[str, tuple[int, ...]]:
    """Every tensor of an adapter, with its shape.

    Args:
        config: of one layer; what it says of an MLP is read with ``mlp`` alone.
        mlp: whether it has one.
    """
    parts: tuple[str, ...] = (f"{_LAYER}self_attn.", f"{_LAYER}input_layernorm.")
    if mlp:
        parts += f"{_LAYER}mlp.", f"{_LAYER}post_attention_layernorm."
    own = {
        name.removeprefix(_LAYER): shape
        for name, shape in config.tensor_shapes().items()
        if name.startswith(parts)
    }
    return {**own, "norm.weight": (config.hidden_size,)}


class Adapter:
    """One adapter, ready to run.

    Args:
        config: of one layer, without a window or sandwich norms.
        tensors: all that ``adapter_shapes`` names, with an MLP or without; converted, not kept.
        target: its dtype and device are used.
        packed: lay the weights out for the CPU where that works.
        quantize: round them, see ``outpace.drafters.trained.rounding``.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, Tensor],
        target: Target,
        packed: bool = True,
        quantize: str | None = None,
    ) -> None:
        self.config, self.dtype, self.device = config, target.dtype, target.device
        self._heads = config.head_shape
        self._rotation = Rotation(config.ropes[0], self.device)

        form = Form(target.dtype, target.device, packed, quantize)

        def read(name: str) -> Tensor:
            turned = name.startswith(("self_attn.q_", "self_attn.k_"))
            return paired(tensors[name], config.head_dim) if turned else tensors[name]

        def linear(names: Sequence[str], bias: bool) -> Linear:
            weight_OI = torch.cat([read(f"{name}_proj.weight") for name in names])
            bias_O = torch.cat([read(f"{name}_proj.bias") for name in names]) if bias else None
            return form.linear(weight_OI, bias_O)

        def norm(weight: Tensor) -> Norm:
            return Norm(weight.to(self.device), config)

        self._qkv = linear([f"self_attn.{one}" for one in "qkv"], config.qkv_bias)
        self._out = linear(["self_attn.o"], config.out_bias)
        self._gate_up: Linear | None = None
        if "mlp.down_proj.weight" in tensors:
            self._gate_up = linear(["mlp.gate", "mlp.up"], config.mlp_bias)
            self._down = linear(["mlp.down"], config.mlp_bias)
            self._mlp_norm = norm(tensors["post_attention_layernorm.weight"])
        self._input_norm, self._norm = (
            norm(tensors[f"{name}.weight"]) for name in ("input_layernorm", "norm")
        )
        self._head_norm = None
        if config.qk_norm:
            query, key = (read(f"self_attn.{one}_norm.weight").to(self.device) for one in "qk")
            self._head_norm = heads_norm(query, key, config)
        self._plan = self._listed()

    def _listed(self) -> Plan:
        """A pass as a list of operations."""
        plan = Plan(self._heads, self._rotation)
        x = plan.lent(self.config.hidden_size)
        heads = plan.product(self._qkv, plan.norm(self._input_norm, x))
        mixed, z = plan.pick(plan.attend(heads, self._head_norm)), plan.pick(x)
        more = plan.product(self._out, mixed)
        if self._gate_up is not None:
            read = plan.norm(self._mlp_norm, z, add=more)
            gated_up = plan.gate(self.config.activation, plan.product(self._gate_up, read))
            more = plan.product(self._down, gated_up)
        plan.give(plan.norm(self._norm, z, add=more))
        return plan

    def new_cache(self) -> DenseCache:
        """An empty cache for its keys and values."""
        return DenseCache(1, self._heads.kv, self._heads.width, device=self.device)

    def run(self, rows: PassRows, cache: DenseCache, offsets: Sequence[int], x_TH: Tensor) -> Tensor:
        """One pass; keys and values are written for all rows.

        Args:
            rows: of feeds without riders.
            cache: from ``new_cache``; the one that ``rows`` was made with.
            offsets: per feed, the position of the first row of its slot.
            x_TH: the residual stream of all rows.

        Returns:
            y of the rows wanted, [R, H] in the target's dtype or float32, ready for its head. What a
            row gets does not depend on the rows beside it.
        """
        if self._plan.ready:
            counts, seen = (len(rows.ids), len(rows.wanted)), Seen.of(rows, cache, offsets)
            return self._plan.run(counts, (x_TH,), rows.wanted, seen)[0]
        wanted, heads = rows.wanted, self._heads
        with torch.inference_mode():
            size = max(len(rows.ids), self._qkv.min_rows)
            stream_TH = torch.zeros(size, self.config.hidden_size, device=self.device)
            stream_TH[: len(rows.ids)] = x_TH
            normed_TH = torch.empty(stream_TH.shape, dtype=self.dtype, device=self.device)
            self._input_norm(stream_TH, normed_TH)
            few = not wanted or few_is_best(cache, rows.spans, heads, self.dtype)
            if few:
                head_TXW = self._qkv(normed_TH).float().view(size, -1, heads.width)
            else:
                attend = attention(cache, rows.spans, size, heads, frozenset({None}), self.dtype)
                head_TXW = attend.head_TXD
                head_TXW.flatten(1).copy_(self._qkv(normed_TH))
            self._turn(head_TXW, rows, offsets)
            if not wanted:
                self._store(rows, cache, head_TXW[:, heads.queries :])
                return stream_TH.new_empty(0, stream_TH.shape[1], dtype=self.dtype)
            if few:
                mixed_TY = attend_few(cache, rows.spans[0], head_TXW, heads, self.dtype)
            else:
                mixed_TY = attend(0, None)
            index = torch.tensor([*wanted, *wanted[:1] * (self._qkv.min_rows - len(wanted))])
            index = index.to(self.device)
            out_RH = self._out(mixed_TY.index_select(0, index))
            z_RH = stream_TH.index_select(0, index).add_(out_RH)
            if self._gate_up is not None:
                gate_up_RF = self._gate_up(self._mlp_norm(z_RH).to(self.dtype))
                z_RH.add_(self._down(gated(self.config.activation, gate_up_RF)))
            y_RH = self._norm(z_RH).to(self.dtype)
        with torch.no_grad():  # made outside of inference mode it is an ordinary tensor
            return y_RH[: len(wanted)].clone()

    def _turn(self, head_TXW: Tensor, rows: PassRows, offsets: Sequence[int]) -> None:
        """Norm and rotate queries and keys in place."""
        positions = [
            offset + position
            for span, offset in zip(rows.spans, offsets, strict=True)
            for position in span.positions
        ]
        positions += [0] * (len(head_TXW) - len(positions))
        turned_TXW = head_TXW[:, : self._heads.queries + self._heads.kv]
        if self._head_norm is not None:
            self._head_norm(turned_TXW, turned_TXW)
        pairs = turned_TXW.view(*turned_TXW.shape[:2], self._heads.width // 2, 2)
        torch.view_as_complex(pairs).mul_(self._rotation.at(positions))

    def _store(self, rows: PassRows, cache: DenseCache, new_TXW: Tensor) -> None:
        """Write keys and values of a pass from which nothing else is wanted."""
        parts = new_TXW[:, : self._heads.kv], new_TXW[:, self._heads.kv :]
        for span in rows.spans:
            own = slice(span.start, span.start + len(span.stored))
            for store, part in zip(cache.by_row, parts, strict=True):
                store[0, span.slot, span.stored.start : span.stored.stop] = part[own]
