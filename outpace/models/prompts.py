"""The forms that a prompt may have - text, token ids, chat messages - and their token ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from outpace.errors import PromptTooLong, RequestError
from outpace.models.base import Target

if TYPE_CHECKING:
    from outpace.models.text import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages with ``role`` and ``content``."""
Reference = str | Sequence[int]
"""Text or token ids that an answer is expected to resemble."""
T = TypeVar("T")


def as_prompts(prompt: Any) -> tuple[list[Prompt], bool]:
    """Tell one prompt from a batch of prompts.

    Returns:
        The prompts, and whether a single one was given.
    """
    if isinstance(prompt, str):
        return [prompt], True
    prompt = listed(prompt)
    if not isinstance(prompt, Sequence):
        raise RequestError(refusal("a prompt", prompt))
    if prompt and isinstance(prompt[0], str | Sequence) and not isinstance(prompt[0], Mapping):
        return list(prompt), False
    return [prompt], True


def encode(prompt: Any, target: Target, *, chat: bool = False) -> tuple[int, ...]:
    """Token ids that a sequence with this prompt begins with; ``chat`` wraps a text in the model's chat
    template.

    Raises:
        PromptTooLong: a text or conversation that is sure not to fit.
        RequestError: an empty prompt, or what is none; text where there is no tokenizer.
    """
    prompt, most = listed(prompt), target.max_positions - 1
    if isinstance(prompt, Sequence) and not prompt:
        raise RequestError("the prompt is empty; give some text or token ids")
    messages = isinstance(prompt, Sequence) and isinstance(prompt[0], Mapping)
    if target.encodes and (messages or (chat and isinstance(prompt, str))):
        raise RequestError(f"{target.name} is an encoder-decoder and holds no chats; give its text alone")
    if isinstance(prompt, str):
        tokenizer = tokenizer_of(target, "a text prompt")
        if chat:
            return tuple(tokenizer.chat([{"role": "user", "content": prompt}], most_tokens=most))
        return target.framed(tokenizer.encode(prompt, most=most))
    if messages:
        return tuple(tokenizer_of(target, "a chat").chat(prompt, most_tokens=most))
    return target.framed(as_ids(prompt, "a prompt"))


def encode_within(prompt: Any, target: Target, most: int) -> tuple[int, ...] | None:
    """Token ids of a prompt; None if there are more than ``most``, or than the context holds."""
    try:
        ids = encode(prompt, target)
    except PromptTooLong:
        return None
    return ids if len(ids) <= most else None


def evenly(rows: Sequence[T], count: int | None) -> list[T]:
    """At most ``count`` of the rows, spread evenly over all of them; None takes all."""
    count = len(rows) if count is None else min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def as_ids(tokens: Any, what: str) -> tuple[int, ...]:
    """Token ids as plain integers.

    Raises:
        RequestError: bytes, or something that is no list of whole numbers.
    """
    tokens = listed(tokens)
    if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes | bytearray):
        raise RequestError(refusal(what, tokens))
    try:
        return tuple(operator.index(token) for token in tokens)
    except TypeError:
        raise RequestError(f"token ids are whole numbers; {what} holds {tokens!r:.80}") from None


def as_reference(reference: Any, target: Target) -> tuple[int, ...] | None:
    """Token ids of a reference, which may be text or None.

    Raises:
        RequestError: as ``as_ids``; ids that are no tokens; text where there is no tokenizer.
    """
    if reference is None:
        return None
    if isinstance(reference, str):
        reference = tokenizer_of(target, "a reference text").encode(reference, special=False)
    ids = as_ids(reference, "a reference")
    check_ids(ids, target, "the reference")
    return ids


def check_ids(ids: Sequence[int], target: Target, what: str) -> None:
    """Raise RequestError unless all are tokens of the target."""
    wrong = next((t for t in ids if not 0 <= t < target.vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"{what}: token {wrong} is outside the vocabulary of {target.name} (0 to {target.vocab_size - 1})"
        )


def tokenizer_of(target: Target, what: str) -> Tokenizer:
    """The target's tokenizer; RequestError, saying what needs it, if there is none."""
    if target.tokenizer is None:
        raise RequestError(
            f"{what} needs a tokenizer, and {target.name} has none; put its tokenizer.json into the "
            "model's folder; Python also takes token ids, and Engine.load(..., tokenizer=...)"
        )
    return target.tokenizer


def listed(value: Any) -> Any:
    """A tensor or array as a list; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def refusal(what: str, value: Any) -> str:
    """Why a value is no prompt or reference."""
    forms = "text, token ids or chat messages" if what == "a prompt" else "text or token ids"
    return f"{what} is {forms}, got {type(value).__name__}"
