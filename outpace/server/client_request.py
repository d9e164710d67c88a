"""What one HTTP request asks for, once it is read."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.engine.requests import GenerationRequest
from outpace.server.reasoning import Reasoning
from outpace.server.tools import CallSyntax


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRequest:
    """One HTTP request, with nothing left to check."""

    requests: tuple[GenerationRequest, ...]
    """One per prompt."""
    n: int
    """Answers per prompt."""
    stream: bool
    include_usage: bool
    running_usage: bool
    """Usage with every chunk."""
    token_ids: bool
    detailed: bool
    """Tell for every token who wrote it."""
    traced: bool
    """Show every pass in the stream."""
    predicted: bool
    """Whether the request brought a prediction."""
    echo: tuple[str, ...] | None = None
    """Per prompt the text to put before the answer."""
    silent: bool = False
    """No token is wanted. One is made all the same, and left out."""
    reasoning: Reasoning | None = None
    """How thinking is found in the answer; None: nobody looks for it."""
    call_syntax: CallSyntax | None = None
    """How calls are found in the answer; None: it is text."""

    @property
    def answers(self) -> int:
        """Answers in all, numbered prompt by prompt."""
        return len(self.requests) * self.n
