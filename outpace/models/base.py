"""The contract of a target: a model that scores many rows of many sequences in one pass.

Any model behind it may be the target, a draft model, or a part of the target that drafts.

Shape letters: T rows of a pass, V vocabulary, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outpace.cache.base import KVCache
from outpace.clock import PassClock
from outpace.errors import ModelError
from outpace.types import Feed, Scored, VocabMap

if TYPE_CHECKING:
    from outpace.models.defaults import GenerationDefaults
    from outpace.models.likeness import Likeness
    from outpace.models.text import Tokenizer

TREE = "tree"
"""Rows of one feed may branch."""
LAYERS = "layers"
"""``variant`` and ``without`` work, ``score(layers=...)`` may stop early, feeds may ``resume``."""
TAPS = "taps"
"""Hidden states can be asked for by name."""
HEAD = "head"
"""``embed`` and ``head`` work: vectors of tokens, and logits of hidden states."""
EMBEDDINGS = "embeddings"
"""Riders may enter, also as embeddings."""
VIEWS = "views"
"""A feed may see a part of the committed text; ``choice`` makes memory for such views."""
KV_READ = "kv_read"
"""``read`` gives keys and values of committed rows (``outpace.models.views.KeyValues``)."""


class Target(ABC):
    """A causal language model over one vocabulary."""

    name: str
    """What reports call it."""
    digest: str
    """Stable id of the weights; drafters trained for a target are found by it."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    """Context length in tokens, prompt and output together."""
    why_shorter: str | None = None
    """Why the context is shorter than the model is said to take; None: it is not."""
    device: torch.device
    dtype: torch.dtype
    can: frozenset[str]
    """Which of TREE, LAYERS, TAPS, HEAD, EMBEDDINGS, VIEWS, KV_READ it supports; chains always work."""
    tokenizer: Tokenizer | None = None
    defaults: GenerationDefaults | None = None
    """Sampling defaults and end-of-sequence ids that came with the model."""
    encodes = False
    """Whether an encoder reads its prompts, apart from the answers. Then a prompt is no text to go on
    from, there are no chats, and tokens of a prompt have no logits."""
    drafter_anyway = False
    """Take drafters that were trained for another model, as long as their sizes fit."""
    quantize: str | None = None
    """How projections and head are rounded; None: not at all."""
    note: str | None = None
    """One line worth telling the user, for example that quantized weights were expanded."""

    @property
    def equal_rows(self) -> bool:
        """Whether a row comes out the same to the last bit in every pass: alone, in a tree, beside
        others. Only then is greedy text promised to be that of plain decoding.
        """
        return False

    @abstractmethod
    def new_cache(self, capacity: int = 0) -> KVCache:
        """An empty cache for this model.

        Args:
            capacity: tokens per slot to reserve at once, prompt and output together; the cache
                grows past it when needed, at the price of a copy.
        """

    @abstractmethod
    def score(
        self,
        feeds: Sequence[Feed],
        cache: KVCache,
        *,
        taps: frozenset[str] = frozenset(),
        layers: int | None = None,
    ) -> Scored:
        """Run one pass over all rows of all feeds.

        Every row attends to the committed text of its slot and to its own ancestors, at
        position = committed length + depth. Its keys and values are appended to the tail of
        the slot; ``cache.keep``, ``truncate`` and ``drop`` decide what stays.

        Args:
            feeds: at most one per slot. Rows may differ in number and shape.
            cache: from this model's ``new_cache``.
            taps: names of features wanted for every row: ``hidden.L``, ``attn_in.L``,
                ``attn_out.L``. The first is the residual stream after layer L: 0 is the embedding,
                -1 the last layer, after the final norm.
            layers: run only the first so many layers; logits are then the head on that
                layer's normed output. Keys and values are written for these layers only.

        Returns:
            Logits of the wanted rows and the taps. Valid until the next call.

        Raises:
            ModelError: a tap, a rider or a tree that this model cannot serve.

        Cost: one pass. No host sync.
        """

    def head(self, hidden_TH: Tensor, vocab: VocabMap | None = None) -> Tensor:
        """Logits [T, V] of normed hidden states, or [T, D] over a draft vocabulary; needs HEAD."""
        raise ModelError(f"{self.name} cannot unembed hidden states; use the own decoder")

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Vectors [T, H] of token ids as a pass takes them in, float32; needs HEAD."""
        raise ModelError(f"{self.name} does not give embeddings; use the own decoder")

    def framed(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that a sequence with this prompt begins with; the prompt, where no encoder reads it.

        Raises:
            RequestError: what an encoder cannot read.
        """
        return tuple(ids)

    def source_of(self, prompt: Sequence[int]) -> tuple[int, ...] | None:
        """What an encoder reads of a framed prompt, the mark of its end included; None without one."""
        return None

    def longest(self, prompt: Sequence[int]) -> int:
        """Most tokens of a sequence that begins with this framed prompt, which is counted too."""
        return self.max_positions

    def variant(self, *, layers: Sequence[int]) -> Target:
        """A target made of some layers of this one, sharing its weights and nothing else."""
        raise ModelError(f"{self.name} cannot leave out layers; use the own decoder")

    def without(self, *, attentions: Collection[int], mlps: Collection[int]) -> Target:
        """This target with some attentions and MLPs left out: they add nothing to the residual stream.

        Layers and taps keep their numbers, caches of this target fit, and passes count on its clock. They
        write keys and values of the attentions that run, and read those that this target left.
        """
        raise ModelError(f"{self.name} cannot leave out sub-layers; use the own decoder")

    @property
    def likeness(self) -> Likeness | None:
        """What tells the same model, rounded otherwise; None where weights cannot be read by name."""
        return None

    @cached_property
    def clock(self) -> PassClock:
        """Seconds that this target spent inside passes, laying out rows not counted."""
        return PassClock()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights read by a pass over one row."""
        return 0

    def share(self, part: Target) -> float:
        """Weights that a pass of a part, or of a draft model, reads, over those of a pass of this target."""
        return part.weight_bytes / max(1, self.weight_bytes)

    def require(self, needs: frozenset[str], who: str) -> None:
        """Raise ModelError unless this target can everything that ``who`` needs."""
        missing = sorted(needs - self.can)
        if missing:
            raise ModelError(
                f"{who} needs {', '.join(missing)}, which {self.name} ({type(self).__name__}) "
                f"cannot; it can {', '.join(sorted(self.can)) or 'chains only'}"
            )
