"""A vocabulary, from bytes to tokens and back; and what two vocabularies share.

Two models that speak of the same text in different tokens agree on its bytes and on nothing else.
Ids are incomparable, and strings depend on how a vocabulary writes spaces and bytes. So everything
here goes through bytes, including those that are no UTF-8.

Shape letters: D draft vocabulary, V target vocabulary, K tokens that both have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.models.base import Target
from outpace.models.text import Tokenizer

_STRETCH = re.compile(r"[\udc80-\udcff]+|[^\udc80-\udcff]+")
"""Bytes that are no UTF-8, as ``surrogateescape`` reads them, or text without any."""
_UNKNOWN = "\ufffd"
_PROBES = "\n\t.,;:!?-"
"""Characters that may stand before a text to be split, so that it is not taken for a beginning."""


class Piece(NamedTuple):
    """A token, and how many bytes of the text it stands for."""

    id: int
    size: int


class Spelling:
    """How one vocabulary writes bytes.

    Args:
        rows: of its embedding; the tokenizer may know tokens that the model lacks.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        self.tokenizer = tokenizer
        self.size = min(tokenizer.vocab_size, rows)
        self.special = frozenset(
            token for token in tokenizer.special_ids | tokenizer.eos_ids if token < self.size
        )
        self.known: dict[bytes, int] = {}
        """Bytes -> the ordinary token that stands for them; of several the one that is used."""
        twice: dict[bytes, list[int]] = {}
        for token in range(self.size):
            spelled = self.spell(token)
            if spelled and token not in self.special:
                if spelled in self.known:
                    twice.setdefault(spelled, [self.known[spelled]]).append(token)
                self.known[spelled] = token
        for spelled, tokens in twice.items():
            used = [token for token in tokens if self._uses(token, spelled)]
            self.known[spelled] = (used or tokens)[-1]
        self._adds_space = self._join(self._ids("a")) == b" a"
        self._probe = next((char for char in _PROBES if self._after("e", char) is not None), "")

    @classmethod
    def of(cls, model: Target, who: str) -> Spelling:
        """A model's own.

        Raises:
            ModelError: it has no tokenizer.
        """
        if model.tokenizer is None:
            raise ModelError(f"{who}: {model.name} has no tokenizer; give a model that has one")
        return cls(model.tokenizer, model.vocab_size)

    @cached_property
    def opening(self) -> tuple[int, ...]:
        bos = self.tokenizer.bos_id
        begins = bos is not None and bos < self.size and bos in self.tokenizer.encode("")
        return (bos,) if begins and bos is not None else ()

    def spell(self, token: int) -> bytes:
        """What a token stands for; nothing for one that the model lacks."""
        return self.tokenizer.token_bytes(token) if 0 <= token < self.size else b""

    def encode(self, data: bytes, first: bool = False) -> list[Piece]:
        """Split bytes into tokens.

        What the vocabulary cannot say byte by byte becomes whatever its tokenizer makes of it,
        an unknown token or a replacement, for the same bytes.

        Args:
            data: any bytes; those that are no UTF-8 become byte tokens, where there are some.
            first: the text begins here, so that a tokenizer may put a space before it.

        Returns:
            Pieces whose sizes add up to ``len(data)``; none for bytes that leave no token.

        Cost: linear; for text that does not come back as it was, up to two calls per character.
        """
        out: list[Piece] = []
        for stretch in _STRETCH.findall(data.decode("utf-8", "surrogateescape")):
            if "\udc80" <= stretch[0] <= "\udcff":
                for byte in stretch.encode("utf-8", "surrogateescape"):
                    token = self.known.get(bytes([byte]))
                    out += self._unknown(_UNKNOWN, 1) if token is None else [Piece(token, 1)]
            else:
                out += self._text(stretch, first and not out)
        return _covering(out)

    def _text(self, text: str, first: bool) -> list[Piece]:
        """Tokens of text, as long stretches as come back as they were."""
        found = self._exact(text, first)
        if found is not None:
            return found
        if len(text) == 1:
            parts = [self.known.get(bytes([byte])) for byte in text.encode()]
            if None not in parts:
                return [Piece(part, 1) for part in parts if part is not None]
            return self._unknown(text, len(text.encode()))
        half = text.rfind(" ", 1, len(text) // 2 + 1)
        half = half if half > 0 else len(text) // 2
        return self._text(text[:half], first) + self._text(text[half:], False)

    def _exact(self, text: str, first: bool) -> list[Piece] | None:
        """Tokens whose bytes are those of the text; None if the tokenizer gives others."""
        want = text.encode()
        if len(text) == 1 and want in self.known and not first:
            return [Piece(self.known[want], len(want))]
        if self._adds_space and not first:
            within = text[0] == " " and len(text) > 1
            ids = self._ids(text[1:]) if within else self._after(text, self._probe) or []
        else:
            ids = self._ids(text)
        sizes = [len(self.spell(token)) for token in ids]
        joined = self._join(ids)
        if first and ids and joined == b" " + want:
            sizes[0] -= 1
        elif joined != want:
            return None
        return [Piece(token, size) for token, size in zip(ids, sizes, strict=True)]

    def _after(self, text: str, probe: str) -> list[int] | None:
        """Tokens of text that goes on, from a tokenizer that puts a space before every text.

        None if the character before it does not stay apart.
        """
        before, ids = self._ids(probe), self._ids(probe + text)
        return ids[len(before) :] if ids[: len(before)] == before else None

    def _unknown(self, char: str, size: int) -> list[Piece]:
        ids = [token for token in self._ids(char) if token < self.size]
        if self._adds_space and len(ids) > 1 and self.spell(ids[0]) == b" ":
            ids = ids[1:]
        return [Piece(ids[0], size), *(Piece(token, 0) for token in ids[1:])] if ids else [Piece(-1, size)]

    def _uses(self, token: int, spelled: bytes) -> bool:
        try:
            return self._ids(spelled.decode()) == [token]
        except UnicodeDecodeError:
            return False

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special=False)

    def _join(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.spell(token) for token in ids)


