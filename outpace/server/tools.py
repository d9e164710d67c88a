"""Functions that a model may call: how it is told of them, and made to call them.

A chat template knows best how its model reads and writes calls, so it is asked. A conversation with
a function and a call of it is rendered, and what came out is looked at. A model whose template
knows nothing of functions is told of them in the system message, to be called in the form of
`tool_parser.HERMES`. Calls and what they gave become text of the conversation then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.errors import RequestError
from outpace.server.encoding import Json
from outpace.server.errors import ApiError
from outpace.server.schema import NamedTool, Tool, too_deep
from outpace.server.structured_output import StructuredOutput
from outpace.server.tool_parser import HERMES, LLAMA3, MISTRAL, Format, special_marks

_NAME = "probe_function"
_PROBE: Json = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "required": ["probe_key"],
            "properties": {"probe_key": {"type": "integer", "description": "Probe."}},
        },
    },
}
_ASKS: Json = {"role": "user", "content": "Probe."}
_CALLS: Json = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "probe0123", "type": "function", "function": {"name": _NAME, "arguments": {"probe_key": 1}}}
    ],
}
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TEXT = "TEXT: /(.|\\n)*/"
_NO_BRACE = "FREE: /([ \\n]*[^{ \\n](.|\\n)*)?/"
"""Text that does not begin as a call does."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """What the reader of an answer must know to find calls in it."""

    form: Format
    names: frozenset[str]
    parallel: bool = True
    """Whether there may be several; otherwise the first one counts."""
    alone: bool = False
    """Whether the answer is calls and no text."""


class Toolbox:
    """How one model is told of functions and writes calls."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        told = self._text([_ASKS])
        both = self._text([_ASKS, _CALLS])
        self._tells = _NAME in told
        self._writes = both.count(_NAME) > told.count(_NAME)
        self.form: Format | None = self._find(told, both)
        """None: a form that is not known here, so that answers are text."""

    def _text(self, messages: Sequence[Json]) -> str:
        try:
            return str(self._tokenizer.chat_text(messages, tools=[_PROBE]))
        except RequestError:
            return ""

    def _find(self, told: str, both: str) -> Format | None:
        if not self._tells:
            return HERMES
        for form in (MISTRAL, HERMES, LLAMA3):
            if form.opens in both or (form.opens in told and not self._writes):
                return form
        return LLAMA3 if '"parameters": {"probe_key"' in both else None

    def call_syntax(
        self, tools: Sequence[Tool] | None, parallel: bool = True, alone: bool = False
    ) -> CallSyntax | None:
        """What to look for in an answer; None: nothing."""
        if not tools or self.form is None:
            return None
        return CallSyntax(self.form, frozenset(tool.function.name for tool in tools), parallel, alone)

    def conversation(
        self, messages: Sequence[Json], tools: Sequence[Tool] | None
    ) -> tuple[list[Json], list[Json] | None]:
        """Messages and functions as the chat template takes them."""
        plain = [_as_template(tool) for tool in tools or ()]
        out = [_with_objects(message) for message in messages]
        if not self._writes:
            out = _spelled(out)
        if plain and not self._tells:
            return _introduced(out, plain), None
        return out, plain or None

    def structured_output(
        self, tools: Sequence[Tool] | None, choice: str | NamedTool | None, parallel: bool
    ) -> StructuredOutput | None:
        """The form that an answer must have so that it holds the calls that are asked for.

        Args:
            choice: of the API; None: auto.
            parallel: whether one answer may hold several calls.

        Raises:
            ApiError: a choice without functions, of an unknown one, or that cannot be enforced.
        """
        must = choice not in (None, "none", "auto")
        if choice == "none" or not (tools or must):
            return None
        tools = list(tools or ())
        names = [tool.function.name for tool in tools]
        if must and not tools:
            raise ApiError(400, "tool_choice needs tools; give some", "tool_choice")
        if len(set(names)) < len(names):
            raise ApiError(400, "tools holds two functions of one name; rename one", "tools")
        if isinstance(choice, NamedTool):
            if choice.function.name not in names:
                raise ApiError(
                    400,
                    f"tool_choice names {choice.function.name!r}, which is not among tools; name one that is",
                    "tool_choice",
                )
            tools, parallel = [tools[names.index(choice.function.name)]], False
        strict = any(tool.function.strict for tool in tools)
        if not (must or strict):
            return None
        field = "tool_choice" if must else "tools"
        if self.form is None:
            raise ApiError(
                400,
                f"{field}: this model writes calls in a form that is not known "
                "here, so none can be asked for; leave it out",
                field,
            )
        return StructuredOutput("grammar", self._grammar(self.form, tools, must, parallel), field)

    def _grammar(self, form: Format, tools: Sequence[Tool], must: bool, parallel: bool) -> str:
        """A grammar of answers: calls alone, or any text in which what is called is well formed."""
        schema = json.dumps(_schema(form, tools, strict=not must))
        if form is LLAMA3:  # a call is the whole answer; several are no part of its training
            if must:
                return f"start: %json {schema}\n"
            return f"start: call | FREE\n{_NO_BRACE}\ncall: %json {schema}\n"
        special = {mark: token for token, mark in special_marks(form, self._tokenizer).items()}

        def spelled(mark: str) -> str:
            return f"<[{special[mark]}]>" if mark in special else json.dumps(mark)

        body = f"call: %json {schema}\n"
        if form is MISTRAL:
            listed = {"type": "array", "minItems": 1, "items": json.loads(schema)}
            listed["x-guidance"], listed["$defs"] = _COMPACT, listed["items"].pop("$defs")
            if not parallel:
                listed["maxItems"] = 1
            body = f'call: " "? %json {json.dumps(listed)}\n'
            after = ""
        else:
            after = f' "\\n" {spelled(form.closes)}'
            body += 'gap: "\\n"\n'
        begin = "" if form is MISTRAL else ' "\\n"'
        if must:
            block = f"{spelled(form.opens)}{begin} call{after}"
            more = " (gap block)*" if parallel and form is HERMES else ""
            return f"start: block{more}\nblock: {block}\n{body}"
        opening = f"opening: TEXT {spelled(form.opens)}"
        many = "*" if parallel else "?"
        if form.opens not in special:  # text ends where the mark does
            opening = f"opening[lazy]: TEXT {spelled(form.opens)}"
        block = f"block: opening{begin} call{after}\n"
        return f"start: block{many} rest\nrest: TEXT\n{_TEXT}\n{opening}\n{block}{body}"


