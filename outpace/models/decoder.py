"""The Llama family on one block: few, large operations, and rows that do not feel each other.

Llama 2 and 3, Mistral, SmolLM2, Qwen2, Qwen3 and Gemma 3 differ in what `DecoderConfig` says
and in nothing else. The residual stream is float32 whatever the dtype of the weights, and every
operation between two projections works row by row, so that a row's logits do not depend on the
rows beside it (see `attention.py`).

Shape letters: T rows of a pass (filled up to a few at least), H hidden size, V vocabulary,
D width of a head, E = D / 2, R riders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.cache.base import KVCache
from outpace.cache.dense import DenseCache
from outpace.errors import ModelError
from outpace.models.attention import Attention, HeadShape
from outpace.models.base import EMBEDDINGS, LAYERS, TAPS, TREE, Target
from outpace.models.families import DecoderConfig
from outpace.models.packed import MIN_ROWS, Linear
from outpace.models.passrows import PassRows, Rotation
from outpace.models.text import Tokenizer
from outpace.models.weights import Checkpoint
from outpace.types import Feed, Scored, VocabMap

DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes that a decoder can be loaded in."""

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
_TAPS = ("hidden", "attn_in", "attn_out")


class Norm:
    """x / sqrt(mean(x^2) + eps) * weight, row by row, in float32.

    Args:
        weight_H: as stored; [heads, D] norms every head by itself.
        config: for eps and the offset of the weights.
    """

    def __init__(self, weight_H: Tensor, config: DecoderConfig) -> None:
        size = weight_H.shape[-1]
        self._weight_H = (weight_H.float() + config.norm_offset) * size**0.5
        self._floor = torch.tensor((size * config.norm_eps) ** 0.5, device=weight_H.device)

    def __call__(self, x_TH: Tensor, out: Tensor | None = None) -> Tensor:
        # sqrt(|x|^2 + H * eps) as a hypotenuse: one small operation instead of four.
        length_T1 = torch.linalg.vector_norm(x_TH, dim=-1, keepdim=True).hypot_(self._floor)
        return torch.mul(x_TH / length_T1, self._weight_H, out=out)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """Weights of one layer."""

    qkv: Linear
    """Dimensions of query and key heads are in pairs that rotate together."""
    out: Linear
    gate_up: Linear
    down: Linear
    attn_norm: Norm
    mlp_norm: Norm
    qk_norm: Norm | None
    after_attn: Norm | None
    after_mlp: Norm | None
    window: int | None
    rope: int

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices."""
        return sum(one.nbytes for one in (self.qkv, self.out, self.gate_up, self.down))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ends:
    """Weights before and after the layers."""

    embed_VH: Tensor
    norm: Norm
    head: Linear


class Decoder(Target):
    """A decoder of the Llama family; ``load`` makes one.

    Taps: ``hidden.L`` and ``hidden.-1`` as in the contract; ``attn_in.L`` is the normed input of
    the attention of layer L, counted from 0, and ``attn_out.L`` what it adds to the residual
    stream. ``hidden.0`` and up are float32.
    """

    can = frozenset({TREE, LAYERS, TAPS, EMBEDDINGS})

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        blocks: Sequence[Block],
        ends: Ends,
        turns: Sequence[Rotation],
    ) -> None:
        self.config, self.defaults = config, checkpoint.defaults
        self.name, self.digest = checkpoint.name, checkpoint.digest
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers, self.max_positions = len(blocks), config.max_positions
        self.device, self.dtype = ends.embed_VH.device, ends.embed_VH.dtype
        self._checkpoint, self._blocks, self._ends, self._turns = checkpoint, blocks, ends, turns
        self._windows = frozenset(block.window for block in blocks)
        self._activation = _ACTIVATIONS[config.activation]
        self._shape = HeadShape(
            config.num_kv_heads,
            config.num_heads // config.num_kv_heads,
            config.head_dim,
            config.attention_scale,
            config.attention_softcap,
        )
        self._reduced: list[tuple[VocabMap, Linear]] = []

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        packed: bool = True,
    ) -> Decoder:
        """Read the weights, layer by layer: expand, merge, lay out, forget the original.

        Args:
            checkpoint: an opened model.
            dtype: of weights and projections, one of ``DTYPES``.
            device: where to run.
            packed: lay the weights out for the CPU where that works; False is the oracle.

        Raises:
            ModelError: another dtype, or a weight file that is corrupt or truncated.

        Memory: the weights in ``dtype``, a tied head twice, and one layer on its way.
        """
        if dtype not in DTYPES:
            known = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
            raise ModelError(f"dtype {str(dtype).removeprefix('torch.')!r} is not one of {known}")
        load = _Loader(checkpoint, dtype, torch.device(device), packed)
        config = checkpoint.config
        embed_VH = load("model.embed_tokens")
        head = Linear(embed_VH if config.tied_head else load("lm_head"), packed=packed)
        ends = Ends(embed_VH=embed_VH, norm=load.norm("model.norm"), head=head)
        blocks = [load.block(layer) for layer in range(config.num_layers)]
        turns = [Rotation(rope, ends.embed_VH.device) for rope in config.ropes]
        decoder = cls(checkpoint, config, blocks, ends, turns)
        decoder.note = checkpoint.note(dtype)
        return decoder

    @property
    def tokenizer(self) -> Tokenizer:  # type: ignore[override]
        """The checkpoint's tokenizer, built when first asked for."""
        if self._tokenizer is None:
            self._tokenizer = self._checkpoint.tokenizer()
        return self._tokenizer

    _tokenizer: Tokenizer | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights read by a pass over one row."""
        return self._ends.head.nbytes + sum(block.nbytes for block in self._blocks)

    def new_cache(self, capacity: int = 0) -> DenseCache:
        """An empty cache; see the contract."""
        shape = self._shape
        return DenseCache(
            self.num_layers, shape.kv, shape.width, device=self.device, capacity=capacity
        )

    def variant(self, *, layers: Sequence[int]) -> Decoder:
        """A decoder of some layers of this one, in the order given, counted anew from 0."""
        if not layers or not set(layers) <= set(range(self.num_layers)):
            raise ModelError(
                f"cannot take layers {list(layers)} of {self.name}, which has layers 0 to "
                f"{self.num_layers - 1}"
            )
        config = replace(
            self.config,
            num_layers=len(layers),
            windows=tuple(self.config.windows[i] for i in layers),
            rope_of_layer=tuple(self.config.rope_of_layer[i] for i in layers),
        )
        blocks = [self._blocks[i] for i in layers]
        part = Decoder(self._checkpoint, config, blocks, self._ends, self._turns)
        chosen = "-".join(str(i) for i in layers)
        part.name, part.digest = f"{self.name}[layers={chosen}]", f"{self.digest}:{chosen}"
        part._tokenizer = self._tokenizer
        return part

    def head(self, hidden_TH: Tensor, vocab: VocabMap | None = None) -> Tensor:
        """Logits [T, V] of normed hidden states, or [T, D] over a draft vocabulary, float32.

        Gradients flow to ``hidden_TH`` if it asks for them; that path lays no weights out. The
        rows of a draft vocabulary are copied at its first use and kept.
        """
        learning = torch.is_grad_enabled() and hidden_TH.requires_grad
        head = self._ends.head if vocab is None else self._head_of(vocab)
        hidden_TH = hidden_TH.to(self.dtype)
        logits = F.linear(hidden_TH, head.dense()) if learning else head(hidden_TH)
        cap = self.config.logit_softcap
        logits = logits.float()
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _head_of(self, vocab: VocabMap) -> Linear:
        for known, head in self._reduced:
            if known is vocab:
                return head
        whole = self._ends.embed_VH if self.config.tied_head else self._ends.head.dense()
        rows = whole[vocab.to_target_D.to(self.device)]
        self._reduced.append((vocab, Linear(rows, packed=self._ends.head.packed)))
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
        if not isinstance(cache, DenseCache) or cache.store.shape[0] != self.num_layers:
            raise ModelError(f"this cache was not made by {self.name}; use its new_cache()")
        rows = PassRows(feeds, cache, depth)
        self._check_taps(taps, depth, rows.levels[-1] if rows.levels else 0)
        with torch.inference_mode():
            x_TH, seen = self._body(rows, cache, depth, taps)
            last_TH, picked = self._last(rows, x_TH, "hidden.-1" in taps)
            if "hidden.-1" in taps:
                seen["hidden.-1"] = rows.without_riders(last_TH)
            # Outside inference mode a copy is an ordinary tensor, which autograd may use.
            ...
