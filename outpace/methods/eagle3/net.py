"""The network of EAGLE heads: one layer that reads features of the target and its own output.

    EAGLE-3    g = fc(features);  q, k, v read norm(emb) and norm(g) side by side;  stream: g
    EAGLE-1/2  g = fc(emb and feature side by side);  q, k, v read g;               stream: g
    both       a = stream + attention + mlp;  logits = head(a); a is the next feature

A pass takes rows of many sequences, chains and trees, as a pass of a decoder does. Behind the
attention it computes only the rows whose outputs are wanted.

Papers: Li et al. 2024, arXiv:2401.15077 and arXiv:2406.16858; Li et al. 2025, arXiv:2503.01840.

Shape letters: T rows of a pass (filled up to a few), H hidden size, I width of what attention reads,
F width of all features side by side, R rows wanted, D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.drafters.one_layer import LAYER, OneLayer
from outpace.models.base import Target
from outpace.models.blocks import Form
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.models.levels import Answer, Asked, Start
from outpace.models.packed import Linear
from outpace.models.passes import PassRows
from outpace.models.plan import Plan
from outpace.models.products import LARGEST
from outpace.models.room import Strip
from outpace.models.rowwise import Norm
from outpace.models.seen import Seen
from outpace.models.taps import beside

CONFIDENCE = ("confidence.weight", "confidence.bias")
"""Tensors of the head that tells how likely a guess is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleShape:
    """What kind of head it is."""

    decoder: DecoderConfig
    """Of the one layer."""
    taps: tuple[str, ...]
    """Features of the target, in the order in which they stand side by side."""
    draft_vocab: int
    """Rows of its own head."""
    fused: bool = True
    """EAGLE-3. False: EAGLE-1/2, which has neither input norms nor a head of its own."""
    fc_bias: bool = False
    """Whether ``fc`` has a bias."""
    residual_normed: bool = False
    """The stream starts as norm(g), not as g (``norm_before_residual``)."""
    output_normed: bool = False
    """The next feature is norm(a), not a (``norm_output``)."""
    joint_norm: bool = False
    """One norm over all features side by side, before ``fc`` (``norm_before_fc``)."""
    each_norm: bool = False
    """A norm over each feature, before ``fc`` (``fc_norm``)."""
    confident: bool = False
    """Whether a head tells how likely a guess is kept."""

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor it reads, by the names of the speculators format."""
        config, hidden = self.decoder, self.decoder.hidden_size
        wide = len(self.taps) if self.fused else 2
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, wide * hidden)}
        if self.fc_bias:
            shapes["fc.bias"] = (hidden,)
        for name, shape in config.tensor_shapes().items():
            if name.startswith(LAYER):
                reads_both = self.fused and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
                doubled = (shape[0], 2 * shape[1]) if reads_both else shape
                shapes[name.removeprefix("model.")] = doubled
        if not self.fused:
            del shapes["layers.0.input_layernorm.weight"]
            return shapes
        shapes |= {
            "layers.0.hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab, hidden),
        }
        if self.joint_norm:
            shapes["input_norm.weight"] = (wide * hidden,)
        if self.each_norm:
            shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(wide)}
        if self.confident:
            shapes |= dict(zip(CONFIDENCE, ((1, hidden), (1,)), strict=True))
        return shapes


class EagleNet:
    """One head, ready to run.

    Args:
        shape: of the head.
        tensors: all that ``shape.tensor_shapes`` names; converted, not kept.
        target: its dtype and device; embeds, and unembeds for heads without rows of their own.
        embed_VH: an embedding of its own; None borrows the target's.
        id_D: tokens that it can draft, whose embeddings it keeps at hand; None: all, and none.
        packed: lay the weights out for the CPU where that works.
        quantize: round them, see ``outpace.drafters.trained.rounding``.
    """

    def __init__(
        self,
        shape: EagleShape,
        tensors: Mapping[str, Tensor],
        target: Target,
        embed_VH: Tensor | None = None,
        id_D: Tensor | None = None,
        packed: bool = True,
        quantize: str | None = None,
    ) -> None:
        config, dtype, device = shape.decoder, target.dtype, target.device
        self.shape, self.dtype, self.device = shape, dtype, device
        self.hidden_size = config.hidden_size
        form = Form(dtype, device, packed, quantize)
        layer = {f"model.{name}": one for name, one in tensors.items()}
        self._layer = OneLayer(config, layer, form)
        self._block = self._layer.block

        def linear(name: str, form: Form = form) -> Linear:
            bias = tensors.get(f"{name}.bias")
            return form.linear(tensors[f"{name}.weight"], bias)

        def norm(name: str) -> Norm:
            return Norm(tensors[f"{name}.weight"].to(device), config)

        self._fc = linear("fc")
        self._feature_norms: list[Norm] = []
        if shape.each_norm or shape.joint_norm:
            count = len(shape.taps) if shape.each_norm else 1
            names = [f"fc_norm.{i}" for i in range(count)] if shape.each_norm else ["input_norm"]
            self._feature_norms = [norm(name) for name in names]
        self._hidden_norm = norm("layers.0.hidden_norm") if shape.fused else None
        self._norm = norm("norm") if shape.fused else None
        # Half of what a level reads. In four bits a level costs an eighth less, and the first guess keeps
        # 0.004 less.
        head = form if quantize is None else replace(form, quantize="int4")
        self._own_head = linear("lm_head", head) if shape.fused else None
        self._head: Callable[[Tensor], Tensor] = self._own_head or target.head
        if shape.confident:
            weight, bias = CONFIDENCE
            self._sure_H, self._sure = tensors[weight][0].to(device).float(), float(tensors[bias])
        self._embed: Callable[[Sequence[int]], Tensor] = target.embed
        self._vectors: tuple[Linear, float] | None = None
        """Those of the target and their factor, for compiled code."""
        if embed_VH is None and packed and isinstance(target, Decoder):
            vectors, factor = target.embedding.vectors, target.embedding.factor(target.config)
            self._vectors = None if vectors is None else (vectors, factor)
        if embed_VH is not None:
            self._embed = _Table(embed_VH.to(device, dtype))
        elif id_D is not None and self._vectors is None:
            self._embed = _AtHand(target, id_D)
        self._plans = {features: self._plan(features) for features in (True, False)}
        self._reader = self._plan(True, reads=True)
        ready = all(plan.ready for plan in self._plans.values())
        self.descends = ready and self._vectors is not None and self._own_head is not None
        """Whether levels run in one call; see ``FeatureNet``."""

    def _plan(self, features: bool, reads: bool = False) -> Plan:
        """A pass as a list of operations, on features of the target or on outputs of earlier rows.

        Args:
            reads: whether keys and values are stored, and no row is wanted.
        """
        hidden, block, shape = self.hidden_size, self._block, self.shape
        plan = self._layer.plan()
        fuses = features and shape.fused
        stream = plan.lent(len(shape.taps) * hidden if fuses else hidden)
        embed = plan.lent(hidden) if self._vectors is None else plan.embed(*self._vectors)
        if fuses:
            for i, norm in enumerate(self._feature_norms):
                wide = stream.width // len(self._feature_norms)
                if i == 0:
                    normed = plan.fresh(stream.width)
                plan.norm(norm, plan.columns(stream, i * wide, wide), plan.columns(normed, i * wide, wide))
            stream = plan.product(self._fc, normed if self._feature_norms else stream)
        u = plan.fresh(2 * hidden)
        left, right = plan.columns(u, 0, hidden), plan.columns(u, hidden, hidden)
        if self._hidden_norm is None:
            plan.copy(embed, left)
            plan.copy(stream, right)
            u = stream = plan.product(self._fc, u)
        else:
            plan.norm(block.attn_norm, embed, left)
            plan.norm(self._hidden_norm, stream, right)
            stream = right if shape.residual_normed else stream
        if reads:
            queries = self._layer.heads.queries * self._layer.heads.width
            left_out = queries - queries % LARGEST
            heads = plan.fresh(block.qkv.outputs)
            kept = plan.columns(heads, left_out, heads.width - left_out)
            plan.product(block.qkv, u, kept, left_out)
            plan.attend(heads, block.qk_norm, block.window)
            return plan
        a = plan.layer(block, self._layer.activation, stream, u)
        if self._norm is None:
            plan.give(a)
            return plan
        normed = plan.norm(self._norm, a)
        plan.give(normed if shape.output_normed else a)
        assert self._own_head is not None
        plan.give(plan.product(self._own_head, normed))
        return plan

    @property
    def taps(self) -> tuple[str, ...]:
        """Features of the target, in the order in which they stand side by side."""
        return self.shape.taps

    def new_cache(self) -> DenseCache:
        """An empty cache for its one layer."""
        return self._layer.new_cache()

    def feature(self, taps: Mapping[str, Tensor]) -> Tensor:
        """Features [T, F] of rows of a pass of the target, side by side."""
        whole_TF = beside(taps, self.shape.taps)
        return whole_TF if self._plans[True].ready else whole_TF.to(self.dtype)

    def run(
        self, rows: PassRows, cache: DenseCache, offsets: Sequence[int], given_TF: Tensor, features: bool
    ) -> tuple[Tensor, Tensor]:
        """One pass, with logits of its own vocabulary or the target's; see ``FeatureNet``."""
        plan = self._plans[features] if rows.wanted else self._reader
        if plan.ready:
            return self._compiled(plan, rows, cache, offsets, given_TF)
        with torch.inference_mode():
            stream_TH = self._fuse(given_TF) if features else given_TF
            x_TH, u_TI = self._inputs(rows.ids, stream_TH)
            a_RH = self._layer.run(rows, cache, offsets, x_TH, u_TI)
            count = len(rows.wanted)
            if not count:
                return a_RH[:0], a_RH[:0]
            normed_RH = a_RH if self._norm is None else self._norm(a_RH)
            given_RH = normed_RH if self.shape.output_normed else a_RH
            headed_RH = normed_RH.to(self.dtype)
        with torch.no_grad():
            # Made outside of inference mode the logits are ordinary tensors.
            return given_RH[:count], self._head(headed_RH.clone())[:count].float()

    def _compiled(
        self, plan: Plan, rows: PassRows, cache: DenseCache, offsets: Sequence[int], given_TF: Tensor
    ) -> tuple[Tensor, Tensor]:
        counts = len(rows.ids), len(rows.wanted)
        seen = Seen.of(rows, cache, offsets)
        lent = (given_TF,) if self._vectors is not None else (given_TF, self._embed(rows.ids))
        given = plan.run(counts, lent, rows.wanted, seen, rows.ids)
        if not given:  # no row was wanted
            return torch.empty(0, self.hidden_size), torch.empty(0, 0)
        out_RH, *logits = given
        if logits:
            return out_RH, logits[0]
        with torch.no_grad():
            return out_RH, self._head(out_RH).float()

    def descend(
        self,
        start: Start,
        asked: Asked[Answer],
        given_TF: Tensor | Strip,
        id_D: Tensor | None,
        first: PassRows | None,
    ) -> tuple[Answer, Strip]:
        """Levels of chains or trees in one call; see ``FeatureNet``."""
        seen = None if first is None else Seen.of(first, start.cache, start.offset_B)
        begins = None if first is None or seen is None else (self._plans[True], first, seen)
        return self._plans[False].run_levels(start, asked, given_TF, id_D, begins)

    def foresee(self, out_RH: Tensor) -> Tensor:
        """Chance that a guess from each of these outputs is kept, float32 [R] on the CPU."""
        assert self._norm is not None, "heads without a norm have no confidence head"
        normed_RH = out_RH if self.shape.output_normed else self._norm(out_RH)
        # Row by row, whatever rows are beside: a product would round by their number.
        return ((normed_RH.float() * self._sure_H).sum(-1) + self._sure).sigmoid().cpu()

    def _fuse(self, feature_TF: Tensor) -> Tensor:
        """Turn features of the target into what the layer reads, float32 [T, H]."""
        if not self.shape.fused:
            return feature_TF.float()
        norms = self._feature_norms
        if norms:
            parts = feature_TF.float().chunk(len(norms), -1)
            normed = [norm(part) for norm, part in zip(norms, parts, strict=True)]
            feature_TF = torch.cat(normed, -1).to(self.dtype)
        return self._fc(feature_TF).float()

    def _inputs(self, ids: Sequence[int], stream_TH: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream, and what queries, keys and values read; rows are filled up."""
        count, hidden = len(ids), self.hidden_size
        size, embed_TH = max(count, self._fc.min_rows), self._embed(ids)
        x_TH = torch.zeros(size, hidden, device=self.device)
        u_TI = torch.zeros(size, 2 * hidden, dtype=self.dtype, device=self.device)
        if self._hidden_norm is None:
            u_TI[:count, :hidden] = embed_TH
            u_TI[:count, hidden:] = stream_TH
            fused_TH = self._fc(u_TI)
            x_TH.copy_(fused_TH)
            return x_TH, fused_TH
        self._block.attn_norm(embed_TH, u_TI[:count, :hidden])
        if self.shape.residual_normed:
            self._hidden_norm(stream_TH, x_TH[:count])
            u_TI[:, hidden:] = x_TH
        else:
            x_TH[:count] = stream_TH
            self._hidden_norm(x_TH, u_TI[:, hidden:])
        return x_TH, u_TI


class _Table:
    """An embedding of a head's own."""

    def __init__(self, embed_VH: Tensor) -> None:
        self._embed_VH = embed_VH

    def __call__(self, ids: Sequence[int]) -> Tensor:
        index = torch.tensor(ids, dtype=torch.int64, device=self._embed_VH.device)
        return self._embed_VH[index].float()


class _AtHand:
    """The target's embedding, with the vectors of some tokens in memory.

    A target may have to read them from its file, which takes a twentieth of a level.
    """

    def __init__(self, target: Target, id_D: Tensor) -> None:
        ids = id_D.tolist()
        vector_DH = target.embed(ids)
        self._all, self._device = target.embed, target.device
        small_DH = vector_DH.to(target.dtype)
        exact = torch.equal(small_DH.float(), vector_DH)
        self._vector_DH = small_DH if exact else vector_DH
        self._row = {token: row for row, token in enumerate(ids)}

    def __call__(self, ids: Sequence[int]) -> Tensor:
        try:
            index = [self._row[token] for token in ids]
        except KeyError:
            return self._all(ids)
        rows = torch.tensor(index, device=self._device)
        return self._vector_DH.index_select(0, rows).float()
