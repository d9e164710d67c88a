"""Prompt lookup: what followed these words before may follow them again.

    ... the cat sat on [the cat] -> draft "sat on the"

Strong where the output repeats its input (editing, summarising, retrieval, code); silent
elsewhere, where it costs a few dictionary reads. Needs no weights and no training.

The original always drafts the same number of tokens. Here a draft ends where one more guess would
cost more than it is expected to bring. A short match or a text that keeps refusing gets few
guesses, a long match many.

Source: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from outpace.drafters.base import Request, Traits
from outpace.drafters.worth import Priced, Trust, grow
from outpace.models.base import Target
from outpace.tree.growth import DraftRow
from outpace.types import Draft, Outcome

Place: TypeAlias = tuple[int, int, int]
"""Where a copy began in the text, the index that it takes next, and how many tokens agree."""

LONGEST = 32
"""Matches are not followed further back: chances hardly grow beyond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLookupConfig:
    max_ngram: int = 4
    """Longest suffix to search for, in tokens. Longer ones are tried first."""
    min_ngram: int = 1
    """Shortest suffix worth a draft. After a match of one token a quarter of the guesses is kept,
    which pays while a pass has rows to spare."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}")


@dataclass(slots=True, eq=False)
class _State:
    """The text so far, and where each n-gram was last followed by something."""

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram -> index of the token that followed its newest occurrence."""
    trust: Trust = field(default_factory=Trust)


class PromptLookup(Priced[_State]):
    """Looks the longest recent suffix up in an index of n-grams.

    Cost: O(max_ngram) dictionary operations per token and per draft, as many entries per token of
    text, and at most ``LONGEST`` comparisons per draft.
    """

    Config = PromptLookupConfig
    traits = Traits(default_nodes=16, previews=True)

    def __init__(self, config: PromptLookupConfig) -> None:
        self.config = config

    @classmethod
    def load(cls, config: PromptLookupConfig, target: Target) -> PromptLookup:
        return cls(config)

    def begin(self, request: Request) -> _State:
        """The text that is held already; the rest of the prompt arrives through ``observe``."""
        state = _State()
        for token in request.prompt[: request.num_cached]:
            self._push(state, token)
        return state

    def propose_one(self, row: DraftRow[_State]) -> Draft:
        """A chain; in a tree the siblings come from shorter suffixes. CHOSEN, and empty where
        no suffix of ``min_ngram`` tokens came before.
        """
        tokens, trust = row.state.tokens, row.state.trust

        def after(places: list[Place]) -> list[tuple[int, float, list[Place]]]:
            found: dict[int, tuple[float, list[Place]]] = {}
            left = 1.0
            for first, at, match in places:
                if tokens[at] not in found:
                    # A shorter suffix has its say where the longer ones are wrong.
                    chance = left * trust.chance(match)
                    left -= chance
                    # A copy that has caught up with the text is a loop: let it go round.
                    then = at + 1 if at + 1 < len(tokens) else first
                    found[tokens[at]] = chance, [(first, then, match + 1)]
            return [(token, *what) for token, what in found.items()]

        return grow(after, self._places(row.state), row.budget, trust.own)

    def _places(self, state: _State) -> list[Place]:
        """Where the suffixes of the text were last followed by something, the longest first."""
        out: list[Place] = []
        tokens, most = state.tokens, self.config.max_ngram
        for n in range(most, self.config.min_ngram - 1, -1):
            first = state.ends.get(tuple(tokens[-n:])) if len(tokens) >= n else None
            if first is not None:
                match = _agreeing(tokens, first, n) if n == most else n
                out.append((first, first, match))
        return out

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        """Index the new text; an n-gram enters once its successor is known. Learn trust."""
        for state, outcome in zip(states, outcomes, strict=True):
            for token in outcome.appended:
                self._push(state, token)
            state.trust.learn(outcome)

    def _push(self, state: _State, token: int) -> None:
        tokens = state.tokens
        for n in range(self.config.min_ngram, self.config.max_ngram + 1):
            if len(tokens) >= n:
                state.ends[tuple(tokens[-n:])] = len(tokens)
        tokens.append(token)


def _agreeing(tokens: Sequence[int], first: int, known: int) -> int:
    """How many tokens before ``first`` are also the last of the text; ``known`` are for sure.

    An n-gram proves no more than n. A copy that has gone on for longer deserves more guesses.
    """
    match = known
    while match < min(first, LONGEST) and tokens[first - 1 - match] == tokens[-1 - match]:
        match += 1
    return match
