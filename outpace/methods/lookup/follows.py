"""What lookups over a suffix automaton of one text share: reading it, and going back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from outpace.drafters.worth import Priced, Trust
from outpace.methods.lookup.automaton import SuffixAutomaton
from outpace.types import Outcome


@dataclass(slots=True, eq=False)
class Text:
    read: SuffixAutomaton
    """Prompt and output, as far as they were looked at."""
    unread: list[int] = field(default_factory=list)
    """What came since: in a batch where nobody drafts, it may never be needed."""
    trust: Trust = field(default_factory=Trust)

    @property
    def text(self) -> SuffixAutomaton:
        """Prompt and output. Cost: amortised O(1) per token that came since the last look."""
        if self.unread:
            self.read.extend(self.unread)
            self.unread.clear()
        return self.read


T = TypeVar("T", bound=Text)


class FollowsText(Priced[T]):
    """A lookup whose state is a ``Text``; it says how to begin and what to propose."""

    def observe(self, states: Sequence[T], outcomes: Sequence[Outcome]) -> None:
        """Take in the new text, and which guesses were kept."""
        for state, outcome in zip(states, outcomes, strict=True):
            if outcome.forced:
                state.unread.extend(outcome.fed)
            state.unread.extend(outcome.verdict.emitted)
            state.trust.learn(outcome)

    def mark(self, state: T) -> tuple[int, float]:
        """Constant cost; so is taking a token back, amortised."""
        return state.text.mark(), state.trust.doubt

    def rewind(self, state: T, mark: tuple[int, float]) -> T:
        """In place."""
        state.text.rewind(mark[0])
        state.trust.doubt = mark[1]
        return state
