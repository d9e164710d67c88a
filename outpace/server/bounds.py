"""What `/openapi.json` says of bodies beyond the types of their fields: ranges, lengths, what excludes what.

The checks themselves are in `schema`, `parsing` and `params`. JSON Schema cannot say whether a grammar can be
read, whether two numbers fit each other, or how many tokens a text has. That is left to the checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outpace.models.chat import ROLES

Schema = dict[str, Any]

_NULL: Schema = {"type": "null"}
_NOT: Schema = {"enum": [None, False]}
_TEXT: Schema = {"type": "string", "minLength": 1}
_CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}
_PART: Schema = {
    "type": "object",
    "required": ["text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT: Schema = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [{"type": "string"}, _PART]}}]
}
_TEXTS: Schema = {
    "type": "array",
    "contains": {"anyOf": [_TEXT, {"required": ["text"], "properties": {"text": _TEXT}}]},
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "additionalProperties": False,
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [*_CONTENT["anyOf"], _NULL]},
        "name": {},
        "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, _NULL]},
        "tool_call_id": {},
        "reasoning_content": {},
        "refusal": _NULL,
        "annotations": {"anyOf": [{"type": "array", "maxItems": 0}, _NULL]},
        "audio": _NULL,
        "function_call": _NULL,
    },
    "anyOf": [
        {"required": ["content"], "properties": {"content": _CONTENT}},
        {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
    ],
}
"""As `models.chat.check_messages` and `parsing` take one."""
_SAYS: Schema = {
    "anyOf": [
        {"required": ["content"], "properties": {"content": {"anyOf": [_TEXT, _TEXTS]}}},
        _MESSAGE["anyOf"][1],
    ]
}
"""Of one message at least there is a text, or a call."""
_SILENT: Schema = {"required": ["text"], "properties": {"text": {"maxLength": 0}}}
_SPEAKS: Schema = {
    "properties": {"content": {"anyOf": [_TEXT, {"type": "array", "contains": {"not": _SILENT}}]}},
    "required": ["content"],
}
"""Likewise, in the messages of `/v1/messages`."""


def _null(*names: str) -> Schema:
    """Fields that are absent or null."""
    return {"properties": dict.fromkeys(names, _NULL)}


def _is(name: str, value: Schema) -> Schema:
    """A field that is there and so."""
    return {"required": [name], "properties": {name: value}}


def _all(*schemas: Schema) -> Schema:
    return {"allOf": list(schemas)}


def _any(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


_OBJECT: Schema = {"type": "object"}
_STREAMS = _is("stream", {"const": True})
_UNTRACED = {"properties": {"speculation": _any(_NULL, {"properties": {"trace": _NOT}})}}
_FREE = {"properties": {"min_tokens": {"enum": [None, 0]}, "ignore_eos": _NOT, "allowed_token_ids": _NULL}}
"""What leaves room for a form that the answer must have."""
_TEXT_FORM = {"properties": {"response_format": _any(_NULL, {"properties": {"type": {"const": "text"}}})}}
_NO_FORM = _all(_TEXT_FORM, _null("structured_outputs"))
_UNFORCED = {"properties": {"tool_choice": {"enum": [None, "none", "auto"]}}}
_COMMON = [
    _any(_STREAMS, _all(_null("stream_options"), _UNTRACED)),
    _any(_TEXT_FORM, _null("structured_outputs")),
    _any(_NO_FORM, _FREE),
]
_KINDS = ("json", "regex", "choice", "grammar")
_TRACED = _any(_STREAMS, _UNTRACED)
_DISABLED = _all(_is("type", {"const": "disabled"}), _null("budget_tokens"))
_ENABLED = _all(_is("type", {"const": "enabled"}), _is("budget_tokens", {"type": "integer"}))
_TOOLS = _is("tools", {"type": "array", "minItems": 1})
_CALLED = _any(
    {"properties": {"tool_choice": _any(_NULL, {"properties": {"type": {"enum": ["auto", "none"]}}})}},
    _all(_TOOLS, {"properties": {"output_config": _any(_NULL, _null("format"))}}),
)
RULES: Mapping[str, list[Schema]] = {
    "MessagesBody": [_TRACED, _CALLED],
    "CountBody": [_CALLED],
    "ResponsesBody": [
        _TRACED,
        _any(
            _UNFORCED,
            _all(
                _TOOLS,
                {
                    "properties": {
                        "text": _any(
                            _NULL, {"properties": {"format": _any(_NULL, _is("type", {"const": "text"}))}}
                        )
                    }
                },
            ),
        ),
    ],
    "ToolChoice": [
        _any(
            _all(_is("type", {"const": "tool"}), _is("name", {"type": "string"})),
            _all(_is("type", {"enum": ["auto", "any", "none"]}), _null("name")),
        )
    ],
    "Format": [
        _any(
            _all(_is("type", {"const": "json_schema"}), _is("schema", _OBJECT)),
            _all(_is("type", {"enum": ["text", "json_object"]}), _null("schema")),
        )
    ],
    "Thinking": [_any(_ENABLED, _DISABLED)],
    "CompletionBody": [
        *_COMMON,
        _any(
            {"properties": {"stream": {"enum": [None, False]}}},
            {"properties": {"echo": _NOT}},
            _null("logprobs"),
        ),
    ],
    "ChatBody": [
        *_COMMON,
        _any(_UNFORCED, _all(_TOOLS, _FREE, _NO_FORM)),
        _any(_null("top_logprobs"), _is("logprobs", {"const": True})),
    ],
    "TokenizeBody": [
        _any(
            _all(_is("prompt", {"type": "string"}), _null("messages")),
            _all(_is("messages", {"type": "array"}), _null("prompt")),
        )
    ],
    "ResponseFormat": [
        _any(
            _all(_is("type", {"const": "json_schema"}), _is("json_schema", _OBJECT)),
            _all(_is("type", {"enum": ["text", "json_object"]}), _null("json_schema")),
        )
    ],
    "StructuredOutputs": [
        _any(
            *(
                _all(_is(name, {"not": _NULL}), _null(*(one for one in _KINDS if one != name)))
                for name in _KINDS
            )
        )
    ],
}
"""Schema -> what its fields demand of each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Numbers of one server that requests are checked against."""

    vocab_size: int
    context: int
    """Most tokens of what is written or read as text."""
    prompt: int
    """Most tokens of a prompt."""
    answers: int
    new_tokens: int | None
    logprobs: int
    stops: int
    drafters: tuple[str, ...]
    template_keys: tuple[str, ...]
    """Keys that `chat_template_kwargs` may not have."""
    messages: int
    thinks: bool
    """Whether thinking can be told apart, and limited."""


def bound(schemas: Mapping[str, Schema], of: Bounds) -> None:
    """Add to the schemas of bodies what requests are checked against besides."""
    token: Schema = {"type": "integer", "minimum": 0, "maximum": of.vocab_size - 1}
    ids: Schema = {"type": "array", "items": token, "minItems": 1, "maxItems": of.prompt}
    several: Schema = {"type": "array", "minItems": 1, "maxItems": of.answers}
    prompts = [_TEXT, ids, {**several, "items": _TEXT}, {**several, "items": ids}]
    most = {} if of.new_tokens is None else {"maximum": of.new_tokens}
    fields: dict[str, Schema] = {
        "n": {"maximum": of.answers},
        "best_of": {"maximum": 1},
        "max_tokens": most,
        "min_tokens": most,
        "max_completion_tokens": most,
        "logprobs": {"maximum": of.logprobs},
        "top_logprobs": {"maximum": of.logprobs},
        "stop": {"items": _TEXT, "maxItems": of.stops, "minLength": 1},
        "stop_token_ids": {"items": token, "maxItems": of.stops},
        "allowed_token_ids": {"items": token, "minItems": 1},
        "tokens": {"items": token, "maxItems": of.context},
        "logit_bias": {"propertyNames": {"pattern": f"^({below(of.vocab_size)})$"}, "maxProperties": 10000},
        "messages": {"items": _MESSAGE, "contains": _SAYS, "minItems": 1, "maxItems": of.messages},
        "chat_template_kwargs": {"propertyNames": {"not": {"enum": list(of.template_keys)}}},
    }
    for schema in schemas.values():
        for field, said in schema.get("properties", {}).items():
            if field not in schema.get("required", ()) and said.get("default", "none is told") is not None:
                _or_null(said)
    for name, more in RULES.items():
        schemas[name]["allOf"] = more
    for name in ("CompletionBody", "ChatBody", "TokenizeBody", "DetokenizeBody"):
        for field, said in schemas[name]["properties"].items():
            _add(said, fields.get(field, {}))
    _add(schemas["MessagesBody"]["properties"]["max_tokens"], most)
    _add(schemas["MessagesBody"]["properties"]["stop_sequences"], fields["stop"])
    for field, said in (("max_output_tokens", most), ("top_logprobs", fields["top_logprobs"])):
        _add(schemas["ResponsesBody"]["properties"][field], said)
    schemas["CompletionBody"]["properties"]["prompt"]["anyOf"] = prompts
    for name in ("MessagesBody", "CountBody"):
        _add(schemas[name]["properties"]["messages"], {"contains": _SPEAKS, "maxItems": of.messages})
    if not of.thinks:
        schemas["Thinking"]["allOf"] = [_DISABLED]
        for schema in schemas.values():
            budget = schema.get("properties", {}).get("thinking_token_budget", {})
            if budget.pop("anyOf", None):
                budget.update(_NULL)
    _add(schemas["Speculation"]["properties"]["drafter"], {"enum": [*of.drafters]})


def _or_null(said: Schema) -> None:
    """A field that is left out where it is null."""
    own = {key: said.pop(key) for key in [*said] if key not in ("title", "description", "default")}
    said["anyOf"] = [*own.pop("anyOf", [own]), _NULL]


def _add(said: Schema, more: Schema) -> None:
    """Put bounds where the types are that they belong to."""
    for one in (said, *said.get("anyOf", ())):
        own = _OF.get(one.get("type", ""), ())
        one.update({key: value for key, value in more.items() if key in own})


_OF: Mapping[str, tuple[str, ...]] = {
    "integer": ("maximum",),
    "string": ("minLength", "enum"),
    "array": ("items", "contains", "minItems", "maxItems"),
    "object": ("propertyNames", "maxProperties"),
}


def below(limit: int) -> str:
    """An expression for the whole numbers from 0 to ``limit`` - 1, without leading zeros."""
    last = str(limit - 1)
    ways = ["0"] if len(last) == 1 else ["0", f"[1-9][0-9]{{0,{len(last) - 2}}}"]
    for place, digit in enumerate(map(int, last)):
        least = 1 if place == 0 else 0
        if digit > least:
            rest = len(last) - place - 1
            ways.append(f"{last[:place]}[{least}-{digit - 1}][0-9]{{{rest}}}")
    return "|".join([*ways, last])
