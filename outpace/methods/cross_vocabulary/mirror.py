"""The committed text of one sequence, as a model with another tokenizer would write it.

    target   | The | c | at | sat |        committed one by one, never changed
    mirror   | The | cat | sat |           c was there alone for a while; at made it a cat

Text grows at its end, and the last tokens of another vocabulary change while it does. So only a
tail is written anew, some tokens at a time; what lies before it never changes again. Tokens that
mean something by themselves, such as the end of a message, part the text: nothing before them is
touched. The mirror has the bytes of the text. It leaves out parts of characters that are not
complete yet, and tokens that the other vocabulary lacks.

Cost: of a step, splitting a tail of at most ``2 * TAIL`` tokens and the new bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outpace.methods.cross_vocabulary.spelling import Piece, Shared, Spelling

TAIL = 16
"""Tokens at the end of a text that may still become others."""


@dataclass(frozen=True, slots=True, eq=False)
class Bridge:
    """From the tokens of one vocabulary to those of another."""

    source: Spelling
    goal: Spelling
    goal_of: Sequence[int]
    """Source id -> goal id, or -1."""
    by_token: bool
    """Whether every token that both have is taken as it stands; else only special ones."""

    def fixed(self, token: int) -> tuple[int, ...] | None:
        """What a token becomes whatever stands around it; None for text."""
        special = token in self.source.special or not self.source.spell(token)
        if special or self.by_token:
            goal = self.goal_of[token] if token < len(self.goal_of) else -1
            if goal >= 0:
                return (goal,)
        return () if special else None

    def begins(self, token: int) -> bytes:
        """The bytes of the first token of a text, of which some vocabularies drop a space."""
        whole, spelled = self.source.tokenizer, self.source.spell(token)
        if whole.decode([token]) != whole.decode([token], continues=True):
            return spelled.removeprefix(b" ")
        return spelled

    def mirror(self) -> Mirror:
        opening = list(self.goal.opening)
        return Mirror(self, opening, [0] * len(opening), len(opening))


def to_draft(target: Spelling, draft: Spelling, common: Shared, by_token: bool) -> Bridge:
    """From a target's tokens to a draft model's."""
    return Bridge(target, draft, common.draft_of, by_token)


@dataclass(slots=True, eq=False)
class Mirror:
    bridge: Bridge
    ids: list[int]
    sizes: list[int]
    """Bytes of the text that each of them stands for."""
    stable: int
    """Ids before this one never change again."""
    read: int = 0
    """Tokens of the source."""
    held: int = 0
    """Bytes at the end that the ids do not cover: a character that is not complete."""
    run: bytearray = field(default_factory=bytearray)
    """Bytes of the text from id ``stable`` on."""
    parted: bool = False
    """Whether something stands before ``run``, so that it is no beginning."""

    def copy(self) -> Mirror:
        """The same text, to go on with separately."""
        return replace(self, ids=list(self.ids), sizes=list(self.sizes), run=bytearray(self.run))

    def common(self, later: Mirror) -> int:
        """How many leading ids a mirror of the same text, further on, still has."""
        same = min(self.stable, later.stable)
        for mine, other in zip(self.ids[same:], later.ids[same:], strict=False):
            if mine != other:
                break
            same += 1
        return same

    def extend(self, tokens: Sequence[int]) -> int:
        """Append tokens of the source.

        Returns:
            How many ids are as they were, from the first on; those after them changed or are new.
        """
        same, fresh = len(self.ids), bytearray()
        for token in tokens:
            fixed = self.bridge.fixed(token)
            if fixed is None:
                begins = not (self.parted or self.run or fresh)
                spell = self.bridge.begins if begins else self.bridge.source.spell
                fresh += spell(token)
            else:
                same = min(same, self._write(fresh))
                fresh = bytearray()
                # A text that begins with its opening anyway does not get a second one.
                if not (self.read == 0 and list(fixed) == self.ids):
                    self.ids += fixed
                    self.sizes += [0] * len(fixed)
                self.stable, self.held = len(self.ids), 0
                self.parted |= self.stable > len(self.bridge.goal.opening)
                self.run.clear()
            self.read += 1
        return min(same, self._write(fresh))

    def _write(self, fresh: bytearray) -> int:
        """Append bytes to the run, and write it anew; as ``extend``."""
        if not fresh:
            return len(self.ids)
        self.run += fresh
        data = bytes(self.run)
        whole = codecs.utf_8_decode(data, "surrogateescape", False)[1]
        if any(data[i : i + 1] not in self.bridge.goal.known for i in range(whole, len(data))):
            data = data[:whole]
        self.held = len(self.run) - len(data)
        old = [Piece(*one) for one in zip(self.ids[self.stable :], self.sizes[self.stable :], strict=True)]
        new = self.bridge.goal.encode(data, not self.parted)
        if self.parted:
            new = spliced(old, new)
        same = self.stable
        for before, after in zip(old, new, strict=False):
            if before.id != after.id:
                break
            same += 1
        self.ids[self.stable :] = [piece.id for piece in new]
        self.sizes[self.stable :] = [piece.size for piece in new]
        if not new and not self.held:
            self.run.clear()  # bytes that leave no token
        self._settle()
        return same

    def _settle(self) -> None:
        if len(self.ids) - self.stable <= 2 * TAIL:
            return
        cut = len(self.ids) - TAIL
        done = sum(self.sizes[self.stable : cut])
        while cut > self.stable and done < len(self.run) and self.run[done] & 0xC0 == 0x80:
            cut -= 1  # not within a character
            done -= self.sizes[cut]
        if cut > self.stable:
            del self.run[:done]
            self.stable, self.parted = cut, True


def spliced(old: Sequence[Piece], new: Sequence[Piece]) -> list[Piece]:
    """New pieces of a text, after the old ones of its beginning.

    A text that was cut out of a longer one may begin with other tokens than it has there. From
    the first place on where both have the same token, the new ones are right; before it, the old.
    """
    at: dict[tuple[int, Piece], int] = {}
    place = 0
    for index, piece in enumerate(old):
        at[place, piece] = index
        place += piece.size
    place = 0
    for index, piece in enumerate(new):
        if (place, piece) in at:
            return [*old[: at[place, piece]], *new[index:]]
        place += piece.size
    return list(new)
