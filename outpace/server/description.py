"""What ``/openapi.json`` says: every answer that a path may give, errors included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from outpace.server.bounds import Bounds, bound

_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["integer", "string"]},
            },
        }
    },
}
_EVENT = {
    "type": ["object", "string"],
    "required": ["data"],
    "properties": {"data": {"type": "string"}},
    "description": "An event: its data is a chunk or an error, as JSON; that of the last event is [DONE].",
}
_ALWAYS = {
    401: "The key is missing or wrong.",
    403: "The server does not answer to this host name.",
    500: "A defect of the server; its log says more.",
}
_BODY = {
    400: "The request is wrong; the message says what to change.",
    404: "There is no such model here.",
    408: "The body came too slowly.",
    413: "The body is too long.",
}
_ANSWER = {
    429: "Too many answers wait; come back later.",
    503: "The server is stopping.",
    504: "The answer takes too long.",
}
_GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_REASONS = {
    "description": "low_confidence: at a token that a drafter doubts, where lossy ones are allowed.",
    "enum": ["stop", "length", "tool_calls", "low_confidence", None],
}
_CHOICE = {"type": "object", "properties": {"finish_reason": _REASONS}, "required": ["finish_reason"]}
_CHOICES = {"properties": {"choices": {"type": "array", "items": _CHOICE}}, "required": ["choices"]}
_OWN = {
    "/v1/models/{model}": {404: _BODY[404]},
    "/health": {503: "The server is stopping, or has broken down."},
}


def describe(app: FastAPI, bounds: Bounds) -> dict[str, Any]:
    """The description of an application; made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path, operations in made["paths"].items():
            for method, operation in operations.items():
                _complete(path, method, operation)
        schemas = made["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own form, which is never sent
            schemas.pop(name, None)
        schemas["Error"] = _ERROR
        bound(schemas, bounds)
        app.openapi_schema = made
    return app.openapi_schema


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    """Add the answers that an operation may give, and take out those that it never gives."""
    responses = operation["responses"]
    responses.pop("422", None)
    found = {**_ALWAYS, **_OWN.get(path, {})}
    if method == "post":
        found |= _BODY
    if path in _GENERATES:
        found |= _ANSWER
        responses["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
    if path == "/metrics":
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        choices = _CHOICES if path.endswith("completions") else {}
        responses["200"]["content"]["application/json"]["schema"] = {"type": "object", **choices}
    reference: Mapping[str, Any] = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status, meaning in sorted(found.items()):
        responses[str(status)] = {"description": meaning, "content": dict(reference)}
