"""Prompts that the target thinks of itself: training data from nothing but the model.

A model that was tuned on conversations has learned how users write. Given the beginning of a
user's turn and nothing else, it writes one (Magpie, arXiv:2406.08464). The prompts come out as
mixed as those that it was tuned on. Given its own answer as well, it writes the user's next turn.
Both are stored as rows of JSONL, to be answered like any other file of prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.engine.engine import Engine
from outpace.errors import ModelError, OutpaceError
from outpace.files import parse_json, write_whole
from outpace.models.graphs import CudaRecorder
from outpace.params import NEUTRAL, SamplingParams
from outpace.train.corpus import Message
from outpace.train.crowd import Wanted
from outpace.train.fixed_batches import answer_all
from outpace.train.generate import check_chat
from outpace.train.progress import Reporter, Say
from outpace.train.text_net import TextNet

_MARK = "MARKMARK"
_ROUND = 4  # batches of prompts asked for between two writings: what a killed process loses
_SPARE = 8  # and a quarter: prompts asked for beyond those that are wanted, for some are dropped
_GOES_ON = 3  # one prompt in so many becomes a conversation
_FEWEST = 8  # characters; shorter ones ask nothing
_HOPELESS = 4  # full rounds that give nothing new
_TURNS = 1 << 30  # seeds of second turns lie so far behind those of prompts
_OPENED = 4  # one prompt in so many begins with words that are given
OPENINGS = (
    "Write a Python function that",
    "Comment",
    "Was ist",
    "Fix this code:\n\n```python\n",
    "Escribe",
    "Scrivi",
    "What does this code do?\n\n```js\n",
    "Traduis en anglais :",
    "Schreibe",
    "Write an SQL query that",
    "Por que",
    "Hoe",
)
"""Beginnings in several languages and about code: left alone, a model hardly ever writes these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfPromptConfig:
    count: int
    """Prompts wanted."""
    temperature: float = 0.8
    """Of the target while it plays the user."""
    max_new_tokens: int = 384
    """Longer prompts have no end and are left out."""
    batch: int = 64
    """Prompts under way at a time."""
    seed: int = 0
    """Of everything drawn."""

    @property
    def round(self) -> int:
        """Prompts asked for between two writings."""
        return _ROUND * self.batch

    def __post_init__(self) -> None:
        for name in ("count", "max_new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")


def opening_of(number: int) -> str:
    """The words that a prompt begins with; mostly none."""
    turn, rest = divmod(number, _OPENED)
    return "" if rest else OPENINGS[turn % len(OPENINGS)]


def user_turn(engine: Engine, before: Sequence[Message] = (), said: str = "") -> tuple[tuple[int, ...], str]:
    """The beginning of a user's turn after these messages, and the text that ends one.

    Args:
        said: what the user has said of it already.

    Raises:
        RequestError: the target has no tokenizer or no chat template.
        ModelError: its template changes what users write, so that the place cannot be found.
    """
    tokenizer = engine.target.tokenizer
    if tokenizer is None:
        raise ModelError(f"{engine.target.name} has no tokenizer; give files with --prompts")
    check_chat(engine.target)
    text = tokenizer.chat_text([*before, {"role": "user", "content": _MARK}], generation_prompt=False)
    opening, found, after = text.partition(_MARK)
    if not found or not after.strip():
        raise ModelError(
            f"the chat template of {engine.target.name} shows no end of a user's "
            "turn; give files with --prompts"
        )
    return tuple(tokenizer.encode(opening + said, special=False)), after.strip().split("\n")[0]


