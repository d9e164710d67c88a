"""The target guesses, seeing the tokens that its own heads vote for; nothing is trained.

Per head of keys, its query heads vote with the softmax of their scores over the text. So none outvotes
another because its scores are larger. A run of tokens has the votes of its best one; runs with most votes
are seen, with the first few tokens and the last. Scores come of the few coordinates where queries are
largest. A layer keeps its choice while the query points the same way.

With ``lossy=true`` the target itself sees no more than that, in every pass behind the prompt. That
is faster for long texts, and no longer the distribution of the model. It has to be allowed.

Sources: TokenSelect, arXiv:2411.02886, which selects for every query and is no drafter; there one choice of
tokens serves all heads of a layer. Few coordinates: SparQ, arXiv:2312.04985.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outpace.drafters.viewing import ViewDrafter, ViewState
from outpace.models.base import Target
from outpace.models.views import VOTE, Rule
from outpace.tree.growth import DraftRow
from outpace.types import Draft


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSelectConfig:
    budget: int = 512
    """Tokens seen: the first, the last and those chosen."""
    sinks: int = 16
    """First tokens of the text, always seen."""
    window: int = 112
    """Last tokens, always seen."""
    run: int = 32
    """Neighbouring tokens that are chosen together; 32 fill a cache line with keys in bfloat16."""
    read: int = 24
    """Coordinates of a key that choosing reads: those where queries are largest; 0 for all."""
    every: int | None = None
    """Drafts (``lossy``: tokens) from one choice to the next; without it 8, and 1 if lossy. What is chosen
    for several is kept side by side: 23 kB per token of a model with 30 layers and 3 heads of keys."""
    same: float = 0.9
    """Cosine of the queries from which on a layer keeps its choice."""
    fall: float = 0.5
    """Choose anew when a smaller share of the last guesses was kept."""
    lossy: bool = False
    """The target sees no more either: changes the distribution of the output."""

    def __post_init__(self) -> None:
        if min(self.run, self.stride) < 1 or min(self.sinks, self.window - 1, self.count - 1) < 0:
            raise ValueError(
                f"budget must be above sinks and window, run and every 1 or more, got budget={self.budget} "
                f"sinks={self.sinks} window={self.window} run={self.run} every={self.stride}"
            )
        if self.read < 0 or self.read % 2:
            raise ValueError(f"read must be even, 0 or more, got {self.read}")
        if not 0 <= self.fall <= 1:
            raise ValueError(f"fall must be in [0, 1], got {self.fall}")

    @property
    def stride(self) -> int:
        if self.every is not None:
            return self.every
        return 1 if self.lossy else 8

    @property
    def first(self) -> int:
        return -(-self.sinks // self.run) * self.run

    @property
    def count(self) -> int:
        return (self.budget - self.first - self.window) // self.run * self.run

    @property
    def rule(self) -> Rule:
        return Rule(
            sinks=self.first,
            window=self.window,
            count=self.count,
            kind=VOTE,
            run=self.run,
            read=self.read,
            least=self.same,
            copies=self.stride > 1,
        )


class TokenSelect(ViewDrafter):
    """Drafts through a view of chosen tokens; see `ViewDrafter`."""

    Config = TokenSelectConfig

    def __init__(self, config: TokenSelectConfig, target: Target) -> None:
        super().__init__(target, config.rule, config.stride, config.fall)
        if config.lossy:
            self.traits = replace(
                self.traits, default_nodes=1, lossless=False, uses_target_cache=False, least_context=0
            )

    @classmethod
    def load(cls, config: TokenSelectConfig, target: Target) -> TokenSelect:
        return cls(config, target)

    def propose(self, rows: Sequence[DraftRow[ViewState]]) -> list[Draft]:
        """A draft; if lossy no guess, but what the pass is to see."""
        if self.traits.lossless:
            return super().propose(rows)
        return [Draft(view=row.state.seeing.look(len(row.tokens) - 1)) for row in rows]
