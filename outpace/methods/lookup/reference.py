"""Reference drafting: the output is expected to follow a given text, give or take some edits.

    reference   He go to school every days , and ...
    output      He goes to school every day
                   |       guess after the edit: "to school every days", one place further on
                                             |   and here: ", and ..."

Aggressive decoding for editing, LLMA for answers that copy from documents, and expected output (a
*prediction*) are one method. It keeps its place in the reference, and drafts on from there. After
a divergence it finds the place again. The reference is the one that the caller supplied, else the
prompt. The output joins the prompt as it comes, so an answer that repeats itself follows itself.
Where an encoder reads the prompt, its source is the reference, from the first token to the end of
the text. Who corrects or rewrites copies most of it.

The place is a few hypotheses, best first. After a divergence from a text that is followed, the
next few tokens of the reference say what kind of edit it was:

    the new token comes soon    what lies between was left out, or two words changed places
    it does not                 a word was replaced, or one was put in

A replaced word ends where the next one begins, since a misspelled word has more tokens than the
right one. Further places are those where the longest suffix of the output occurs; nearer places
are preferred, a longer suffix outweighs the distance. The text that follows keeps the hypotheses
that agree. Once the first token after an edit is right, a draft goes on as if there had been none
(`outpace.drafters.worth`).

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
from dataclasses import dataclass, field, replace

from outpace.drafters.base import Request, Traits
from outpace.drafters.worth import Priced, Trust, grow
from outpace.models.base import Target
from outpace.tree.growth import DraftRow
from outpace.types import Draft, Outcome

SOURCES = ("prompt", "request")
Source = Callable[[Sequence[int]], Sequence[int] | None]
"""What an encoder reads of a prompt; None without an encoder."""

SUPPLIED = 16
"""An output that was announced begins as if so many tokens of it had been right already."""
RESUMED = 8
"""It goes on as after so many, once the place after an edit was found."""
_NEAREST = 12  # places of one phrase that are looked at
_LONGEST = 16  # tokens that are compared at a place
_KEPT = 4  # hypotheses
_FAR = 0.35  # what doubling a distance costs, in tokens that agree
_PATIENCE = 2  # divergences in a row after which a replaced token is no explanation
_AHEAD = 4  # tokens that may be left out at once
_FADE = 0.6  # of the chance of an edit, at every further divergence in a row
# How often the next token is right if the edit was of that kind, in sentences with one error each.
_REPLACED, _INSERTED, _SKIPPED, _SWAPPED, _RARE = 0.7, 0.25, 0.5, 0.45, 0.1


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
    first: float | None = None
    """Chance of the expected token where a kind of edit is assumed."""
    jump: int | None = None
    """Index after the expected token, if that is not the next one."""

    def advanced(self) -> _Place:
        """The hypothesis once the expected token came."""
        match = self.match + 1 if self.first is None else RESUMED
        return _Place(self.at + 1 if self.jump is None else self.jump, min(match, 1 << 20))


@dataclass(slots=True, eq=False)
class _State:
    places: list[_Place]
    """Best first."""
    expected: int | None
    """Where the output would go on if every divergence had replaced one token by one."""
    grows: bool
    """Whether the output joins the reference."""
    begins: Callable[[int], bool]
    """Whether a token begins a word."""
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
            place.advanced()
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
            if not self.grows:
                edits = self._edits(self.expected - 1)
                known = {place.at for place in edits}
                others = [p for p in scores if p.match > 1 and p.at not in known]
                return [*edits, *sorted(others, key=lambda place: -scores[place])][:_KEPT]
            scores.setdefault(_Place(self.expected, 1), 0.0)
            scores.setdefault(_Place(self.expected - 1, 1), -0.1)  # a token was put in
        return sorted(scores, key=lambda place: (-scores[place], place.at))[:_KEPT]

    def _edits(self, at: int) -> list[_Place]:
        """What the last token may have been, which is not that of the reference at this index."""
        ahead = self.reference[at + 1 : at + 1 + _AHEAD]
        new, fade = self.output[-1], _FADE ** (self.lost - 1)
        if new in ahead:
            then = at + 2 + ahead.index(new)
            swapped = then == at + 2
            chance, jump = (_SWAPPED, then) if swapped else (_RARE, None)
            return [_Place(then, 1, fade * _SKIPPED), _Place(at, 1, fade * chance, jump)]
        word = at + 1
        while word < len(self.reference) and not self.begins(self.reference[word]):
            word += 1
        return [_Place(word, 1, fade * _REPLACED), _Place(at, 1, fade * _INSERTED)]

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

    def __init__(
        self,
        config: ReferenceConfig,
        source: Source | None = None,
        begins: Callable[[int], bool] = lambda token: True,
    ) -> None:
        self.config = config
        self._source, self._begins = source, begins

    @classmethod
    def load(cls, config: ReferenceConfig, target: Target) -> Reference:
        tokenizer = target.tokenizer
        if tokenizer is None:
            return cls(config, target.source_of)
        spelled = tokenizer.token_bytes
        return cls(config, target.source_of, lambda token: not spelled(token)[:1].isalnum())

    def begin(self, request: Request) -> _State:
        """Index the reference. One that was supplied, or that an encoder reads, is followed from its
        first token on.
        """
        reference: Sequence[int] | None = request.reference
        if reference is None and self._source is not None and self.config.source == "prompt":
            reference = self._source(request.prompt)
        if reference is not None:
            state = _State([_Place(0, SUPPLIED)], 0, grows=False, begins=self._begins)
            state.follow(reference)
        else:
            state = _State([], None, grows=self.config.source == "prompt", begins=self._begins)
            state.follow(request.prompt if state.grows else ())
        return state

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        for state, outcome in zip(states, outcomes, strict=True):
            for token in outcome.verdict.emitted:
                state.read(token)
            state.trust.learn(outcome)

    def propose_one(self, row: DraftRow[_State]) -> Draft:
        """A chain; in a template the siblings are other hypotheses. CHOSEN."""
        state = row.state
        reference, trust = state.reference, state.trust
        # What follows a text that is still growing is the draft itself: it goes round.
        wrap = state.places[0].at if state.grows and state.places else len(reference)

        def after(places: list[_Place]) -> list[tuple[int, float, list[_Place]]]:
            found: dict[int, list[_Place]] = {}
            for place in places:
                if place.at < len(reference):
                    found.setdefault(reference[place.at], []).append(place)
            out = []
            for token, on in found.items():
                first, match = on[0].first, on[0].match
                if first is not None:
                    chance = trust.doubted(first)
                else:
                    rivals = sum(place.match >= match for place in places)
                    agree = sum(place.match >= match for place in on)
                    chance = trust.chance(match, agree, rivals)
                then = [place.advanced() for place in on]
                then = [place if place.at < len(reference) else replace(place, at=wrap) for place in then]
                out.append((token, chance, then))
            return out  # in the order of the hypotheses

        return grow(after, state.places, row.budget, state.trust.own)
