"""Probability distributions over a vocabulary, stored on their support.

Shape letters: S tokens in the support of a distribution, V vocabulary, D draft vocabulary, K queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kernels import draws


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """A probability distribution over the target's vocabulary, stored on its support.

    A one-hot distribution has one entry, a top-k distribution k entries, a full softmax V entries with
    ``id_S = None``. A token outside the support has probability 0. One code path therefore
    serves greedy decoding, reduced draft vocabularies and full distributions alike.
    """

    prob_S: Tensor
    """float32 (float64 where distributions are enumerated), sums to 1."""
    id_S: Tensor | None = None
    """int64 target ids, distinct; None: entry i is token i."""

    @classmethod
    def one_hot(cls, token: int, dtype: torch.dtype = torch.float32) -> Law:
        """The distribution that always gives ``token``."""
        return cls(torch.ones(1, dtype=dtype), torch.tensor([token]))

    @property
    def ids(self) -> Tensor:
        """int64 [S], the token of each entry."""
        if self.id_S is not None:
            return self.id_S
        return torch.arange(len(self.prob_S), device=self.prob_S.device)

    def at(self, id_K: Tensor) -> Tensor:
        """Probabilities [K] of the given tokens; 0 outside the support. Mutates nothing."""
        if self.id_S is None:
            last = len(self.prob_S) - 1
            return torch.where(id_K <= last, self.prob_S[id_K.clamp_max(last)], 0.0)
        if len(id_K) * len(self.id_S) <= 1 << 14:
            hit_KS = id_K[:, None] == self.id_S[None, :]
            return (hit_KS * self.prob_S).sum(1)
        size = 1 + int(max(id_K.max(), self.id_S.max()))
        return self.dense(size)[id_K]

    def place(self, token: int) -> int:
        """The entry of a token; -1 outside the support."""
        if self.id_S is None:
            return token if token < len(self.prob_S) else -1
        return draws.place(self.id_S, token)

    def prob(self, token: int) -> float:
        """Probability of one token. One host sync."""
        at = self.place(token)
        return float(self.prob_S[at]) if at >= 0 else 0.0

    def dense(self, size: int) -> Tensor:
        """The distribution as a vector [size]; ``size`` must reach past the largest id of the support."""
        if self.id_S is None and len(self.prob_S) == size:
            return self.prob_S
        out = self.prob_S.new_zeros(size)
        out[self.ids] = self.prob_S
        return out

    def without(self, tokens: Sequence[int]) -> Law | None:
        """The distribution given that none of ``tokens`` comes; None if it has no other.

        Cost: O(support). One host sync.
        """
        prob_S = draws.strike(self.prob_S, [at for at in map(self.place, tokens) if at >= 0])
        return None if prob_S is None else Law(prob_S, self.id_S)

    @classmethod
    def normed(cls, weight_S: Tensor, id_S: Tensor | None) -> Law | None:
        """A distribution from weights, which it takes over; None if they are all 0. One host sync."""
        mass = float(weight_S.sum())
        return cls(weight_S.div_(mass), id_S) if mass > 0 else None

    def top(self, k: int) -> list[int]:
        """The k most probable tokens, best first; fewer if the support is smaller."""
        k = min(k, len(self.prob_S))
        best = self.prob_S.topk(k).indices
        return [int(t) for t in (best if self.id_S is None else self.id_S[best]).tolist()]


@dataclass(frozen=True, slots=True, eq=False)
class VocabMap:
    """A draft vocabulary inside the target's.

    Serves reduced vocabularies and intersections of two vocabularies. Every map keeps the
    end-of-sequence tokens, or the drafter could never guess an end.
    """

    to_target_D: Tensor
    """int64, draft id -> target id, distinct."""
    feed_V: Tensor
    """int64, target id -> draft id, or -1 where the draft model has no such token."""
