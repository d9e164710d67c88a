"""Thinking in an answer: where it begins and ends, and how long it may be.

    outside  -- start -->  inside      every token counts
    inside   -- end -->    outside     the marks do not count
    inside, and as many as allowed     closing: each token of what closes it is certain
    closing  -- its last token -->     outside

All of it is a function of the path, so a budget is a rule per node of a tree, as a grammar is. It keeps the
contract of `outpace.params.Grammar`. A mark that has begun where the budget ends is gone on with, and not
begun anew. A section that begins when nothing is left is closed at once. Marks may have several tokens; they
are found as Knuth, Morris and Pratt find words.

With a grammar, thinking comes first: the answer may begin with it, and the grammar with what follows. It says
nothing inside.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.errors import RequestError

OUTSIDE, INSIDE, CLOSING = 0, 1, 2
KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Marks of well-known models, of which both are tokens of their own there."""


class Place(NamedTuple):
    """Where a path is."""

    phase: int = OUTSIDE
    spent: int = 0
    """Tokens of thinking so far, over all sections of the answer."""
    match: int = 0
    """Tokens of the next mark that were read; while closing, those that were written."""


@dataclass(frozen=True)
class Section:
    """How thinking begins and ends, and after how many tokens."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    closing: tuple[int, ...]
    """What is written where the budget ends. Ends with ``end``."""
    budget: int | None = None
    again: bool = True
    """Whether thinking may begin anywhere; otherwise at the beginning of the answer alone."""

    def begun(self, prompt: Sequence[int]) -> Place:
        """Where an answer begins: inside, if the prompt ends there."""
        size, start = len(self.start), self.start
        at = next((i for i in range(len(prompt) - size, -1, -1) if tuple(prompt[i : i + size]) == start), -1)
        place = Place()
        if at >= 0:
            free = Section(start, self.end, self.closing)
            place = Place(INSIDE)
            for token in prompt[at + size :]:
                place = free.step(place, token)
        # What the prompt thought and ended is not the answer's.
        return self._settled(place if place.phase == INSIDE else Place())

    def step(self, place: Place, token: int) -> Place:
        """The place after one more token."""
        phase, count, match = place
        if phase == CLOSING:
            done = match + 1 == len(self.closing)
            return Place(OUTSIDE, count) if done else Place(CLOSING, count, match + 1)
        mark = self.end if phase == INSIDE else self.start
        count += phase == INSIDE
        match = self._matched(phase, match, token)
        if match < len(mark):
            return self._settled(Place(phase, count, match))
        if phase == INSIDE:
            return Place(OUTSIDE, count - len(mark))
        return self._settled(Place(INSIDE, count))

    def walk(self, place: Place, tokens: Sequence[int]) -> Place:
        for token in tokens:
            place = self.step(place, token)
        return place

    def _settled(self, place: Place) -> Place:
        if place.phase != INSIDE or self.budget is None or place.spent < self.budget:
            return place
        return Place(CLOSING, place.spent, place.match if self.closing == self.end else 0)

    def _matched(self, phase: int, match: int, token: int) -> int:
        """Tokens of the mark that the text ends with, after one more token."""
        mark, fall = (self.end, self._fall_end) if phase == INSIDE else (self.start, self._fall_start)
        while match and mark[match] != token:
            match = fall[match - 1]
        return match + (mark[match] == token)

    @cached_property
    def _fall_start(self) -> tuple[int, ...]:
        return _prefix(self.start)

    @cached_property
    def _fall_end(self) -> tuple[int, ...]:
        return _prefix(self.end)


def _prefix(mark: tuple[int, ...]) -> tuple[int, ...]:
    """For every place of a mark, the longest shorter beginning of it that ends there too."""
    fall = [0] * len(mark)
    for i in range(1, len(mark)):
        k = fall[i - 1]
        while k and mark[k] != mark[i]:
            k = fall[k - 1]
        fall[i] = k + (mark[k] == mark[i])
    return tuple(fall)


@dataclass(frozen=True)
class Thinking:
    """The rule of one request, as a grammar.

    Args:
        begun: where its answer begins.
        grammar: of what follows the thinking; None: anything.
    """

    section: Section
    begun: Place
    vocab_size: int
    grammar: Any = None

    def begin(self) -> Matcher:
        return Matcher(self)


class Matcher:
    """A place in an answer; see `outpace.params.Matcher`."""

    def __init__(self, rule: Thinking) -> None:
        self._rule, self._place = rule, rule.begun
        self._inner = None if rule.grammar is None else rule.grammar.begin()
        self._held: tuple[int, ...] = ()
        """Tokens outside that the grammar has not taken yet: they may be the start of thinking."""
        self._body = False
        """Whether the grammar's own text has begun."""

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        place, held, body = self._at(path)
        section = self._rule.section
        if place.phase == CLOSING:
            return self._only(section.closing[place.match])
        if place.phase == INSIDE or self._inner is None:
            return None
        if body:
            found: Tensor | None = self._inner.allowed(held)
            return found
        return self._first(place, held)

    def expects(self, path: Sequence[int]) -> Sequence[int]:
        """The rest of what closes the thinking; behind it, what the grammar expects."""
        place, held, body = self._at(path)
        if place.phase == CLOSING:
            return self._rule.section.closing[place.match :]
        told = getattr(self._inner, "expects", None) if body else None
        return () if told is None else told(held)

    def advance(self, tokens: Sequence[int]) -> None:
        place, held, body = self._at(tokens)
        if self._inner is not None and body:
            self._inner.advance(held)
            held = ()
        self._place, self._held, self._body = place, held, body

    def _at(self, path: Sequence[int]) -> tuple[Place, tuple[int, ...], bool]:
        """Where a path leads, what the grammar has not taken yet, and whether its text has begun."""
        section = self._rule.section
        if self._inner is None:
            return section.walk(self._place, path), (), False
        place, held, body = self._place, self._held, self._body
        for token in path:
            if body:
                held = (*held, token)
            elif place.phase == OUTSIDE:  # a start of thinking, or of the grammar's text
                if token == section.start[place.match]:
                    place = section.step(place, token)
                    held = (*held, token) if place.phase == OUTSIDE else ()
                else:
                    held, body = (*held, token), True
            else:
                place = section.step(place, token)
                body = place.phase == OUTSIDE
        return place, held, body

    def _first(self, place: Place, held: tuple[int, ...]) -> Tensor:
        """At the beginning: what the grammar allows, where it allows what was read, or more of a start."""
        out_V, inner = self._only(self._rule.section.start[place.match]), self._inner
        assert inner is not None, "asked where there is a grammar alone"
        for i in range(len(held) + 1):
            allowed_V = inner.allowed(held[:i])
            if i == len(held):
                return out_V if allowed_V is None else out_V | allowed_V
            if allowed_V is not None and not bool(allowed_V[held[i]]):
                return out_V
        raise AssertionError

    def _only(self, token: int) -> Tensor:
        out_V = torch.zeros(self._rule.vocab_size, dtype=torch.bool)
        out_V[token] = True
        return out_V


