"""Randomness as a function: every coin is named, none is drawn from a stream.

A coin is a counter-based hash of (seed, stream, position of the pending token, key). A request's
prompt is mixed into its seed (`key_of`), so that two prompts under one seed share no coin. The
stream names the use, the key the node and the draw (and the level of a cascade). The pending
position grows at every step, so no coin is used twice; batching, preemption and the order of calls
change none. What was made with a seed's coins must not be drafted from under the same coins.

One kind is keyed by the *absolute* position instead. `race`, the Gumbel race, picks a token as a function
of its distribution and of the coin of its position alone. The same distribution at the same position gives
the same token, so text is reproducible under any drafter. Use it only where the emitted token is that
function, as in the verifier `coupled`. Elsewhere a position that is drafted twice would meet the same
coins. A policy or drafter that reads refused tokens would then bias the output.
"""

from __future__ import annotations

import enum
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce

import numpy as np

from outpace.kernels import draws
from outpace.types import Law

_MASK = (1 << 64) - 1


class Stream(enum.IntEnum):
    """Uses of randomness that must not share a coin."""

    DRAFT = 1
    JUDGE = 2
    POLICY = 4
    RACE = 5
    ANSWER = 6


class Coins(ABC):
    """The coins of one sequence in one step, for one use."""

    @abstractmethod
    def flip(self, prob: float, *key: int) -> bool:
        """True with the given probability. ``prob`` outside (0, 1) decides without a coin."""

    @abstractmethod
    def choose(self, law: Law, *key: int) -> int:
        """A token drawn from the distribution. One host sync."""

    @abstractmethod
    def race(self, law: Law, depth: int, count: int = 1) -> list[int]:
        """The winner at ``pending position + depth``, then the runners-up: a draw without
        replacement under coins that draft and target share.

        Returns fewer than ``count`` tokens if the distribution's support is smaller. One host sync.
        """


class KeyedCoins(Coins):
    """The real thing.

    Args:
        seed: what names the coins of a text; ``key_of`` mixes the prompt into a request's seed.
        position: index of the pending token in its sequence, prompt included.
    """

    __slots__ = ("_base", "_seed", "_stream", "position")

    def __init__(self, seed: int, position: int, stream: Stream) -> None:
        self._seed, self.position, self._stream = seed, position, stream
        self._base: int | None = None  # made when the first coin falls: at temperature 0 none does

    @property
    def base(self) -> int:
        """What the keys of coins are mixed into, one part after another."""
        if self._base is None:
            self._base = _mix(_mix(_mix(self._seed, self._stream), 0), self.position)
        return self._base

    @property
    def race_base(self) -> int:
        """What positions are mixed into, for races."""
        return _mix(self._seed, Stream.RACE)

    def uniform(self, *key: int) -> float:
        """The uniform in [0, 1) behind the coin with this key."""
        return (reduce(_mix, key, self.base) >> 11) * 2.0**-53

    def flip(self, prob: float, *key: int) -> bool:
        if prob <= 0.0 or prob >= 1.0:
            return prob >= 1.0
        return self.uniform(*key) < prob

    def choose(self, law: Law, *key: int) -> int:
        if len(law.prob_S) == 1:
            return int(law.ids[0])
        index = draws.choose(law.prob_S, self.uniform(*key))
        return index if law.id_S is None else int(law.id_S[index])

    def race(self, law: Law, depth: int, count: int = 1) -> list[int]:
        if len(law.prob_S) == 1:
            return [int(law.ids[0])]
        order = draws.race(law.prob_S, law.id_S, self.race_key(depth), count)
        return order if law.id_S is None else [int(law.id_S[i]) for i in order]

    def race_key(self, depth: int) -> int:
        """What names the noise of a race."""
        return _mix(self.race_base, self.position + depth)


def later_seed(seed: int, turn: int) -> int:
    """The seed of an answer of a request: its own for the first (0), else 48 bits hashed from it."""
    return seed if turn == 0 else _mix(_mix(seed, int(Stream.ANSWER)), turn) >> 16


def key_of(seed: int, prompt: Sequence[int]) -> int:
    """What names the coins of a text: two prompts under one seed meet independent coins."""
    ids = np.asarray(prompt, dtype="<i8").tobytes()
    digest = hashlib.blake2b(ids, digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")


def _mix(state: int, part: int) -> int:
    """SplitMix64's finalizer over a state advanced by ``part`` (Steele et al. 2014)."""
    z = (state * 0xD1342543DE82EF95 + (part & _MASK) * draws.GOLDEN + draws.GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
