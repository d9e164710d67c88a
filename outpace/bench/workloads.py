"""Prompts to measure and to check with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_BUILTIN = Path(__file__).with_name("builtin.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    id: str
    """Unique within the workload."""
    numbered: bool = field(default=False, kw_only=True)
    """Whether its file has the id as a whole number."""
    category: str
    """Reports group by it."""
    messages: tuple[dict[str, str], ...]
    """The conversation that is to be answered."""
    reference: str | None = None
    """The text that the answer is expected to resemble, if there is one."""
    turns: tuple[str, ...] = ()
    """What the user says next, turn by turn, once ``messages`` are answered.

    A runner answers ``messages`` first, plainly, and builds the conversation of the next turn
    with ``after``. So all contenders get the same prompt, whatever they answer themselves."""

    def after(self, answers: Sequence[str]) -> tuple[dict[str, str], ...]:
        """The conversation to be answered next, given the plain answers to the turns before."""
        talk = list(self.messages)
        for answer, turn in zip(answers, self.turns, strict=False):
            talk.append({"role": "assistant", "content": answer})
            talk.append({"role": "user", "content": turn})
        return tuple(talk)


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
