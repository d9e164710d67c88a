"""Chat templates: messages to prompt text, with what templates of the Hugging Face hub expect.

Templates come from strangers, so they run in the sandbox of jinja2 and see plain data only.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from outpace.errors import ModelError, RequestError
from outpace.models.fields import brief

if TYPE_CHECKING:
    from jinja2 import Template

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles a message may have; which of them a model knows is up to its template."""


def compile_template(source: str) -> "Template":
    """Compile a chat template.

    Raises:
        ModelError: the template has a syntax error.
    """
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    from outpace.models.sandbox import Sandbox, bounded

    class Generation(Extension):
        """Accepts the tag that marks what the assistant wrote; only training uses it."""

        tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> str:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # The filter of jinja2 escapes for HTML, which no model was trained on.
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.add_filter("tojson", to_json)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        with bounded():
            return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ModelError(
            f"the model's chat template is broken: {error.message} (line {error.lineno})"
        ) from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check the messages of a conversation and reduce them to plain data.

    Contents may be a string, a list of text parts (they are joined), or None beside tool calls.

    Raises:
        RequestError: the first thing that is wrong, with the number of its message.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            f'messages must be a list of {{"role": ..., "content": ...}}, got {type(messages).__name__}'
        )
    if not messages:
        raise RequestError("messages is empty; give at least one user message")
    checked = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"message {number} must be an object with role and content, got {type(message).__name__}"
            )
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"message {number} has role {role!r}; known roles: {', '.join(ROLES)}")
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
            content = "".join(_text_of(part, number) for part in content)
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise RequestError(
                f"message {number} has content of type {type(content).__name__}; "
                "give a string or a list of text parts"
            )
        checked.append({**message, "content": content})
    if not any(one["content"] or one.get("tool_calls") for one in checked):
        raise RequestError("messages has no text; give some")
    plain: list[dict[str, Any]] = _plain("messages", checked)
    return plain


def render(template: "Template", messages: list[dict[str, Any]], /, **variables: Any) -> str:
    """Fill a template in. Variables may have any names but ``messages``.

    Raises:
        RequestError: the template refuses these messages, in the template's own words, or takes too
            much time or memory for them.
    """
    from outpace.models.sandbox import TooMuch, bounded

    given = _plain("chat template arguments", variables)
    try:
        with bounded(len(messages)):
            return template.render({**given, "messages": messages})
    except TooMuch as error:
        raise RequestError(
            f"the model's chat template is given up: {error}; shorten the messages, or give a raw prompt"
        ) from error
    except Exception as error:  # a template is foreign code and may raise anything
        raise RequestError(f"the model's chat template refuses these messages: {brief(error)}") from error


def _text_of(part: Any, number: int) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str) or part.get("type", "text") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind == "text":
            raise RequestError(f"message {number} has a part of type 'text' without a text; give it")
        raise RequestError(f"message {number} has a part of type {kind!r}; only text is supported")
    return text


def _plain(what: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{what} must be plain JSON data: {brief(error)}") from error
