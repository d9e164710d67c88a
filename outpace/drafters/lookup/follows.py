"""What lookups over a suffix automaton of one text share: reading it, and going back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from outpace.drafters.lookup.automaton import SuffixAutomaton
from outpace.drafters.lookup.worth import Priced, Trust
from outpace.types import Outcome


@dataclass(slots=True, eq=False)
class Text:
    """One sequence."""

    text: SuffixAutomaton
    """Prompt and output."""
    trust: Trust = field(default_factory=Trust)


T = TypeVar("T", bound=Text)


class FollowsText(Priced[T]):
    """A lookup whose state is a ``Text``; it says how to begin and what to propose."""

    def observe(self, states: Sequence[T], outcomes: Sequence[Outcome]) -> None:
        """Take in the new text, and which guesses were kept."""
        for state, outcome in zip(states, outcomes, strict=True):
            if outcome.forced:
                state.text.extend(outcome.fed)
            state.text.extend(outcome.verdict.emitted)
            state.trust.learn(outcome)

    def mark(self, state: T) -> tuple[int, float]:
        """Constant cost; so is taking a token back, amortised."""
        return state.text.mark(), state.trust.doubt

    def rewind(self, state: T, mark: tuple[int, float]) -> T:
        """In place."""
        state.text.rewind(mark[0])
        state.trust.doubt = mark[1]
        return state
