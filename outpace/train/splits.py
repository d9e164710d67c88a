"""Prompts to learn from and prompts to measure with: whether there are both, said before any is answered."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.errors import RequestError
from outpace.models.base import Target
from outpace.models.prompts import encode_within
from outpace.train.corpus import CorpusPrompt
from outpace.train.generate import GenerateConfig
from outpace.train.progress import Say
from outpace.train.speed import LIKELY
from outpace.train.tokens import TokenStore, held_out


def check_splits(
    target: Target,
    prompts: Sequence[CorpusPrompt],
    store: TokenStore | None,
    data: GenerateConfig,
    longest: int,
    say: Say,
) -> None:
    """Refuse prompts that give nothing to learn from, or nothing to measure with.

    Args:
        prompts: in the order in which they will be answered.
        store: the answers that are there already.
        longest: tokens of a sequence that training reads; no shorter prompt's answer is cut off.
        say: told if the tokens that are wanted are likely to end before a prompt of both kinds was answered.

    Raises:
        RequestError: all of them, or none, are held out, or they are too long.

    Cost: prompts are encoded until one of both kinds was seen.
    """
    stored = set() if store is None else set(store.held_out_S[store.prompt_S < longest].tolist())
    kinds, answered, fitting = set(stored), 0, 0
    for prompt in prompts:
        if len(kinds) == 2:
            break
        if (ids := encode_within(prompt.messages, target, data.max_prompt)) is not None:
            answered += 1
            if len(ids) < longest:
                fitting += 1
                kinds.add(held_out(ids))
    if not stored and not answered:
        raise RequestError(f"no prompt has at most {data.max_prompt} tokens; raise data.max_prompt")
    if not stored and not fitting:
        raise RequestError(
            f"no prompt is shorter than {longest} tokens, and training reads no more of a text; raise "
            "pipeline.max_length and pipeline.tokens_per_batch"
        )
    if answered and len(kinds) < 2:
        which = "all" if True in kinds else "none"
        raise RequestError(
            f"of {fitting} prompts shorter than {longest} tokens {which} would be held out, and a drafter is "
            f"trained on some and measured on others; give more"
        )
    reached = round(data.tokens / (LIKELY * data.max_new_tokens * data.answers))
    if not stored and answered > reached + 1:
        say(
            f"{data.tokens} tokens are about {reached + 1} answered prompts; it takes {answered} to have one "
            "to train on and one to measure with, so more --tokens may be needed"
        )
