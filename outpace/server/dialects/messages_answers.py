"""Answers and errors of ``/v1/messages``, in the form of Anthropic's API."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from outpace.engine.results import Result
from outpace.server.dialects.blocks import Block, BlockWriter, Happened
from outpace.server.encoding import Json, JsonResponse
from outpace.server.errors import ApiError

PATH = "/v1/messages"
"""Errors of this path and those below it have a form of their own."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesWriter(BlockWriter):
    """Writes an answer as a message of blocks."""

    prefix = "msg"

    def opening(self, index: int) -> list[Json]:
        empty = self._message_of([], None, None, self._usage(None))
        return [{"type": "message_start", "message": empty}]

    def told(self, what: Happened, block: Block, new: str) -> Iterator[Json]:
        if what == "opens":
            start = {"type": "content_block_start", "index": block.number}
            yield {**start, "content_block": _shown(block, empty=True)}
        elif what == "grows":
            kind, key = _DELTAS[block.kind]
            delta = {"type": kind, key: new}
            yield {"type": "content_block_delta", "index": block.number, "delta": delta}
        else:
            yield {"type": "content_block_stop", "index": block.number}

    def last(self, result: Result) -> Iterator[Json]:
        reason, text = self._ended(result)
        delta = {"stop_reason": reason, "stop_sequence": text}
        usage, more = self._usage(result), {"metrics": self._metrics([result]), "lossless": self.lossless}
        yield {"type": "message_delta", "delta": delta, "usage": usage, **more}
        yield {"type": "message_stop"}

    def whole_answer(self, result: Result) -> Json:
        content = [_shown(block) for block in self.blocks.made]
        whole = self._message_of(content, *self._ended(result), self._usage(result))
        return {**whole, "metrics": self._metrics([result]), "lossless": self.lossless}

    def fault(self, error: ApiError) -> Json:
        return error_of(error, self.number)

    def _message_of(self, content: list[Json], reason: str | None, text: str | None, usage: Json) -> Json:
        return {
            "id": self._id.replace("-", "_"),
            "type": "message",
            "role": "assistant",
            "model": self._about["model"],
            "content": content,
            "stop_reason": reason,
            "stop_sequence": text,
            "usage": usage,
        }

    def _ended(self, result: Result) -> tuple[str, str | None]:
        """Why it ended, and at which of the client's texts."""
        reason = self._reason(0, result)
        if reason == "tool_calls" or (reason == "stop" and self.calls):
            return "tool_use", None
        if reason == "length":
            return "max_tokens", None
        stops = self.wanted.requests[0].params.stop
        if stops and self._tokenizer is not None:
            whole = self._tokenizer.decode(result.tokens)
            rest = whole[len(result.text) :]
            found = next((stop for stop in stops if rest.startswith(stop)), None)
            if found is not None:
                return "stop_sequence", found
        return "end_turn", None

    def _usage(self, result: Result | None) -> Json:
        cached = 0 if result is None else result.cached_tokens
        return {
            "input_tokens": len(self.wanted.requests[0].prompt) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": 0 if result is None else len(result.tokens),
        }


def _shown(block: Block, empty: bool = False) -> Json:
    text = "" if empty else block.text
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": text}
    given: Any = {}
    with contextlib.suppress(ValueError, RecursionError):  # so the model wrote it
        given = json.loads(text or "{}")
    return {
        "type": "tool_use",
        "id": block.id,
        "name": block.name,
        "input": given if isinstance(given, dict) else {},
    }


def error_of(error: ApiError, number: str | None) -> Json:
    """An error of ours in this form; ``param`` stays, for programs that know it.

    Args:
        number: of the request.
    """
    status, body = error.status_code, error.body()["error"]
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    told = {"type": kind, **{key: body[key] for key in ("message", "param", "code")}}
    return {"type": "error", "error": told, "request_id": number}


def in_form(scope: Mapping[str, Any], error: ApiError) -> Json:
    """An error as the path that it belongs to tells errors."""
    path = scope["path"]
    own = path == PATH or path.startswith(f"{PATH}/")
    return error_of(error, scope.get("number")) if own else error.body()


def refusal(scope: Mapping[str, Any], error: ApiError) -> JsonResponse:
    """An error as the answer to this request."""
    return JsonResponse(in_form(scope, error), error.status_code, error.headers)
