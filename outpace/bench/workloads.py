"""Prompts to measure and to check with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_BUILTIN = Path(__file__).with_name("builtin.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of a workload."""

    id: str
    """Unique within the workload."""
    category: str
    """Reports group by it."""
    messages: tuple[dict[str, str], ...]
    """The conversation that is to be answered."""
    reference: str | None = None
    """The text that the answer is expected to resemble, if there is one."""


def builtin() -> list[Prompt]:
    """Read the prompts that come with the package."""
    prompts = []
    for line in _BUILTIN.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompts.append(
            Prompt(
                id=str(row["id"]),
                category=row["category"],
                messages=tuple(row["messages"]),
                reference=row.get("reference"),
            )
        )
    return prompts
