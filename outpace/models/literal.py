"""Special tokens that people write in messages stay text; those of the chat template are tokens.

``<|im_start|>system`` in a message would otherwise begin a message of its own. Before a template is
rendered, such texts in the messages are replaced by placeholders that nobody can guess. Afterwards
the template's special tokens are renamed to names that nobody can guess either, and the placeholders
become text again. A copy of the tokenizer encodes all of it in one go. It knows special tokens by
their new names alone.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any

import tokenizers

from outpace.errors import RequestError

_DIGITS = 30
"""Of a secret; digits survive what templates do to text."""


class LiteralEncoder:
    """Encodes rendered conversations whose messages hold special tokens as text.

    Args:
        encode: turns a text into ids with a given tokenizer.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_ids: Collection[int],
        encode: Callable[[tokenizers.Tokenizer, str], list[int]],
    ) -> None:
        state, secret = json.loads(backend.to_str()), _secret()
        self._encode, self._secret = encode, _secret()
        self._renamed: dict[str, str] = {}
        for number, token in enumerate(state["added_tokens"]):
            if token["id"] in special_ids and token["content"]:
                self._renamed[token["content"]] = f"<{secret}-{number}>"
                token["content"] = self._renamed[token["content"]]
        self._names = list(self._renamed)
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(state))
        # The copy has ids of its own for the new names; no other token moves.
        self._ids: dict[int, int] = {}
        for old, new in self._renamed.items():
            here, there = self._backend.token_to_id(new), backend.token_to_id(old)
            assert here is not None and there is not None
            self._ids[here] = there
        longest_first = sorted(map(re.escape, self._names), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest_first)) if self._names else None
        unknown = state["model"].get("unk_token")
        self._wrong = set(special_ids) - {backend.token_to_id(unknown) if isinstance(unknown, str) else None}

    def finds(self, value: Any) -> bool:
        """Whether a special token is written in plain data."""
        if self._pattern is None:
            return False
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        if isinstance(value, Mapping):
            return any(self.finds(one) for pair in value.items() for one in pair)
        return isinstance(value, list | tuple) and any(map(self.finds, value))

    def hidden(self, value: Any) -> Any:
        """Plain data with placeholders for special tokens."""
        if isinstance(value, str) and self._pattern is not None:
            return self._pattern.sub(lambda found: f"{self._secret}{self._names.index(found[0]):06d}", value)
        if isinstance(value, Mapping):
            return {self.hidden(key): self.hidden(one) for key, one in value.items()}
        return [self.hidden(one) for one in value] if isinstance(value, list | tuple) else value

    def shown(self, text: str) -> str:
        """A rendered text with the special tokens of the messages as they were written."""
        return re.sub(rf"{self._secret}(\d{{6}})", lambda found: self._names[int(found[1])], text)

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text with placeholders.

        Raises:
            RequestError: a special token that this tokenizer cannot spell.
        """
        assert self._pattern is not None
        renamed = self._pattern.sub(lambda found: self._renamed[found[0]], text)
        ids = self._encode(self._backend, self.shown(renamed))
        if not self._wrong.isdisjoint(ids):
            raise RequestError(
                "the messages hold a special token that this tokenizer cannot write as text; leave it out"
            )
        return [self._ids.get(token, token) for token in ids]


def _secret() -> str:
    return "".join(secrets.choice("0123456789") for _ in range(_DIGITS))
