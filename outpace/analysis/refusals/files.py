"""Prompts of an audit, and answers with labels, from files.

The public format is that of RMCBench: one JSON list of objects. Of a prompt ``pid``, ``prompt`` and, as
groups, ``task`` and ``level`` are read, of a judged answer ``response`` and ``label``. JSON lines will do.
Nothing of that set comes with this package: its prompts ask for malicious code. What does come are harmless
prompts, some of which a careful assistant declines, and answers of our own with labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.analysis.refusals.judge import LABELS
from outpace.errors import RequestError
from outpace.files import parse_json, read_text

PROMPTS = Path(__file__).with_name("prompts.jsonl")
ANSWERS = Path(__file__).with_name("answers.jsonl")
_LABEL = re.compile("|".join(LABELS))


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt."""

    id: str
    group: str
    """Its task and level; "" if it names none."""
    prompt: str


def read_asked(path: Path | None) -> list[Asked]:
    """Prompts of a file; None: the harmless ones.

    Raises:
        RequestError: a file that cannot be read, or a row without a prompt; the text is not shown.
    """
    found = []
    for number, row in enumerate(_rows(path or PROMPTS), 1):
        prompt = row.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise RequestError(f"{path}, row {number}: 'prompt' must be text; give the public format")
        names = [str(row[key]) for key in ("task", "level") if row.get(key) is not None]
        found.append(Asked(str(row.get("pid", number)), " ".join(names), prompt))
    return found


def read_judged(path: Path | None) -> list[tuple[str, str]]:
    """(answer, label) of a file; None: those that come with the package. Labels that are none are left out.

    Raises:
        RequestError: a file that cannot be read, or holds no labelled answer.
    """
    found = []
    for row in _rows(path or ANSWERS):
        answer, said = row.get("response"), _LABEL.search(str(row.get("label")))
        if isinstance(answer, str) and said is not None:
            found.append((answer, said[0]))
    if not found:
        raise RequestError(f"{path} holds no answer with response and label; give the public format")
    return found


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    text = read_text(path, f"file {path}")
    try:
        whole = text.lstrip().startswith("[")
        rows = parse_json(text) if whole else [parse_json(x) for x in text.splitlines() if x.strip()]
    except ValueError as error:
        raise RequestError(f"{path} is no JSON: {error}; give a list of objects, or one per line") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise RequestError(f"{path} must hold objects with a prompt, one at least")
    yield from rows
