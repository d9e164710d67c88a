"""The Llama family on one block: few, large operations, and rows that do not feel each other.

Families, from Llama 2 to OLMo 2, differ in what `DecoderConfig` says and in nothing else. The
residual stream is float32 whatever the dtype of the weights. Every operation between two projections
works row by row, so a row's logits do not depend on the rows beside it (see `attention.py`).

Shape letters: T rows of a pass (filled up to a few at least), H hidden size, V vocabulary,
D width of a head, E = D / 2, R riders.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.cache.base import KVCache
from outpace.cache.dense import DenseCache
from outpace.errors import ModelError
from outpace.models.attention import Span
from outpace.models.base import EMBEDDINGS, HEAD, KV_READ, LAYERS, TAPS, TREE, VIEWS, Target
from outpace.models.blocks import Block, Ends, Form, capped, read_block, read_ends, read_head, release
from outpace.models.embedding import Embedding
from outpace.models.families import DecoderConfig
from outpace.models.fused import fits, stored
from outpace.models.graphs import CudaRecorder, Record, StaticPasses
from outpace.models.layers import Layers
from outpace.models.likeness import Likeness
from outpace.models.packed import Linear
from outpace.models.passes import PassRows
from outpace.models.products import works
from outpace.models.program import Programs, Results
from outpace.models.quantize import check_kind, note
from outpace.models.room import Room
from outpace.models.rope import ENDS, Rotation
from outpace.models.taps import check_taps, spread
from outpace.models.text import Tokenizer
from outpace.models.views import Choice, KeyValues, Rule, read
from outpace.models.weights import Checkpoint
from outpace.types import Feed, Scored, VocabMap

DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes that a decoder can be loaded in."""


