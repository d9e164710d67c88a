"""Sequences that lose their slot for a while, and drafters that begin anew within a text.

What a drafter knows from ids alone, and what it has learned, stays with the sequence: it reads
nothing twice. Drafters that read features of the target begin anew, for the passes that read
the text again show them these. So the text goes on as if nothing had happened.
"""

from __future__ import annotations

from dataclasses import replace

from outpace.cache.base import KVCache
from outpace.engine.method import Method
from outpace.engine.sequence import ActiveSequence


def suspend(row: ActiveSequence, cache: KVCache) -> None:
    """Take the slot away from a sequence that no pass is running over."""
    cache.close(row.slot)
    row.slot = -1


def resume(row: ActiveSequence, method: Method, cache: KVCache, slot: int) -> None:
    """Give a suspended sequence a slot that holds a prefix of its tokens, not its pending one.

    Effects: ``row.reading`` holds until its text is read again.
    """
    row.slot = slot
    if row.new_tokens == 0:
        restart(row, method, cache)
        return
    again = frozenset(name for name in row.all_members if method.members[name].drafter.traits.taps)
    restart(row, method, cache, again, num_cached=cache.length(slot))
    row.behind = True
    row.members = {name: row.all_members[name] for name in again}


def restart(
    row: ActiveSequence,
    method: Method,
    cache: KVCache,
    names: frozenset[str] | None = None,
    num_cached: int | None = None,
) -> None:
    """Begin drafters of a sequence anew.

    Args:
        names: which drafters; None: all.
        num_cached: tokens that no pass will show them; None: those that the slot holds, and the pending
            one too, unless the text is still being read.
    """
    if num_cached is None:
        num_cached = cache.length(row.slot) if row.reading else len(row.tokens)
    request = replace(row.request, prompt=tuple(row.tokens), num_cached=num_cached)
    for name, member in row.all_members.items():
        if names is None or name in names:
            drafter = method.members[name].drafter
            old, member.state = member.state, drafter.begin(request)
            drafter.end(old)
