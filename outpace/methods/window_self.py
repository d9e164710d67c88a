"""The target guesses, seeing the first few and the last tokens of the text only; nothing is trained.

The simplest view of a long text: sinks and window, as in StreamingLLM, with the true positions. It
is the baseline of the drafters that choose what they see.

Papers: StreamingLLM, arXiv:2309.17453; as a drafter in TriForce, arXiv:2404.11912.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.drafters.viewing import ViewDrafter
from outpace.models.base import Target
from outpace.models.views import Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSelfConfig:
    sinks: int = 16
    """First tokens of the text that are seen."""
    window: int = 496
    """Last tokens that are seen."""

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 1:
            raise ValueError(f"sinks must be 0 or more and window 1 or more, got {self.sinks}, {self.window}")


class WindowSelf(ViewDrafter):
    """Drafts through sinks and window; see `ViewDrafter`."""

    Config = WindowSelfConfig

    @classmethod
    def load(cls, config: WindowSelfConfig, target: Target) -> WindowSelf:
        return cls(target, Rule(sinks=config.sinks, window=config.window))
