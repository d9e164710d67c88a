"""The extra part of a streamed chunk: who wrote its tokens, and the tree of their pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace.engine.requests import GenerationRequest
from outpace.serving.events import Tokens
from outpace.serving.trace import Pass

TARGET = "target"
"""Who wrote a token that no drafter had guessed."""


class Tracer:
    """Writes traces of the answers of one request.

    Args:
        tokenizer: the target's; None leaves texts empty.
    """

    def __init__(self, requests: Sequence[GenerationRequest], tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._streams = [
            None if tokenizer is None else tokenizer.text_stream(continues=one.continues) for one in requests
        ]
        self._owed = [""] * len(requests)

    def of(self, event: Tokens) -> dict[str, Any]:
        """Who wrote the tokens of an event, and its pass."""
        done = event.seen
        assert isinstance(done, Pass)
        texts = self._split(event)
        return {
            "tokens": [
                {"text": text, "by": done.by if place < event.accepted else TARGET}
                for place, text in enumerate(texts)
            ],
            "draft": None if done.forced else self._draft(done),
        }

    def _split(self, event: Tokens) -> list[str]:
        """The event's text, token by token; joined they are the text, whatever it is.

        A character counts for the token that completes it. Text that is held back until it is
        certain to belong to the answer counts for the first token told when it is.
        """
        stream, left, owed = self._streams[event.index], event.text, self._owed[event.index]
        out = []
        for token in event.ids:
            own = owed + ("" if stream is None else stream.push((token,)))
            out.append(left[: len(own)])
            left, owed = left[len(own) :], own[len(left) :]
        self._owed[event.index] = owed
        if out:
            out[-1] += left
        return out

    def _draft(self, done: Pass) -> dict[str, Any]:
        added = None if done.added is None else {"text": self._spell(done.added), "p": _short(done.added_p)}
        return {
            "by": done.by,
            "drafted": done.drafted,
            "pending": self._spell(done.pending),
            "tokens": [self._spell(token) for token in done.tokens],
            "parents": list(done.parents),
            "kept": list(done.kept),
            "q": [_short(value) for value in done.q],
            "p": [_short(value) for value in done.p],
            "added": added,
        }

    def _spell(self, token: int) -> str:
        """A token as such; half a character is spelled in bytes, one without bytes by its id."""
        spelled = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)
        return bytes(spelled or b"#%d" % token).decode("utf-8", "backslashreplace")


def _short(value: float | None) -> float | None:
    """Four digits are enough to look at. NaN is nothing that JSON has."""
    return None if value is None or value != value else round(value, 4)
