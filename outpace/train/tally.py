"""What is counted while held-out rows are judged, in every process for its own rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor


class Tally(ABC):
    """Counts of an objective besides acceptance, which its ``save`` writes."""

    @abstractmethod
    def gather(self, sum: Callable[[Tensor], Tensor]) -> None:
        """Put the sums over all processes in the place of this one's counts.

        Args:
            sum: gives sums of vectors; shorter ones count as if zeros followed.
        """
