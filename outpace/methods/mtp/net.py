"""The modules of `mtp`: one decoder layer each, on states of the target or of the module before.

    chained     g = eh_proj [enorm(emb), hnorm(f)];  x = layer(g)      f: of the module before
    parallel    x = layer(f)                                           f: of the target, for all
    both        logits = unembedding(norm(x))

The unembedding is the target's. What the next module of a chain reads is x, or norm(x). Files say
which (``recycle``), and which state of the target the first one reads (``base``). The norms hide a
wrong choice: text stays fluent, and less of it is accepted.

Papers: Gloeckle et al. 2024, arXiv:2404.19737 (parallel); DeepSeek-V3, arXiv:2412.19437 (chained).

Shape letters: T rows of a pass, R rows wanted, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.drafters.one_layer import OneLayer, layer_shapes, layer_tensors
from outpace.models.base import Target
from outpace.models.blocks import Form
from outpace.models.families import DecoderConfig
from outpace.models.passes import PassRows
from outpace.models.plan import Plan
from outpace.models.rowwise import Norm
from outpace.models.seen import Seen

CHAINED, PARALLEL = "chained", "parallel"
RAW, NORMED = "raw", "normed"


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpShape:
    """What kind of modules, and how many."""

    kind: str
    """``chained`` or ``parallel``."""
    decoder: DecoderConfig
    """Of every module's one layer."""
    modules: int
    """K: how many there are."""
    steps: int
    """Depths that can be drafted; behind its last module a chain uses that one again."""
    base: str
    """Feature of the target that the first module reads; in parallel all of them."""
    recycle: str = NORMED
    """What the next module reads: ``raw``, or behind the module's norm."""
    hidden_first: bool = False
    """Whether ``eh_proj`` reads the state before the embedding."""

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a drafter folder besides its vocabulary."""
        hidden, shapes = self.decoder.hidden_size, dict[str, tuple[int, ...]]()
        for module in range(self.modules):
            at = f"modules.{module}."
            shapes |= layer_shapes(self.decoder, f"{at}layer.")
            shapes[f"{at}norm.weight"] = (hidden,)
            if self.kind == CHAINED:
                shapes |= {f"{at}{one}.weight": (hidden,) for one in ("enorm", "hnorm")}
                shapes[f"{at}eh_proj.weight"] = (hidden, 2 * hidden)
        return shapes


class Module:
    """One module, ready to run.

    Args:
        shape: of all modules.
        number: which one, from 0.
        tensors: all that ``shape.tensor_shapes`` names; converted, not kept.
        target: embeds; its dtype and device are used.
        quantize: round them, see ``outpace.drafters.trained.rounding``.
    """

    def __init__(
        self,
        shape: MtpShape,
        number: int,
        tensors: Mapping[str, Tensor],
        target: Target,
        quantize: str | None = None,
    ) -> None:
        at = f"modules.{number}."
        self._shape, self._target, config = shape, target, shape.decoder
        form = Form(target.dtype, target.device, quantize=quantize)
        self._layer = OneLayer(config, layer_tensors(tensors, f"{at}layer."), form)

        def norm(name: str) -> Norm:
            return Norm(tensors[f"{at}{name}.weight"].to(target.device), config)

        self._norm = norm("norm")
        self._reads_tokens = shape.kind == CHAINED
        if self._reads_tokens:
            self._enorm, self._hnorm = norm("enorm"), norm("hnorm")
            self._join = form.linear(tensors[f"{at}eh_proj.weight"])
        self._plan = self._listed()

    def new_cache(self) -> DenseCache:
        """An empty cache for its layer."""
        return self._layer.new_cache()

    def _listed(self) -> Plan:
        """A pass as a list of operations."""
        hidden, block, plan = self._shape.decoder.hidden_size, self._layer.block, self._layer.plan()
        stream = plan.lent(hidden)
        if self._reads_tokens:
            embed, u = plan.lent(hidden), plan.fresh(2 * hidden)
            first, second = plan.columns(u, 0, hidden), plan.columns(u, hidden, hidden)
            left, right = (second, first) if self._shape.hidden_first else (first, second)
            plan.norm(self._enorm, embed, left)
            plan.norm(self._hnorm, stream, right)
            stream = plan.product(self._join, u)
        x = plan.layer(block, self._layer.activation, stream, plan.norm(block.attn_norm, stream))
        normed = plan.norm(self._norm, x)
        plan.give(x)
        plan.give(normed)
        return plan

    def run(
        self, rows: PassRows, cache: DenseCache, offsets: Sequence[int], given_TH: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One pass.

        Args:
            rows: of feeds whose ids are the tokens that the rows embed. Keys and values are written
                for all of them.
            cache: from ``new_cache``; the one that ``rows`` was made with.
            offsets: per feed, the position of the first row of its slot.
            given_TH: the states that the rows read.

        Returns:
            For the rows wanted, what the next module reads, and what the unembedding reads; [R, H],
            float32.
        """
        count = len(rows.wanted)
        lent = (given_TH, self._target.embed(rows.ids)) if self._reads_tokens else (given_TH,)
        if self._plan.ready:
            seen = Seen.of(rows, cache, offsets)
            x_RH, normed_RH = self._plan.run((len(rows.ids), count), lent, rows.wanted, seen)
        else:
            with torch.no_grad():
                x_RH, normed_RH = self._by_torch(rows, cache, offsets, lent)
        return (x_RH if self._shape.recycle == RAW else normed_RH), normed_RH

    def _by_torch(
        self, rows: PassRows, cache: DenseCache, offsets: Sequence[int], lent: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        dtype, layer = self._target.dtype, self._layer
        x_TH = lent[0].float()
        if self._reads_tokens:
            parts = [self._enorm(lent[1].float()), self._hnorm(x_TH)]
            both = parts[::-1] if self._shape.hidden_first else parts
            x_TH = self._join(torch.cat(both, -1).to(dtype)).float()
        filled = x_TH.new_zeros(max(len(x_TH), layer.min_rows), x_TH.shape[1])
        filled[: len(x_TH)] = x_TH
        u_TH = layer.block.attn_norm(filled).to(dtype)
        x_RH = layer.run(rows, cache, offsets, filled, u_TH)[: len(rows.wanted)]
        return x_RH, self._norm(x_RH)