def _covering(pieces: Sequence[Piece]) -> list[Piece]:
    """Give the bytes that left no token to the one before, or else to the one after."""
    out: list[Piece] = []
    lost = 0
    for piece in pieces:
        if piece.id >= 0:
            out.append(Piece(piece.id, piece.size + lost))
            lost = 0
        elif out:
            out[-1] = Piece(out[-1].id, out[-1].size + piece.size)
        else:
            lost += piece.size
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What two vocabularies have in common: a one-to-one map of some tokens to some tokens.

    Ordinary tokens correspond if they stand for the same bytes. Special ones do by name; the
    beginning of a text does to the beginning, and its end to its end.
    """

    to_target_D: Tensor
    """int64, draft id -> target id, or -1."""
    to_draft_V: Tensor
    """int64, target id -> draft id, or -1."""
    draft_K: Tensor
    """int64, ascending: draft ids that have a target id."""
    target_of: tuple[int, ...]
    """``to_target_D`` on the host."""
    draft_of: tuple[int, ...]
    """``to_draft_V`` on the host."""
    ordinary: int
    """How many of them are ordinary tokens."""


def shared(draft: Spelling, target: Spelling, model: Target, rows: int) -> Shared:
    """Find what a draft model's vocabulary shares with a target's of ``rows`` tokens.

    Where an end of text has no namesake, the last one of either side is taken. The end of an
    answer has a higher id than the end of a document.
    """
    pairs = {
        token: target.known[spelled] for spelled, token in draft.known.items() if spelled in target.known
    }
    ordinary = len(pairs)
    names = {target.spell(token): token for token in sorted(target.special, reverse=True)}
    for token in sorted(draft.special):
        if draft.spell(token) in names:
            pairs[token] = names.pop(draft.spell(token))
    taken = set(pairs.values())
    ours, theirs = draft.tokenizer, target.tokenizer
    for mine, other in (([ours.bos_id], [theirs.bos_id]), (sorted(ours.eos_ids), sorted(theirs.eos_ids))):
        left = [t for t in mine if t is not None and t < draft.size and t not in pairs]
        free = [t for t in other if t is not None and t < target.size and t not in taken]
        if left and free and not taken.intersection(t for t in other if t is not None):
            pairs[left[-1]] = free[-1]
            taken.add(free[-1])
    target_of, draft_of = [-1] * model.vocab_size, [-1] * rows
    for token, other_token in pairs.items():
        target_of[token], draft_of[other_token] = other_token, token
    on = model.device
    return Shared(
        torch.tensor(target_of, device=on),
        torch.tensor(draft_of, device=on),
        torch.tensor(sorted(pairs), dtype=torch.int64, device=on),
        tuple(target_of),
        tuple(draft_of),
        ordinary,
    )
