"""Grammatical errors of five types, put into clean sentences by a seed; imported, not run.

A pair of sentences made here teaches a model to correct: it reads the wrong one and writes the
clean one.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

TYPES = ("agreement", "article", "preposition", "spelling", "order")

_ARTICLES = ("a", "an", "the")
_PREPOSITIONS = ("in", "on", "at", "to", "for", "of", "with", "from", "by", "into", "about")
_OTHERS = "and was is were his her he she it they that had has not so very their be could him them you my"
_LITTLE = frozenset((*_ARTICLES, *_PREPOSITIONS, *_OTHERS.split()))
"""Words that stand in few places, so that a wrong order shows."""
_FORMS = (
    "is are",
    "was were",
    "has have",
    "does do",
    "doesn't don't",
    "isn't aren't",
    "wasn't weren't",
    "this these",
    "goes go",
    "wants want",
    "likes like",
    "needs need",
    "makes make",
    "takes take",
    "gets get",
    "gives give",
    "buys buy",
    "sells sell",
    "costs cost",
    "eats eat",
    "uses use",
    "works work",
    "earns earn",
    "pays pay",
    "spends spend",
    "plays play",
    "runs run",
    "loves love",
    "sees see",
    "says say",
    "knows know",
    "finds find",
    "puts put",
    "decides decide",
    "receives receive",
    "reads read",
    "lives live",
    "weighs weigh",
    "drives drive",
    "walks walk",
    "brings bring",
    "starts start",
)
_OTHER_FORM = {a: b for pair in _FORMS for a, b in (pair.split(), reversed(pair.split()))}
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_NEAR = {row[i]: row[max(0, i - 1) : i] + row[i + 1 : i + 2] for row in _ROWS for i in range(len(row))}
"""Letters beside a letter on a keyboard."""


VARIANTS = 2
"""Misspellings of a word."""
MISSPELLED = 300
"""How many words are ever misspelled: the commonest of the texts that are long enough."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence with errors, and as it should be."""

    wrong: str
    clean: str
    types: tuple[str, ...]
    """One for every error, in the order in which they were made; empty: nothing is wrong."""


def sentences(text: str, fewest: int = 4, most: int = 20) -> list[str]:
    """The sentences of a text that have a usual beginning and end, and so many words."""
    found = []
    for paragraph in re.split(r"\n\s*\n|<\|endoftext\|>", text):
        for one in re.split(r"(?<=[.!?])\s+(?=[\"A-Z])", " ".join(paragraph.split())):
            if fewest <= one.count(" ") + 1 <= most and re.fullmatch(r"[A-Z][\w ,;:'$%.!?()-]*[.!?]", one):
                found.append(one)
    return found


def common_words(texts: Iterable[str]) -> frozenset[str]:
    """The words that are misspelled."""
    counts = Counter(word for text in texts for word in re.findall(r"\b[a-z]{4,}\b", text))
    return frozenset(word for word, _ in counts.most_common(MISSPELLED))


def corrupted(sentence: str, common: frozenset[str], coin: random.Random, most: int = 3) -> Pair:
    """A pair with 0 to ``most`` errors of types drawn evenly; a type without a place is left out.

    Args:
        common: of ``common_words``.
    """
    number = coin.choices(range(most + 1), [0.1, *(0.6 * 0.4**i for i in range(most))])[0]
    return with_errors(sentence, [coin.choice(TYPES) for _ in range(number)], common, coin)


def with_errors(sentence: str, types: Sequence[str], common: frozenset[str], coin: random.Random) -> Pair:
    """A pair with one error of each of the types that has a place in the sentence."""
    words, made = sentence.split(" "), []
    for kind in types:
        changed = _spelling(words, common, coin) if kind == "spelling" else _MAKE[kind](words, coin)
        if changed is not None and changed != words:
            words = changed
            made.append(kind)
    wrong = " ".join(words)
    return Pair(wrong, sentence, tuple(made) if wrong != sentence else ())


def _places(words: Sequence[str], known: Callable[[str], bool]) -> list[int]:
    return [i for i, word in enumerate(words) if known(word)]


def _agreement(words: list[str], coin: random.Random) -> list[str] | None:
    places = _places(words, lambda word: word.lower() in _OTHER_FORM)
    if not places:
        return None
    i = coin.choice(places)
    return [*words[:i], _cased(_OTHER_FORM[words[i].lower()], words[i]), *words[i + 1 :]]


def _article(words: list[str], coin: random.Random) -> list[str] | None:
    places = _places(words[1:], lambda word: word in _ARTICLES)
    if not places:
        return None
    i = coin.choice(places) + 1
    if coin.random() < 0.5:
        return [*words[:i], *words[i + 1 :]]
    # "a" for "the" is rarely wrong, so what is swapped is "a" and "an".
    other = {"a": "an", "an": "a"}.get(words[i])
    return [*words[:i], *([] if other is None else [other]), *words[i + 1 :]]


def _preposition(words: list[str], coin: random.Random) -> list[str] | None:
    places = _places(words[1:], lambda word: word in _PREPOSITIONS)
    if not places:
        return None
    i = coin.choice(places) + 1
    others = [one for one in _PREPOSITIONS if one != words[i]]
    return [*words[:i], coin.choice(others), *words[i + 1 :]]


def _spelling(words: list[str], common: frozenset[str], coin: random.Random) -> list[str] | None:
    places = _places(words[1:], lambda word: word.rstrip(",.!?") in common)
    if not places:
        return None
    i = coin.choice(places) + 1
    word = words[i].rstrip(",.!?")
    wrong = coin.choice(misspellings(word)) + words[i][len(word) :]
    return [*words[:i], wrong, *words[i + 1 :]]


def misspellings(word: str) -> list[str]:
    """The few ways in which a word is misspelled here: people make the same mistakes again and again."""
    coin, found = random.Random(word), []
    for _ in range(VARIANTS):
        at, kind = coin.randrange(1, len(word) - 1), coin.randrange(4)
        if kind == 0:
            found.append(word[:at] + word[at + 1] + word[at] + word[at + 2 :])
        elif kind == 1:
            found.append(word[:at] + word[at + 1 :])
        elif kind == 2:
            found.append(word[:at] + word[at] + word[at:])
        else:
            found.append(word[:at] + coin.choice(_NEAR[word[at]]) + word[at + 1 :])
    return found


def _order(words: list[str], coin: random.Random) -> list[str] | None:
    places = [
        i
        for i in range(1, len(words) - 1)
        if (words[i] + words[i + 1]).isalpha() and not _LITTLE.isdisjoint(words[i : i + 2])
    ]
    if not places:
        return None
    i = coin.choice(places)
    return [*words[:i], words[i + 1], words[i], *words[i + 2 :]]


def _cased(word: str, like: str) -> str:
    return word.capitalize() if like[:1].isupper() else word


_MAKE: dict[str, Callable[[list[str], random.Random], list[str] | None]] = {
    "agreement": _agreement,
    "article": _article,
    "preposition": _preposition,
    "order": _order,
}
