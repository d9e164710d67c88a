"""Two vocabularies: what they share, and how far a draft model of the one guesses for a target of the other.

    overlap(target, draft, texts)                              tokenizers alone
    predict(target, draft, answers, temperature, by, nodes)    both models read answers of the target once
    measure(engine, spec, asked, params)                       the drafter itself

By text, a guess of the draft model counts where it equals the answer. A token of the target is kept if all
draft tokens that cover it are. By tokens, a guess at a position is kept with probability sum(min(p, q)),
where q is the draft's distribution over the shared tokens.

Shape letters: N positions of an answer, J tokens of the draft model, V the target's vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from outpace.engine.engine import Engine
from outpace.methods.cross_vocabulary.mirror import to_draft
from outpace.methods.cross_vocabulary.spelling import Shared, Spelling, shared
from outpace.models.base import Target
from outpace.models.text import Tokenizer
from outpace.params import SamplingParams
from outpace.types import Feed

WAYS = ("text", "tokens")
_FURTHER = 8  # tokens behind a draft, among which a border of both is looked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """What a draft model's vocabulary and a target's have in common."""

    target: int
    """Ordinary tokens, by what they stand for."""
    draft: int
    shared: int
    mass: float
    """Share of the target's tokens in the texts that the draft vocabulary has."""
    borders: float
    """Share of the borders of the target's tokens, in the texts, that are borders of draft tokens."""
    draft_per_target: float
    """Draft tokens per token of the target."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "target_tokens": self.target,
            "draft_tokens": self.draft,
            "shared_tokens": self.shared,
            "shared_mass": self.mass,
            "shared_borders": self.borders,
            "draft_tokens_per_target_token": self.draft_per_target,
        }


def overlap(target: Tokenizer, draft: Tokenizer, texts: Sequence[Sequence[int]]) -> Overlap:
    """Compare two vocabularies on texts in the target's tokens; special ones part a text."""
    goal, source = Spelling(target, target.vocab_size), Spelling(draft, draft.vocab_size)
    both = goal.known.keys() & source.known.keys()
    tokens = kept = borders = agreed = pieces = 0
    for text in texts:
        run: list[bytes] = []
        for token in (*text, None):
            spelled = b"" if token is None or token in goal.special else goal.spell(token)
            if spelled:
                run.append(spelled)
                continue
            written = source.encode(b"".join(run))
            ends = set(accumulate(piece.size for piece in written))
            own = list(accumulate(map(len, run)))
            tokens += len(run)
            kept += sum(one in both for one in run)
            borders += max(0, len(run) - 1)
            agreed += sum(end in ends for end in own[:-1])
            pieces += len(written)
            run = []
    return Overlap(
        target=len(goal.known),
        draft=len(source.known),
        shared=len(both),
        mass=kept / tokens if tokens else 0.0,
        borders=agreed / borders if borders else 0.0,
        draft_per_target=pieces / tokens if tokens else 0.0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """How far guesses are kept: predicted, or measured."""

    first: float
    """Probability that the first guess of a draft is kept, over all drafts."""
    acceptance: float
    """Kept guesses over guesses."""
    emitted: float
    """Tokens per pass."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"first_guess": self.first, "acceptance_rate": self.acceptance, "mean_emitted": self.emitted}


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what the target answered; special tokens at its end are left out."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


def predict(
    target: Target, draft: Target, answers: Sequence[Answer], temperature: float, by: str, nodes: int
) -> Kept:
    """How far chains of ``nodes`` guesses should be kept, from reading the answers once.

    Args:
        by: ``text`` or ``tokens``.

    Cost: a pass of each model over every answer.
    """
    goal, source = Spelling.of(target, "target"), Spelling.of(draft, "draft model")
    common = shared(source, goal, draft, target.vocab_size)
    reaches = []
    for answer in answers:
        ids_J, at_N = _mirrored(goal, source, common, answer, by == "tokens")
        # The pass that reads a prompt gives the first token, so drafts begin at the second.
        if by == "text":
            reach = _by_text(draft, ids_J, at_N, nodes)
        else:
            reach = _by_tokens(target, draft, common, answer, ids_J, at_N, temperature, nodes)
        reaches.append(reach[1:])
    return expected(reaches, nodes)


def expected(reaches: Sequence[Sequence[Sequence[float]]], nodes: int) -> Kept:
    """What comes of answers where a draft at position i keeps k + 1 guesses or more with reach[i][k]."""
    passes = drafts = guesses = kept = first = tokens = 0.0
    for reach in reaches:
        length = len(reach)
        tokens += length
        visits = [0.0] * length  # expected number of passes that begin here
        if length:
            visits[0] = 1.0
        for i, chances in enumerate(reach):
            room = min(nodes, length - i - 1)
            passes += visits[i]
            drafts += visits[i] * (room > 0)
            guesses += visits[i] * room
            at_least = [1.0, *chances[:room], 0.0]
            first += visits[i] * (at_least[1] if room else 0.0)
            for k in range(room + 1):
                chance = visits[i] * (at_least[k] - at_least[k + 1])
                kept += chance * k
                if i + k + 1 < length:
                    visits[i + k + 1] += chance
    return Kept(
        first=first / drafts if drafts else 0.0,
        acceptance=kept / guesses if guesses else 0.0,
        emitted=tokens / passes if passes else 1.0,
    )


def measure(engine: Engine, spec: str, asked: Sequence[tuple[int, ...]], params: SamplingParams) -> Kept:
    """Have a drafter draft.

    Args:
        spec: of it; prompts are answered one after the other.
    """
    results = [engine.generate([ids], params, drafter=spec)[0].counters for ids in asked]
    tried = sum(one.drafted_at[0] for one in results if one.drafted_at)
    drafted = sum(one.drafted for one in results)
    passes = sum(one.passes for one in results)
    return Kept(
        first=sum(one.accepted_at[0] for one in results if one.accepted_at) / tried if tried else 0.0,
        acceptance=sum(one.accepted for one in results) / drafted if drafted else 0.0,
        emitted=sum(one.new_tokens - 1 for one in results) / passes if passes else 1.0,
    )


def spec_of(model: str, by: str) -> str:
    """The drafter, as a method spec."""
    return f"cross_vocabulary[by={by} model={model}]"


def _mirrored(
    goal: Spelling, source: Spelling, common: Shared, answer: Answer, by_tokens: bool
) -> tuple[list[int], list[int | None]]:
    """Prompt and answer in draft tokens.

    Returns:
        The tokens; and how many of them lie before, between and behind the answer's tokens, None where a
        draft token lies across that place.
    """
    mirror = to_draft(goal, source, common, by_tokens).mirror()
    mirror.extend(answer.prompt)
    counts: list[int | None] = [len(mirror.ids)]
    totals = [sum(mirror.sizes) + mirror.held]
    for token in answer.tokens:
        mirror.extend([token])
        counts.append(None if mirror.held else len(mirror.ids))
        totals.append(sum(mirror.sizes) + mirror.held)
    if by_tokens:  # shared tokens are taken as they stand, and stay
        return mirror.ids, counts
    sums_J = [0, *accumulate(mirror.sizes)]
    places = [bisect_right(sums_J, total) - 1 for total in totals]
    return mirror.ids, [
        place if sums_J[place] == total and place > 0 else None
        for place, total in zip(places, totals, strict=True)
    ]


def _by_text(
    draft: Target, ids_J: Sequence[int], at_N: Sequence[int | None], nodes: int
) -> list[list[float]]:
    """Whether the draft model's likeliest text is the answer, so many tokens of the target on."""
    start = next((one for one in at_N if one is not None), len(ids_J))
    if start >= len(ids_J):
        return [[0.0] * nodes for _ in at_N[:-1]]
    guess_J = _logits(draft, ids_J, start).argmax(-1).tolist()
    right = [guess == token for guess, token in zip(guess_J, ids_J[start:], strict=False)]
    reach = []
    for i, here in enumerate(at_N[:-1]):
        last = -1 if here is None else here
        while here is not None and last - start < len(right) and right[last - start]:
            last += 1
        # A token is kept if it ends where a right guess ends, or before.
        ends = [at_N[i + k] for k in range(1, nodes + _FURTHER) if i + k < len(at_N)]
        kept = [float(here is not None and end is not None and end <= last) for end in ends]
        # One that ends within a draft token is kept if that token is, which the next border tells.
        for k in reversed(range(len(kept) - 1)):
            kept[k] = max(kept[k], kept[k + 1])
        reach.append((kept + [0.0] * nodes)[:nodes])
    return reach


def _by_tokens(
    target: Target,
    draft: Target,
    common: Shared,
    answer: Answer,
    ids_J: Sequence[int],
    at_N: Sequence[int | None],
    temperature: float,
    nodes: int,
) -> list[list[float]]:
    """Probability that so many guesses in a row are kept, at every position."""
    whole = (*answer.prompt, *answer.tokens)
    p_NV = _logits(target, whole, len(answer.prompt))
    start = next((one for one in at_N if one is not None), len(ids_J))
    q_JV = _logits(draft, ids_J, start, more=True)
    to_target_K = common.to_target_D[common.draft_K]
    chances = []
    for i, here in enumerate(at_N[:-1]):
        if here is None or here - start >= len(q_JV):
            chances.append(0.0)
            continue
        p_V, q_K = p_NV[i].float(), q_JV[here - start][common.draft_K].float()
        if temperature == 0:
            chances.append(float(int(to_target_K[q_K.argmax()]) == int(p_V.argmax())))
        else:
            p_K = torch.softmax(p_V / temperature, -1)[to_target_K]
            both = torch.minimum(p_K, torch.softmax(q_K / temperature, -1)).sum()
            chances.append(min(1.0, float(both)))
    reach = []
    for i in range(len(chances)):
        row, product = [], 1.0
        for k in range(nodes):
            product *= chances[i + k] if i + k < len(chances) else 0.0
            row.append(product)
        reach.append(row)
    return reach


def _logits(model: Target, ids: Sequence[int], start: int, more: bool = False) -> Tensor:
    """Logits for the tokens from ``start`` on; with ``more`` also for the one behind the last."""
    cache = model.new_cache()
    rows = tuple(range(start - 1, len(ids) - (not more)))
    with torch.inference_mode():
        return model.score([Feed.chain(cache.open(), tuple(ids), want=rows)], cache).logits_TV.clone()
