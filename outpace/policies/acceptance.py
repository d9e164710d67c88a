"""How much of a draft is kept: stated chances, corrected by what they were worth lately.

Every guess has a stated chance. A lookup tells it beforehand; of other drafters it is a constant. What
was kept is compared with what was stated, over all texts and over the text at hand:

    chance = stated * (kept + w) / (stated + w) of all texts * (kept + w) / (expected + w) of this one
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.policies.tuning import Tuning


class Ratio:
    """Guesses kept, over those that were expected to be; old ones are forgotten."""

    __slots__ = ("expected", "kept")

    def __init__(self, kept: float = 0.0, expected: float = 0.0) -> None:
        if not (0.0 <= kept <= 1e6 and 0.0 <= expected <= 1e6):
            raise ValueError(f"need counts, got {kept} and {expected}")
        self.kept, self.expected = float(kept), float(expected)

    @classmethod
    def measured(cls, kept_D: Sequence[float], tried_D: Sequence[float], tuning: Tuning) -> Ratio:
        """What was measured beforehand, by level: drafts that were kept there, and tried. It counts no
        more than one text does.
        """
        scale = min(1.0, tuning.text / sum(tried_D)) if any(tried_D) else 0.0
        return cls(scale * sum(kept_D), scale * tuning.hope * sum(tried_D))

    def value(self, doubt: float) -> float:
        """Above 1 where more was kept than expected; 1 while nothing was seen."""
        return (self.kept + doubt) / (self.expected + doubt)

    def add(self, kept: float, expected: float, most: float) -> None:
        """Take in what was kept; of all that was seen at most so much stays."""
        self.kept += kept
        self.expected += expected
        total = max(self.kept, self.expected)
        if total > most:
            self.kept *= most / total
            self.expected *= most / total
