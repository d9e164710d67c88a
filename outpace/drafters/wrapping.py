"""Drafters that stand before other drafters. What they do not change is that of the drafters inside.

A new member of the contract gets its forwarding here, once, and not in every wrapper.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from outpace.clock import Clocks, PassClock
from outpace.drafters.base import Drafter
from outpace.types import Budget, Draft

S = TypeVar("S")


class WrappingDrafter(Drafter[S]):
    """Forwards the drafter's contract to the drafters inside.

    A subclass implements ``begin``, ``propose``, ``observe`` and ``inner``. Its ``observe`` ends
    with ``self.follow()``.
    """

    def __init__(self, drafters: Sequence[Drafter[Any]]) -> None:
        self.drafters = tuple(drafters)
        self._base_traits = self.traits
        self.follow()

    @abstractmethod
    def inner(self, state: S) -> Sequence[tuple[Drafter[Any], Any]]:
        """Give the drafters that follow the sequence, each with its own state of it."""

    def follow(self) -> None:
        """Take over traits of the drafters inside; one may change its own while it observes."""
        inner, own = [one.traits for one in self.drafters], self._base_traits
        self.traits = replace(
            own,
            taps=own.taps.union(*(one.taps for one in inner)),
            uses_target_cache=own.uses_target_cache or any(one.uses_target_cache for one in inner),
            resumes=own.resumes or any(one.resumes for one in inner),
            lossless=own.lossless and all(one.lossless for one in inner),
            deterministic=own.deterministic and all(one.deterministic for one in inner),
        )

    @cached_property
    def clock(self) -> PassClock:
        clocks = [one.clock for one in self.drafters]
        return clocks[0] if len(clocks) == 1 else Clocks(clocks)

    def promise(self, state: S, draft: Draft) -> Sequence[float]:
        drafter, own = self.inner(state)[0]
        return drafter.promise(own, draft)

    def cut(self, state: S, draft: Draft, budget: Budget) -> Draft | None:
        drafter, own = self.inner(state)[0]
        return drafter.cut(own, draft, budget)

    def by_drafter(self, states: Sequence[S]) -> list[tuple[Drafter[Any], list[int]]]:
        """Group sequences by the first drafter inside."""
        found: dict[int, tuple[Drafter[Any], list[int]]] = {}
        for i, state in enumerate(states):
            drafter = self.inner(state)[0][0]
            found.setdefault(id(drafter), (drafter, []))[1].append(i)
        return list(found.values())

    def num_uncached(self, state: S, tokens: Sequence[int]) -> int:
        return sum(drafter.num_uncached(own, tokens) for drafter, own in self.inner(state))

    def end(self, state: S) -> None:
        """End the states of all drafters inside."""
        for drafter, own in self.inner(state):
            drafter.end(own)
