r"""Tool calls in the text of an answer, taken out while it is still being written.

Four ways of writing a call, of which a model's chat template uses one:

    hermes    <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>    (Qwen, Hermes, and
              SmolLM2, which may also write a list between the marks)
    llama3    {"name": "f", "parameters": {...}}      as the whole answer, or after <|python_tag|>
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]    or  [TOOL_CALLS]f[ARGS]{...}

A call is told in pieces: first its name, then its arguments as the model writes them. Before the
name is known nothing is told, so that text which only looked like a call is given as text, mark
included. What a model writes wrong behind the name (arguments that are no JSON) is the client's to
see.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections import deque
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.server.encoding import Json

_Scan = Generator[None, str, str]
"""Takes characters, one per ``send``; the empty one ends the text. Gives the last one it read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    name: str
    opens: str
    """The mark before calls."""
    closes: str = ""
    """The mark behind them; empty: the end of the text."""
    bare: bool = False
    """Whether an answer that begins with a brace may be a call without a mark. Then only a name
    that was offered makes it one."""
    arguments: str = "arguments"
    """The key that the model was trained to write."""
    named: str = ""
    """What stands between a name and its arguments, where calls need not be objects."""
    short_ids: bool = False
    """Whether templates take only ids of nine letters and digits."""

    def new_id(self) -> str:
        """Of a call; the client gives it back with what came of the call."""
        return secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}"


HERMES = Format(name="hermes", opens="<tool_call>", closes="</tool_call>")
LLAMA3 = Format(name="llama3", opens="<|python_tag|>", bare=True, arguments="parameters")
MISTRAL = Format(name="mistral", opens="[TOOL_CALLS]", named="[ARGS]", short_ids=True)


@dataclass(slots=True)
class Found:
    """What a portion of text turned out to hold."""

    parts: list[str | Json] = field(default_factory=list)
    """Text and calls, in the order of the answer."""

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[Json]:
        """In the form of a streamed delta: the first of a call has its id and name."""
        return [part for part in self.parts if not isinstance(part, str)]


class _Broken(Exception):
    """This is no call."""


