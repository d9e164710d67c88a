"""What lookups over a suffix automaton of one text share: reading it, and going back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from outpace.drafters.worth import Priced, Trust
from outpace.methods.lookup.automaton import SuffixAutomaton
from outpace.types import Outcome


@dataclass(slots=True, eq=False)
class AutomatonState:
    known: SuffixAutomaton
    """Prompt and output, as far as they were indexed."""
    pending: list[int] = field(default_factory=list)
    """Tokens that came since. In a batch where nobody drafts, they may never be indexed."""
    trust: Trust = field(default_factory=Trust)

    @property
    def automaton(self) -> SuffixAutomaton:
        """Prompt and output. Cost: amortised O(1) per token that came since the last look."""
        if self.pending:
            self.known.extend(self.pending)
            self.pending.clear()
        return self.known


T = TypeVar("T", bound=AutomatonState)


class FollowsText(Priced[T]):
    """A lookup whose state is an ``AutomatonState``; it says how to begin and what to propose."""

    def observe(self, states: Sequence[T], outcomes: Sequence[Outcome]) -> None:
        """Take in the new text, and which guesses were kept."""
        for state, outcome in zip(states, outcomes, strict=True):
            state.pending.extend(outcome.appended)
            state.trust.learn(outcome)

    def mark(self, state: T) -> tuple[int, float]:
        """Constant cost; so is taking a token back, amortised."""
        return state.automaton.mark(), state.trust.doubt

    def rewind(self, state: T, mark: tuple[int, float]) -> T:
        """In place."""
        state.automaton.rewind(mark[0])
        state.trust.doubt = mark[1]
        return state
