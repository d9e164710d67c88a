"""What a step needs to run on a text that is a guess: a cache ahead of it (coins: drafters/ahead.py).

A draft model that is sped up runs steps of its own between two steps of the target. Its text is
the committed one and what it has guessed so far. Nothing here writes to what the target's
sequence owns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from outpace.cache.base import KVCache, shared_prefix
from outpace.clock import PassClock
from outpace.drafters.ahead import WarpAhead
from outpace.drafters.columns import PASSES
from outpace.models.base import Target
from outpace.sampling import Warp
from outpace.types import Feed, Law, Scored


class Soft(WarpAhead):
    """The distributions of a greedy sequence as they were before the likeliest token was taken, for
    levels that judge leniently. Penalties and bans are left out: a guess need not keep them.
    """

    def __init__(self, base: Warp) -> None:
        super().__init__(base, chosen=True)
        self.greedy = False

    @property
    def plain(self) -> bool:
        return False

    def law(self, logits_V: Tensor, path: Sequence[int] = (), id_V: Tensor | None = None) -> Law:
        return Law(logits_V.float().softmax(0), id_V)


class CacheAhead(KVCache):
    """A model's cache, of which a step sees only what it asked for.

    A slot may lag behind its text. The next pass of `Reader` then feeds the missing tokens too,
    and the rows of ``keep`` count from the one after them.
    """

    def __init__(self, real: KVCache) -> None:
        super().__init__()
        self.real = real
        self._slots = real._slots
        self._lag: dict[int, int] = {}
        self._missing: dict[int, tuple[int, ...]] = {}

    def follow(self, slot: int, tokens: Sequence[int]) -> None:
        """Bring a slot in line with a text; the last token will be pending."""
        held = self._slots[slot].ids
        same = shared_prefix(held, tokens[:-1])
        self.real.truncate(slot, same)
        self._missing[slot] = tuple(tokens[same:-1])
        self._lag[slot] = 0

    def take(self, slot: int) -> tuple[int, ...]:
        """What the slot lacks. The caller feeds it, and says so with ``shift`` or ``keep``."""
        return self._missing.pop(slot, ())

    def shift(self, slot: int, lag: int) -> None:
        """The tail begins with so many rows that the step does not know of."""
        self._lag[slot] = lag

    def keep(self, slot: int, rows: Sequence[int]) -> None:
        """Commit a path, and before it what was missing."""
        lag = self._lag.pop(slot, 0)
        self.real.keep(slot, [*range(lag), *(row + lag for row in rows)])

    def drop(self, slot: int) -> None:
        self.real.drop(slot)

    @property
    def nbytes(self) -> int:
        return self.real.nbytes

    def _reserve(self, slots: int, rows: int) -> None:
        self.real._reserve(slots, rows)

    def _move(self, slot: int, rows: Sequence[int], start: int) -> None:
        self.real._move(slot, rows, start)


class Reader(Target):
    """A draft model as the target of inner steps.

    Args:
        model: it; scores with the cache behind a `CacheAhead`.
    """

    def __init__(self, model: Target, clock: PassClock) -> None:
        self.model, self._clock = model, clock
        self.name, self.digest, self.vocab_size = model.name, model.digest, model.vocab_size
        self.hidden_size, self.num_layers = model.hidden_size, model.num_layers
        self.max_positions, self.can = model.max_positions, model.can & PASSES
        self.device, self.dtype = model.device, model.dtype

    @property
    def clock(self) -> PassClock:
        return self._clock

    def new_cache(self, capacity: int = 0) -> CacheAhead:
        return CacheAhead(self.model.new_cache(capacity))

    def score(
        self,
        feeds: Sequence[Feed],
        cache: KVCache,
        *,
        taps: frozenset[str] = frozenset(),
        layers: int | None = None,
    ) -> Scored:
        """One pass, over missing tokens as well; two if something must not share theirs."""
        assert isinstance(cache, CacheAhead)
        alone = bool(taps) or any(f.riders is not None or f.resume is not None for f in feeds)
        whole = []
        for feed in feeds:
            missing = cache.take(feed.slot)
            if missing and alone:
                self.read({feed.slot: missing}, cache)
            elif missing:
                cache.shift(feed.slot, len(missing))
                feed = behind(feed, missing)
            whole.append(feed)
        with self._clock:
            return self.model.score(whole, cache.real, taps=taps, layers=layers)

    def read(self, tokens: Mapping[int, Sequence[int]], cache: CacheAhead) -> None:
        """Commit given tokens, slot by slot, in one pass."""
        with self._clock:
            self.model.score([Feed.chain(s, t, want=()) for s, t in tokens.items()], cache.real)
        for slot, fed in tokens.items():
            cache.real.keep(slot, range(len(fed)))


def behind(feed: Feed, missing: Sequence[int]) -> Feed:
    """The same rows after some tokens of which no logits are wanted."""
    lag = len(missing)
    want = range(len(feed.token_J)) if feed.want is None else feed.want
    return Feed(
        feed.slot,
        (*missing, *feed.token_J),
        (*range(-1, lag - 1), *(parent + lag for parent in feed.parent_J)),
        want=tuple(row + lag for row in want),
    )