class CallReader:
    """Reads one answer.

    Args:
        tokenizer: tells which marks are special tokens, which no text holds; None: none is.
        alone: the answer is calls and no text, so that one sign of a mark begins a call.
    """

    def __init__(
        self, form: Format, names: Collection[str], tokenizer: Any = None, alone: bool = False
    ) -> None:
        self._form, self._names, self._alone = form, frozenset(names), alone
        self.begun = self.whole = 0
        """Calls that were told so far, and those of them that ended as they should."""
        self.before = 0
        """Characters of text that were told before the first call."""
        self._found = Found()
        self._again: deque[str] = deque()
        self._held: str | None = None
        """What was read since a mark, as long as it may yet turn out to be text."""
        self._open = False
        """Whether a call was told since the last mark."""
        self._after_call = self._over = self._cut = False
        self._gap = ""
        """Blanks before a call, which text behind it gets back."""
        self.marks = {} if tokenizer is None else special_marks(form, tokenizer)
        """Token id -> mark, of marks that are special tokens; they count as characters here."""
        self._stream = tokenizer.text_stream() if self.marks else None
        self._decoded = self._told = 0
        self._places: deque[tuple[int, str]] = deque()
        self._machine = self._run()
        next(self._machine)

    def push(self, ids: Sequence[int], text: str) -> Found:
        """Take new tokens and the text that became certain with them; give what is certain now."""
        if self._stream is not None:
            for token in ids:
                if token in self.marks:
                    self._places.append((self._decoded, self.marks[token]))
                else:
                    self._decoded += len(self._stream.push((token,)))
        while self._places and self._places[0][0] <= self._told + len(text):
            place, mark = self._places.popleft()
            before, text = text[: place - self._told], text[place - self._told :]
            self._told += len(before)
            self._read(before + mark)
        self._told += len(text)
        self._read(text)
        return self._take()

    def close(self, cut: bool = False) -> Found:
        """The text has ended: give what was held back.

        Args:
            cut: it ended at a limit. The beginning of a call is then neither call nor text.
        """
        self._over, self._cut = True, cut
        with contextlib.suppress(StopIteration):
            self._machine.send("")
        return self._take()

    def _read(self, text: str) -> None:
        for character in text:
            self._machine.send(character)

    def _take(self) -> Found:
        found, self._found = self._found, Found()
        return found

    # The states, each a generator that takes characters.

    def _run(self) -> _Scan:
        start = True
        while True:
            mark = yield from self._text(start)
            start = False
            if not mark:
                return ""
            self._held, self._open = mark, False
            marked = mark.endswith(self._form.opens)
            gap = mark[: len(mark) - len(mark.lstrip())]
            if not marked:  # the brace is part of the call
                self._held = mark[:-1]
                self._again.appendleft("{")
            try:
                yield from self._calls(marked)
            except _Broken:
                yield from self._mend(mark)
            self._held = None
            if self._open and not self._gap:
                self._gap = gap

    def _mend(self, mark: str) -> _Scan:
        """What looked like a call is none, or does not end as it should."""
        held, self._held = self._held or "", None
        if self._open and self._form.closes:
            yield from self._closing("")
        elif self._cut and not self._again and self._begins(held, mark):
            pass  # the end came first: nobody knows what was to be called, or how
        elif self._open:
            self._again.extendleft(reversed(held))
        else:
            self._say(held[: len(mark)])
            self._again.extendleft(reversed(held[len(mark) :]))
        return ""

    def _begins(self, held: str, mark: str) -> bool:
        """Whether a text that is cut was the beginning of a call."""
        if self._open:  # of one more, behind others
            return re.fullmatch(r"[\s,;\]]*(\{.*)?", held, re.DOTALL) is not None
        if self._alone or mark.endswith(self._form.opens):
            return True
        named = re.match(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"', held)
        return named is not None and named[1] in self._names

    def _text(self, start: bool) -> _Scan:
        """Text up to a mark, which is given with the blanks before it; at the end of all of it
        nothing.
        """
        opens, waiting = self._form.opens, ""
        while True:
            character = yield from self._next()
            if not character:
                if not (self._cut and (self._alone or len(waiting.strip()) > 1)):
                    self._say(waiting)
                return ""
            waiting += character
            if start and self._form.bare and waiting.lstrip() == "{":
                return waiting
            start = start and not waiting.strip()
            while waiting and not opens.startswith(waiting.lstrip()):
                self._say(waiting[0])
                waiting = waiting[1:]
            if waiting.lstrip() == opens:
                return waiting

    def _calls(self, marked: bool) -> _Scan:
        """One call or several behind a mark, and the mark behind them."""
        last = yield from self._blank()
        listed = last == "["
        if listed:
            last = yield from self._blank()
        while True:
            if last == "{":
                yield from self._object(marked)
            elif self._form.named and (last.isalnum() or last == "_"):
                yield from self._named(last)
            else:
                raise _Broken
            self._held = ""
            last = yield from self._blank()
            if last and last in ",;":
                last = yield from self._blank()
            elif last == "]" and listed:
                last = yield from self._blank()
                break
            elif last != "{":
                if self._form.named and last == self._form.opens[0]:  # one mark per call
                    self._again.appendleft(last)
                    return last
                break
        yield from self._closing(last)
        return ""

    def _closing(self, last: str) -> _Scan:
        """Read up to the mark behind calls. What stands before it means nothing; without it, and
        where there is none, it is text.
        """
        rest, closes = last, self._form.closes
        if not closes:
            self._again.appendleft(last)
            return last
        while not rest.endswith(closes):
            last = yield from self._next()
            if not last:
                if not (self._cut and rest and closes.startswith(rest)):
                    self._say(rest)
                return ""
            rest += last
        return closes

    def _object(self, marked: bool) -> _Scan:
        """A call as a JSON object, whose brace has been read."""
        name: str | None = None
        waiting: str | None = None
        told = False
        while True:
            last = yield from self._blank()
            if last == ",":
                continue
            if last == "}":
                break
            key = yield from self._string(last)
            if (yield from self._blank()) != ":":
                raise _Broken
            last = yield from self._blank()
            if key == "name":
                name = yield from self._string(last)
                if not name or not (marked or name in self._names):
                    raise _Broken
                if waiting is not None:
                    self._begin(name, waiting)
                    told = True
            elif key not in ("arguments", "parameters"):
                yield from self._value(last, tell=False)
            elif name is not None and not told and last and last in "{[":
                self._begin(name, "")
                told = True
                yield from self._value(last, tell=True)
            else:
                waiting = _unwrapped((yield from self._value(last, tell=False)))
                if name is not None and not told:
                    self._begin(name, waiting)
                    told = True
        if name is None or not (told or marked):
            raise _Broken
        if not told:
            self._begin(name, "{}")
        self.whole += 1
        return "}"

    def _named(self, last: str) -> _Scan:
        """A call as a name and an object."""
        name = ""
        while last != "{":
            if not last or last.isspace():
                raise _Broken
            name += last
            last = yield from self._next()
        self._begin(name.partition("[")[0], "")
        yield from self._value(last, tell=True)
        self.whole += 1
        return "}"

    # JSON, character by character.

    def _next(self) -> _Scan:
        character = self._again.popleft() if self._again else "" if self._over else (yield)
        if self._held is not None:
            self._held += character
        return character

    def _blank(self) -> _Scan:
        """The first character that is no white space."""
        while True:
            character = yield from self._next()
            if not character or not character.isspace():
                return character

    def _string(self, last: str) -> _Scan:
        """A JSON string whose first character was read; gives what it means."""
        if last != '"':
            raise _Broken
        try:
            text = json.loads((yield from self._value(last, tell=False)), strict=False)
        except ValueError as error:
            raise _Broken from error
        return str(text)

    def _value(self, last: str, *, tell: bool) -> _Scan:
        """A JSON value whose first character was read; gives it as it is written."""
        depth, quoted, escaped, written = 0, False, False, ""
        while True:
            if not last:
                raise _Broken
            if not quoted and not depth and last in ",}]":  # behind a number or a word
                self._again.appendleft(last)
                if self._held:
                    self._held = self._held[:-1]
                return written
            written += last
            if tell:
                self._tell(last)
            if quoted:
                quoted = escaped or last != '"'
                escaped = last == "\\" and not escaped
            elif last == '"':
                quoted = True
            elif last in "{[":
                depth += 1
            elif last in "}]":
                depth -= 1
            if not quoted and not depth and last in '"}]':
                return written
            last = yield from self._next()

    # What is told.

    def _say(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
            text = text and self._gap + text
        if text:
            self._after_call, self._gap = False, ""
            self._found.parts.append(text)
            self.before += 0 if self.begun else len(text)

    def _begin(self, name: str, arguments: str) -> None:
        """A call, with as much of its arguments as is known."""
        self._held, self._open = None, True
        self._found.parts.append(
            {
                "index": self.begun,
                "id": self._form.new_id(),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )
        self.begun += 1
        self._after_call = True

    def _tell(self, arguments: str) -> None:
        parts = self._found.parts
        if not parts or isinstance(parts[-1], str):
            parts.append({"index": self.begun - 1, "function": {"arguments": ""}})
        call = parts[-1]
        assert not isinstance(call, str)
        call["function"]["arguments"] += arguments


def special_marks(form: Format, tokenizer: Any) -> dict[int, str]:
    """Token id -> mark, of the marks that are special tokens of a model."""
    found = {}
    for mark in (form.opens, form.closes, form.named):
        ids = tokenizer.encode(mark, special=False) if mark else []
        if len(ids) == 1 and ids[0] in tokenizer.special_ids:
            found[ids[0]] = mark
    return found


def _unwrapped(value: str) -> str:
    """Arguments, where a model wrote them as a JSON text of JSON."""
    if not value.startswith('"'):
        return value
    try:
        inner = str(json.loads(value, strict=False))
        json.loads(inner)
    except ValueError:
        return value
    return inner
