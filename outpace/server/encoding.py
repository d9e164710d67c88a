"""JSON as it leaves: compact, in UTF-8, without numbers that JSON does not have."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


def to_json(value: Any) -> bytes:
    """Compact JSON in UTF-8.

    Raises:
        ValueError: a number that is not finite, which is a defect of whoever gives it.
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


class JsonResponse(Response):
    """An answer in one JSON object."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return to_json(content)