def _schema(form: Format, tools: Sequence[Tool], *, strict: bool) -> Json:
    """A JSON schema of one call.

    Args:
        strict: hold only those to their schema that ask for it.
    """
    inner, options = {}, []
    for number, tool in enumerate(tools):
        place = f"tool{number}"
        given = tool.function.parameters if tool.function.strict or not strict else None
        inner[place] = _moved(given or {"type": "object"}, f"#/$defs/{place}")
        options.append(
            {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "name": {"const": tool.function.name},
                    form.arguments: {"$ref": f"#/$defs/{place}"},
                },
                "required": ["name", form.arguments],
            }
        )
    return {"x-guidance": _COMPACT, "$defs": inner, "anyOf": options}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references hold when it stands at ``place`` of another."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }


def _as_template(tool: Tool) -> Json:
    """A function as templates show it: what the client said, but for what is not the model's."""
    said = tool.function.model_dump(exclude_unset=True, exclude={"strict"})
    return {"type": "function", "function": {k: v for k, v in said.items() if v is not None}}


def _with_objects(message: Json) -> Json:
    """A message whose calls have arguments as objects, which templates expect; the API has text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        given = function.get("arguments")
        if isinstance(given, str):
            try:
                read = json.loads(given) if given.strip() else {}
            except (ValueError, RecursionError):  # so the model wrote it
                read = given
            good = isinstance(read, dict) and not too_deep(read)
            function["arguments"] = read if good else given
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def check_calls(number: int, message: Mapping[str, Any]) -> None:
    """Raise ApiError if the calls of a message are none."""
    calls = message.get("tool_calls")
    if calls is None:
        return
    field = f"messages.{number}.tool_calls"
    if not isinstance(calls, list):
        raise ApiError(400, f"{field} must be a list of calls", field)
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        good = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if not good or call.get("type", "function") != "function":
            raise ApiError(
                400,
                f'{field} must hold objects such as {{"id": ..., "type": '
                '"function", "function": {"name": ..., "arguments": ...}}',
                field,
            )


def _spelled(messages: Sequence[Json]) -> list[Json]:
    """Calls and what they gave as text, for a template that knows neither."""
    out: list[Json] = []
    given = False
    for message in messages:
        role, calls = message.get("role"), message.get("tool_calls")
        if role == "tool":
            text = f"<tool_response>\n{_text_of(message)}\n</tool_response>"
            if given:
                out[-1]["content"] += f"\n{text}"
            else:
                out.append({"role": "user", "content": text})
        elif calls:
            blocks = [_block(call["function"]) for call in calls]
            content = "\n".join([text for text in (_text_of(message),) if text] + blocks)
            kept = {k: v for k, v in message.items() if k != "tool_calls"}
            out.append({**kept, "content": content})
        else:
            out.append(message)
        given = role == "tool"
    return out


def _block(function: Mapping[str, Any]) -> str:
    said = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return f"{HERMES.opens}\n{json.dumps(said, ensure_ascii=False)}\n{HERMES.closes}"


def _text_of(message: Json) -> str:
    """The text of a message; parts of other kinds are the business of whoever checks messages."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(
            str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content
        )
    return content if isinstance(content, str) else ""


def _introduced(messages: Sequence[Json], tools: Sequence[Json]) -> list[Json]:
    """Messages that tell of functions in the system message."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"You can call these functions, each described by a JSON schema:\n<tools>\n{listed}\n"
        "</tools>\nTo call one, answer with its name and its arguments as one JSON object between "
        'tags, once per call:\n<tool_call>\n{"name": "NAME", "arguments": {"KEY": VALUE}}\n'
        "</tool_call>\nWhat it gives comes back between <tool_response> tags. Answer in plain "
        "words where no function helps."
    )
    first = messages[0] if messages else {}
    if first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{_text_of(first)}\n\n{text}"}, *messages[1:]]
