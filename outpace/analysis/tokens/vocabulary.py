"""What is in a vocabulary: kinds of tokens, scripts, letters with a token of their own, control tokens.

    found = look_into("a", tokenizer)
    found.kinds, found.scripts, found.control

Every token has one kind, the first that fits:

    control       special, or written like one: <...> or [...] that is no HTML tag; or it stands for nothing
    byte          one byte that is no character
    split         bytes that begin or end within a character
    letter        one letter
    sign          one character that is no letter
    word          a space and letters of one script
    spaced        a space and anything else
    part          letters of one script, without a space
    other         anything else

The kinds follow Chelombitko et al. 2024, arXiv:2410.12989.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from outpace.errors import ModelError
from outpace.files import expanded
from outpace.models.text import Tokenizer
from outpace.models.tiny import tiny_tokenizer
from outpace.models.zoo import open_checkpoint

KINDS = ("control", "byte", "split", "letter", "sign", "word", "spaced", "part", "other")
_WORDED = ("letter", "word", "part")
"""Kinds that have a script."""
_CONTROL = re.compile(r"<[^<>\s]+>|\[[A-Za-z0-9_]+\]")
_HTML = re.compile(
    r"</?(a|abbr|b|blockquote|body|br|button|code|dd|div|dl|dt|em|font|form|h[1-6]|head|header|hr|html|i|iframe"
    r"|img|input|label|li|link|meta|nav|ol|option|p|pre|s|script|section|select|small|span|strong|style|sub|sup"
    r"|table|tbody|td|textarea|tfoot|th|thead|title|tr|u|ul|video)/?>",
    re.IGNORECASE,
)
_NO_SCRIPT = frozenset(
    "MODIFIER MATHEMATICAL FULLWIDTH HALFWIDTH DOUBLE-STRUCK BLACK-LETTER SCRIPT ANGSTROM KELVIN MICRO"
    " FEMININE MASCULINE TURNED ROTATED SUPERSCRIPT VULGAR COMBINING IDEOGRAPHIC SQUARED NEGATIVE CIRCLED"
    " PARENTHESIZED OHM EULER PLANCK ALEF BET GIMEL DALET INFORMATION ESTIMATED VARIATION".split()
)
"""First words of names of letters and marks that name no script."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """One vocabulary, counted."""

    name: str
    size: int
    kinds: Mapping[str, int]
    """Kind -> tokens; they add up to ``size``."""
    scripts: Mapping[str, int]
    """Script -> tokens that are made of its letters alone; most first."""
    letters: Mapping[str, int]
    """Script -> letters that are a token by themselves, with or without a space before them."""
    bytes: int
    """Bytes that have a token. Text needs 243 of them, the others are not in UTF-8."""
    control: tuple[str, ...]
    """Control tokens, special ones first, in the order of their ids."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "tokenizer": self.name,
            "vocab_size": self.size,
            "kinds": [{"token_kind": kind, "tokens": self.kinds[kind]} for kind in KINDS],
            "scripts": [
                {
                    "script": script,
                    "tokens": count,
                    "letters": self.letters.get(script, 0),
                    "assigned_letters": assigned().get(script, 0),
                }
                for script, count in self.scripts.items()
            ],
            "byte_tokens": self.bytes,
            "control": list(self.control),
        }


def read_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by a model's name, its folder or GGUF file, or a tokenizer.json; weights are not read.

    Raises:
        UnknownNameError, ModelError: as ``load_target``.
    """
    if name == "tiny":
        return tiny_tokenizer()
    path = expanded(name)
    if path.is_file() and path.suffix == ".json":
        if path.name != "tokenizer.json":
            raise ModelError(f"{name} is no tokenizer; give a file that is called tokenizer.json")
        return Tokenizer.from_folder(path.parent)
    if (path / "tokenizer.json").is_file():
        return Tokenizer.from_folder(path)
    return open_checkpoint(name).tokenizer()


def look_into(name: str, tokenizer: Tokenizer) -> Vocabulary:
    """Count the kinds and scripts of a vocabulary.

    Cost: some seconds for 250 000 tokens.
    """
    kinds: Counter[str] = Counter()
    scripts: Counter[str] = Counter()
    letters: dict[str, set[str]] = {}
    control: dict[bool, list[str]] = {True: [], False: []}
    known = set()
    for token in range(tokenizer.vocab_size):
        spelled = tokenizer.token_bytes(token)
        special = token in tokenizer.special_ids
        kind, script = kind_of(spelled, special)
        kinds[kind] += 1
        if len(spelled) == 1:
            known.add(spelled)
        if script:
            scripts[script] += 1
            text = spelled.decode().removeprefix(" ")
            if len(text) == 1 and text.isalpha():
                letters.setdefault(script, set()).add(text)
        if kind == "control":
            control[special].append(spelled.decode("utf-8", "replace"))
    return Vocabulary(
        name=name,
        size=tokenizer.vocab_size,
        kinds={kind: kinds[kind] for kind in KINDS},
        scripts=dict(scripts.most_common()),
        letters={script: len(found) for script, found in letters.items()},
        bytes=len(known),
        control=(*control[True], *control[False]),
    )


def kind_of(spelled: bytes, special: bool = False) -> tuple[str, str]:
    """The kind of a token, and its script; "" where the kind has none."""
    try:
        text = spelled.decode()
    except UnicodeDecodeError:
        return ("byte" if len(spelled) == 1 else "split"), ""
    if special or not text or (_CONTROL.fullmatch(text) and not _HTML.fullmatch(text)):
        return "control", ""
    script = script_of(text)
    if len(text) == 1:
        return ("letter" if script else "sign"), script
    if text.startswith(" "):
        script = script_of(text[1:])
        return ("word" if script else "spaced"), script
    return ("part" if script else "other"), script


def script_of(text: str) -> str:
    """The one script of a text of letters; "" for anything else. Marks belong to the letter before them."""
    found = ""
    for char in text:
        mark = unicodedata.category(char)[0] == "M"
        own = _script(char)
        if mark and found and own in ("", found):
            continue
        if not own or (found and own != found):
            return ""
        found = own
    return found


@lru_cache(maxsize=1 << 16)
def _script(char: str) -> str:
    """The script of a letter or mark, by the first word of its name."""
    if unicodedata.category(char)[0] not in "LM":
        return ""
    word = unicodedata.name(char, "").split(" ")[0].partition("-")[0]
    return "" if word in _NO_SCRIPT else word


@lru_cache(maxsize=1)
def assigned() -> Mapping[str, int]:
    """Script -> letters that Unicode has of it, as this Python knows it."""
    counts = Counter(
        _script(char)
        for char in map(chr, (*range(0xD800), *range(0xE000, 0x32000)))
        if unicodedata.category(char)[0] == "L"
    )
    return dict(counts)


def worded(kinds: Mapping[str, int]) -> int:
    """Tokens that have a script."""
    return sum(kinds[kind] for kind in _WORDED)


def shares(counts: Iterable[int], whole: int) -> list[float]:
    """Counts in percent."""
    return [100.0 * count / whole if whole else 0.0 for count in counts]
