"""What a server takes from strangers, as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of one request, and of all of them together. What exceeds one is refused."""

    body_bytes: int = 1 << 20
    """Longest body of a request. The worst body of this length takes 0.3 s to read, and nothing
    else runs meanwhile."""
    prompt_tokens: int | None = None
    """Longest prompt; None: what the context holds."""
    new_tokens: int | None = None
    """Most tokens per answer that may be asked for; None: what the context holds. Also the
    length of a chat answer whose request names none."""
    answers: int = 32
    """Most answers per request: prompts times ``n``."""
    logprobs: int = 20
    """Most alternatives per token."""
    stops: int = 16
    """Most stop strings, and most stop ids."""
    schema_chars: int = 1 << 16
    """Longest JSON schema, expression or grammar, as text."""
    read_seconds: float = 30.0
    """Longest wait for the next piece of a body; all of it may take twice as long."""
    request_seconds: float = 600.0
    """Longest time from the last byte of a request to the last of its answer."""
    per_key: int | None = None
    """Most answers under way for one key; more are answered 429. None: no bound."""
    connections: int = 512
    """Most connections at a time; more are answered 503."""
    grace_seconds: float = 30.0
    """How long answers under way may take after the server was told to stop."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
