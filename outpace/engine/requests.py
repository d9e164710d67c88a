"""What users ask for, checked and put in order before anything is opened for it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

from outpace.coins import later_seed
from outpace.drafters.base import Request
from outpace.errors import PromptTooLong, RequestError, UnknownNameError, shown
from outpace.models.base import Target
from outpace.models.prompts import Prompt, Reference, check_ids, listed, refusal
from outpace.models.thinking import Thinking, make_rule
from outpace.params import Grammar, SamplingParams

Wanted = SamplingParams | Sequence[SamplingParams] | None
"""Settings for all prompts, for each, or none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest(Request):
    """One answer that is wanted, with nothing left to check. A drafter reads it as a `Request`."""

    params: SamplingParams
    """Resolved, see ``SamplingParams.resolved``."""
    seed: int
    rule: Grammar | None = None
    """What says which tokens may follow: the grammar of ``params``, and thinking before it."""
    index: int = 0
    """Which answer of the request."""
    continues: bool = False
    """Its text carries on from the prompt's, so a leading space belongs to it."""
    drafter: str | None = None
    """Method spec, ``none``, or None for whoever runs it to choose. Read by services alone, as
    are the fields below; a call of the engine says these things for all of its prompts."""
    draft_tokens: int | None = None
    """Most guesses per pass; 0 drafts nothing, None leaves it to drafter and policy."""
    reproducible: bool | None = None
    """As for ``Engine.generate``."""
    prompt_logprobs: int | None = None
    """Alternatives to report for every token of the prompt; None reports nothing of it."""
    traced: bool = False
    """Whether every piece of its answer brings its pass along."""

    def answers(self) -> Iterator[GenerationRequest]:
        """One for each of the ``params.n`` answers, numbered from 0. The first has the seed that the
        user gave, later ones seeds that are hashed from it; where none was given they are drawn.
        """
        for turn in range(self.params.n):
            given = self.params.seed is not None or turn == 0
            seed = later_seed(self.seed, turn) if given else secrets.randbits(48)
            yield replace(self, index=turn, seed=seed)


def check(ids: tuple[int, ...], params: SamplingParams, target: Target, eos_ids: frozenset[int]) -> None:
    """Raise RequestError unless the target can serve this prompt with these settings."""
    if not ids:
        raise RequestError("the prompt has no tokens; give some text or token ids")
    if len(ids) > target.max_positions - 1:
        raise PromptTooLong(target.max_positions - 1, len(ids), target.why_shorter)
    check_ids(ids, target, "the prompt")
    params.check_vocab(target.vocab_size, eos_ids)
    if params.stop and target.tokenizer is None:
        raise RequestError(
            f"stop strings {params.stop!r} need a tokenizer, and this model has none; use stop_token_ids"
        )


def rule_of(ids: Sequence[int], params: SamplingParams, target: Target) -> Grammar | None:
    """What says which tokens may follow in an answer; None: nothing does.

    Raises:
        RequestError: a budget for a model whose marks of thinking are not known, or that are banned.
    """
    rule: Grammar | None = make_rule(
        target, ids, params.thinking_marks, params.thinking_token_budget, params.grammar
    )
    if params.thinking_token_budget is not None and isinstance(rule, Thinking):
        closing = frozenset(rule.section.closing)
        if closing & params.banned_tokens or not closing <= (params.allowed_tokens or closing):
            raise RequestError("banned_tokens or allowed_tokens leave out what ends the thinking; allow it")
    return rule


def params_of(params: Wanted, settings: dict[str, Any], count: int) -> list[SamplingParams]:
    """One SamplingParams per prompt.

    Raises:
        UnknownNameError: a setting that there is not.
        RequestError: one that is out of range, no SamplingParams, or not as many as prompts.
    """
    wanted = _wanted(params, settings)
    each = wanted if isinstance(wanted, Sequence) else [wanted] * count
    if len(each) != count:
        raise RequestError(f"{len(each)} params for {count} prompts; give one each, or one")
    return list(map(checked_params, each))


def paired(
    prompts: Iterable[Prompt],
    params: SamplingParams | Iterable[SamplingParams] | None,
    settings: dict[str, Any],
) -> Iterator[tuple[Prompt, SamplingParams]]:
    """Pair prompts with their params, taking both one by one, the prompt first."""
    if isinstance(prompts, str):
        raise RequestError(f"prompts are the one text {shown(prompts)}; give a list")
    wanted = _wanted(params, settings)
    each = chain(wanted, repeat(None)) if isinstance(wanted, Iterable) else repeat(wanted)
    for number, (prompt, own) in enumerate(zip(prompts, each, strict=False)):
        if own is None:
            raise RequestError(f"{number} params for more prompts; give one each, or one for all")
        yield prompt, checked_params(own)


def _wanted(params: Any, settings: dict[str, Any]) -> Any:
    if params is not None and settings:
        raise RequestError(f"give params or settings ({', '.join(settings)}), not both")
    if params is not None:
        return params
    for name in settings:
        if name not in SamplingParams.__dataclass_fields__:
            raise UnknownNameError("setting", name, SamplingParams.__dataclass_fields__)
    return SamplingParams(**settings)


def checked_params(params: Any) -> SamplingParams:
    """Raise RequestError for what are no SamplingParams."""
    if not isinstance(params, SamplingParams):
        kind = type(params).__name__
        raise RequestError(f"params are SamplingParams, got {kind} {shown(params)}; or name each setting")
    return params


def references_of(reference: Any, count: int) -> list[Reference | None]:
    """One reference, or None, per prompt; a single one serves all.

    Raises:
        RequestError: neither text nor a list, or one whose length is not the number of prompts.
    """
    reference = listed(reference)
    if reference is None or isinstance(reference, str | bytes):
        return [reference] * count
    if not isinstance(reference, Sequence):
        raise RequestError(refusal("a reference", reference))
    if all(isinstance(token, int) for token in reference):
        return [tuple(reference)] * count
    if len(reference) != count:
        raise RequestError(f"{len(reference)} references for {count} prompts; give one each, or one for all")
    return list(reference)
