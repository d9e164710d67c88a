"""Tokens per character by language: what a vocabulary makes of the same text in many of them.

rows = by_language(tokenizers, read_texts([]))    a sample that comes with the package
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.errors import RequestError
from outpace.files import parse_json, read_text
from outpace.models.text import Tokenizer

SAMPLE = Path(__file__).with_name("languages.jsonl")
"""One short story in 27 languages, and some lines of Python."""
BASE, CODE = "English", "Python"
"""Other languages of the sample are compared with the base, since they say the same; not so the code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """A language, as several tokenizers write it."""

    language: str
    characters: int
    bytes: int
    tokens: Mapping[str, int]
    """Tokenizer -> tokens."""
    exact: Mapping[str, bool]
    """Tokenizer -> whether its tokens give the same text back."""

    def per_character(self, name: str) -> float:
        """Tokens per character."""
        return self.tokens[name] / self.characters

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "language": self.language,
            "characters": self.characters,
            "bytes": self.bytes,
            "by_tokenizer": [
                {
                    "tokenizer": name,
                    "tokens": count,
                    "tokens_per_character": self.per_character(name),
                    "exact": self.exact[name],
                }
                for name, count in self.tokens.items()
            ],
        }


def read_texts(files: Sequence[Path]) -> dict[str, str]:
    """Language -> text: of JSONL with ``language`` and ``text``, or of plain text, named by its file.

    No files: the sample.

    Raises:
        RequestError: a file that cannot be read, a line that is something else, or no text.
    """
    found: dict[str, str] = {}
    for path in files or (SAMPLE,):
        if path.suffix != ".jsonl":
            found[path.stem] = found.get(path.stem, "") + read_text(path)
            continue
        for number, line in enumerate(read_text(path).splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
                name, text = row.get("language", path.stem), row["text"]
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise RequestError(f"{path}, line {number}: no JSON object with text ({error})") from error
            if not isinstance(name, str) or not isinstance(text, str):
                raise RequestError(f"{path}, line {number}: language and text must be strings")
            found[name] = found.get(name, "") + text
    if empty := [name for name, text in found.items() if not text]:
        raise RequestError(f"the text {empty[0]!r} is empty; give some text")
    if not found:
        raise RequestError(f"{files[0]} holds no text; give lines with language and text")
    return found


def by_language(tokenizers: Mapping[str, Tokenizer], texts: Mapping[str, str]) -> list[Counted]:
    """Write every text with every tokenizer, without the tokens that begin or end a text."""
    rows = []
    for language, text in texts.items():
        ids = {name: one.encode(text, special=False) for name, one in tokenizers.items()}
        rows.append(
            Counted(
                language=language,
                characters=len(text),
                bytes=len(text.encode()),
                tokens={name: len(found) for name, found in ids.items()},
                exact={name: tokenizers[name].decode(found) == text for name, found in ids.items()},
            )
        )
    return rows