def find_marks(tokenizer: Any) -> tuple[str, str] | None:
    """The marks of a model, if it has well-known ones as tokens; else None."""
    for start, end in KNOWN if tokenizer is not None else ():
        if all(len(tokenizer.encode(mark, special=False)) == 1 for mark in (start, end)):
            return start, end
    return None


def make_section(target: Any, marks: Sequence[str], budget: int | None, again: bool = True) -> Section:
    """Marks as tokens of a model.

    Args:
        marks: start, end, and a text before the end where the budget ends; empty: the model's own.

    Raises:
        RequestError: a model without tokenizer, or without marks of its own.
    """
    marks = marks or find_marks(target.tokenizer) or ()
    if not marks or target.tokenizer is None:
        raise RequestError(
            f"{target.name} has no marks of thinking among its tokens; name them with --thinking-mark, "
            "or thinking_marks"
        )
    start, end, message = (*marks, "")[:3]

    def ids(text: str) -> tuple[int, ...]:
        return tuple(target.tokenizer.encode(text, special=False))

    return Section(ids(start), ids(end), (*ids(message), *ids(end)), budget, again)


def make_rule(
    target: Any, prompt: Sequence[int], marks: Sequence[str], budget: int | None, grammar: Any
) -> Any:
    """What says which tokens may follow in one answer: the grammar, and thinking before it.

    Args:
        marks: as for ``make_section``.
        budget: tokens of thinking; None: any number.
        grammar: of the rest; None: there is none.

    Raises:
        RequestError: as ``make_section``.
    """
    if budget is None and (grammar is None or not marks):
        return grammar
    section = make_section(target, marks, budget, again=grammar is None)
    return Thinking(section, section.begun(prompt), target.vocab_size, grammar)


