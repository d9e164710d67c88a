"""Where a text ends: end-of-sequence ids, stop ids, stop strings, length.

Stop strings are searched in the detokenised text, so they are found wherever the borders of
tokens and steps fall. The characters are judged as if they came one by one: the match that ends
first wins, and no grouping of them into tokens or steps changes what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from outpace.errors import RequestError
from outpace.sampling import SamplingParams

FinishReason = Literal["stop", "length"]
"""``stop``: an end-of-sequence id, a stop id or a stop string; ``length``: max_new_tokens."""


class TextStream(Protocol):
    """Tokens in, text out; a tokenizer's own state for one sequence."""

    def push(self, ids: Sequence[int], /) -> str:
        """Text that these tokens complete; incomplete characters wait for later tokens."""
        ...

    def flush(self) -> str:
        """What still waits. Nothing is pushed afterwards."""
        ...


class StopChecker:
    """Cuts what one sequence emits at its first stop, and hands out its text.

    Args:
        params: resolved or not; only the fields about stopping are read.
        eos_ids: of the model; they do not stop anything under ``ignore_eos``.
        stream: fresh, for this sequence alone; None if nobody wants text.

    Raises:
        RequestError: stop strings without a stream to find them in.
    """

    def __init__(
        self, params: SamplingParams, eos_ids: frozenset[int], stream: TextStream | None = None
    ) -> None:
        if params.stop and stream is None:
            raise RequestError(
                f"stop strings {params.stop!r} need a tokenizer, and this model has none; "
                "use stop_token_ids"
            )
        self.generated = 0
        """Tokens kept so far."""
        self.reason: FinishReason | None = None
        """Why the text has ended, or None while it goes on."""
        self._params = params
        self._ends = params.end_ids(eos_ids)
        self._stream = stream
        self._parts: list[str] = []
        self._taken = 0
        self._held = ""  # the longest end of the text that may yet become a stop string

    @property
    def remaining(self) -> int:
        """Tokens that may still be kept."""
        return 0 if self.reason else self._params.max_new_tokens - self.generated

    @property
    def text(self) -> str:
        """The text that is certain: all of it once the sequence has ended."""
        return "".join(self._parts)

    def take(self) -> str:
        """What became certain since the last call. Never part of a stop string that is cut."""
        new = "".join(self._parts[self._taken :])
        self._taken = len(self._parts)
        return new

    def cut(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Keep newly emitted tokens up to and with the one that completes a stop.

        No stop counts within the first ``min_tokens`` tokens. The text of an
        end-of-sequence or stop id is left out; ``include_stop`` puts a stop id's text back.

        Args:
            tokens: emitted since the last call. Those that are kept count as committed.

        Returns:
            How many of them to keep, and the reason if the text ends there. A token that ends
            the text and also uses up ``max_new_tokens`` gives ``stop``.
        """
        assert self.reason is None, "the text has ended"
        for length, token in enumerate(tokens, 1):
            self.generated += 1
            if self._may_stop and token in self._ends:
                if self._params.include_stop and token in self._params.stop_token_ids:
                    self._push(token)
                self._end("stop")
            elif self._push(token):
                self.reason = "stop"
            elif self.generated >= self._params.max_new_tokens:
                self._end("length")
            if self.reason is not None:
                return length, self.reason
        return len(tokens), None

    def close(self) -> None:
        """Release held text of a sequence that ends for an outside reason. Twice is harmless."""
        if self._held or self._stream is not None:
            tail = "" if self._stream is None else self._stream.flush()
            if not self._read(tail):
                self._parts.append(self._held)
            self._held, self._stream = "", None

    @property
    def _may_stop(self) -> bool:
        return self.generated > self._params.min_tokens

    def _end(self, reason: FinishReason) -> None:
        """End at the last token kept, unless the flushed text completes a stop string."""
        before = self._stream is not None and self._read(self._stream.flush())
        self.reason = "stop" if before else reason
        self._parts.append(self._held)
        self._held, self._stream = "", None

    def _push(self, token: int) -> bool:
        return self._stream is not None and self._read(self._stream.push((token,)))

    def _read(self, piece: str) -> bool:
        """Take in new text; True if it completes a stop string, which ends the text."""
        old, text = len(self._held), self._held + piece
        if self._may_stop:
            hits = [
                (start + len(stop), start)
                for stop in self._params.stop
                if (start := text.find(stop, max(0, old - len(stop) + 1))) >= 0
            ]
            if hits:
                end, start = min(hits)
                self._parts.append(text[: end if self._params.include_stop else start])
                self._held = ""
                return True
        keep = next(
            n
            for n in range(min(len(text), self._longest), -1, -1)
            if n == 0 or any(len(s) > n and s.startswith(text[-n:]) for s in self._params.stop)
        )
        self._parts.append(text[: len(text) - keep])
        self._held = text[len(text) - keep :]
        return False
