"""Which replica has read the beginning of a request: blocks of text, named by all text up to their end."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

BLOCK = 256
"""Bytes of a block: about a page of the cache, 64 tokens."""
_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt")
"""Fields of bodies that become text of a prompt, in the order in which templates write them."""

R = TypeVar("R", bound=Hashable)


def blocks(body: bytes, key: bytes = b"") -> tuple[bytes, ...]:
    """Names of the blocks that the prompt of a request begins with.

    Two requests share as many names as their prompts share whole blocks.

    Args:
        body: JSON of any of the APIs; anything else has no blocks.
        key: whose request it is: a replica shares nothing between keys.
    """
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(told, dict):
        return ()
    wanted = [told[name] for name in _FIELDS if told.get(name)]
    text = "".join(one if isinstance(one, str) else json.dumps(one) for one in wanted).encode(
        errors="surrogatepass"
    )
    running, names = hashlib.sha256(key), []
    for end in range(BLOCK, len(text) + 1, BLOCK):
        running.update(text[end - BLOCK : end])
        names.append(running.digest()[:16])
    return tuple(names)


class Beginnings(Generic[R]):
    """What each replica was sent, as far as is remembered.

    Args:
        most: blocks to remember of a replica; those least lately used go first.
    """

    def __init__(self, most: int = 1 << 16) -> None:
        self._most = most
        self._seen: dict[R, OrderedDict[bytes, None]] = {}

    def sent(self, replica: R, names: Sequence[bytes]) -> None:
        """Note that a request with these blocks went to a replica."""
        seen = self._seen.setdefault(replica, OrderedDict())
        # The last block is the first to be forgotten: without those before it, it finds nothing.
        for name in reversed(names):
            seen[name] = None
            seen.move_to_end(name)
        while len(seen) > self._most:
            seen.popitem(last=False)

    def keep(self, replicas: set[R]) -> None:
        """Forget all other replicas."""
        for gone in self._seen.keys() - replicas:
            del self._seen[gone]

    def known(self, replica: R, names: Sequence[bytes]) -> int:
        """How many of the first blocks a replica was sent."""
        seen = self._seen.get(replica)
        if seen is None:
            return 0
        return next((count for count, name in enumerate(names) if name not in seen), len(names))

    def ranked(self, loads: Mapping[R, int], names: Sequence[bytes], busier: int) -> list[R]:
        """Replicas, the one to ask first in front.

        That is the one that knows most of the beginning, unless it is busier than the least busy one by more
        than ``busier``. Without such a one it is the least busy, and of equal ones that which was sent least.
        """
        least = min(loads.values(), default=0)

        def order(replica: R) -> tuple[int, int, int]:
            known = self.known(replica, names) if loads[replica] - least <= busier else 0
            return -known, loads[replica], len(self._seen.get(replica, ()))

        return sorted(loads, key=order)
