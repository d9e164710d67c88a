"""What sequences share with those of the same key alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerKey(Generic[T]):
    """One thing per key, for the keys that were used last.

    Args:
        most: keys that are remembered; beyond them the one that was longest unused is forgotten.
            Whoever holds what it had keeps that.
    """

    def __init__(self, make: Callable[[], T], most: int) -> None:
        self._make, self._most = make, most
        self._of_key: dict[str, T] = {}

    def __len__(self) -> int:
        return len(self._of_key)

    def of(self, key: str) -> T:
        found = self._of_key.pop(key) if key in self._of_key else self._make()
        self._of_key[key] = found  # the newest last
        if len(self._of_key) > self._most:
            del self._of_key[next(iter(self._of_key))]
        return found