class Reader:
    """Parts the text of one answer into thinking and what is said.

    Args:
        begun: where the answer begins.
    """

    def __init__(self, section: Section, begun: Place, tokenizer: Any) -> None:
        self._section, self._place = section, begun
        self._stream = tokenizer.text_stream()
        self._held: list[tuple[bool, int, tuple[int, int]]] = []
        """Tokens that may yet be a mark: whether they are thinking, their characters, places and ids."""
        self.said: list[tuple[int, int]] = []
        """Places and ids of tokens of the answer itself, until somebody takes them."""
        self._count = 0
        self._told: list[tuple[bool | None, int]] = []
        """Labels of characters that were not seen yet: thinking, said, or neither."""
        self._text = ""
        """Characters that have no label yet."""
        self.reasoning_tokens = 0
        """Tokens of thinking, without marks and without what closes it."""
        self.cut = False
        """Whether the budget ended it."""

    def push(self, ids: Sequence[int], text: str) -> list[tuple[bool, str]]:
        """Take new tokens, and the text that became certain; give pieces with whether they are thinking."""
        for token in ids:
            self._label(token, len(self._stream.push((token,))))
        return self._parted(text)

    def close(self, text: str = "") -> list[tuple[bool, str]]:
        """The answer has ended; ``text`` is what was not pushed of it."""
        self._release(len(self._held))
        self._told.append((self._place.phase != OUTSIDE, 1 << 40))
        return self._parted(text)

    def _label(self, token: int, size: int) -> None:
        section, before, place = self._section, self._place, self._count
        self._count += 1
        self._place = after = section.step(before, token)
        if before.phase == CLOSING:
            self.cut = True
            self._release(len(self._held) if before.match == 0 and section.closing != section.end else 0)
            written = len(section.closing) - len(section.end)
            if before.match < written:
                self._told.append((True, size))
            else:
                self._told += [(None, n) for _, n, _ in self._held] + [(None, size)]
                self._held.clear()
            return
        self._held.append((before.phase == INSIDE, size, (place, token)))
        crossed = after.phase == (OUTSIDE if before.phase == INSIDE else INSIDE)
        if crossed or (before.phase == OUTSIDE and after.phase == CLOSING):
            mark = section.end if before.phase == INSIDE else section.start
            self._release(len(self._held) - len(mark))
            self._told += [(None, n) for _, n, _ in self._held]
            self._held.clear()
        else:
            keep = after.match if after.phase != CLOSING or section.closing == section.end else 0
            self._release(len(self._held) - keep)

    def _release(self, count: int) -> None:
        """The first of the held tokens are no mark."""
        for thinking, size, token in self._held[: max(0, count)]:
            self.reasoning_tokens += thinking
            self.said += [] if thinking else [token]
            self._told.append((thinking, size))
        del self._held[: max(0, count)]

    def _parted(self, text: str) -> list[tuple[bool, str]]:
        out: list[tuple[bool, str]] = []
        self._text += text
        while self._text and self._told:
            kind, size = self._told[0]
            piece, self._text = self._text[:size], self._text[size:]
            if len(piece) < size:
                self._told[0] = kind, size - len(piece)
            else:
                self._told.pop(0)
            if kind is not None and piece:
                if out and out[-1][0] == kind:
                    out[-1] = kind, out[-1][1] + piece
                else:
                    out.append((kind, piece))
        return out
