"""Workloads from files: which of the known formats a file has is seen from its fields.

Sources of the fields:

- Spec-Bench's ``question.jsonl`` and MT-bench's: ``question_id, category, turns``
- HumanEval: ``task_id, prompt, entry_point, ...``
- MBPP: ``task_id, text, code, test_list``; in its sanitized edition ``prompt`` instead of ``text``
- GSM8K: ``question, answer``
- SPEED-Bench and the project's own rows: ``messages`` or ``prompt``

The right answers that these data sets carry are not read: nobody has them beforehand, so a
drafter may not have them either. Only ``reference`` of a plain row is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outpace.bench.workloads import Prompt, builtin
from outpace.errors import RequestError
from outpace.files import expanded, parse_json, read_text

BUILTIN = "builtin"
ROLES = ("system", "user", "assistant")

_BETWEEN = re.compile(r"[\s,]*")


def read_workload(name_or_path: str) -> list[Prompt]:
    """Read prompts to measure with.

    Args:
        name_or_path: ``builtin``, or a file: JSON lines, or one JSON list of such rows, in one
            of ``FORMATS``. All rows of a file have the same format. The category of a row is
            its ``category``, else its ``group``, else the name of its data set or file.

    Returns:
        The prompts in the order of the file; ids are unique.

    Raises:
        RequestError: no such file, an empty one, a row that is not JSON or of no known format,
            or an id that comes twice. It names the file, the line and the fields found.
    """
    if name_or_path == BUILTIN:
        return builtin()
    path = expanded(name_or_path)
    if not path.exists():
        raise RequestError(f"no workload {name_or_path!r}: it is neither {BUILTIN!r} nor a file")
    text = read_text(path, f"workload {path}")
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    chosen: Format | None = None
    for number, (line, row) in enumerate(_rows(path, text), start=1):
        at = f"{path}, line {line}"
        found = _format_of(row, at)
        if chosen is not None and found is not chosen:
            raise RequestError(
                f"{at}: a row of {found.name} in a file that began as {chosen.name}; write one file for each"
            )
        chosen = found
        try:
            prompt = found.read(_PromptRow(row, path.stem, number))
            said = (row.get(key) for key in ("id", "question_id", "task_id"))
            prompt = replace(prompt, numbered=any(type(id) is int and str(id) == prompt.id for id in said))
        except ValueError as error:
            raise RequestError(f"{at}: {error}") from None
        if prompt.id in lines:
            raise RequestError(f"{at}: id {prompt.id!r} was used in line {lines[prompt.id]}")
        lines[prompt.id] = line
        prompts.append(prompt)
    if not prompts:
        raise RequestError(f"workload {path} is empty: it holds no rows")
    return prompts


@dataclass(frozen=True, slots=True)
class _PromptRow:
    """One row, and what stands in for fields that it lacks. Bad values are ``ValueError``."""

    fields: Mapping[str, Any]
    stem: str
    number: int

    def text(self, key: str) -> str:
        """A string that is not blank."""
        value = self.fields[key]
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{key!r} must be text, got {_brief(value)}")
        return value

    def category(self, otherwise: str) -> str:
        key = next((k for k in ("category", "group") if self.fields.get(k) is not None), None)
        return otherwise if key is None else self.text(key)

    def id(self, key: str = "id", start: str | None = None) -> str:
        """Its id, or one made of its number."""
        value = self.fields.get(key)
        if value is None:
            return f"{start or self.stem}-{self.number}"
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise ValueError(f"{key!r} must be text or a whole number, got {_brief(value)}")
        return str(value)


def _questions(row: _PromptRow) -> Prompt:
    turns = row.fields["turns"]
    if not isinstance(turns, list) or not turns or not all(_said(turn) for turn in turns):
        raise ValueError(f"'turns' must be a list of texts, got {_brief(turns)}")
    return Prompt(
        id=row.id("question_id"),
        category=row.category("questions"),
        messages=_user(turns[0]),
        turns=tuple(turns[1:]),
    )


def _gsm8k(row: _PromptRow) -> Prompt:
    return Prompt(
        id=row.id(start="gsm8k"), category=row.category("gsm8k"), messages=_user(row.text("question"))
    )


def _mbpp(row: _PromptRow) -> Prompt:
    task = row.text("text" if "text" in row.fields else "prompt")
    tests = row.fields.get("test_list") or []
    if not isinstance(tests, list) or not all(_said(test) for test in tests):
        raise ValueError(f"'test_list' must be a list of texts, got {_brief(tests)}")
    if tests:
        task = "\n".join([task, "", "The code has to pass these tests:", "", *tests])
    return Prompt(id=row.id("task_id"), category=row.category("mbpp"), messages=_user(task))


def _humaneval(row: _PromptRow) -> Prompt:
    return Prompt(
        id=row.id("task_id"), category=row.category("humaneval"), messages=_user(row.text("prompt"))
    )


def _plain(row: _PromptRow) -> Prompt:
    reference = row.fields.get("reference")
    if reference is not None and not isinstance(reference, str):
        raise ValueError(f"'reference' must be text, got {_brief(reference)}")
    given = row.fields.get("messages")
    return Prompt(
        id=row.id(),
        category=row.category(row.stem),
        messages=_user(row.text("prompt")) if given is None else _messages(given),
        reference=reference,
    )


def _messages(given: Any) -> tuple[dict[str, str], ...]:
    """Check a conversation; keys besides role and content are left out."""
    if not isinstance(given, list):
        raise ValueError(f"'messages' must be a list of {{role, content}}, got {_brief(given)}")
    out: list[dict[str, str]] = []
    for message in given:
        said = message if isinstance(message, dict) else {}
        role, content = said.get("role"), said.get("content")
        if role not in ROLES or not isinstance(content, str):
            raise ValueError(
                f"a message must have one of the roles {', '.join(ROLES)} and text as content, "
                f"got {_brief(message)}"
            )
        out.append({"role": str(role), "content": content})
    if not out or out[-1]["role"] != "user":
        raise ValueError("'messages' must end with what the user says, for the model to answer")
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    needs: tuple[frozenset[str], ...]
    """A row has this format if it has all fields of one of these sets."""
    read: Callable[[_PromptRow], Prompt]


def _any(*sets: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(one.split()) for one in sets)


FORMATS = (
    Format("Spec-Bench or MT-bench", _any("question_id turns"), _questions),
    Format("MBPP", _any("task_id text code", "task_id prompt code"), _mbpp),
    Format("HumanEval", _any("task_id prompt"), _humaneval),
    Format("GSM8K", _any("question answer"), _gsm8k),
    Format("plain rows", _any("messages", "prompt"), _plain),
)
"""Known formats; the first that fits is taken."""


def _format_of(row: Any, at: str) -> Format:
    if not isinstance(row, dict):
        raise RequestError(f"{at}: a row must be a JSON object, got {_brief(row)}")
    fields = {key for key, value in row.items() if value is not None}
    for known in FORMATS:
        if any(needs <= fields for needs in known.needs):
            return known
    table = "; ".join(
        f"{known.name} ({' or '.join(', '.join(sorted(needs)) for needs in known.needs)})"
        for known in FORMATS
    )
    raise RequestError(
        f"{at}: no known format has the fields {', '.join(sorted(fields)) or '(none)'}; known: {table}"
    )


def _rows(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Line number and content of every row."""
    if text.lstrip()[:1] == "[":
        yield from _list(path, text)
        return
    for line, content in enumerate(text.split("\n"), start=1):
        if content.strip():
            try:
                yield line, parse_json(content)
            except ValueError as error:
                raise RequestError(
                    f"{path}, line {line}: not JSON ({error}); a workload has one JSON object "
                    "per line, or is one JSON list of them"
                ) from None


def _list(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Items of a JSON list, read one by one so that the line of each is known."""
    try:
        count = len(parse_json(text))
    except ValueError as error:
        raise RequestError(f"{path}: not JSON ({error})") from None
    decoder = json.JSONDecoder()
    spot, line, counted = text.index("[") + 1, 1, 0
    for _ in range(count):
        start = _BETWEEN.match(text, spot)
        spot = spot if start is None else start.end()
        line, counted = line + text.count("\n", counted, spot), spot
        item, spot = decoder.raw_decode(text, spot)
        yield line, item


def _user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def _said(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _brief(value: Any) -> str:
    shown = json.dumps(value, default=str)
    return shown if len(shown) <= 60 else shown[:57] + "..."
