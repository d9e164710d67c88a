"""A drafter that follows a text whose last tokens may be taken back.

The tokens of a `Mirror` change at the end while the text grows. A drafter cannot unread, but it
can be marked and rewound. A language model is rewound to the first token that changed. Any other
drafter is marked where the text has become stable, and reads the rest ahead of the mark. If
something changes there, it is rewound to the mark and reads on. Of drafts that were judged it is
told what became of its own guesses, as far as the text has its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.drafters.ahead import UNSEEN, written
from outpace.drafters.base import Drafter
from outpace.drafters.model_rows import ModelDrafter
from outpace.methods.cross_vocabulary.mirror import TAIL
from outpace.types import Draft, Outcome, Verdict


@dataclass(slots=True, eq=False)
class Reading:
    """Where a drafter stands in one text."""

    state: Any
    told: int
    """Tokens that it has read."""
    anchor: int = 0
    """Where it was marked, if it is."""
    mark: Any = None
    marked: bool = False
    frozen: bool = False
    """Whether somebody wants to come back to the mark, so that it must stay."""


@dataclass(frozen=True, slots=True, eq=False)
class News:
    reading: Reading
    ids: Sequence[int]
    """All of it."""
    same: int
    """Leading tokens that are as they were."""
    stable: int
    """Leading tokens that will stay as they are."""
    forced: bool = False
    """It was given, not generated."""
    ends: bool = True
    """The prompt is complete; the last token is pending from now on."""
    draft: Draft | None = None
    """What the drafter proposed, if that was judged,"""
    before: int = 0
    """and after how many tokens, all of which it had read."""


@dataclass(slots=True)
class _Lessons:
    """Outcomes for several texts, at most one each, to be told together."""

    states: list[Any] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)


class Follower:
    """Tells a drafter what is committed, for all sequences.

    Args:
        drafter: reads no features, since nobody computes them.
    """

    def __init__(self, drafter: Drafter[Any]) -> None:
        self.drafter = drafter
        self._rewinds = isinstance(drafter, ModelDrafter)

    def follow(self, news: Iterable[News]) -> None:
        """Read on, in one pass for prompts of the whole batch."""
        settled, fresh, rest = _Lessons(), _Lessons(), _Lessons()
        news = list(news)
        unmarked = []
        for one in news:
            reading = one.reading
            if one.same < reading.told:
                self.back(reading, one.same)
            elif reading.marked and not reading.frozen and one.stable - reading.anchor > 2 * TAIL:
                if reading.told <= one.stable:
                    reading.marked = False  # what was read since will stay
                else:
                    self.back(reading, one.same)
            if not self._rewinds and not reading.marked:
                if one.draft is None or reading.told != one.before:
                    _tell(settled, one, min(one.stable, len(one.ids) - 1), False)
                unmarked.append(reading)
        self._observe(settled)
        for reading in unmarked:
            self._mark(reading)
        for one in news:
            if one.draft is not None and one.reading.told == one.before:
                _tell_judged(fresh, one, one.draft)
        self._observe(fresh)
        for one in news:
            _tell(rest, one, len(one.ids) if one.ends else len(one.ids) - 1, one.ends)
        self._observe(rest)

    def back(self, reading: Reading, same: int) -> None:
        """Make it forget all tokens from ``same`` on, and maybe some before."""
        if self._rewinds:
            reading.state = self.drafter.rewind(reading.state, min(same, reading.told))
            reading.told = min(same, reading.told)
        elif reading.marked:
            reading.state = self.drafter.rewind(reading.state, reading.mark)
            reading.told, reading.mark, reading.marked = reading.anchor, None, False

    def pin(self, reading: Reading) -> None:
        """Keep the present mark until ``unpin``."""
        if not self._rewinds and not reading.marked:
            self._mark(reading)
        reading.frozen = True

    def unpin(self, reading: Reading, same: int) -> None:
        """Go back to that mark, or for a model to the first ``same`` tokens."""
        self.back(reading, same)
        reading.frozen = False

    def _mark(self, reading: Reading) -> None:
        reading.anchor, reading.marked = reading.told, True
        reading.mark = self.drafter.mark(reading.state)

    def _observe(self, lessons: _Lessons) -> None:
        if lessons.states:
            self.drafter.observe(lessons.states, lessons.outcomes)


def _tell(lessons: _Lessons, one: News, end: int, pending: bool) -> None:
    """Tokens up to ``end`` that nobody guessed; the last of them is pending, or has been fed."""
    reading, start = one.reading, one.reading.told
    if end <= start:
        return
    text = tuple(one.ids[start:end])
    if one.forced or not start:
        if not pending:
            outcome = written(text, (), start, forced=True)
        elif len(text) > 1:
            outcome = written(text[:-1], text[-1:], start, forced=True)
        elif start:
            outcome = written((one.ids[start - 1],), text, start - 1)
        else:
            return  # a text of one token: there is nothing to learn from it
    else:
        outcome = written((one.ids[start - 1], *text[:-1]), text, start - 1)
    lessons.states.append(reading.state)
    lessons.outcomes.append(outcome)
    reading.told = end


def _tell_judged(lessons: _Lessons, one: News, draft: Draft) -> None:
    """What became of a draft, as far as the text goes along with it, and one token more."""
    reading = one.reading
    start = reading.told
    kept = draft.path_of(one.ids[start:])
    emitted = tuple(one.ids[start : start + len(kept) + 1])
    if not emitted:
        return
    lessons.states.append(reading.state)
    lessons.outcomes.append(
        Outcome(
            draft,
            UNSEEN,
            Verdict(kept, emitted, censored=len(emitted) == len(kept)),
            (one.ids[start - 1], *emitted[:-1]),
            (0, *(node + 1 for node in kept[: len(emitted) - 1])),
            start - 1,
        )
    )
    reading.told = start + len(emitted)
