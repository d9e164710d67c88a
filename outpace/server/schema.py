"""Bodies of requests: fields of the OpenAI API, those that other servers added, and our own.

A field that is not here is an error that names it. Fields that cannot change an answer are taken
and not read (``UNREAD`` of each kind of body).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

MOST_FIELDS = 100
"""Fields of one object; no object of this API has as many."""
MOST_MESSAGES, MOST_TOOLS, MOST_BIASES = 10_000, 128, 10_000
"""Longest lists of objects. Each object costs the event loop some microseconds."""
DEEPEST = 100
"""Levels of objects and lists within each other; no schema of people or programs has as many."""


def truth(value: Any) -> Any:
    """Refuse 0 and 1 where false or true is meant: Python takes them for equal."""
    if value is not None and not isinstance(value, bool):
        raise ValueError("should be true or false")
    return value


def too_deep(value: Any) -> bool:
    """Whether plain data has more than ``DEEPEST`` levels, on which who reads it could founder."""
    level = [value]
    for _ in range(DEEPEST + 1):
        inner = (
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        )
        level = [value for values in inner for value in values]
        if not level:
            return False
    return True


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    if too_deep(value):
        raise ValueError(f"should have at most {DEEPEST} levels within each other")
    try:
        json.dumps(value, allow_nan=False)  # at the speed of C
    except ValueError:
        raise ValueError("should hold finite numbers alone") from None
    return value


def _one_kind(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check a list of prompts at the speed of C, and stop at the first mistake.

    pydantic would report one error per item and per member of the union: seconds for a long list.
    """
    if not isinstance(value, list) or not value:
        return check(value)
    kinds = set(map(type, value))
    if kinds <= {int, float}:
        return _ids(value)
    if kinds == {list}:
        if len(value) > MOST_MESSAGES:
            raise ValueError(f"should have at most {MOST_MESSAGES} prompts, and has {len(value)}")
        return [_ids(ids) for ids in value]
    if kinds != {str}:
        raise ValueError("should be a text, token ids, a list of texts, or a list of lists of token ids")
    return value


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MOST_BIASES:
        raise ValueError(f"should name at most {MOST_BIASES} tokens, and names {len(value)}")
    return value


def _ids(ids: list[Any]) -> list[int]:
    if set(map(type, ids)) - {int}:
        ids = [_whole(token) for token in ids]
    if set(map(type, ids)) - {int}:
        raise ValueError("should hold lists of token ids")
    if ids and min(ids) < 0:
        raise ValueError(f"token ids should be greater than or equal to 0, and one is {min(ids)}")
    return ids


def _whole(value: Any) -> Any:
    """A whole number that is written as ``2.0``, which is one in JSON, as a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_FAST = Field(fail_fast=True)
_WHOLE = BeforeValidator(_whole)
Id = Annotated[int, Field(ge=0), _WHOLE]
Count = Annotated[int, Field(ge=1), _WHOLE]
TopK = Annotated[int, Field(ge=-1), _WHOLE]
Seed = Annotated[int, _WHOLE]
Divisor = Annotated[float, Field(ge=1e-30, le=1e30)]
Addend = Annotated[float, Field(ge=-1e30, le=1e30)]
"""Beyond, a logit may become infinite, and no distribution is left."""
Ids = Annotated[list[Id], _FAST]
Texts = Annotated[list[str], _FAST]
Prompts = Annotated[str | list[str] | list[Id] | list[list[Id]], WrapValidator(_one_kind)]
Plain = Annotated[dict[str, Any], AfterValidator(_plain)]
Messages = Annotated[list[Plain], Field(fail_fast=True, max_length=MOST_MESSAGES)]


class Body(BaseModel):
    """Anything that a client sends. JSON types are not converted: ``"1"`` is no number."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _given_fields(cls, value: Any) -> Any:
        """Refuse very many fields; those that are null and may be left out are left out."""
        if not isinstance(value, dict):
            return value
        if len(value) > MOST_FIELDS:
            raise ValueError(f"an object has at most {MOST_FIELDS} fields, and this one {len(value)}")
        if None not in value.values():
            return value
        fields = cls.model_fields
        usual = {name for name, one in fields.items() if not one.is_required() and one.default is not None}
        return {name: one for name, one in value.items() if one is not None or name not in usual}


class StreamOptions(Body):
    """How a stream reports."""

    include_usage: bool = False
    """Send a last chunk with ``usage`` and ``metrics``, and no choices."""
    continuous_usage_stats: bool = False
    """Send ``usage`` so far with every chunk."""
    include_obfuscation: bool = False
    """Not read: nothing is added to chunks to hide their length."""


class Speculation(Body):
    """Who drafts for this request, and how much. The distribution of the answer does not depend on it."""

    drafter: str | None = None
    """Method spec, one of those that the server was started with, or ``none``; unset: its first."""
    num_speculative_tokens: Id | None = None
    """Most guesses per pass; 0: none at all; unset: the drafter's own."""
    reproducible: bool | None = None
    """The same seed gives the same text with any drafter and with none; unset: if ``seed`` is
    given."""
    detailed: bool = False
    """Tell for every token of the answer who wrote it."""
    trace: bool = False
    """Put ``outpace`` into every chunk of a stream: who wrote each token, and the tree of the
    pass."""


class TextPart(Body):
    """A piece of a text."""

    type: Literal["text"] = "text"
    text: str


