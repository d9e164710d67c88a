"""A language over four tokens whose text has more than one spelling, as a grammar."""

import torch

A, B, AB, C = range(4)
SPELLED = {A: "a", B: "b", AB: "ab", C: "c"}
WORDS = ("abc", "aba")
"""Texts are words one after the other. So a word begins with "ab", which is one token or two."""


def begins(text):
    """Whether a text is the beginning of one of the language."""
    while len(text) >= 3:
        if text[:3] not in WORDS:
            return False
        text = text[3:]
    return any(word.startswith(text) for word in WORDS)


class Words:
    def begin(self):
        return Place()


class Place:
    def __init__(self):
        self.text = ""

    def _read(self, path):
        return self.text + "".join(SPELLED[token] for token in path)

    def allowed(self, path):
        text = self._read(path)
        if not begins(text):
            return torch.ones(4, dtype=torch.bool)
        return torch.tensor([begins(text + SPELLED[token]) for token in range(4)])

    def expects(self, path):
        """The usual spelling of the text that must follow."""
        text = self._read(path)
        return {0: (AB,), 1: (B,), 2: ()}[len(text) % 3] if begins(text) else ()

    def advance(self, tokens):
        self.text = self._read(tokens)
