r"""Pages of text that was read before, to be copied into slots whose text begins alike.

    page 0        page 1           page 2
    [system ...]--[... prompt A]--[... answer A]      64 tokens each, found by their ids
              \--[... prompt B]

Attention wants the keys of a slot in one piece: products over scattered pages would first have to
gather them, at every pass and layer, and their sums would come in another order. So a page is
shared by copying it into the slot when a sequence enters, which takes a hundredth of the time
of reading the text again, and nobody can write to what others see. The page is the unit of
what is shared, stored and counted; slots stay contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.cache.base import PAGE, KVCache

_Place = tuple[Hashable, tuple[int, ...]]


@dataclass(slots=True, eq=False)
class _Page:
    """Keys and values of 64 tokens, behind those of its parent."""

    place: _Place
    parent: _Page | None
    content: Any
    used: int
    """When it was last looked at."""
    children: int = 0


class PrefixStore:
    """A bounded store of pages; the one least lately used goes first, children before parents.

    Args:
        most: pages to keep; 0 keeps none.
        source_of: what an encoder reads of a text. It reads it whole, so pages of one source hold
            nothing of another, however alike the two begin.
    """

    def __init__(
        self, cache: KVCache, most: int, source_of: Callable[[Sequence[int]], Hashable] = lambda ids: None
    ) -> None:
        self._cache, self.most = cache, most if cache.copies else 0
        self._source_of = source_of
        self._pages: dict[_Place, _Page] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._pages)

    def load(self, slot: int, key: Hashable, ids: Sequence[int]) -> int:
        """Fill an empty slot with the pages that a text begins with.

        Args:
            slot: of the cache, empty.
            key: whose text it is; pages of other keys are not seen.
            ids: the text; at most so many tokens are filled in.

        Returns:
            Tokens that the slot holds now, a multiple of ``PAGE``. Cost: one copy of their keys.
        """
        found = self._walk(key, ids)
        if found:
            count = PAGE * len(found)
            self._cache.restore(slot, ids[:count], [page.content for page in found])
        return PAGE * len(found)

    def known(self, key: Hashable, ids: Sequence[int]) -> int:
        """Tokens that ``load`` would fill in."""
        return PAGE * len(self._walk(key, ids))

    def save(self, slot: int, key: Hashable) -> None:
        """Keep the whole pages of a slot's committed text, those that are new."""
        if not self.most:
            return
        ids = self._cache.slot(slot).ids
        root, path = self._root(key, ids), self._walk(key, ids)
        for start in range(PAGE * len(path), len(ids) - PAGE + 1, PAGE):
            if len(self._pages) >= self.most and not self._evict(path):
                return
            parent = path[-1] if path else None
            place = (root if parent is None else id(parent), tuple(ids[start : start + PAGE]))
            content = self._cache.copy(slot, start, start + PAGE)
            path.append(_Page(place, parent, content, self._clock))
            self._pages[place] = path[-1]
            if parent is not None:
                parent.children += 1

    def shrink(self, most: int) -> None:
        """Keep at most so many pages for now."""
        while len(self._pages) > max(0, most):
            self._evict([])

    def _walk(self, key: Hashable, ids: Sequence[int]) -> list[_Page]:
        """The longest chain of pages that a text begins with; they count as used now."""
        self._clock += 1
        path: list[_Page] = []
        name = self._root(key, ids)
        for start in range(0, len(ids) - PAGE + 1, PAGE):
            page = self._pages.get((name, tuple(ids[start : start + PAGE])))
            if page is None:
                break
            page.used = self._clock
            path.append(page)
            name = id(page)
        return path

    def _root(self, key: Hashable, ids: Sequence[int]) -> Hashable:
        return key, self._source_of(ids)

    def _evict(self, path: Sequence[_Page]) -> bool:
        """Forget a page without children that is not on ``path``; False if there is none."""
        free = [page for page in self._pages.values() if not page.children and page not in path]
        if not free:
            return False
        page = min(free, key=lambda page: page.used)
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
