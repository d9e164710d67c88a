"""How fast a target reads and answers here: measured on a few passes.

Shape letters: T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from outpace.engine.engine import Engine
from outpace.models.base import Target
from outpace.models.prompts import encode_within, evenly
from outpace.train.corpus import CorpusPrompt
from outpace.types import Feed

LIKELY = 0.6
"""Length of an answer as a share of the longest allowed, where none is known."""
_SAMPLE = 64  # prompts whose lengths are looked at


def typical_prompt(engine: Engine, prompts: Sequence[CorpusPrompt], most: int) -> float:
    """Mean length of some of the prompts, tokens; longer ones than ``most`` do not count."""
    found = [encode_within(one.messages, engine.target, most) for one in evenly(prompts, _SAMPLE)]
    fitting = [len(ids) for ids in found if ids is not None] or [most]
    return sum(fitting) / len(fitting)


def decode_seconds(target: Target, batch: int, context: int) -> tuple[float, int]:
    """Seconds of a pass over ``batch`` sequences so long, and cache bytes per token of one."""
    context = max(1, min(context, target.max_positions - 2))
    cache = target.new_cache(capacity=context + 1)
    slots = [cache.open() for _ in range(batch)]
    for slot in slots:  # keys that nobody computed: what they hold is no matter for the time
        cache.append(slot, [0] * context, range(-1, context - 1))
        cache.keep(slot, range(context))

    def one() -> None:
        target.score([Feed.chain(slot, [0]) for slot in slots], cache)
        for slot in slots:
            cache.drop(slot)

    return seconds_of(one), cache.nbytes // (batch * (context + 1))


def row_seconds(target: Target, taps: frozenset[str]) -> float:
    """Seconds per token of a pass that reads texts."""
    length = max(1, min(256, target.max_positions - 1))

    def one() -> None:
        cache = target.new_cache(capacity=length)
        target.score([Feed.chain(cache.open(), [0] * length, want=()) for _ in range(4)], cache, taps=taps)

    return seconds_of(one) / (4 * length)


def seconds_of(work: Callable[[], None]) -> float:
    """The second of two runs: the first one sets things up."""
    work()
    began = time.perf_counter()
    work()
    return max(time.perf_counter() - began, 1e-9)