class Prediction(Body):
    """A text that the answer is expected to resemble."""

    type: Literal["content"] = "content"
    content: str | Annotated[list[TextPart], _FAST]

    @property
    def text(self) -> str:
        """The text in one piece."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class NamedSchema(Body):
    """A JSON schema, as ``response_format`` wraps it."""

    name: str = "answer"
    """Not read."""
    description: str | None = None
    """Not read."""
    schema_: Plain | None = Field(default=None, alias="schema")
    """The schema; unset: any JSON object."""
    strict: bool | None = None
    """The answer obeys the schema in any case."""


class ResponseFormat(Body):
    """What an answer has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """What an answer has to look like; exactly one of these."""

    json_: Plain | str | None = Field(default=None, alias="json")
    """A JSON schema, or its text."""
    regex: str | None = None
    """A regular expression for the whole answer."""
    choice: Texts | None = None
    """The answers that there may be."""
    grammar: str | None = None
    """A grammar in the form of Lark."""


class Function(Body):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: Plain | None = None
    """A JSON schema of its arguments; unset: any object."""
    strict: bool | None = None
    """Calls obey the schema, also where the model is free to call or not."""


class Tool(Body):
    """A function, as ``tools`` wraps it."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """Which function."""

    name: str


class NamedTool(Body):
    """The function that is to be called."""

    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)]


class Answered(Body):
    """What all requests for an answer have in common. None counts as not given."""

    model: str | None = None
    """The name that ``/v1/models`` lists."""
    temperature: float | None = Field(default=None, ge=0)
    """Divides the logits; 0 always takes the likeliest token."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Keep the smallest set of likeliest tokens with at least this probability."""
    seed: Seed | None = None
    """Names the coins: same seed, same settings, same text."""
    stream: bool | None = None
    """Send the answer piece by piece, as server-sent events."""
    speculation: Speculation | None = None


class Generation(Answered):
    """What completions and chat have in common. None counts as not given."""

    UNREAD: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "reasoning_effort",
            "verbosity",
        }
    )
    """Fields that are taken and not read."""

    max_tokens: Count | None = None
    """Longest answer, tokens."""
    top_k: TopK | None = None
    """Keep the k likeliest tokens; 0 or -1: all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Keep tokens at least this probable, as a share of the likeliest one's."""
    repetition_penalty: Divisor | None = None
    """Above 1: tokens of prompt and answer become less likely."""
    presence_penalty: Addend | None = None
    """Subtracted from the logit of every token in the answer."""
    frequency_penalty: Addend | None = None
    """The same, times how often it is there."""
    logit_bias: Annotated[dict[str, Addend] | None, BeforeValidator(_few_biases)] = None
    """Token id -> what is added to its logit."""
    allowed_token_ids: Ids | None = None
    """If given, nothing else is generated."""
    thinking_token_budget: Id | None = None
    """Most tokens of thinking; then its end is written, and the answer begins."""
    n: Count | None = None
    """Answers per prompt."""
    stop: str | Texts | None = None
    """Strings that end the text where they begin."""
    stop_token_ids: Ids | None = None
    """Tokens that end the text, besides the model's own."""
    include_stop_str_in_output: bool = False
    """Whether the stop string stays in the text."""
    ignore_eos: bool = False
    """Whether to go on after the model's end-of-sequence tokens."""
    min_tokens: Id | None = None
    """So many tokens are generated before any stop counts."""
    skip_special_tokens: Annotated[Literal[True], BeforeValidator(truth)] = True
    """Special tokens are never part of the text."""
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    """Drafted from by the drafter ``reference``, unless ``speculation`` names another."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = False
    """Send token ids along."""
    user: str | None = None
    metadata: Plain | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


class CompletionBody(Generation):
    """``POST /v1/completions``."""

    prompt: Prompts
    """A text, token ids, or a list of either."""
    logprobs: Id | None = None
    """Report log-probabilities, with so many alternatives per token."""
    max_tokens: Id | None = None
    """Longest answer, tokens; 0: none, for the log-probabilities of the prompt alone."""
    echo: bool = False
    """Put the prompt before the answer; with ``logprobs``, its log-probabilities too."""
    best_of: Count | None = None
    """1 alone: answers are not ranked."""
    suffix: None = None
    """Not supported."""


class ChatBody(Generation):
    """``POST /v1/chat/completions``."""

    messages: Messages
    """Objects with ``role`` and ``content``."""
    max_completion_tokens: Count | None = None
    """The newer name of ``max_tokens``."""
    logprobs: bool | None = None
    """Report log-probabilities."""
    top_logprobs: Id | None = None
    """Alternatives per token; needs ``logprobs``."""
    tools: Tools | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """``none`` tells the model of no tools; ``required``, or a function: the answer is calls."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    chat_template_kwargs: Plain | None = None
    """More values for the chat template."""
    add_generation_prompt: bool = True
    """End the prompt with the opening of the assistant's turn."""
    special_tokens_in_messages: bool = False
    """Whether a special token that is written in a message is that token; otherwise it is text."""
    modalities: Annotated[list[Literal["text"]], _FAST] | None = None


class TokenizeBody(Body):
    """``POST /tokenize``: a text or messages."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    """Add what the model expects around a text."""
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Plain | None = None
    special_tokens_in_messages: bool = False
    """As in chats."""
    return_token_strs: bool = False
    """Send the text of every token along."""


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool = False
    """Leave special tokens out."""
