"""``POST /v1/responses``: bodies of OpenAI's newer API, as chats of ours. Nothing is stored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag

from outpace.server.dialects.blocks import as_chat_body, by_field, by_shape, refuse
from outpace.server.encoding import Json
from outpace.server.errors import missing
from outpace.server.schema import MOST_MESSAGES, MOST_TOOLS, Answered, Body, ChatBody, Count, Id, Plain, truth


class TextPart(Body):
    """A piece of text."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Plain], Field(max_length=0)] | None = None
    """Empty: nothing is annotated."""
    logprobs: list[Any] | None = None
    """Not read: those of an earlier answer come back."""


class ReasoningPart(Body):
    """A piece of thinking."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


Parts = Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_MESSAGES)]
Texted = Annotated[Annotated[str, Tag("~str")] | Annotated[Parts, Tag("~list")], by_shape()]
"""A text, or its pieces."""
Thoughts = Annotated[list[ReasoningPart], Field(fail_fast=True, max_length=MOST_MESSAGES)]


class MessageItem(Body):
    """One turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texted
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    """Not read, as the two before it."""


class CallItem(Body):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: str
    name: str = Field(min_length=1, max_length=128)
    arguments: str
    id: str | None = None
    status: str | None = None


class OutputItem(Body):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Texted
    id: str | None = None
    status: str | None = None


class ReasoningItem(Body):
    """Thinking of an earlier answer."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Thoughts = Field(default_factory=list)
    """Not read."""
    content: Thoughts | None = None
    encrypted_content: None = None
    status: str | None = None


Item = Annotated[
    Annotated[MessageItem, Tag("~message")]
    | Annotated[CallItem, Tag("~function_call")]
    | Annotated[OutputItem, Tag("~function_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")],
    by_field("type", "message"),
]
Items = Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]


Said = Annotated[str, Field(min_length=1)]


class Function(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: Plain | None = None
    """A JSON schema of its arguments; unset: any object."""
    strict: bool | None = None
    """Calls obey the schema, also where the model is free to call or not."""


class Named(Body):
    """The function that is to be called."""

    type: Literal["function"]
    name: str


class Format(Body):
    """What an answer has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    """Not read."""
    description: str | None = None
    """Not read."""
    schema_: Plain | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """The answer obeys the schema in any case."""


class TextOptions(Body):
    """How text is answered."""

    format: Format | None = None
    verbosity: str | None = None
    """Not read."""


class ReasoningOptions(Body):
    """Not read: ``thinking_token_budget`` says how long a model may think."""

    effort: str | None = None
    summary: str | None = None


class StreamOptions(Body):
    """Not read."""

    include_obfuscation: bool = False


_LOGPROBS = "message.output_text.logprobs"
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class ResponsesBody(Answered):
    """``POST /v1/responses``."""

    UNREAD: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
            "prompt_cache_key",
            "prompt_cache_retention",
            "reasoning",
            "safety_identifier",
            "service_tier",
            "store",
            "stream_options",
            "user",
        }
    )
    """Fields that are taken and not read; ``metadata`` comes back."""

    input: Annotated[Annotated[Said, Tag("~str")] | Annotated[Items, Tag("~list")], by_shape()]
    """A text of the user, or messages, calls and what came of them."""
    instructions: str | None = None
    """Put before all messages, as a system message."""
    max_output_tokens: Count | None = None
    """Longest answer, tokens; thinking counts."""
    tools: Annotated[list[Function], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Named | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: Id | None = None
    """Most tokens of thinking; then its end is written, and the answer begins."""
    previous_response_id: None = None
    """Only null: nothing is stored."""
    conversation: None = None
    """Likewise."""
    background: Annotated[Literal[False] | None, BeforeValidator(truth)] = None
    truncation: Literal["disabled"] | None = None
    """A prompt that is too long is refused."""
    include: Annotated[list[Included], Field(fail_fast=True)] | None = None
    """What answers tell besides; of these only log-probabilities are there."""
    top_logprobs: Id | None = None
    """Alternatives per token of the text. Above 0 it asks for log-probabilities, as ``include`` does."""
    store: bool | None = None
    metadata: Plain | None = None
    user: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    stream_options: StreamOptions | None = None


NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Fields of a chat -> what they are called here."""


def as_chat(body: ResponsesBody) -> ChatBody:
    """The same request as a chat.

    Raises:
        ApiError: a schema where there should be none, or none where there should be one.
    """
    messages: list[Json] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += _messages(body.input)
    found: Json = {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "thinking_token_budget": body.thinking_token_budget,
    }
    if body.tools is not None:
        found["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in body.tools
        ]
    choice = body.tool_choice
    if isinstance(choice, Named):
        found["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        found["tool_choice"] = choice
    if body.top_logprobs or _LOGPROBS in (body.include or ()):
        found |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    form = None if body.text is None else body.text.format
    if form is not None:
        if form.type == "json_schema" and form.schema_ is None:
            raise missing("text.format.schema")
        if form.type != "json_schema" and form.schema_ is not None:
            raise refuse(
                "text.format", f"a schema belongs to the type json_schema, and the type is {form.type}"
            )
        found["response_format"] = {"type": form.type}
        if form.schema_ is not None:
            found["response_format"]["json_schema"] = {"schema": form.schema_}
    return as_chat_body(found, body)


def _messages(items: list[Item]) -> list[Json]:
    """Items as messages of ours: thinking, text and calls of the assistant that follow each other are one."""
    out: list[Json] = []

    def mine() -> Json:
        """The message of the assistant that is being put together."""
        if not out or out[-1]["role"] != "assistant":
            out.append({"role": "assistant", "content": ""})
        return out[-1]

    for item in items:
        if isinstance(item, ReasoningItem):
            thought = "".join(part.text for part in item.content or ())
            if thought:
                out.append({"role": "assistant", "content": "", "reasoning_content": thought})
        elif isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            mine().setdefault("tool_calls", []).append(call)
        elif isinstance(item, OutputItem):
            out.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif item.role == "assistant":
            whole = mine()
            whole["content"] += _text(item.content)
        else:
            role = "system" if item.role == "developer" else item.role
            out.append({"role": role, "content": _text(item.content)})
    return out


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