class Decoder(Target):
    """A decoder of the Llama family; ``load`` makes one.

    Taps: ``hidden.L`` and ``hidden.-1`` as in the contract. ``attn_in.L`` is the normed input of the
    attention of layer L, counted from 0; ``attn_out.L`` is what it adds to the residual stream,
    unscaled. ``hidden.0`` and up are float32.
    """

    can = frozenset({TREE, LAYERS, TAPS, HEAD, EMBEDDINGS, VIEWS, KV_READ})

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        blocks: Sequence[Block],
        ends: Ends,
        turns: Sequence[Rotation],
        form: Form,
    ) -> None:
        self.config, self.defaults = config, checkpoint.defaults
        self.name, self.digest = checkpoint.name, checkpoint.digest
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers, self.max_positions = len(blocks), config.max_positions
        self.device, self.dtype, self._form = form.device, form.dtype, form
        compiled = ends.head.product is not None
        self._between = torch.float32 if compiled else form.dtype
        """Dtype of rows between products."""
        self._min_rows = ends.head.min_rows
        self.checkpoint = checkpoint
        """What it was read from: tensors one at a time, by Hugging Face name."""
        self._blocks, self._ends, self._turns = blocks, ends, turns
        self._attends = tuple(block.attends for block in blocks)
        self._shape = config.head_shape
        self._layers = Layers(blocks, turns, self._shape, config, self._between)
        self.why_shorter = next((ENDS[rope.kind] for rope in config.ropes if rope.kind in ENDS), None)
        self._reduced: list[tuple[VocabMap, Linear]] = []
        self._room = Room()
        self._programs: Programs | None = None
        if Programs.runs(config, blocks, ends, self._shape):
            self._programs = Programs(config, blocks, ends, turns, self._shape)
        self.static: StaticPasses | None = None
        """Runs passes of common shapes as recorded launches; None: all run eagerly."""
        if self.device.type == "cuda" and config.mixture is None:  # which experts run, a recording cannot say
            self.static = self.static_passes(CudaRecorder(self.device))

    def static_passes(self, record: Record) -> StaticPasses:
        """Its layers in fixed shapes; see ``StaticPasses``."""
        return StaticPasses(self._shape, self._layers.windows, self._turns, self.dtype, record)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        packed: bool = True,
        quantize: str | None = None,
        stored: bool = False,
    ) -> Decoder:
        """Read the weights, layer by layer: expand, merge, lay out, forget the original.

        Args:
            dtype: of weights and projections, one of ``DTYPES``.
            packed: lay the weights out for the CPU where that works; False is the oracle.
            quantize: round projections and head to ``int8`` or ``int4``. That is another model,
                with another name and digest; what is computed stays in ``dtype``.
            stored: leave quantized matrices as they are stored, where compiled code multiplies
                them; ``dtype`` is then that of everything else.

        Raises:
            ModelError: another dtype, a weight file that is corrupt or truncated, or what
                ``check_kind`` raises.

        Memory: the weights in ``dtype`` or as stored, and one layer on its way.
        """
        if dtype not in DTYPES:
            known = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
            raise ModelError(f"dtype {str(dtype).removeprefix('torch.')!r} is not one of {known}")
        config, where = checkpoint.config, torch.device(device)
        if quantize is not None:
            check_kind(quantize, where)
        stored = stored and packed and quantize is None and works(where.type)
        form = Form(dtype, where, packed, quantize, stored)
        ends = read_ends(checkpoint, form)
        blocks = []
        for layer in range(config.num_layers):
            blocks.append(read_block(checkpoint, layer, form))
            release()
        turns = [Rotation(rope, where) for rope in config.ropes]
        decoder = cls(checkpoint, config, blocks, ends, turns, form)
        lines = [checkpoint.note(dtype, stored), decoder.why_shorter]
        if quantize is not None:
            linears = [ends.head, *(one for block in blocks for one in block.linears)]
            lines.append(note(linears, quantize))
            decoder.quantize = quantize
            decoder.name = f"{decoder.name}[{quantize}]"
            decoder.digest = f"{decoder.digest}-{quantize}"
        decoder.note = "; ".join(line for line in lines if line) or None
        return decoder

    def quantized(self, kind: str) -> Decoder:
        """The same model, read anew and rounded to ``int8`` or ``int4``; see ``load``."""
        return Decoder.load(self.checkpoint, dtype=self.dtype, device=self.device, quantize=kind)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:  # type: ignore[override]
        """The checkpoint's tokenizer, built when first asked for; None if it has none."""
        try:
            return self.checkpoint.tokenizer()
        except ModelError:
            return None

    @property
    def likeness(self) -> Likeness:
        return self.checkpoint.likeness

    @property
    def embedding(self) -> Embedding:
        """Its embedding, to share; the vectors are not scaled."""
        return self._ends.embed

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights read by a pass over one row."""
        return self._ends.head.nbytes + sum(block.nbytes for block in self._blocks)

    @property
    def equal_rows(self) -> bool:
        """On a CPU no row sees its neighbours, but in products of torch 6 or 10 numbers wide."""
        return self.device.type == "cpu" and self._shape.width not in (6, 10)

    def new_cache(self, capacity: int = 0) -> DenseCache:
        shape, place = self._shape, (self._shape, self.dtype, self.device)
        own, dtype = (self.num_layers, shape.kv, shape.width), stored(*place)
        return DenseCache(*own, device=self.device, capacity=capacity, dtype=dtype, tiled=fits(*place))

    def choice(self, rule: Rule) -> Choice:
        """Memory for what the views of one sequence show."""
        full = next((block.rope for block in self._blocks if block.window is None), 0)
        return Choice(rule, self.num_layers, self._shape, self._turns[full])

    def read(self, cache: KVCache, slot: int, layer: int) -> KeyValues:
        """Keys and values of the committed rows of a slot, in one layer; views."""
        return read(cache, slot, layer)

    def variant(self, *, layers: Sequence[int]) -> Decoder:
        """A decoder of some layers of this one, in the order given, counted anew from 0."""
        if not layers or not set(layers) <= set(range(self.num_layers)):
            raise ModelError(
                f"cannot take layers {list(layers)} of {self.name}, which has layers 0 to "
                f"{self.num_layers - 1}"
            )
        config = self.config.of_layers(layers)
        chosen = "-".join(str(i) for i in layers)
        return self._part(config, [self._blocks[i] for i in layers], f"layers={chosen}")

    def without(self, *, attentions: Collection[int], mlps: Collection[int]) -> Decoder:
        """This decoder without some sub-layers; see the contract."""
        blocks = [
            replace(one, attends=i not in attentions, has_mlp=i not in mlps)
            for i, one in enumerate(self._blocks)
        ]
        left = [f"{kind}{i}" for kind, some in (("a", attentions), ("m", mlps)) for i in sorted(some)]
        part = self._part(self.config, blocks, f"without={'-'.join(left)}")
        part.clock = self.clock
        return part

    def with_layers(self, checkpoint: Checkpoint, layers: Sequence[int]) -> Decoder:
        """This decoder with some layers read from another checkpoint of its shape; caches fit."""
        blocks = list(self._blocks)
        for i in layers:
            blocks[i] = read_block(checkpoint, i, replace(self._form, stored=False))
        part = self._part(self.config, blocks, f"other={'-'.join(str(i) for i in layers)}")
        part.clock = self.clock
        return part

    def _part(self, config: DecoderConfig, blocks: Sequence[Block], chosen: str) -> Decoder:
        part = Decoder(self.checkpoint, config, blocks, self._ends, self._turns, self._form)
        part.quantize = self.quantize
        part.name, part.digest = f"{self.name}[{chosen}]", f"{self.digest}:{chosen}"
        if "tokenizer" in vars(self):
            part.tokenizer = self.tokenizer
        return part

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Vectors [T, H] of token ids as a pass takes them in, float32."""
        return self._ends.embed(ids).float() * self._ends.embed.factor(self.config)

    def head(self, hidden_TH: Tensor, vocab: VocabMap | None = None) -> Tensor:
        """Logits [T, V] of normed hidden states, or [T, D] over a draft vocabulary, float32.

        Gradients flow to ``hidden_TH`` if it asks for them; that path lays no weights out. The
        rows of a draft vocabulary are copied at its first use and kept.
        """
        learning = torch.is_grad_enabled() and hidden_TH.requires_grad
        head, x_TH = self.unembedding(vocab), hidden_TH.to(self._between)
        logits = F.linear(x_TH, head.dense().to(x_TH.dtype)) if learning else head(x_TH)
        return capped(logits.float(), self.config.logit_softcap)

    def unembedding(self, vocab: VocabMap | None) -> Linear:
        """Its head, to share, or the rows of a draft vocabulary, which are copied once."""
        if vocab is None:
            return self._ends.head
        for known, head in self._reduced:
            if known is vocab:
                return head
        part = read_head(self.checkpoint, self._form, vocab.to_target_D)
        if part is None:
            if self.config.tied_head and self.quantize is None:
                rows = self._ends.embed(vocab.to_target_D.tolist())
            else:
                rows = self._ends.head.dense()[vocab.to_target_D.to(self.device)]
            part = Linear(rows, packed=self._ends.head.packed)
        self._reduced.append((vocab, part))
        return self._reduced[-1][1]

    def score(
        self,
        feeds: Sequence[Feed],
        cache: KVCache,
        *,
        taps: frozenset[str] = frozenset(),
        layers: int | None = None,
    ) -> Scored:
        """Run one pass; see the contract.

        Riders given as embeddings enter as they are, unscaled. Their hidden states are normed,
        ready for ``head``. A feed with ``resume`` must cover exactly the rows that the tail of
        its slot holds, in order; they are not appended again.
        """
        depth = self._depth(layers)
        if not isinstance(cache, DenseCache) or cache.layers != self.num_layers:
            raise ModelError(f"this cache was not made by {self.name}; use its new_cache()")
        resumed = [feed.resume.layer for feed in feeds if feed.resume is not None]
        check_taps(self.name, taps, range(max(resumed, default=0), depth), self._attends)
        rows = PassRows(feeds, cache, depth)
        with self.clock:
            return self._pass(rows, cache, depth, taps)

    @property
    def at_once(self) -> Programs | None:
        """What runs several passes in one call; None where Python has to look between them."""
        plain = self.config.logit_softcap is None and self.static is None
        return self._programs if plain and self._programs is not None and self._programs.embeds else None

    def _pass(self, rows: PassRows, cache: DenseCache, depth: int, taps: frozenset[str]) -> Scored:
        fed, picked = len(rows.wanted), len(rows.wanted) + len(rows.riders)
        headed = picked if rows.rider_logits else fed
        compiled = self._programs is not None and self.static is None
        work = self._compiled if compiled else self._by_torch
        got = work(rows, cache, depth, taps, headed)
        cap = self.config.logit_softcap
        features, last_TH, logits_TV = got.taps, got.last_TH, capped(got.logits_TV, cap)
        return Scored(
            logits_TV[:fed] if rows.rider_logits else logits_TV,
            rows.start_B,
            features,
            rows.tap_start_B if taps else (0,),
            last_TH[fed:picked] if rows.riders and last_TH is not None else None,
            logits_TV[fed:] if rows.rider_logits else None,
            rows.rider_start_B if rows.riders else (0,),
            got.best if cap is None else None,
            lasting=True,
        )

    def _compiled(
        self, rows: PassRows, cache: DenseCache, depth: int, taps: frozenset[str], headed: int
    ) -> Results:
        assert self._programs is not None
        got = self._programs.run(rows, cache, depth, taps, self.embed, headed)
        if not rows.riders:
            return got
        with torch.inference_mode(False), torch.no_grad():
            features = {name: rows.without_riders(got.taps[name]) for name in taps}
        return got._replace(taps=features)

    def _by_torch(
        self, rows: PassRows, cache: DenseCache, depth: int, taps: frozenset[str], headed: int
    ) -> Results:
        """Features, normed rows that are wanted, and logits of the first ``headed`` of them."""
        picked = [*rows.wanted, *rows.riders]
        with torch.inference_mode():
            x_TH, seen = self._body(rows, cache, depth, taps)
            last_TH, index = x_TH, [*picked, *[0] * (self._min_rows - len(picked))]
            if "hidden.-1" in taps:
                last_TH = self._ends.norm(x_TH).to(self._between)
                seen["hidden.-1"] = last_TH
            last_TH = last_TH.index_select(0, torch.tensor(index, device=self.device))
            if "hidden.-1" not in taps:
                last_TH = self._ends.norm(last_TH).to(self._between)
        # Made outside of inference mode these are ordinary tensors, which autograd may use.
        with torch.no_grad():
            features = {name: rows.without_riders(seen[name]).clone() for name in taps}
            last_TH = last_TH.clone()
            logits_TV = torch.empty(0, self.vocab_size, dtype=torch.float32, device=self.device)
            if headed:
                raw_TV = self._ends.head(last_TH[: max(headed, self._min_rows)])[:headed]
                logits_TV = self._room.widened(raw_TV)
        return Results(features, last_TH, logits_TV, None)

    def _body(
        self, rows: PassRows, cache: DenseCache, depth: int, taps: frozenset[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the layers; give the residual stream [T, H] and the taps of all rows."""
        stream_TH = self._embed(rows)
        seen: dict[str, Tensor] = {}
        borders = [0, *rows.levels, depth]
        if self.static is not None and self.static.fits(rows):
            stream_TH, seen = self.static.run(rows, cache, depth, taps, stream_TH, self._layers.run_layers)
            borders = []
        for begin, end in pairwise(borders):
            rows.join(begin, stream_TH)
            spans, running = rows.running(begin)
            if not spans:
                continue
            x_TH = stream_TH
            if len(running) < len(rows.ids):
                filling = [running[0]] * (self._min_rows - len(running))
                x_TH = stream_TH[torch.tensor([*running, *filling], device=self.device)]
            found: dict[str, Tensor] = {}
            self._layers.run(x_TH, range(begin, end), spans, cache, taps, found)
            if x_TH is not stream_TH:
                index = torch.tensor(running, device=self.device)
                stream_TH[index] = x_TH[: len(running)]
                found = {name: spread(one, index, len(stream_TH)) for name, one in found.items()}
            seen |= found
        for other, layer, spans, running in rows.apart():
            own_TH = stream_TH[running]
            other.run_rows(own_TH, range(layer, depth), spans, cache)
            stream_TH[running] = own_TH
        if f"hidden.{depth}" in taps:
            seen[f"hidden.{depth}"] = stream_TH
        return stream_TH, seen

    def _embed(self, rows: PassRows) -> Tensor:
        """The residual stream before the first layer, with rows of zeros behind if few."""
        count = len(rows.ids)
        size = (max(count, self._min_rows), self.hidden_size)
        stream_TH = torch.zeros(size, dtype=torch.float32, device=self.device)
        stream_TH[:count] = self.embed(rows.ids)
        for start, embed_RH in rows.embeds:
            stream_TH[start : start + len(embed_RH)] = embed_RH
        return stream_TH

    def run_rows(self, x_TH: Tensor, layers: range, spans: list[Span], cache: DenseCache) -> None:
        """Run rows through some layers, in place, over keys and values of any decoder of this shape."""
        if self._programs is not None and self.static is None:
            self._programs.through(x_TH, layers, spans, cache)
            return
        few = max(0, self._min_rows - len(x_TH))
        filled_TH = F.pad(x_TH, (0, 0, 0, few))
        self._layers.run(filled_TH, layers, spans, cache, frozenset(), {})
        x_TH.copy_(filled_TH[: len(x_TH)])

    def _depth(self, layers: int | None) -> int:
        depth = self.num_layers if layers is None else layers
        if not 0 < depth <= self.num_layers:
            raise ModelError(f"cannot run {layers} layers of {self.name}: it has {self.num_layers}")
        return depth
