r"""Pages of text that was read before, to be copied into slots whose text begins alike.

    page 0        page 1           page 2
    [system ...]--[... prompt A]--[... answer A]      64 tokens each, found by their ids
              \--[... prompt B]

Attention wants the keys of a slot in one piece. Products over scattered pages would first have to
gather them, at every pass and layer, and their sums would come in another order. So a page is
shared by copying it into the slot when a sequence enters. That takes a hundredth of the time of
reading the text again, and nobody can write to what others see. The page is the unit of what is
shared, stored and counted; slots stay contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.cache.base import PAGE, KVCache

PIECE = 16
"""Rows of a drafter's prefix that are shared together; a conversation reads as many again at most."""

_Place = tuple[Hashable, tuple[int, ...]]


@dataclass(slots=True, eq=False)
class _Page:
    """Keys and values of some tokens, behind those of its parent."""

    place: _Place
    parent: _Page | None
    content: Any
    children: int = 0


class PrefixStore:
    """A bounded store of pages; the one least lately used goes first, children before parents.

    Args:
        most: pages to keep; 0 keeps none.
        size: tokens of a page.
        source_of: what an encoder reads of a text. It reads it whole, so pages of one source hold
            nothing of another, however alike the two begin.
    """

    def __init__(
        self,
        cache: KVCache,
        most: int,
        source_of: Callable[[Sequence[int]], Hashable] = lambda ids: None,
        size: int = PAGE,
    ) -> None:
        self._cache, self.most, self.size = cache, most if cache.copies else 0, size
        self._source_of = source_of
        self._pages: dict[_Place, _Page] = {}
        """The one looked at longest ago first, and a child before its parent where both were."""

    def __len__(self) -> int:
        return len(self._pages)

    def load(self, slot: int, key: Hashable, ids: Sequence[int]) -> int:
        """Fill an empty slot with the pages that a text begins with.

        Args:
            slot: of the cache, empty.
            key: whose text it is; pages of other keys are not seen.
            ids: the text; at most so many tokens are filled in.

        Returns:
            Tokens that the slot holds now: whole pages. Cost: one copy of their keys.
        """
        found = self._walk(key, ids)
        count = self.size * len(found)
        if found:
            self._cache.restore(slot, ids[:count], [page.content for page in found])
        return count

    def known(self, key: Hashable, ids: Sequence[int]) -> int:
        """Tokens that ``load`` would fill in."""
        return self.size * len(self._walk(key, ids))

    def save(self, slot: int, key: Hashable) -> None:
        """Keep the whole pages of a slot's committed text, those that are new."""
        if not self.most:
            return
        ids, size = self._cache.slot(slot).ids, self.size
        root, path = self._root(key, ids), self._walk(key, ids)
        for start in range(size * len(path), len(ids) - size + 1, size):
            if len(self._pages) >= self.most and not self._evict(path):
                return
            parent = path[-1] if path else None
            place = (root if parent is None else id(parent), tuple(ids[start : start + size]))
            content = self._cache.copy(slot, start, start + size)
            path.append(_Page(place, parent, content))
            self._pages[place] = path[-1]
            if parent is not None:
                parent.children += 1

    def shrink(self, most: int) -> None:
        """Keep at most so many pages for now."""
        while len(self._pages) > max(0, most):
            self._evict([])

    def _walk(self, key: Hashable, ids: Sequence[int]) -> list[_Page]:
        """The longest chain of pages that a text begins with; they count as used now."""
        path: list[_Page] = []
        name, size = self._root(key, ids), self.size
        for start in range(0, len(ids) - size + 1, size):
            page = self._pages.get((name, tuple(ids[start : start + size])))
            if page is None:
                break
            path.append(page)
            name = id(page)
        for page in reversed(path):
            self._pages[page.place] = self._pages.pop(page.place)
        return path

    def _root(self, key: Hashable, ids: Sequence[int]) -> Hashable:
        return key, self._source_of(ids)

    def _evict(self, path: Sequence[_Page]) -> bool:
        """Forget a page without children that is not on ``path``; False if there is none."""
        free = (page for page in self._pages.values() if not page.children and page not in path)
        page = next(free, None)
        if page is None:
            return False
        del self._pages[page.place]
        if page.parent is not None:
            page.parent.children -= 1
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        assert len(self._pages) <= self.most, (len(self._pages), self.most)
        children: dict[int, int] = {}
        for place, page in self._pages.items():
            assert page.place == place
            if page.parent is not None:
                assert self._pages.get(page.parent.place) is page.parent, "a parent went first"
                assert place[0] == id(page.parent)
                children[id(page.parent)] = children.get(id(page.parent), 0) + 1
        for page in self._pages.values():
            assert page.children == children.get(id(page), 0), page.place
