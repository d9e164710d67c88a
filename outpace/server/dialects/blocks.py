"""An answer as blocks one after the other, thinking, text and calls, told piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from pydantic import Discriminator, ValidationError

from outpace.engine.results import Result
from outpace.server.answers import ChatWriter
from outpace.server.encoding import Json
from outpace.server.errors import ApiError, from_validation
from outpace.server.schema import Answered, Body, ChatBody
from outpace.server.tool_parser import Found
from outpace.serving.events import Tokens

Kind = Literal["thinking", "text", "call"]
Happened = Literal["opens", "grows", "ends"]


@dataclass(slots=True)
class Block:
    number: int
    kind: Kind
    id: str = ""
    """Of a call, that the client gives back with what came of it."""
    name: str = ""
    """Of a call's function."""
    text: str = ""
    """So far; of a call, its arguments."""
    logprobs: list[Json] = field(default_factory=list)
    """Of the tokens of a text, as far as it was told; empty unless they were asked for."""


@dataclass(slots=True)
class Blocks:
    """Those of one answer."""

    made: list[Block] = field(default_factory=list)
    _open: Block | None = None
    _call: int = -1

    def take(self, thought: str, found: Found) -> Iterator[tuple[Happened, Block, str]]:
        """What new thinking, text and pieces of calls do to the blocks, with what is new."""
        if thought:
            yield from self._grow("thinking", thought)
        for is_text, group in groupby(found.parts, lambda part: isinstance(part, str)):
            same = list(group)
            if not is_text:
                for call in same:
                    yield from self._calls(call)
            elif text := "".join(map(str, same)):
                yield from self._grow("text", text)

    def _calls(self, call: Any) -> Iterator[tuple[Happened, Block, str]]:
        if call["index"] != self._call:
            self._call = call["index"]
            yield from self._turn(Block(len(self.made), "call", call["id"], call["function"]["name"]))
        if call["function"]["arguments"]:
            yield from self._grow("call", call["function"]["arguments"])

    def end(self) -> Iterator[tuple[Happened, Block, str]]:
        if self._open is not None:
            yield "ends", self._open, ""
        self._open = None

    def _grow(self, kind: Kind, text: str) -> Iterator[tuple[Happened, Block, str]]:
        if self._open is None or self._open.kind != kind:
            yield from self._turn(Block(len(self.made), kind))
        assert self._open is not None
        self._open.text += text
        yield "grows", self._open, text

    def _turn(self, block: Block) -> Iterator[tuple[Happened, Block, str]]:
        yield from self.end()
        self._open = block
        self.made.append(block)
        yield "opens", block, ""


class BlockWriter(ChatWriter):
    """Writes one answer as blocks; a subclass says how each is told."""

    named = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.wanted.detailed or self.wanted.traced:
            raise ApiError(
                400,
                "speculation.detailed and speculation.trace are for completions and chats; leave them out",
                f"speculation.{'detailed' if self.wanted.detailed else 'trace'}",
            )
        self.blocks = Blocks()
        self.cut = False
        """Whether the length ended the answer, once all that is left is to end its last block."""

    def told(self, what: Happened, block: Block, new: str) -> Iterator[Json]:
        """Events of what happened to a block."""
        raise NotImplementedError

    def whole_answer(self, result: Result) -> Json:
        """The answer in one piece; its blocks are complete."""
        raise NotImplementedError

    def last(self, result: Result) -> Iterator[Json]:
        """Events behind the last block."""
        raise NotImplementedError

    def answer(self, results: Sequence[Result], events: Sequence[Sequence[Tokens]]) -> Json:
        (result,) = results
        for _ in self._blocks(result.tokens, result.text, result):
            pass
        return self.whole_answer(result)

    def pieces(self, event: Tokens) -> list[Json]:
        return list(self._blocks(event.ids, event.text))

    def ending(self, index: int, result: Result) -> list[Json]:
        return [*self._blocks((), "", result), *self.last(result)]

    def _blocks(self, ids: Sequence[int], text: str, ended: Result | None = None) -> Iterator[Json]:
        for thought, found in self._in_order(0, ids, text, ended):
            for happened in self.blocks.take(thought, found):
                yield from self.told(*happened)
        if ended is not None:
            self.cut = ended.finish_reason == "length"
            for happened in self.blocks.end():
                yield from self.told(*happened)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks.made if block.kind == "call"]


def by_shape() -> Discriminator:
    """Tells a text from a list, so that one reason is given for what is neither or has a mistake inside.

    Tags begin with ``~``: they are no part of the names of fields.
    """
    return Discriminator(
        lambda value: "~str" if isinstance(value, str) else "~list" if isinstance(value, list) else None,
        custom_error_type="text_or_list",
        custom_error_message="Input should be a string or a list",
    )


def by_field(name: str, otherwise: str | None = None) -> Discriminator:
    """Tells objects apart by what one of their fields holds."""

    def tag(value: Any) -> str | None:
        given = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
        given = otherwise if given is None else given
        return f"~{given}" if isinstance(given, str) else None

    return Discriminator(
        tag,
        custom_error_type=f"unknown_{name}",
        custom_error_message=f"Input has a {name} that is not read here",
    )


def refuse(place: str, why: str) -> ApiError:
    """A field that is known and cannot be honoured."""
    return ApiError(400, f"{place}: {why}", place)


def as_chat_body(found: dict[str, Any], body: Body) -> ChatBody:
    """A chat of these fields and those that all requests for an answer have.

    Raises:
        ApiError: one turn became several messages, and they are too many.
    """
    names = [name for name in Answered.model_fields if name in type(body).model_fields]
    shared = body.model_dump(include=set(names), exclude_unset=True)
    try:
        return ChatBody.model_validate({**found, **shared})
    except ValidationError as error:
        raise from_validation(error.errors()) from error