def write_prompts(engine: Engine, path: Path, config: SelfPromptConfig, *, say: Say = print) -> int:
    """Let the target write prompts until the file holds those that are wanted.

    Rows are ``{"number", "prompt"}`` in the order of their numbers, each prompt once. The number
    alone says which coins were drawn. So work that was stopped goes on to the same file, as long
    as the settings are the same.

    Args:
        engine: of the target; its drafter is not used.
        path: of the file; one that is there is gone on with.

    Returns:
        How many prompts the file holds: ``config.count``, or those that it had.

    Raises:
        ModelError: the target has no chat template to play the user in.
        OutpaceError: the file is damaged, or the target writes nothing new.

    Effects: writes the file whole every few hundred prompts.
    """
    end, net = user_turn(engine)[1], TextNet.on_gpu(engine.target)
    rows = dict(_rows(path, "prompt"))
    kept = set(rows.values())
    number = _behind(rows)
    told, idle = Reporter("prompts", "prompts", say, len(rows)), 0
    while len(rows) < config.count:
        before, wanted = len(rows), config.count - len(rows)
        numbers = range(number, number + min(config.round, wanted + wanted // 4 + _SPARE))
        said = [opening_of(one) for one in numbers]
        begun = {one: user_turn(engine, said=one)[0] for one in set(said)}
        written = []
        for one in _written(engine, [begun[one] for one in said], config, numbers, net, end):
            written.append(one)
            told.late(min(before + len(written), config.count), config.count)
        for i, more in sorted(written):
            text = said[i] + more if said[i] else more.strip()
            # No more than are wanted, so that the size of a round decides about nothing.
            if len(more) >= _FEWEST and text not in kept and len(rows) < config.count:
                rows[numbers[i]] = text
                kept.add(text)
        number += len(numbers)
        idle = idle + len(numbers) if len(rows) == before else 0
        if idle >= _HOPELESS * config.round:
            raise OutpaceError(
                f"{engine.target.name} wrote {len(rows)} different prompts and "
                f"then none in {idle}; ask for fewer"
            )
        _write(path, "prompt", rows)
        told.now(len(rows), config.count)
    return len(rows)


def write_conversations(
    engine: Engine, prompts: Path, path: Path, config: SelfPromptConfig, *, say: Say = print
) -> int:
    """Let the target answer one prompt in three, and write the user's next turn.

    Rows are ``{"number", "messages"}`` with the number of their prompt, and end with the user's turn.
    Work that was stopped goes on to the same file.

    Args:
        engine: of the target; its drafter is not used.
        path: of the file; one that is there is gone on with.
        config: how; its count is not used.

    Returns:
        How many conversations the file holds.

    Raises:
        OutpaceError: a file is damaged.
    """
    asked = {n: text for n, text in _rows(prompts, "prompt") if n % _GOES_ON == 0}
    rows = dict(_rows(path, "messages"))
    net = TextNet.on_gpu(engine.target)
    told_of = Reporter("conversations", "conversations", say, len(rows))
    for number in range(_behind(rows), max(asked, default=-1) + 1, config.round):
        before, total = len(rows), max(len(rows), len(asked))
        opened = [n for n in range(number, number + config.round) if n in asked]
        told: list[tuple[int, list[Message]]] = [
            (n, [{"role": "user", "content": asked[n]}]) for n in opened if not _special(engine, asked[n])
        ]
        starts = [engine.encode(messages) for _, messages in told]
        answers = []
        for one in _written(engine, starts, config, [n for n, _ in told], net):
            answers.append(one)
            told_of.late(before, total)
        answered = [
            (told[i][0], [*told[i][1], {"role": "assistant", "content": text.strip()}])
            for i, text in sorted(answers)
            if text.strip() and not _special(engine, text)
        ]
        starts = [user_turn(engine, messages)[0] for _, messages in answered]
        end = user_turn(engine)[1]
        turns = []
        for one in _written(engine, starts, config, [n + _TURNS for n, _ in answered], net, end):
            turns.append(one)
            told_of.late(before + len(turns), total)
        for i, text in sorted(turns):
            if len(text.strip()) >= _FEWEST:
                rows[answered[i][0]] = [*answered[i][1], {"role": "user", "content": text.strip()}]
        if len(rows) > before:
            _write(path, "messages", rows)
        told_of.now(len(rows), total)
    return len(rows)


def _special(engine: Engine, text: str) -> bool:
    """Whether special tokens are written in a text."""
    tokenizer = engine.target.tokenizer
    return tokenizer is not None and tokenizer.literal.finds([text])


def _written(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    config: SelfPromptConfig,
    numbers: Sequence[int],
    net: TextNet | None,
    end: str | None = None,
) -> Iterator[tuple[int, str]]:
    """What follows the prompts and came to an end by itself, as (index, text). A number says the coins; on a
    GPU the first does, for all.
    """
    params = [
        SamplingParams(
            **NEUTRAL | {"temperature": config.temperature},
            max_new_tokens=config.max_new_tokens,
            stop=() if end is None else (end,),
            seed=(config.seed << 32) + number,
        )
        for number in numbers
    ]
    if net is not None and (stops := _stops(engine, end)) is not None:
        wanted = (Wanted(ids, [one], i) for i, (ids, one) in enumerate(zip(prompts, params, strict=True)))
        tokenizer = engine.target.tokenizer
        assert tokenizer is not None, "prompts were written with it"
        seed = (config.seed << 32) + min(numbers, default=0)
        for one in answer_all(net, wanted, config.batch, stops, CudaRecorder(net.device), seed):
            if one.ended:
                yield one.number, tokenizer.decode(one.tokens[:-1]).rstrip()
        return
    for index, result in engine.map(iter(prompts), params, batch=config.batch, drafter="none"):
        if result.finish_reason == "stop":
            yield index, result.text.rstrip()


def _stops(engine: Engine, end: str | None) -> frozenset[int] | None:
    """Tokens that end a text or are written as ``end``; None if that is no single token."""
    tokenizer = engine.target.tokenizer
    if end is None or tokenizer is None:
        return engine.eos_ids
    ids = tokenizer.encode(end, special=False)
    return engine.eos_ids | {*ids} if len(ids) == 1 else None


def _behind(rows: Mapping[int, Any]) -> int:
    """The first number behind those that are there."""
    return max(rows, default=-1) + 1


def _write(path: Path, key: str, rows: Mapping[int, Any]) -> None:
    lines = (json.dumps({"number": n, key: one}, ensure_ascii=False) + "\n" for n, one in rows.items())
    write_whole(path, "".join(lines))


def _rows(path: Path, key: str) -> Iterator[tuple[int, Any]]:
    if not path.is_file():
        return
    kind = {"prompt": str, "messages": list}[key]
    for line, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = parse_json(text)
            if type(row["number"]) is not int or not isinstance(row[key], kind):
                raise TypeError("a value of another kind")
            yield row["number"], row[key]
        except (ValueError, KeyError, TypeError) as error:
            raise OutpaceError(
                f"{path} line {line} is no row with number and {key} ({error}); delete the file to begin anew"
            ) from None
