"""A conversation that keeps what it has read: each turn feeds only what is new."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outpace.engine.engine import Engine
from outpace.engine.method import Method
from outpace.engine.requests import GenerationRequest, checked_params
from outpace.engine.results import Chunk
from outpace.errors import RequestError
from outpace.models.prefix import PIECE
from outpace.params import SamplingParams
from outpace.verifiers.base import Verifier


class Conversation:
    """Chat turns over one cache slot of an engine.

    The prefix of the dialogue stays in the cache between turns. Where the chat template spells an
    earlier answer otherwise than it was generated, the cache is cut back to the common part.

    Args:
        engine: must outlive the conversation.
        params: sampling settings of every turn.
        system: a system message to begin with.
        drafter: method spec in place of the engine's own.
        reproducible: as in ``Engine.generate``.

    Raises:
        RequestError: ``params`` ask for several answers, or are none.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
        drafter: str | None = None,
        reproducible: bool | None = None,
    ) -> None:
        self.engine = engine
        self.params = checked_params(SamplingParams() if params is None else params)
        if self.params.n != 1:
            raise RequestError(f"a conversation has one answer per turn, got n={self.params.n}")
        opening = [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = [] if system is None else opening
        """The dialogue so far; only whole turns are in it."""
        self._drafter, self._reproducible = drafter, reproducible
        self._slot: int | None = None
        self._newest: object = None  # the sequence of the turn that holds the slot

    def send(self, text: str) -> Iterator[Chunk]:
        """Stream the answer to a message; a turn broken off leaves the dialogue unchanged.

        Bad input raises at once; nothing is opened before the first chunk is asked for.

        Raises:
            RequestError: no text; a dialogue that outgrew the context; a turn read on behind the next one.
        """
        engine = self.engine
        if isinstance(text, str) and not text.strip():
            raise RequestError("the message is empty; say something")
        messages = [*self.messages, {"role": "user", "content": text}]
        request = engine.request(messages, self.params)
        method = engine.method(self._drafter)
        verifier = engine.verifier(method, self._reproducible, request.params)
        return self._turn(request, method, verifier, messages)

    def _turn(
        self, request: GenerationRequest, method: Method, verifier: Verifier, messages: list[dict[str, Any]]
    ) -> Iterator[Chunk]:
        """Open what the turn needs when its first piece is asked for, and run it."""
        engine = self.engine
        with engine.lock:
            if self._slot is None:
                self._slot = engine.cache.open()
            # The last prompt token is always fed anew: its pass yields the first token.
            same = engine.cache.sync(self._slot, request.prompt[:-1])
            if any(one.drafter.traits.taps for one in method.members.values()):
                engine.cache.truncate(self._slot, same // PIECE * PIECE)  # heads know whole pieces of it
            row = self._newest = engine.start_sequence(request, self._slot, method, verifier)
        for chunk in engine.chunks([row], method, keep_slots=True):
            if chunk.result is not None:
                self.messages = [*messages, {"role": "assistant", "content": chunk.result.text}]
            yield chunk
            if self._newest is not row:
                raise RequestError("another turn has begun, or the conversation ended; read turns one by one")

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the cache slot back."""
        with self.engine.lock:
            if self._slot is not None:
                self.engine.cache.close(self._slot)
                self._slot = self._newest = None
