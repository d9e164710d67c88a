"""Answer files of Spec-Bench, so that its own scripts read what was measured here.

Source of the fields: https://github.com/hemingkx/Spec-Bench, ``evaluation/eval.py`` (which
writes them), ``speed.py`` and ``equal.py`` (which read them).

``speed.py`` divides the mean over questions of ``new_tokens / wall_time`` by the same of a
baseline file. It counts the tokens of that file anew. To do so it reads the texts with a tokenizer and
takes one off each for the mark at the beginning of a text. So with the file of ``none`` as the baseline
its ratio is off by a token per turn where the tokenizer adds no such mark. It is also off by the stop
tokens, which a text does not show. ``equal.py`` compares texts, question by question in the order of
the files.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from outpace.bench.records import Run
from outpace.bench.workloads import Prompt
from outpace.engine.results import Counters
from outpace.errors import RequestError
from outpace.files import write_whole


def write_answers(
    path: Path,
    method: str,
    prompts: Sequence[Prompt],
    runs: Sequence[Sequence[Run]],
    *,
    decode: Callable[[Sequence[int]], str],
    clock: Callable[[], float] = time.time,
) -> None:
    """Write the answers of one method, one question a line, in the order of the prompts.

    Args:
        path: the file; its folder is made if need be.
        prompts: the questions. Ids and categories stay what they were in their file.
        runs: per question, the runs of its turns in order, each of this one case alone.
        decode: token ids to text, special tokens left out.
        clock: seconds since 1970, for ``tstamp``.

    Fields of a choice, one entry per turn: ``turns`` the texts, ``new_tokens``, and ``wall_time`` in
    seconds, prefill included. ``decoding_steps`` are passes after the prompt, null if it was not
    told. ``accept_lengths`` has the emitted tokens of every pass of all turns. Their mean is
    mean emitted; their order is not kept (longest first in each turn).

    Raises:
        RequestError: a run of several cases, whose seconds belong to all of them, or a question
            without an answer.

    Effects: the file appears whole or not at all.
    """
    stamp = clock()
    lines = []
    for prompt, turns in zip(prompts, runs, strict=True):
        if not turns:
            raise RequestError(f"{method} has no answer to {prompt.id!r}; run all the prompts")
        if any(len(run.tokens) != 1 for run in turns):
            raise RequestError(
                f"an answer file needs the time of every answer, but {prompt.id!r} was one of "
                f"{max(len(run.tokens) for run in turns)} in a batch; use --batch 1"
            )
        row = {
            "question_id": int(prompt.id) if prompt.numbered else prompt.id,
            "category": prompt.category,
            "answer_id": _answer_id(method, prompt.id, turns),
            "model_id": method,
            "choices": [_choice(turns, decode)],
            "tstamp": stamp,
        }
        lines.append(json.dumps(row) + "\n")
    write_whole(path, "".join(lines))


def _choice(turns: Sequence[Run], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    counters = [run.counters[0] if run.counters else None for run in turns]
    return {
        "index": 0,
        "turns": [decode(run.tokens[0]).strip() for run in turns],
        "decoding_steps": [None if one is None else one.passes for one in counters],
        "new_tokens": [len(run.tokens[0]) for run in turns],
        "wall_time": [run.seconds for run in turns],
        "accept_lengths": [n for one in counters if one is not None for n in accept_lengths(one)],
    }


def accept_lengths(counters: Counters) -> list[int]:
    """Emitted tokens of every pass, longest first.

    ``accepted_at[d]`` passes kept more than d tokens, so their differences say how many passes
    kept exactly so many. A pass that a stop cut short may have emitted no token of the target's
    own. One of the longest then counts as that pass, which keeps the sum right.
    """
    kept_more = (counters.passes, *counters.accepted_at, 0)
    lengths: list[int] = []
    for kept in range(len(kept_more) - 1):
        lengths = [kept + 1] * (kept_more[kept] - kept_more[kept + 1]) + lengths
    surplus = sum(lengths) - (counters.new_tokens - 1)
    if lengths and surplus == 1 and lengths[0] > 1:
        lengths[0] -= 1
        lengths.sort(reverse=True)
    return lengths


def _answer_id(method: str, question: str, turns: Iterable[Run]) -> str:
    said = repr((method, question, [run.tokens for run in turns]))
    return hashlib.sha256(said.encode()).hexdigest()[:22]
