"""Plain decoding: nobody guesses, so every pass emits one token. The baseline of everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.drafters.base import Drafter, Request
from outpace.models.base import Target
from outpace.tree.growth import DraftRow
from outpace.types import Draft, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class NoConfig:
    """No settings."""


class NoDrafter(Drafter[None]):
    """Answers every call with the empty draft."""

    Config = NoConfig

    @classmethod
    def load(cls, config: NoConfig, target: Target) -> NoDrafter:
        return cls()

    def begin(self, request: Request) -> None:
        """No state."""

    def propose(self, rows: Sequence[DraftRow[None]]) -> list[Draft]:
        return [Draft()] * len(rows)

    def observe(self, states: Sequence[None], outcomes: Sequence[Outcome]) -> None:
        """Learn nothing."""
