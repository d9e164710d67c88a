"""JSON as it leaves: compact, in UTF-8, without numbers that JSON does not have."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

Json = dict[str, Any]

_BREAKS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Ends of lines for some readers of event streams, who would cut an event there. JSON itself
escapes those of ASCII; inside its strings, where alone they can stand, these may be escaped."""


def to_json(value: Any) -> bytes:
    """Compact JSON in UTF-8, in one line for every reader. Half surrogate pairs are escaped.

    Raises:
        ValueError: a number that is not finite, which is a defect of whoever gives it.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(_BREAKS).encode(errors="backslashreplace")


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)
