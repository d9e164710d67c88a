"""The network of `fspad`: EAGLE's, with two parts that can be left out.

    f           the target's last state, or the output of the row before; e the token's embedding
    sampling    s = f + W_down (silu(W_gate e) * W_up f)          without: s = f
                a = layer(fc [e, s])                              a is the next row's f
    partial     logits = unembedding(a + W_read a)                without: unembedding(a)

Without both it is EAGLE's first network. The token picks from the feature in a wider space before
both are mixed. What the head reads need not be the feature itself. Two things are asked of the
network: to be close to the target's feature and to be sure of the token. So they conflict less.

Paper: Gui et al. 2024 (FSPAD), arXiv:2408.15562. Reconstructed from its abstract: the gate, its width, and
the read-out are ours; only the two ideas are the paper's.

Shape letters: T rows of a pass, R rows wanted, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.cache.dense import DenseCache
from outpace.drafters.last_state import LAST
from outpace.drafters.one_layer import OneLayer, layer_shapes, layer_tensors
from outpace.law import VocabMap
from outpace.models.base import Target
from outpace.models.blocks import Form
from outpace.models.families import DecoderConfig
from outpace.models.levels import Answer, Asked, Start
from outpace.models.packed import Linear
from outpace.models.passes import PassRows
from outpace.models.plan import Plan
from outpace.models.room import Strip
from outpace.models.seen import Seen


@dataclass(frozen=True, kw_only=True, slots=True)
class FspadShape:
    """Which parts it has, and how large they are."""

    decoder: DecoderConfig
    """Of its one layer, which has no input norm."""
    sampling: int
    """Width of the space in which a token samples a feature; 0 leaves the part out."""
    partial: bool
    """Whether the head reads more than the next feature."""

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a drafter folder besides its vocabulary."""
        hidden, wide = self.decoder.hidden_size, self.sampling
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}
        shapes |= layer_shapes(self.decoder, normed=False)
        if wide:
            shapes |= {f"{one}.weight": (wide, hidden) for one in ("gate", "up")}
            shapes["down.weight"] = (hidden, wide)
        if self.partial:
            shapes["read.weight"] = (hidden, hidden)
        return shapes


class FspadNet:
    """The network, ready to run; see `outpace.drafters.feature_rows.FeatureNet`.

    Args:
        shape: of the network.
        tensors: all that ``shape.tensor_shapes`` names; converted, not kept.
        target: embeds and unembeds; its dtype and device are used.
        vocab: the draft vocabulary; None is the target's whole.
        quantize: round them, see ``outpace.drafters.trained.rounding``.
    """

    taps = (LAST,)

    def __init__(
        self,
        shape: FspadShape,
        tensors: Mapping[str, Tensor],
        target: Target,
        vocab: VocabMap | None = None,
        quantize: str | None = None,
    ) -> None:
        self.shape, self.device, self._target, self._vocab = shape, target.device, target, vocab
        form = Form(target.dtype, target.device, quantize=quantize)
        self._layer = OneLayer(shape.decoder, layer_tensors(tensors), form)
        names = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
        self._matrix: dict[str, Linear] = {
            name: form.linear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
            for name in names
            if not name.startswith("layer.")
        }
        self._plan = self._listed()

    def _listed(self) -> Plan:
        """A pass as a list of operations."""
        hidden, wide, matrix = self.shape.decoder.hidden_size, self.shape.sampling, self._matrix
        plan = self._layer.plan()
        stream, embed = plan.lent(hidden), plan.lent(hidden)
        both = plan.fresh(2 * hidden)
        left, right = plan.columns(both, 0, hidden), plan.columns(both, hidden, hidden)
        plan.copy(embed, left)
        if wide:
            gated, sampled = plan.fresh(2 * wide), plan.copy(stream)
            plan.product(matrix["gate"], embed, plan.columns(gated, 0, wide))
            plan.product(matrix["up"], stream, plan.columns(gated, wide, wide))
            plan.add(plan.product(matrix["down"], plan.gate("silu", gated)), sampled)
            plan.copy(sampled, right)
        else:
            plan.copy(stream, right)
        x = plan.product(matrix["fc"], both)
        a = plan.layer(self._layer.block, self._layer.activation, x, x)
        if self.shape.partial:
            read = plan.copy(a)
            plan.add(plan.product(matrix["read"], a), read)
            plan.give(read)
        plan.give(a)
        return plan

    def new_cache(self) -> DenseCache:
        """An empty cache for its one layer."""
        return self._layer.new_cache()

    def feature(self, taps: Mapping[str, Tensor]) -> Tensor:
        """Features of rows of a pass of the target; a copy."""
        return taps[LAST].float().clone()

    def run(
        self, rows: PassRows, cache: DenseCache, offsets: Sequence[int], given_TF: Tensor, features: bool
    ) -> tuple[Tensor, Tensor]:
        """One pass; features of the target and its own are read alike."""
        with torch.no_grad():
            lent = given_TF.float(), self._target.embed(rows.ids)
            if self._plan.ready:
                seen = Seen.of(rows, cache, offsets)
                given = self._plan.run((len(rows.ids), len(rows.wanted)), lent, rows.wanted, seen)
                a_RH, read_RH = given[-1], given[0]
            else:
                a_RH = self._by_torch(rows, cache, offsets, *lent)
                read_RH = a_RH + self._times("read", a_RH) if self.shape.partial else a_RH
            if not len(rows.wanted):
                return a_RH, a_RH
            return a_RH, self._target.head(read_RH, self._vocab).float()

    @property
    def descends(self) -> bool:
        """Never: its embedding and its head are the target's, which no plan has."""
        return False

    def descend(
        self,
        start: Start,
        asked: Asked[Answer],
        given_TF: Tensor | Strip,
        id_D: Tensor | None,
        first: PassRows | None,
    ) -> tuple[Answer, Strip]:
        raise NotImplementedError("fspad goes level by level")

    def _by_torch(
        self, rows: PassRows, cache: DenseCache, offsets: Sequence[int], f_TH: Tensor, embed_TH: Tensor
    ) -> Tensor:
        layer, count = self._layer, len(f_TH)
        if self.shape.sampling:
            picked = F.silu(self._times("gate", embed_TH)) * self._times("up", f_TH)
            f_TH = f_TH + self._times("down", picked)
        x_TH = f_TH.new_zeros(max(count, layer.min_rows), f_TH.shape[1])
        x_TH[:count] = self._times("fc", torch.cat([embed_TH, f_TH], -1))
        return layer.run(rows, cache, offsets, x_TH, x_TH.to(self._target.dtype))[: len(rows.wanted)]

    def _times(self, name: str, x_TI: Tensor) -> Tensor:
        return self._matrix[name](x_TI.to(self._target.dtype)).float()
