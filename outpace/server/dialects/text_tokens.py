"""Which tokens a text is made of, found while both are still being made."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any


class TextTokens:
    """The tokens of one answer, thinking left out, by the characters that they begin with.

    A token that is a part of a character belongs to that character. Special tokens have no text.

    Args:
        marks: special tokens that stand in the text all the same, and how.
    """

    def __init__(self, tokenizer: Any, marks: Mapping[int, str]) -> None:
        self._special, self._marks = tokenizer.special_ids, marks
        self._stream = tokenizer.text_stream()
        self._written = 0
        self._waiting: deque[tuple[int, int]] = deque()
        """Where a token begins in the text, and its place in the answer."""

    def push(self, said: Sequence[tuple[int, int]]) -> None:
        """Take places and ids of new tokens."""
        for place, token in said:
            mark = self._marks.get(token)
            if mark is None and token in self._special:
                continue
            self._waiting.append((self._written, place))
            self._written += len(mark or self._stream.push((token,)))

    def take(self, until: int) -> list[int]:
        """Places of tokens that begin before this character, each once."""
        out = []
        while self._waiting and self._waiting[0][0] < until:
            out.append(self._waiting.popleft()[1])
        return out
