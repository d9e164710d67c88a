"""Where a text ends: end-of-sequence ids, stop ids, stop strings, a rule of the user's own, length.

Stop strings are searched in the detokenised text, so they are found wherever the borders of
tokens and steps fall. The characters are judged as if they came one by one: the match that ends
first wins. No grouping of them into tokens or steps changes what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from outpace.params import SamplingParams

FinishReason = Literal["stop", "length", "low_confidence"]
"""``stop``: an end-of-sequence id, a stop id or a stop string; ``length``: max_new_tokens;
``low_confidence``: a token that a drafter doubts, where lossy ones are allowed."""


class TextStream(Protocol):
    """Tokens in, text out; a tokenizer's own state for one sequence."""

    def push(self, ids: Sequence[int], /) -> str:
        """Text that these tokens complete; incomplete characters wait for later tokens."""

    def flush(self) -> str:
        """What still waits. Nothing is pushed afterwards."""


class StopChecker:
    """Cuts what one sequence emits at its first stop, and hands out its text.

    Args:
        params: resolved or not; only the fields about stopping are read.
        eos_ids: of the model; they do not stop anything under ``ignore_eos``.
        stream: fresh, for this sequence alone; None if nobody wants text. Stop strings need one.
    """

    def __init__(
        self, params: SamplingParams, eos_ids: frozenset[int], stream: TextStream | None = None
    ) -> None:
        assert stream is not None or not params.stop, "no text to find stop strings in"
        self.generated = 0
        """Tokens kept so far."""
        self.reason: FinishReason | None = None
        """Why the text has ended, or None while it goes on."""
        self._params, self._simple = params, not params.stop and params.stop_when is None
        self._ends = params.end_ids(eos_ids)
        self._stream = stream
        self._answer: list[int] = []
        self._parts: list[str] = []
        self._taken = 0
        self._longest = max(map(len, params.stop), default=1) - 1
        self._held = ""  # the longest end of the text that may yet become a stop string

    @property
    def text(self) -> str:
        """The text that is certain: all of it once the sequence has ended."""
        return "".join(self._parts)

    def take(self) -> str:
        """What became certain since the last call. Never part of a stop string that is cut."""
        new = "".join(self._parts[self._taken :])
        self._taken = len(self._parts)
        return new

    def cut(self, tokens: Sequence[int], doubted: int | None = None) -> tuple[int, FinishReason | None]:
        """Keep newly emitted tokens up to and with the one that completes a stop.

        No stop counts within the first ``min_tokens`` tokens. The text of an end-of-sequence
        id, a stop id or a doubted token is left out; ``include_stop`` puts a stop id's text back.

        Args:
            tokens: emitted since the last call. Those that are kept count as committed.
            doubted: place of one of them with which the text ends, if nothing else ends it before.

        Returns:
            How many of them to keep, and the reason if the text ends there. A token that both
            stops the text and uses up ``max_new_tokens`` gives ``stop``.

        Cost: host only; O(characters x stop strings).
        """
        assert self.reason is None, "the text has ended"
        params, after = self._params, self.generated + len(tokens)
        simple = self._simple and doubted is None and self._ends.isdisjoint(tokens)
        if simple and after < params.max_new_tokens:
            self.generated = after
            if self._stream is not None:
                self._parts.append(self._stream.push(tokens))
            return len(tokens), None
        for length, token in enumerate(tokens, 1):
            self.generated += 1
            stops = self._may_stop and token in self._ends
            shown = self._params.include_stop and token in self._params.stop_token_ids
            doubts = self._may_stop and not stops and length - 1 == doubted
            if self._stream is not None and (shown or not (stops or doubts)):
                self._read(self._stream.push((token,)))
            if stops or self._wants_no_more(token):
                self.close("stop")
            elif doubts:
                self.close("low_confidence")
            elif self.generated >= self._params.max_new_tokens:
                self.close("length")
            if self.reason is not None:
                return length, self.reason
        return len(tokens), None

    def _wants_no_more(self, token: int) -> bool:
        """Whether the user's own rule ends the text with this token."""
        if self._params.stop_when is None:
            return False
        self._answer.append(token)
        return self._may_stop and self._params.stop_when(self._answer)

    def close(self, reason: FinishReason = "length") -> None:
        """End the text here and release what is held back; harmless if it has ended.

        ``cut`` calls it; others call it when something outside ends a sequence, such as a
        full context. The last characters may still complete a stop string: then that counts.
        """
        if self._stream is not None:
            self._read(self._stream.flush())
        if self.reason is None:
            self._end(self._held, reason)

    def _end(self, text: str, reason: FinishReason) -> None:
        self._parts.append(text)
        self.reason, self._held, self._stream = reason, "", None

    @property
    def _may_stop(self) -> bool:
        return self.generated > self._params.min_tokens

    def _read(self, piece: str) -> None:
        """Take in new text: end at a stop string, else release what cannot belong to one."""
        params, old, text = self._params, len(self._held), self._held + piece
        hits = [
            (start + len(stop), start)
            for stop in params.stop
            if self._may_stop and (start := text.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        if hits:
            end, start = min(hits)
            self._end(text[: end if params.include_stop else start], "stop")
            return
        keep = min(len(text), self._longest)
        while keep and not any(len(s) > keep and s.startswith(text[-keep:]) for s in params.stop):
            keep -= 1
        self._parts.append(text[: len(text) - keep])
        self._held = text[len(text) - keep :]
