"""Thinking in answers of chats: the budget that a request names, and what is told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.models.thinking import Place, Reader, Section, find_marks, make_section
from outpace.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the reader of one answer must know to find the thinking in it."""

    section: Section
    begun: Place

    def reader(self, tokenizer: Any) -> Reader:
        return Reader(self.section, self.begun, tokenizer)


def marks_of(target: Any, given: Sequence[str]) -> tuple[str, ...]:
    """The marks that a server looks for: those that it was given, else the model's own; may be empty.

    Raises:
        RequestError: marks for a model without a tokenizer.
    """
    if given:
        make_section(target, given, None)
    return tuple(given) or find_marks(target.tokenizer) or ()


def settings(marks: tuple[str, ...], budget: int | None, grammar: bool, name: str) -> dict[str, Any]:
    """Arguments of SamplingParams.

    Args:
        grammar: whether the answer has a form, which begins behind the thinking.

    Raises:
        ApiError: a budget for a model whose marks are not known.
    """
    if budget is not None and not marks:
        raise ApiError(
            400,
            f"thinking_token_budget: {name} has no marks of thinking; start the server with --thinking-mark",
            "thinking_token_budget",
        )
    if not marks or (budget is None and not grammar):
        return {}
    return {"thinking_marks": marks, "thinking_token_budget": budget}


def reasoning_of(
    target: Any, marks: tuple[str, ...], prompt: Sequence[int], budget: int | None, grammar: bool
) -> Reasoning | None:
    """How to read one answer; None for a model whose marks are not known."""
    if not marks:
        return None
    section = make_section(target, marks, budget, again=not grammar)
    return Reasoning(section, section.begun(prompt))
