"""The network of `glide`: one layer with a second attention that reads keys and values of the target.

    x = embedding          x += attention(norm x)        over rows of its own, as in a decoder
                           x += W_o glimpse(W_q norm x)  over committed rows of one layer of the target
                           x += mlp(norm x)              logits = unembedding(norm x)

The glimpse has queries and an output matrix, and neither keys nor values: those are the target's, as it left
them in its cache. So the layer's own keys are made of tokens alone, and a row that was drafted is as good as
one that was committed. What is accepted stays.

The network has the face of a model that scores feeds, so that it drafts as a draft model does. Whoever calls
it says first what each slot may glimpse at.

Paper: Du et al. 2024 (GliDe with a CaPE), arXiv:2402.02082, which has no norm before the glimpse.

Shape letters: T rows of a pass, R rows wanted, H hidden size, D width of a head, E = D / 2, X heads,
Y = X * D, C committed rows, K key-value heads, M query rows of one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from outpace.cache.base import KVCache
from outpace.cache.dense import DenseCache
from outpace.clock import PassClock
from outpace.drafters.one_layer import OneLayer, layer_shapes, layer_tensors
from outpace.law import VocabMap
from outpace.models.base import Target
from outpace.models.blocks import Form, paired
from outpace.models.families import DecoderConfig
from outpace.models.passes import PassRows
from outpace.models.plan import Plan
from outpace.models.rowwise import Norm
from outpace.models.seen import Seen
from outpace.models.views import KeyValues
from outpace.types import Feed, Scored


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a drafter folder besides its vocabulary."""
    hidden, wide = config.hidden_size, config.num_heads * config.head_dim
    return layer_shapes(config) | {
        "glimpse.q_proj.weight": (wide, hidden),
        "glimpse.o_proj.weight": (hidden, wide),
        "glimpse_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }


class GlideNet:
    """The network, ready to run.

    Args:
        config: of its layer; heads are as many and as wide as the target's.
        tensors: all that ``tensor_shapes`` names; converted, not kept.
        target: embeds and unembeds.
        vocab: the draft vocabulary; None is the target's whole.
        quantize: round them, see ``outpace.drafters.trained.rounding``.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, Tensor],
        target: Target,
        vocab: VocabMap | None = None,
        quantize: str | None = None,
    ) -> None:
        self._target, self._vocab = target, vocab
        self.max_positions = target.max_positions
        self.vocab_size = target.vocab_size
        form = Form(target.dtype, target.device, quantize=quantize)
        self.layer = OneLayer(config, layer_tensors(tensors), form)
        self._query = form.linear(paired(tensors["glimpse.q_proj.weight"], config.head_dim))
        self._out = form.linear(tensors["glimpse.o_proj.weight"])
        self._glimpse_norm, self._norm = (
            Norm(tensors[f"{name}.weight"].to(target.device), config) for name in ("glimpse_norm", "norm")
        )
        self._first, self._second = self._before(), self._after()
        self.glimpses: Mapping[int, KeyValues] = {}
        """Slot -> what its rows see of the target."""

    @cached_property
    def clock(self) -> PassClock:
        """Seconds inside passes."""
        return PassClock()

    def new_cache(self) -> DenseCache:
        """An empty cache for its layer."""
        return self.layer.new_cache()

    def _before(self) -> Plan:
        """Up to the queries of the glimpse, as a list of operations."""
        block, hidden = self.layer.block, self._query.inputs
        plan = self.layer.plan()
        stream = plan.lent(hidden)
        mixed = plan.attend(plan.product(block.qkv, plan.norm(block.attn_norm, stream)))
        x = plan.pick(stream)
        normed = plan.norm(self._glimpse_norm, x, add=plan.product(block.out, plan.pick(mixed)))
        query = plan.product(self._query, normed)
        plan.give(x)
        plan.give(query)
        return plan

    def _after(self) -> Plan:
        """From what the glimpse mixed on."""
        block, plan = self.layer.block, Plan()
        lent, mixed = plan.lent(self._query.inputs), plan.lent(self._out.inputs)
        x = plan.copy(lent)
        normed = plan.norm(block.mlp_norm, x, add=plan.product(self._out, mixed))
        gate = plan.gate(self.layer.activation, plan.product(block.dense.gate_up, normed))
        plan.give(plan.norm(self._norm, x, add=plan.product(block.dense.down, gate)))
        return plan

    def score(self, feeds: Sequence[Feed], cache: KVCache, *, taps: frozenset[str] = frozenset()) -> Scored:
        """One pass over rows of slots, whose glimpses are set; it has no taps."""
        assert isinstance(cache, DenseCache) and not taps
        rows = PassRows(feeds, cache, 1)
        with self.clock, torch.no_grad():
            x_RH, query_RY = self._attended(rows, cache)
            if not rows.wanted:
                return Scored(x_RH.new_empty(0, 0), rows.start_B)
            mixed_RY = self._glimpse(rows, query_RY)
            if self._second.ready:
                count = len(rows.wanted)
                (normed_RH,) = self._second.run((count, count), (x_RH, mixed_RY))
            else:
                normed_RH = self._by_torch(x_RH, mixed_RY)
            logits_RD = self._target.head(normed_RH, self._vocab).float()
        return Scored(logits_RD, rows.start_B)

    def _attended(self, rows: PassRows, cache: DenseCache) -> tuple[Tensor, Tensor]:
        """The stream behind the own attention, and queries that are not rotated yet."""
        embed_TH, count = self._target.embed(rows.ids), len(rows.wanted)
        starts = [0] * len(rows.spans)
        if self._first.ready:
            seen = Seen.of(rows, cache, starts)
            x_RH, query_RY = self._first.run((len(rows.ids), count), (embed_TH,), rows.wanted, seen)
            return x_RH, query_RY
        layer, dtype = self.layer, self.layer.dtype
        x_TH = embed_TH.new_zeros(max(len(rows.ids), layer.min_rows), embed_TH.shape[1])
        x_TH[: len(rows.ids)] = embed_TH
        u_TH = torch.empty(x_TH.shape, dtype=dtype, device=x_TH.device)
        layer.block.attn_norm(x_TH, u_TH)
        x_RH, mixed_RY = layer.attend(rows, cache, starts, x_TH, u_TH)
        normed_RH = torch.empty(x_RH.shape, dtype=dtype, device=x_RH.device)
        self._glimpse_norm(x_RH, normed_RH, add=layer.block.out(mixed_RY))
        return x_RH[:count], self._query(normed_RH)[:count].float()

    def _glimpse(self, rows: PassRows, query_RY: Tensor) -> Tensor:
        """Values of the target, mixed; nothing where nothing is committed."""
        heads, first = self.layer.heads, 0
        places = [(span, at) for span in rows.spans for at in range(len(span.stored))]
        wanted = [places[row] for row in rows.wanted]
        turn_R1E = self.layer.rotation.at([span.positions[at] for span, at in wanted])
        pair_RXE = torch.view_as_complex(
            query_RY.view(len(wanted), heads.queries, heads.width // 2, 2).contiguous()
        )
        query_RXD = torch.view_as_real(pair_RXE * turn_R1E).flatten(2) * heads.scale
        out_RXD = torch.zeros_like(query_RXD)
        for span in rows.spans:
            count = sum(one is span for one, _ in wanted)
            seen, part = self.glimpses[span.slot], slice(first, first + count)
            first += count
            if not count or not len(seen):
                continue
            query_KMD = query_RXD[part].view(count, heads.kv, -1, heads.width).transpose(0, 1).flatten(1, 2)
            share_KMC = (query_KMD @ seen.key_KDC.float()).softmax(-1)
            mixed_KMD = share_KMC @ seen.value_KCD.float()
            mixed = mixed_KMD.view(heads.kv, count, -1, heads.width).transpose(0, 1)
            out_RXD[part] = mixed.reshape(count, heads.queries, heads.width)
        return out_RXD.flatten(1)

    def _by_torch(self, x_RH: Tensor, mixed_RY: Tensor) -> Tensor:
        block, dtype = self.layer.block, self.layer.dtype
        x_RH = x_RH.clone()
        normed_RH = torch.empty(x_RH.shape, dtype=dtype, device=x_RH.device)
        block.mlp_norm(x_RH, normed_RH, add=self._out(mixed_RY.to(dtype)))
        more_RH = block.dense(normed_RH, self.layer.activation)
        return self._norm(x_RH, add=more_RH.float())
