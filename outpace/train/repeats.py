"""Answers that say again what others said: they teach nothing new, and would leak what is held out.

Every stretch of tokens in an answer gets a hash; a few of the hashes stand for the answer. An answer
is a near-duplicate if most of its hashes occur in answers before it (w-shingling, Broder 1997). All
held-out answers count as before.

Shape letters: S sequences, T tokens of all answers, N places where a stretch begins.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outpace.train.tokens import TokenStore

STRETCH = 12
"""Tokens of a stretch: shorter ones recur by chance, in phrases and lists."""
ONE_IN = 8
"""A stretch in so many counts: a tenth of the memory, and 30 of an answer of 250 tokens."""
SHARE = 0.5
"""Share of the stretches that were there before, in a near-duplicate."""
_FEWEST = 4  # stretches that an answer is judged by
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that products of 64 bits keep all tokens apart


def near_duplicates(store: TokenStore) -> NDArray[np.bool_]:
    """Which sequences [S] of a store are near-duplicates; of two that are alike, the later.

    Cost: about 1 s and 60 MB for 10 million answer tokens.
    """
    order = np.argsort(~store.held_out_S, kind="stable")
    hash_N, owner_N = _stretches(store, order)
    _, first_N, same_N = np.unique(hash_N, return_index=True, return_inverse=True)
    known_N = owner_N[first_N[same_N]] < owner_N  # rows are in order: the first owner is the earliest
    count_S = np.bincount(owner_N, minlength=len(order))
    known_S = np.bincount(owner_N, weights=known_N, minlength=len(order))
    out_S = np.zeros(len(order), np.bool_)
    out_S[order] = (count_S >= _FEWEST) & (known_S > SHARE * count_S)
    return out_S & ~store.held_out_S


def _stretches(store: TokenStore, order: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hashes of the stretches that count, and the rank of the answer that each is in."""
    hashes: list[NDArray[np.uint64]] = []
    for index in order.tolist():
        one = store[index]
        answer_T = one.ids[one.prompt :].astype(np.uint64)
        size = max(0, len(answer_T) - STRETCH + 1)
        mixed_T = np.zeros(size, np.uint64)
        for i in range(STRETCH):
            mixed_T = (mixed_T ^ answer_T[i : i + size]) * _FACTOR
            mixed_T ^= mixed_T >> np.uint64(29)
        hashes.append(mixed_T[mixed_T % np.uint64(ONE_IN) == 0])
    owner_N = np.repeat(np.arange(len(order)), [len(found) for found in hashes])
    return np.concatenate([*hashes, np.empty(0, np.uint64)]), owner_N
