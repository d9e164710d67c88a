"""``POST /v1/messages``: bodies in the form of Anthropic's API, as chats of ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

from outpace.server.dialects.blocks import as_chat_body, by_field, by_shape, refuse
from outpace.server.encoding import Json
from outpace.server.errors import missing
from outpace.server.schema import MOST_MESSAGES, MOST_TOOLS, Answered, Body, ChatBody, Count, Id, Plain, Texts


class CacheControl(Body):
    """Not read: what was read before is found by itself."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class Text(Body):
    """A piece of text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


Texts_ = Annotated[list[Text], Field(fail_fast=True, max_length=MOST_MESSAGES)]
Texted = Annotated[Annotated[str, Tag("~str")] | Annotated[Texts_, Tag("~list")], by_shape()]
"""A text, or its pieces."""


class ToolUse(Body):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str = Field(min_length=1, max_length=128)
    input: Plain
    cache_control: CacheControl | None = None


class ToolResult(Body):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texted = ""
    is_error: bool = False
    """Told to the model in words."""
    cache_control: CacheControl | None = None


class Thought(Body):
    """Thinking of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    """Not read."""


Heard = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[ToolResult, Tag("~tool_result")], by_field("type")
]
Said = Annotated[
    Annotated[Text, Tag("~text")]
    | Annotated[ToolUse, Tag("~tool_use")]
    | Annotated[Thought, Tag("~thinking")],
    by_field("type"),
]
_BLOCKS = Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)
HeardBlocks = Annotated[list[Heard], _BLOCKS]
SaidBlocks = Annotated[list[Said], _BLOCKS]


class UserMessage(Body):
    """A turn of the user, and what came of calls."""

    role: Literal["user"]
    content: Annotated[Annotated[str, Tag("~str")] | Annotated[HeardBlocks, Tag("~list")], by_shape()]


class AssistantMessage(Body):
    """A turn of the model."""

    role: Literal["assistant"]
    content: Annotated[Annotated[str, Tag("~str")] | Annotated[SaidBlocks, Tag("~list")], by_shape()]


Message = Annotated[
    Annotated[UserMessage, Tag("~user")] | Annotated[AssistantMessage, Tag("~assistant")], by_field("role")
]


class Tool(Body):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: Plain
    """A JSON schema of its arguments."""
    strict: bool | None = None
    """Calls obey the schema, also where the model is free to call or not."""
    cache_control: CacheControl | None = None


class ToolChoice(Body):
    """Whether to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Of the function, for ``tool``."""
    disable_parallel_tool_use: bool = False
    """At most one call."""


class Thinking(Body):
    """How long the model may think."""

    type: Literal["enabled", "disabled"]
    """``disabled`` is a budget of 0 for models that think."""
    budget_tokens: Id | None = None
    """Most tokens of thinking; then its end is written."""
    display: Literal["summarized"] | None = None
    """Not read: thinking is told as it is."""


class OutputFormat(Body):
    """What an answer has to look like."""

    type: Literal["json_schema"]
    schema_: Plain = Field(alias="schema")


class OutputConfig(Body):
    """How to answer."""

    format: OutputFormat | None = None
    effort: str | None = None
    """Not read."""


class Metadata(Body):
    """Not read."""

    user_id: str | None = None


class Prompt(Body):
    """What both paths of this form take."""

    model: str | None = None
    """The name that ``/v1/models`` lists."""
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    system: Texted | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(Prompt, Answered):
    """``POST /v1/messages``."""

    UNREAD: ClassVar[frozenset[str]] = frozenset({"metadata", "service_tier", "cache_control"})
    """Fields that are taken and not read."""

    max_tokens: Count
    """Longest answer, tokens; thinking counts."""
    top_k: Id | None = None
    """Keep the k likeliest tokens; 0: all."""
    stop_sequences: Texts | None = None
    """Strings that end the text where they begin."""
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_control: CacheControl | None = None


class CountBody(Prompt):
    """``POST /v1/messages/count_tokens``."""


NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Fields of a chat -> what they are called here."""


def as_chat(body: Prompt, thinks: bool) -> ChatBody:
    """The same request as a chat.

    Args:
        thinks: whether the model has marks of thinking.

    Raises:
        ApiError: an answer that is to be continued, a choice without its function.
    """
    if body.messages[-1].role == "assistant":
        raise refuse(
            "messages", "the last one is the assistant's, and answers are not continued; leave it out"
        )
    messages: list[Json] = [] if body.system is None else [{"role": "system", "content": _text(body.system)}]
    for message in body.messages:
        messages += _messages(message)
    found: Json = {"messages": messages}
    if body.tools is not None:
        found["tools"] = [_tool(tool) for tool in body.tools]
    choice = body.tool_choice
    if choice is not None:
        if choice.type == "tool" and choice.name is None:
            raise missing("tool_choice.name")
        if choice.type != "tool" and choice.name is not None:
            raise refuse("tool_choice", f"a name belongs to the type tool, and the type is {choice.type}")
        named = {"type": "function", "function": {"name": choice.name}}
        found["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.thinking is not None:
        if body.thinking.type == "enabled" and body.thinking.budget_tokens is None:
            raise missing("thinking.budget_tokens")
        if body.thinking.type != "enabled" and body.thinking.budget_tokens is not None:
            raise refuse("thinking", f"budget_tokens belongs to the type enabled, got {body.thinking.type}")
        if body.thinking.budget_tokens is not None and not thinks:
            raise refuse("thinking", "this model has no marks of thinking; leave it out")
        found["thinking_token_budget"] = (body.thinking.budget_tokens or 0) if thinks else None
    form = None if body.output_config is None else body.output_config.format
    if form is not None:
        found["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    if isinstance(body, MessagesBody):
        found |= {"max_tokens": body.max_tokens, "top_k": body.top_k, "stop": body.stop_sequences or None}
    return as_chat_body(found, body)


def _text(content: str | Sequence[Text]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool(tool: Tool) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _messages(message: UserMessage | AssistantMessage) -> list[Json]:
    """One turn as messages of ours: what came of calls first, then the rest."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[Json] = []
    texts: list[str] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for block in message.content:
        if isinstance(block, Text):
            texts.append(block.text)
        elif isinstance(block, ToolUse):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResult):
            said = _text(block.content)
            said = f"Error: {said}" if block.is_error else said
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": said})
        else:
            thoughts.append(block.thinking)
    if not (texts or calls):
        return results
    own: Json = {"role": message.role, "content": "".join(texts)}
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        own["reasoning_content"] = "".join(thoughts)
    return [*results, own]
