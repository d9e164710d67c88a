"""What a service tells: about one answer while it is made, and about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outpace.engine.results import DrafterCounts, Result
from outpace.sampling import TokenLogprobs
from outpace.serving.trace import Pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    index: int
    """Which answer of the request, from 0."""
    ids: tuple[int, ...]
    text: str
    """Newly printable text; may be empty while a character or a stop string is incomplete."""
    accepted: int
    """How many of the tokens, from the first on, a drafter had guessed."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, if the request asked for them."""
    seen: Pass | None = None
    """What the pass did, if the request is ``traced``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """An answer has ended; nothing follows for this index."""

    index: int
    result: Result
    """The whole answer, with its counters and times. Its ``finish_reason`` is ``cancelled`` if
    nobody wanted the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """An answer has come to nothing; nothing follows for this index."""

    index: int
    error: Exception
    """An OutpaceError says what its user can do; anything else is a defect of ours."""


Event = Tokens | Done | Failed
Listener = Callable[[Event], None]
"""Called on the service's thread between passes, so it must not block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceStats:
    running: int = 0
    """Answers that have a slot."""
    waiting: int = 0
    """Answers that have none yet, or lost it for a while."""
    slots: int = 0
    """Most answers at a time."""
    pages: int = 0
    """Pages of keys and values that there may be; 0: no limit is known."""
    pages_used: int = 0
    """Of these, pages of running answers."""
    pages_stored: int = 0
    """Of these, pages of text that was read before, kept for prompts that begin alike."""
    pages_free: int = 0
    passes: int = 0
    """Target passes, prompts included."""
    prompt_tokens: int = 0
    """Of prompts that were read or found stored, each prompt once."""
    cached_tokens: int = 0
    """Of these, found stored."""
    new_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Finish reason -> answers; ``error`` are those that failed."""
    preempted: int = 0
    """Times that an answer lost its memory to another and was read anew later."""
    drafters: dict[str, DrafterCounts] = field(default_factory=dict)
    """Method spec -> totals, of drafters that have drafted."""
