"""What a request wants its answer to look like, from the two fields that can say so."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from outpace.server.errors import ApiError, missing
from outpace.server.schema import Generation

_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    kind: Literal["schema", "regex", "choice", "grammar"]
    text: str
    """A JSON schema, an expression, a JSON list of texts, or a grammar of Lark."""
    field: str
    """Where the body says so."""

    @property
    def source(self) -> str:
        """The field that holds the schema: a choice of tools takes it from them."""
        return "tools" if self.field == "tool_choice" else self.field


def structured_output(
    body: Generation, longest: int, calls: StructuredOutput | None = None
) -> StructuredOutput | None:
    """The form that a body asks for; None for plain text.

    Args:
        longest: most characters of a schema or grammar.
        calls: the form of the calls that it asks for, or may get.

    Raises:
        ApiError: two wishes, none where there should be one, or one that is too long.
    """
    found = _format(body)
    if body.structured_outputs is not None:
        if found is not None:
            raise ApiError(
                400,
                "response_format and structured_outputs exclude each other; drop one of the two",
                "structured_outputs",
            )
        found = _structured(body)
    if calls is not None:
        if found is not None:
            raise ApiError(
                400, f"{calls.field} and {found.field} exclude each other; drop one of the two", calls.field
            )
        found = calls
    if found is not None and len(found.text) > longest:
        raise ApiError(
            400,
            f"{found.source} has {len(found.text)} characters, and at most {longest} are read; shorten it",
            found.source,
        )
    return found


def _format(body: Generation) -> StructuredOutput | None:
    form = body.response_format
    if form is None:
        return None
    if form.type == "json_schema" and form.json_schema is None:
        raise missing("response_format.json_schema")
    if form.type != "json_schema" and form.json_schema is not None:
        raise ApiError(
            400,
            f"response_format: json_schema belongs to the type json_schema, and the type is {form.type}",
            "response_format",
        )
    if form.type == "text":
        return None
    schema = None if form.json_schema is None else form.json_schema.schema_
    text = _ANY_OBJECT if schema is None else _as_text(schema)
    return StructuredOutput("schema", text, "response_format")


def _structured(body: Generation) -> StructuredOutput:
    form = body.structured_outputs
    assert form is not None
    field = "structured_outputs"
    given: list[StructuredOutput] = []
    if form.json_ is not None:
        given.append(StructuredOutput("schema", _as_text(form.json_), field))
    if form.regex is not None:
        given.append(StructuredOutput("regex", form.regex, field))
    if form.choice is not None:
        given.append(StructuredOutput("choice", json.dumps(form.choice), field))
    if form.grammar is not None:
        given.append(StructuredOutput("grammar", form.grammar, field))
    if len(given) != 1:
        raise ApiError(
            400, f"structured_outputs takes one of json, regex, choice and grammar, got {len(given)}", field
        )
    return given[0]


def _as_text(schema: dict[str, Any] | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)
