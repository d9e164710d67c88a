"""Drafters that guess for each sequence by itself, such as those that look text up."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from outpace.drafters.base import Drafter
from outpace.tree.growth import DraftRow
from outpace.types import Draft

S = TypeVar("S")


class RowwiseDrafter(Drafter[S]):
    """A drafter that guesses for each sequence by itself: no pass serves several."""

    @abstractmethod
    def propose_one(self, row: DraftRow[S]) -> Draft:
        """Guess for one sequence; see ``propose``."""

    def propose(self, rows: Sequence[DraftRow[S]]) -> list[Draft]:
        return [self.propose_one(row) for row in rows]
