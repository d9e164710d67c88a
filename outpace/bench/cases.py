"""From the prompts of a workload to the cases that contenders answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.bench.records import Case
from outpace.bench.workloads import Prompt
from outpace.engine.engine import Engine
from outpace.errors import RequestError
from outpace.models.prompts import encode_within, evenly
from outpace.params import NEUTRAL, SamplingParams


@dataclass(kw_only=True, slots=True)
class Asked:
    prompts: list[Prompt] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    """Category by category; a case per turn of a prompt and per seed."""
    notes: list[str] = field(default_factory=list)
    """For the report: what had to be left out."""


def turn_id(prompt: Prompt, turn: int) -> str:
    """Id of the case that is a turn of a prompt; the first turn is the prompt itself."""
    return prompt.id if turn == 0 else f"{prompt.id}#{turn + 1}"


def make_cases(
    engine: Engine, prompts: Sequence[Prompt], *, limit: int | None, max_new_tokens: int, seeds: Sequence[int]
) -> Asked:
    """Turn prompts into cases, as many per category as wanted.

    A later turn follows the model's own greedy answers to the turns before it, ended where the
    model ends them. So all contenders get the same conversation.

    Args:
        engine: encodes prompts, in chat form if the model has a template, and answers turns.
        prompts: those that leave no room for the answer are left out.
        limit: most prompts per category, spread evenly over those that fit; None takes all.
        seeds: every prompt is answered once with each.

    Raises:
        RequestError: no prompt fits.

    Cost: an answer for every turn that is followed by another.
    """
    room = engine.target.max_positions - max_new_tokens
    asked = Asked()
    usable = fitting(engine, prompts, max_new_tokens)
    left_out = len(prompts) - len(usable)
    groups: dict[str, list[tuple[Prompt, tuple[int, ...]]]] = {}
    for prompt, ids in usable:
        groups.setdefault(prompt.category, []).append((prompt, ids))
    cut = 0
    for group, rows in groups.items():
        for prompt, ids in evenly(rows, limit):
            turns = _turns(engine, prompt, ids, max_new_tokens, room)
            cut += 1 + len(prompt.turns) - len(turns)
            asked.prompts.append(prompt)
            asked.cases += [
                Case(
                    id=turn_id(prompt, turn),
                    group=group,
                    ids=said,
                    seed=seed,
                    reference=_reference(engine, prompt),
                )
                for turn, said in enumerate(turns)
                for seed in seeds
            ]
    for number, what in ((left_out, f"of {len(prompts)} prompts"), (cut, "later turns")):
        if number:
            asked.notes.append(
                f"{number} {what} left out: too long for the context of {engine.target.max_positions}"
            )
    return asked


def fitting(
    engine: Engine, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[tuple[Prompt, tuple[int, ...]]]:
    """Prompts that leave room for an answer, with the token ids of their first turns.

    Raises:
        RequestError: none does.
    """
    room = engine.target.max_positions - max_new_tokens
    encoded = [(prompt, _encoded(engine, prompt.messages, room)) for prompt in prompts]
    found = [(prompt, ids) for prompt, ids in encoded if ids is not None]
    if not found:
        raise RequestError(
            f"no prompt leaves room for {max_new_tokens} new tokens in the context of "
            f"{engine.target.max_positions}; give a smaller --max-new-tokens or other prompts"
        )
    return found


def _encoded(engine: Engine, messages: Sequence[Mapping[str, Any]], room: int) -> tuple[int, ...] | None:
    """Token ids of a conversation, or of its text if the model has no chat template; None without room."""
    tokenizer = engine.target.tokenizer
    if tokenizer is not None and tokenizer.chat_template:
        return encode_within(list(messages), engine.target, room)
    return encode_within("\n".join(message["content"] for message in messages), engine.target, room)


def _turns(
    engine: Engine, prompt: Prompt, ids: tuple[int, ...], max_new_tokens: int, room: int
) -> list[tuple[int, ...]]:
    """Prompts of all turns, up to the first that has no room."""
    turns, answers = [ids], list[str]()
    greedy = SamplingParams(**NEUTRAL, max_new_tokens=max_new_tokens)
    while len(turns) <= len(prompt.turns):
        answers.append(engine.generate(turns[-1], greedy, drafter="none").text)
        following = _encoded(engine, prompt.after(answers), room)
        if following is None:
            break
        turns.append(following)
    return turns


def _reference(engine: Engine, prompt: Prompt) -> tuple[int, ...] | None:
    if prompt.reference is None or engine.target.tokenizer is None:
        return None
    return tuple(engine.target.tokenizer.encode(prompt.reference, special=False))
