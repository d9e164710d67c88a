"""Errors as HTTP answers, in the form of the OpenAI API: one object, one line for people."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException

from outpace.errors import OutpaceError, PromptTooLong, RequestError, SpecError, UnknownNameError
from outpace.server import wording

LOG = logging.getLogger("outpace.server")
MISTAKES = (RequestError, SpecError, UnknownNameError)
"""Errors that a client can mend. Others are the business of whoever runs the server."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_LONGEST = 400  # characters of a message, which may repeat what a client sent


class ApiError(HTTPException):
    """A request that is answered with an error.

    Args:
        message: what was wrong, the value that was given, what to do.
        code: for programs; None: the HTTP status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message, self.param, self.code = message, param, code

    def body(self) -> dict[str, Any]:
        return error_body(self.status_code, self.message, self.param, self.code)


def stopping(headers: Mapping[str, str] | None = None) -> ApiError:
    return ApiError(503, "the server is stopping; try again elsewhere", headers=headers)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """What every error looks like. Half surrogate pairs of a client become question marks."""
    return {
        "error": {
            "message": _sendable(message),
            "type": _TYPES.get(status, "server_error"),
            "param": None if param is None else _sendable(param),
            "code": code or status,
        }
    }


def too_long(message: str, param: str) -> ApiError:
    """A prompt that is longer than it may be, in the code that clients know."""
    return ApiError(400, message, param, code="context_length_exceeded")


def missing(name: str) -> ApiError:
    """A field that has to be there and is not."""
    return ApiError(400, f"{name} is missing; give it", name)


def from_mistake(error: OutpaceError) -> ApiError:
    """A mistake in a request that was found below HTTP, one of ``MISTAKES``."""
    text, param = wording.of_engine(str(error))
    if isinstance(error, PromptTooLong):
        return too_long(text, "prompt")
    return ApiError(
        400, text, "speculation.drafter" if isinstance(error, SpecError | UnknownNameError) else param
    )


def renamed(error: ApiError, names: wording.Names) -> ApiError:
    """The same error, in the names that another form of chats has for fields."""
    above = (error.param or "").partition(".")[0]
    param, text = names.get(above, error.param), wording.renamed(error.message, names)
    return ApiError(error.status_code, text, param, error.headers, error.code)


def from_defect(what: str, error: Exception) -> ApiError:
    """A defect: the log is told all of it, the client nothing but that."""
    LOG.error("%s failed", what, exc_info=error)
    return ApiError(500, "a defect of the server; its log says more")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """What a body lacks or has too much of; the first thing that is wrong.

    Args:
        errors: of pydantic, each with ``loc``, ``type``, ``msg``.
    """
    found = wording.likeliest(errors)
    found[0] = wording.of_kind(found[0])
    first, place = found[0], wording.place(found[0])
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", "it ends too soon")
        return ApiError(400, f"the body is not JSON: {why} at character {place[0]}")
    if not place and first["type"] not in ("missing", "dict_type", "model_attributes_type"):
        return ApiError(400, f"the body cannot be read: {wording.reason(found)}")
    if not place:
        return ApiError(400, "the body is no JSON object; send one, with Content-Type: application/json")
    name = ".".join(place)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {name!r}; leave it out", name)
    if first["type"] == "missing":
        return missing(name)
    return ApiError(400, f"{name}: {wording.reason(found)}, got {wording.given(first)}", name)


def _sendable(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
