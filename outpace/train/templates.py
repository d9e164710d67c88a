"""Tasks around a passage: what people ask about a text or a piece of code they hold.

A drafter learns from answers of every kind that it will meet, also from those whose prompts are
long and whose answers repeat them.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator

_TEXT = (
    "Continue this text in the same style.\n\n{text}",
    "Give a short summary of this text.\n\n{text}",
    "Here is the beginning of a text. What could happen next? Write the next part.\n\n{text}",
    "What are the main points of the text below? Answer with a list.\n\n{text}",
    "Name all persons, places and dates of this text, one per line.\n\n{text}",
    "Turn the facts of this text into JSON with the keys who, what, where and when.\n\n{text}",
    "Say the same in simpler words.\n\n{text}",
    "Put {other} in the place of {word} everywhere in this text, and show the full text.\n\n{text}",
    "Correct all mistakes in this text and show the corrected version.\n\n{broken}",
    "Translate this text to {language}.\n\n{text}",
    "Think of three questions that this text answers, and answer them.\n\n{text}",
    "Write a letter to a friend in which you tell what this text is about.\n\n{text}",
    "{numbered}\n\nWhich of these passages mentions {word}, and what does it say? Explain.",
    "{text}\n\nWhat do you think about this? Give reasons for and against.",
    "Make a table of what this text tells, with two columns.\n\n{text}",
    "Sum up in one sentence, then explain the details step by step.\n\n{text}",
    "Tell me in {language} what this text is about.\n\n{text}",
    "{text}\n\nRead the text above. What does it say about {word}? Quote the sentences that you use.",
)
_CODE = (
    "What does this code do? Go through it step by step.\n\n```{kind}\n{text}\n```",
    "Add comments to this code. Show the complete result.\n\n```{kind}\n{text}\n```",
    "Call {word} {other}_{word} instead, and print the full code.\n\n```{kind}\n{text}\n```",
    "Write tests for the following code.\n\n```{kind}\n{text}\n```",
    "How would you go on with this file?\n\n```{kind}\n{text}\n```",
    "Are there mistakes in this code? Suggest improvements.\n\n```{kind}\n{text}\n```",
)
_LANGUAGES = ("French", "German", "Spanish", "Italian", "Portuguese", "Dutch", "English")
_NAMES = ("Robin", "copper", "Harriet", "seven", "Vienna", "lantern", "Bernard", "velvet")
_PREFIXES = ("my", "old", "new", "main")


def passage_prompts(text: str, number: int, code: str | None) -> Iterator[str]:
    """Two prompts around a passage, of different kinds.

    Args:
        number: of the passage in its file; kinds go round with it.
        code: language of the passage if it is code.
    """
    templates = _TEXT if code is None else _CODE
    coin = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    for template in (
        templates[number % len(templates)],
        templates[(number + len(templates) // 2) % len(templates)],
    ):
        if code is None:
            yield template.format(
                text=text,
                broken=_broken(text) if "{broken}" in template else "",
                numbered=_numbered(text) if "{numbered}" in template else "",
                word=_word(text, coin[0]),
                other=_NAMES[coin[1] % len(_NAMES)],
                language=_LANGUAGES[coin[2] % len(_LANGUAGES)],
            )
        else:
            yield template.format(
                text=text,
                kind={"py": "python"}.get(code, code),
                word=_word(text, coin[0]),
                other=_PREFIXES[coin[1] % len(_PREFIXES)],
            )


def _word(text: str, coin: int) -> str:
    """One of the words that a text has often."""
    often = Counter(re.findall(r"[A-Za-z_]{5,}", text)).most_common(5)
    return often[coin % len(often)][0] if often else "it"


def _numbered(text: str) -> str:
    parts = re.split(r"(?<=[.!?])\s+", text)
    size = max(1, -(-len(parts) // 3))
    groups = [" ".join(parts[i : i + size]) for i in range(0, len(parts), size)]
    return "\n\n".join(f"[{i}] {group}" for i, group in enumerate(groups, 1))


def _broken(text: str) -> str:
    """The text as someone in a hurry types it: letters swapped, capitals and commas lost."""
    words = text.replace(",", "").split(" ")
    for i in range(len(words)):
        if i % 7 == 3 and len(words[i]) > 4:
            words[i] = words[i][0] + words[i][2] + words[i][1] + words[i][3:]
        elif i % 5 == 1:
            words[i] = words[i].lower()
    return " ".join(words)
