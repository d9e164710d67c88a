"""A language model that knows a part of the target's vocabulary, as one that knows all of it.

Shape letters: T rows of a pass, V vocabulary of the target, D columns of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from outpace.cache.base import KVCache
from outpace.clock import PassClock
from outpace.models.base import EMBEDDINGS, TAPS, TREE, Target
from outpace.types import Feed, Scored

PASSES = frozenset({TREE, TAPS, EMBEDDINGS})
"""Abilities that are those of a pass: who stands before a model passes them on with ``score``."""
_NEVER = -1e4
"""Logit of a token that the model does not know. It is finite, so that a request that allows no
other token still has a distribution to draw from. The target will refuse what it gives."""


class Columns(Target):
    """Puts the columns of a model's logits where the target has them.

    Args:
        model: whose logits are laid out; its cache is this target's, and so is what its passes can.
        vocab_size: of the target; columns beyond it are padding.
        id_D: target ids of the columns; None: they are the ids.
    """

    def __init__(self, model: Target, vocab_size: int, id_D: Tensor | None = None) -> None:
        self.model, self._id_D = model, id_D
        self.name, self.digest, self.vocab_size = model.name, model.digest, vocab_size
        self.hidden_size, self.num_layers = model.hidden_size, model.num_layers
        self.max_positions, self.can = model.max_positions, model.can & PASSES
        self.device, self.dtype = model.device, model.dtype
        self.tokenizer, self.defaults = model.tokenizer, model.defaults

    @property
    def clock(self) -> PassClock:
        return self.model.clock

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    def new_cache(self, capacity: int = 0) -> KVCache:
        return self.model.new_cache(capacity)

    def score(
        self,
        feeds: Sequence[Feed],
        cache: KVCache,
        *,
        taps: frozenset[str] = frozenset(),
        layers: int | None = None,
    ) -> Scored:
        """One pass of the model. Logits of riders stay as the model gives them."""
        scored = self.model.score(feeds, cache, taps=taps, layers=layers)
        return replace(scored, logits_TV=self._laid_out(scored.logits_TV), best=None)

    def _laid_out(self, logits_TD: Tensor) -> Tensor:
        """Logits [T, V], float32 or as wide as they were. Cost: a row is written once."""
        if not len(logits_TD):  # nothing was wanted, and the model need not say how wide that is
            return logits_TD.new_empty((0, self.vocab_size))
        logits_TD = logits_TD[:, : self.vocab_size]
        if self._id_D is None and logits_TD.shape[1] == self.vocab_size:
            return logits_TD
        logits_TV = logits_TD.new_full((len(logits_TD), self.vocab_size), _NEVER)
        if self._id_D is None:
            logits_TV[:, : logits_TD.shape[1]] = logits_TD
        else:
            logits_TV[:, self._id_D] = logits_TD
        return logits_TV
