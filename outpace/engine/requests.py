"""What users ask for, checked and put in order before anything is opened for it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

from outpace.errors import RequestError
from outpace.params import SamplingParams

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages with ``role`` and ``content``."""
Reference = str | Sequence[int]
"""Text or token ids that an answer is expected to resemble."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """One answer that is wanted, with nothing left to check."""

    ids: tuple[int, ...]
    params: SamplingParams
    """Resolved, see ``SamplingParams.resolved``."""
    seed: int
    index: int = 0
    """Which answer of the request."""
    continues: bool = False
    """Its text carries on from the prompt's, so a leading space belongs to it."""
    reference: tuple[int, ...] | None = None
    drafter: str | None = None
    """Method spec, ``none``, or None for whoever runs it to choose. Read by services alone, as
    are the fields below; a call of the engine says these things for all of its prompts."""
    draft_tokens: int | None = None
    """Most guesses per pass; 0 drafts nothing, None leaves it to drafter and policy."""
    reproducible: bool | None = None
    """As for ``Engine.generate``."""
    key: str = ""
    """Whose request it is; what is remembered of it serves requests of the same key alone."""
    traced: bool = False
    """Whether every piece of its answer brings its pass along."""

    def each(self) -> Iterator[Ready]:
        """One for each of the ``params.n`` answers, numbered from 0. A seed that the user gave
        is counted up; other seeds are drawn anew.
        """
        for turn in range(self.params.n):
            given = self.params.seed is not None or turn == 0
            seed = self.seed + turn if given else secrets.randbits(48)
            yield replace(self, index=turn, seed=seed)


def as_prompts(prompt: Any) -> tuple[list[Prompt], bool]:
    """Tell one prompt from a batch of prompts.

    Returns:
        The prompts, and whether a single one was given.
    """
    if isinstance(prompt, str):
        return [prompt], True
    if hasattr(prompt, "tolist"):  # a tensor or array of ids
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence):
        raise RequestError(
            f"a prompt is text, token ids or chat messages, got {type(prompt).__name__}"
        )
    if prompt and isinstance(prompt[0], str | Sequence) and not isinstance(prompt[0], Mapping):
        return list(prompt), False
    return [prompt], True


def settle(
    params: SamplingParams | Sequence[SamplingParams] | None, settings: dict[str, Any], count: int
) -> list[SamplingParams]:
    """One SamplingParams per prompt."""
    if params is not None and settings:
        raise RequestError(f"give params or settings ({', '.join(settings)}), not both")
    if params is None:
        try:
            params = SamplingParams(**settings)
        except TypeError as error:
            raise RequestError(f"unknown setting: {error}") from None
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} params for {count} prompts; give one each, or one")
    return list(params)


def together(
    prompts: Iterable[Prompt],
    params: SamplingParams | Iterable[SamplingParams] | None,
    settings: dict[str, Any],
) -> Iterator[tuple[Prompt, SamplingParams]]:
    """Pair prompts with their params, taking both one by one, the prompt first."""
    if params is None or isinstance(params, SamplingParams):
        params = repeat(settle(params, settings, 1)[0])
    elif settings:
        raise RequestError(f"give params or settings ({', '.join(settings)}), not both")
    for number, (prompt, own) in enumerate(zip(prompts, chain(params, repeat(None)), strict=False)):
        if own is None:
            raise RequestError(f"{number} params for more prompts; give one each, or one for all")
        yield prompt, own


def each(reference: Any, count: int) -> list[Reference | None]:
    """One reference, or None, per prompt; a single one serves all.

    Raises:
        RequestError: a list whose length is not the number of prompts.
    """
    if reference is None or isinstance(reference, str):
        return [reference] * count
    if all(isinstance(token, int) for token in reference):
        return [tuple(reference)] * count
    if len(reference) != count:
        raise RequestError(
            f"{len(reference)} references for {count} prompts; give one each, or one for all"
        )
    return list(reference)
