"""Who gets memory: slots for sequences, pages for text that may be met again.

A page is 64 rows of a slot. The slots of a cache are equally long, so what they take is a
rectangle: as many pages as the longest one needs, for each. Stored pages come on top, and go first
when slots need their room. So the limit holds for what is allocated, and not only for what is in
use. One long text among many short ones costs a row of pages for each of them. Where that does not fit,
fewer run at a time. While the cache is made larger or smaller, both copies exist; caches
of drafters are not counted. So the limit is a part of what is free, unless it is given.

Where the size of a page is not known, slots take what they need, and only stored pages are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outpace.cache.base import PAGE, KVCache
from outpace.engine.sequence import ActiveSequence
from outpace.errors import RequestError
from outpace.models.prefix import PrefixStore

STORE_BYTES, STORE_PAGES = 1 << 29, 128
"""How much to store unless said otherwise: in bytes, or in pages where their size is not known."""
SHARE = 0.4
"""Of the memory that is free, what slots and stored pages may take unless said otherwise."""
LEAST_PAGES = 64
"""What they may take however little is free."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    limit: int
    """0: there is none."""
    used: int
    """That hold text of running sequences."""
    stored: int
    free: int
    """That nothing is allocated for; 0 without a limit."""


class Memory:
    """Gives slots and takes them back.

    Args:
        cache: of the target, without text; nobody else opens slots meanwhile.
        slots: most that will be asked for.
        pages: limit of everything together; None: a share of what is free on the device now.
        stored: most pages kept for prompts that begin alike; None: some 512 MB; 0: none.
        tail: guesses that a pass may add to a slot; what riders take beyond it is given back when idle.
        source_of: see `PrefixStore`.

    Raises:
        RequestError: too few pages, or a cache that cannot be limited.
    """

    def __init__(
        self,
        cache: KVCache,
        slots: int,
        *,
        pages: int | None = None,
        stored: int | None = None,
        tail: int = 64,
        device: torch.device | None = None,
        source_of: Callable[[Sequence[int]], Hashable] = lambda ids: None,
    ) -> None:
        if pages is not None and not cache.copies:
            raise RequestError(f"pages={pages}: the cache of this model cannot be limited; leave pages out")
        self._slots = slots
        if pages is None and cache.page_bytes and device is not None:
            free = free_bytes(device)
            if free is not None:
                pages = max(LEAST_PAGES, int(SHARE * free) // cache.page_bytes)
        if stored is None:
            stored = STORE_BYTES // cache.page_bytes if cache.page_bytes else STORE_PAGES
        self.cache, self.pages, self._tail = cache, pages, tail + 1
        self.store = PrefixStore(cache, stored if pages is None else min(stored, pages), source_of)
        if pages is not None and pages < self._needs(1):
            raise RequestError(f"pages must be at least {self._needs(1)}, got {pages}")
        self.trim()

    @property
    def longest(self) -> int | None:
        """Tokens of the longest text that can be held, alone; None: there is no limit."""
        return None if self.pages is None else self.pages * PAGE - self._tail

    def check(self, tokens: int) -> None:
        """Raise RequestError if a text cannot be held even when it is alone."""
        if self.pages is not None and self._needs(tokens) > self.pages:
            raise RequestError(
                f"prompt and answer may take {tokens} tokens, which need {self._needs(tokens)} "
                f"pages of memory, and there are {self.pages}; ask for fewer tokens"
            )

    def enter(
        self, ids: Sequence[int], key: str, running: Sequence[ActiveSequence], *, stored: bool = True
    ) -> int | None:
        """Open a slot for a text, with what is known of it copied in.

        Args:
            ids: tokens that are going to be read.
            stored: whether stored pages may be used.

        Returns:
            The slot; None if it must wait for memory.
        """
        if self.pages is not None:
            # A page more than needed: whoever enters shall not be sent away at once.
            needs = max([self._needs(len(ids) + PAGE), *(self._of(row) for row in running)])
            if running and needs * (len(running) + 1) > self.pages:
                return None
            self._make_room(running, 1, min(needs, self.pages))
        slot = self.cache.open()
        try:
            if stored:
                self.store.load(slot, key, ids)
        except BaseException:
            self.cache.close(slot)
            raise
        return slot

    def trim(self) -> None:
        """Give back what passes took beyond the limit, as for riders. No slot is in use."""
        if self.pages is not None and self._allocated + len(self.store) > self.pages:
            self.cache.resize(self.cache.slots, 0)

    def settle(self, running: Sequence[ActiveSequence]) -> bool:
        """Make room for the next pass of these; False if there are too many."""
        if self.pages is None or not running:
            return True
        needs = max(self._of(row) for row in running)
        if len(running) > 1 and needs * len(running) > self.pages:
            return False
        self._make_room(running, 0, min(needs, self.pages))
        return True

    def save(self, row: ActiveSequence) -> None:
        """Store the text that a slot holds, page by page."""
        before = len(self.store)
        self.store.save(row.slot, row.request.key)
        if self.pages is not None and len(self.store) > before:
            self.store.shrink(self.pages - self._allocated)

    @property
    def _allocated(self) -> int:
        slots, rows = self.cache.room
        return slots * (rows // PAGE)

    def _needs(self, tokens: int) -> int:
        return -(-(tokens + self._tail) // PAGE)

    def _of(self, row: ActiveSequence) -> int:
        return self._needs(len(row.tokens))

    def _make_room(self, running: Sequence[ActiveSequence], entering: int, pages: int) -> None:
        """Allocate at least ``pages`` pages for each of these and for ``entering`` more."""
        slots = len(running) + entering
        assert self.pages is not None
        had_slots, had_rows = self.cache.room
        slots = max(slots, self.cache.slots)
        enough = had_slots >= slots and had_rows >= pages * PAGE
        if enough and self._allocated + len(self.store) <= self.pages:
            return
        wide, tall = max(slots, had_slots), max(pages, had_rows // PAGE)
        if wide * tall <= self.pages:
            slots, pages = wide, tall
        else:
            for row in sorted(running, key=lambda row: -row.slot):
                row.slot = self.cache.relocate(row.slot)
            slots = max(entering + len(running), self.cache.slots)
        # Half as much again, as far as it goes, so that a growing text is not copied at each page.
        room = self.pages - len(self.store)
        pages = max(pages, min(pages + pages // 2, room // slots))
        # Slots that nobody uses yet cost nothing before they are written.
        slots = max(slots, min(self._slots, room // pages))
        self.store.shrink(self.pages - slots * pages)
        self.cache.resize(slots, pages * PAGE)

    def counts(self, running: Sequence[ActiveSequence]) -> PageCounts:
        used = sum(-(-self.cache.length(row.slot) // PAGE) for row in running)
        stored, limit = len(self.store), self.pages or 0
        return PageCounts(limit, used, stored, max(0, limit - self._allocated - stored))

    def check_integrity(self, running: Sequence[ActiveSequence]) -> None:
        """Raise AssertionError if memory is lost or the bookkeeping contradicts itself."""
        self.cache.check_integrity()
        self.store.check_integrity()
        slots = [row.slot for row in running]
        assert len(set(slots)) == len(slots), slots
        if self.pages is not None:
            assert self._allocated + len(self.store) <= self.pages, (self._allocated, self.pages)


def free_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Memory that is free on a device; None if it cannot be told.

    Args:
        root: of the file system in which a machine with a CPU alone tells of itself.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    group = root / "sys/fs/cgroup"
    found = []
    try:
        found.append(1024 * _figure(root / "proc/meminfo", "MemAvailable:"))
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        # Files that were read, such as the weights, count as used until their memory is wanted.
        kept = _figure(group / "memory.stat", "inactive_file")
        found.append(min(limit, max(0, limit - used + kept)))
    except (OSError, ValueError):  # another system, or a group without a limit
        pass
    return min(found, default=None)


def _figure(file: Path, name: str) -> int:
    """The number behind a name; ValueError if there is none."""
    for line in file.read_text(encoding="ascii").splitlines():
        if line.split()[:1] == [name]:
            return int(line.split()[1])
    raise ValueError(f"{file} does not tell {name}")
