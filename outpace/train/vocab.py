"""A smaller vocabulary to draft in: the tokens that the target says most often.

A small drafter spends most of its time on the output layer, and few tokens make nearly all text
(FR-Spec, arXiv:2502.14856; EAGLE-3, arXiv:2503.01840).

Shape letters: V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.errors import RequestError
from outpace.models.base import Target
from outpace.train.tokens import TokenStore
from outpace.types import VocabMap


def count_tokens(store: TokenStore, vocab_size: int, *, held_out: bool = False) -> NDArray[np.int64]:
    """How often each token [V] stands in the answers of a split."""
    counts = np.zeros(vocab_size, np.int64)
    for index in np.flatnonzero(store.held_out_S == held_out):
        one = store[int(index)]
        counts += np.bincount(one.ids[one.prompt :], minlength=vocab_size)
    return counts


def always_kept(target: Target) -> frozenset[int]:
    """Tokens that every draft vocabulary holds: ends of texts, and the marks of a chat.

    Without them a drafter could never guess where an answer ends.
    """
    kept: set[int] = set() if target.defaults is None else set(target.defaults.eos_ids)
    tokenizer = target.tokenizer
    if tokenizer is not None:
        kept |= tokenizer.eos_ids
        if tokenizer.chat_template is not None:
            chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            said = tokenizer.chat([*chat, chat[0]])
            kept |= tokenizer.special_ids & set(said)
    return frozenset(token for token in kept if token < target.vocab_size)


def reduced_vocab(counts: NDArray[np.int64], size: int, always: Iterable[int] = ()) -> VocabMap:
    """The ``size`` most frequent tokens, with those that are always kept among them.

    Args:
        counts: of every token, [V]. Of equally frequent ones the smaller ids are taken, which
            tokenizers give to more frequent pieces.
        size: D; V or more takes all.

    Returns:
        A map with ascending target ids.

    Raises:
        RequestError: no room for more than the tokens always kept.
    """
    must = sorted(set(always))
    if size <= len(must):
        raise RequestError(
            f"a draft vocabulary of {size} has no room beside the {len(must)} tokens that end "
            "texts or mark a chat; make it larger"
        )
    rank = counts.astype(np.float64)
    rank[must] = np.inf
    chosen = np.sort(np.argsort(-rank, kind="stable")[: min(size, len(counts))])
    to_target_D = torch.from_numpy(chosen.astype(np.int64))
    feed_V = torch.full((len(counts),), -1, dtype=torch.int64)
    feed_V[to_target_D] = torch.arange(len(to_target_D))
    return VocabMap(to_target_D, feed_V)


def size_for(
    counts: NDArray[np.int64], held: NDArray[np.int64], least: int, wanted: float, always: Iterable[int] = ()
) -> int:
    """The smallest size of a reduced vocabulary, in multiples of ``least``'s eighth, that covers enough.

    Args:
        counts: as for ``reduced_vocab``.
        held: of the tokens to be covered, [V].
        wanted: the share of them that it must hold.

    Returns:
        ``least`` or more, V at most: then the vocabulary holds all.
    """
    size, step = least, max(1, least // 8)
    while size < len(counts) and coverage(held, reduced_vocab(counts, size, always)) < wanted:
        size += step
    return min(size, len(counts))


def coverage(counts: NDArray[np.int64], vocab: VocabMap) -> float:
    """Share of the counted tokens that the vocabulary holds; 1.0 if none was counted."""
    total = int(counts.sum())
    return int(counts[vocab.to_target_D.numpy()].sum()) / total if total else 1.0
