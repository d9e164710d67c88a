"""Reference drafting: the output is expected to follow a given text, give or take some edits.

    reference   He go to school every days , and ...
    output      He goes to school every day
                   |       guess after the edit: "to school every days", one place further on
                                             |   and here: ", and ..."

Aggressive decoding for editing, LLMA for answers that copy from documents, and expected output
(a *prediction*) are one method: keep one's place in the reference, draft on from there, and after
a divergence find the place again. The reference is the one that the caller supplied, else the
prompt, which the output joins as it comes: an answer that repeats itself follows itself. Where an
encoder reads the prompt, its source is the reference, from the first token to the end of the text:
who corrects or rewrites copies most of it.

The place is a few hypotheses, best first: after a divergence one token was replaced, or one was
put in, or the longest suffix of the output that occurs in the reference says where it goes on;
nearer places are preferred, a longer suffix outweighs the distance. The text that follows keeps
the hypotheses that agree. Drafts are long where the place has been right for long, a few tokens
after a divergence (`outpace.drafters.worth`).

Reaches several times the speed of plain decoding where the output repeats the reference; drafts
little or nothing where it does not.

Cost: O(1) per token of the output, O(reference) once; 300 bytes per token of the reference.
Paper: Sun et al. 2021, input-guided aggressive decoding, arXiv:2106.04970; Yang et al. 2023,
LLMA, arXiv:2304.04487.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from outpace.drafters.base import Request, Traits
from outpace.drafters.worth import Priced, Trust, grow
from outpace.models.base import Target
from outpace.tree.growth import DraftRow
from outpace.types import Draft, Outcome

SOURCES = ("prompt", "request")
Source = Callable[[Sequence[int]], Sequence[int] | None]
"""What an encoder reads of a prompt; None without an encoder."""

SUPPLIED = 8
"""An output that was announced begins as if so many tokens of it had been right already."""
_NEAREST = 12  # places of one phrase that are looked at
_LONGEST = 16  # tokens that are compared at a place
_KEPT = 4  # hypotheses
_FAR = 0.35  # what doubling a distance costs, in tokens that agree
_PATIENCE = 2  # divergences in a row after which a replaced token is no explanation


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceConfig:
    source: str = "prompt"
    """What to follow where a request brings no reference: prompt and output so far (of an
    encoder-decoder its source), or with ``request`` nothing."""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source must be {' or '.join(SOURCES)}, got {self.source}")


@dataclass(frozen=True, slots=True)
class _Place:
    """A hypothesis of where in the reference the output goes on."""

    at: int
    """Index of the token that is expected next."""
    match: int
    """Tokens before it that agree with the output; 1 where an edit is assumed instead."""


@dataclass(slots=True, eq=False)
class _State:
    places: list[_Place]
    """Best first."""
    expected: int | None
    """Where the output would go on if every divergence had replaced one token by one."""
    grows: bool
    """Whether the output joins the reference."""
    reference: list[int] = field(default_factory=list)
    lost: int = 0
    """Divergences since a hypothesis was last right."""
    output: list[int] = field(default_factory=list)
    trust: Trust = field(default_factory=Trust)
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """Phrase of one or two tokens -> indices of the tokens after it, ascending."""

    def follow(self, tokens: Iterable[int]) -> None:
        """Append to the reference. A phrase is found once something follows it."""
        for token in tokens:
            end = len(self.reference)
            for size in range(1, min(2, end) + 1):
                self.ends.setdefault(tuple(self.reference[end - size :]), []).append(end)
            self.reference.append(token)

    def read(self, token: int) -> None:
        """Advance past one token of the output."""
        self.output.append(token)
        if self.expected is not None:
            self.expected += 1
        right = [
            _Place(place.at + 1, min(place.match + 1, 1 << 20))
            for place in self.places
            if place.at < len(self.reference) and self.reference[place.at] == token
        ]
        if right:
            self.places, self.lost = right, 0
            self.expected = right[0].at
        else:
            self.lost += 1
            self.places = []
        if self.grows:
            self.follow([token])
        if not right:
            self.places = self._find()

    def _find(self) -> list[_Place]:
        scores: dict[_Place, float] = {}
        for size in (2, 1):
            after = self.ends.get(tuple(self.output[-size:]), []) if self.output else []
            for at in self._nearest(after):
                match = self._match(at)
                distance = len(self.reference) if self.expected is None else self.expected - at
                score = match - _FAR * math.log2(1 + abs(distance))
                if score > 0 or match > 1:
                    scores[_Place(at, match)] = score
        if self.expected is not None and self.lost <= _PATIENCE:
            scores.setdefault(_Place(self.expected, 1), 0.0)
            scores.setdefault(_Place(self.expected - 1, 1), -0.1)  # a token was put in
        return sorted(scores, key=lambda place: (-scores[place], place.at))[:_KEPT]

    def _nearest(self, places: list[int]) -> list[int]:
        """The few of them that are nearest to where the output is expected to go on."""
        if self.expected is None:
            return places[-_NEAREST:]
        middle = bisect_left(places, self.expected)
        return places[max(0, middle - _NEAREST // 2) : middle + _NEAREST // 2]

    def _match(self, at: int) -> int:
        """How many tokens before a place agree with the end of the output."""
        most = min(_LONGEST, at, len(self.output))
        match = 0
        while match < most and self.reference[at - 1 - match] == self.output[-1 - match]:
            match += 1
        return match


class Reference(Priced[_State]):
    """Follows a given text, and finds its place again after edits."""

    Config = ReferenceConfig
    traits = Traits(default_nodes=32, previews=True)

    def __init__(self, config: ReferenceConfig, source: Source | None = None) -> None:
        self.config = config
        self._source = source

    @classmethod
    def load(cls, config: ReferenceConfig, target: Target) -> Reference:
        return cls(config, target.source_of)

    def begin(self, request: Request) -> _State:
        """Index the reference. One that was supplied, or that an encoder reads, is followed from its
        first token on.
        """
        reference: Sequence[int] | None = request.reference
        if reference is None and self._source is not None and self.config.source == "prompt":
            reference = self._source(request.prompt)
        if reference is not None:
            state = _State([_Place(0, SUPPLIED)], 0, grows=False)
            state.follow(reference)
        else:
            state = _State([], None, grows=self.config.source == "prompt")
            state.follow(request.prompt if state.grows else ())
        return state

    def propose(self, rows: Sequence[DraftRow[_State]]) -> list[Draft]:
        """A chain each; in a template the siblings are other hypotheses. CHOSEN."""
        return [self._propose(row) for row in rows]

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        for state, outcome in zip(states, outcomes, strict=True):
            for token in outcome.verdict.emitted:
                state.read(token)
            state.trust.learn(outcome)

    def _propose(self, row: DraftRow[_State]) -> Draft:
        state = row.state
        reference, trust = state.reference, state.trust
        # What follows a text that is still growing is the draft itself: it goes round.
        wrap = state.places[0].at if state.grows and state.places else len(reference)

        def after(places: list[_Place]) -> list[tuple[int, float, list[_Place]]]:
            found: dict[int, list[_Place]] = {}
            for place in places:
                if place.at < len(reference):
                    at = place.at + 1 if place.at + 1 < len(reference) else wrap
                    then = _Place(at, place.match + 1)
                    found.setdefault(reference[place.at], []).append(then)
            out = []
            for token, on in found.items():
                match = on[0].match - 1
                rivals = sum(place.match >= match for place in places)
                agree = sum(place.match > match for place in on)
                out.append((token, trust.chance(match, agree, rivals), on))
            return out  # in the order of the hypotheses

        return grow(after, state.places, row.budget, state.trust.own)
