"""What the target computes at every token; texts that begin alike share it up to where they part.

Besides the taps of a pass, ``kv.L`` is what the target's cache holds of layer L: the token's keys, rotated,
then its values. It is read as a drafter reads it (KV_READ), once the token is committed.

Shape letters: T rows of a text, H hidden size, C rows of a slot, Y numbers of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from outpace.cache.base import PAGE, KVCache, shared_prefix
from outpace.errors import ModelError
from outpace.models.base import KV_READ, TAPS, Target
from outpace.models.views import Readable
from outpace.types import Feed

ROWS = 1024
"""Tokens of a pass, about."""
KV = "kv."


def width_of(target: Target, tap: str) -> int:
    """Numbers per token of a tap."""
    if not tap.startswith(KV):
        return target.hidden_size
    shape = target.config  # type: ignore[attr-defined]
    return 2 * int(shape.num_kv_heads * shape.head_dim)


def rows_of(
    target: Target, cache: KVCache, slot: int, rows: range, taps: Mapping[str, Tensor], tap: str
) -> Tensor:
    """A tap [T, .] of committed rows of a slot.

    Args:
        taps: of the pass that fed these rows and no others of the slot.
    """
    if not tap.startswith(KV):
        return taps[tap]
    held = cast(Readable, target).read(cache, slot, int(tap.removeprefix(KV)))
    return held.row_CY[rows.start : rows.stop]


def passes(taps: Sequence[str]) -> frozenset[str]:
    """Those that a pass is asked for."""
    return frozenset(tap for tap in taps if not tap.startswith(KV))


def needed(taps: Sequence[str]) -> frozenset[str]:
    """Abilities of a target that has all of these taps."""
    return frozenset({TAPS} if len(passes(taps)) == len(taps) else {TAPS, KV_READ})


@torch.no_grad()
def compute(
    target: Target, texts: Sequence[Sequence[int]], taps: Sequence[str], rows: int = ROWS
) -> Iterator[dict[str, Tensor]]:
    """Features of texts, tap -> bfloat16 [T, H] on the CPU, in the order of the texts.

    Args:
        target: with the ability to give taps.
        rows: tokens of a pass, about; a longer text has passes of its own.

    Raises:
        ModelError: no such taps, or features that are not finite.
    """
    copies = target.new_cache().copies
    likes: dict[int, tuple[int, int]] = {}
    of, count = 0, {True: 0, False: 0}  # rows of texts that follow another, and of others
    for i, text in enumerate(texts):
        of, shared = _followed(texts, i, of if likes and copies else None)
        if likes and count[shared > 0] + len(text) - shared > rows:
            yield from _score(target, texts, likes, taps, rows)
            likes, of, shared, count = {}, i, 0, {True: 0, False: 0}
        likes[i] = of, shared
        count[shared > 0] += len(text) - shared
    if likes:
        yield from _score(target, texts, likes, taps, rows)


def alike(texts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Which text each one follows, and for how many tokens.

    Returns:
        Index of a text before it, and tokens that they share, fewer than it has; itself and 0 where the
        text begins like no other.
    """
    found: list[tuple[int, int]] = []
    for i in range(len(texts)):
        found.append(_followed(texts, i, found[-1][0] if found else None))
    return found


def _followed(texts: Sequence[Sequence[int]], i: int, of: int | None) -> tuple[int, int]:
    """The same for one text, which may follow the one at ``of``."""
    shared = 0 if of is None else min(shared_prefix(texts[of], texts[i]), len(texts[i]) - 1)
    return (i, 0) if of is None or shared < PAGE else (of, shared)


def _score(
    target: Target,
    texts: Sequence[Sequence[int]],
    likes: Mapping[int, tuple[int, int]],
    taps: Sequence[str],
    rows: int,
) -> list[dict[str, Tensor]]:
    """Features of some texts: first of those that begin like no other.

    Args:
        likes: index of a text -> see ``alike``.
    """
    cache = target.new_cache(capacity=max(len(texts[i]) for i in likes))
    slots = {i: cache.open() for i, (of, _) in likes.items() if of == i}
    found = _read(target, texts, slots, cache, taps, rows)
    slots = {i: cache.fork(slots[of], shared) for i, (of, shared) in likes.items() if of != i}
    for i, own in _read(target, texts, slots, cache, taps, rows).items():
        of, shared = likes[i]
        found[i] = {tap: torch.cat([found[of][tap][:shared], own[tap]]) for tap in taps}
    return [found[i] for i in likes]


def _read(
    target: Target,
    texts: Sequence[Sequence[int]],
    slots: Mapping[int, int],
    cache: KVCache,
    taps: Sequence[str],
    rows: int,
) -> dict[int, dict[str, Tensor]]:
    """Features of what is left of texts behind what their slots hold, together in passes.

    Args:
        slots: index of a text -> its slot.
        rows: tokens of one text that a pass reads, at most.
    """
    left = {i: len(texts[i]) - cache.length(slot) for i, slot in slots.items()}
    pieces: dict[int, dict[str, list[Tensor]]] = {i: {tap: [] for tap in taps} for i in slots}
    for _ in range(0, max(left.values(), default=0), rows):
        feeds = {}
        for i, slot in slots.items():
            held = cache.length(slot)
            feeds[i] = Feed.chain(slot, list(texts[i][held : held + rows]), want=())
        scored = target.score([*feeds.values()], cache, taps=passes(taps))
        for n, (i, feed) in enumerate(feeds.items()):
            held = cache.length(feed.slot)
            cache.keep(feed.slot, range(len(feed.token_J)))
            part_rows = range(held, cache.length(feed.slot))
            for tap in taps:
                found_TH = rows_of(target, cache, feed.slot, part_rows, scored.of(n).taps, tap)
                rows_TH = found_TH.to("cpu", torch.bfloat16, copy=True)
                if not bool(torch.isfinite(rows_TH).all()):
                    raise ModelError(
                        f"{target.name} gave features {tap} that are not finite for text {i}; "
                        "load it in float32"
                    )
                pieces[i][tap].append(rows_TH)
    return {i: {tap: torch.cat(one) for tap, one in piece.items()} for i, piece in pieces.items()}
