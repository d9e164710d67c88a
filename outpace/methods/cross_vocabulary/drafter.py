"""A draft model with another tokenizer: its text is turned into the target's tokens.

    target's text    The| cat| sat             draft model's     The| ca|t| s|at
                                               it goes on         on| the| m|at
    by text          on| the| mat              its text, as the target's tokenizer splits it
    by tokens        on| the                   it draws only tokens that both vocabularies have

    cross_vocabulary[model=M]
    cross_vocabulary[model=M by=tokens drafter=cascade[levels=draft_model[model=M]+max_gram]]

*By text*, any two vocabularies will do. The draft model's likeliest text is split by the target's
tokenizer. Such guesses are chosen, so the output keeps its distribution at any temperature. When sampling,
one is kept as often as the target itself draws it.

*By tokens*, the draft model's distribution is restricted to the shared tokens and renormalised. In the
target's ids, that is the q of a guess. When sampling, more is kept, if shared tokens are most of what
the target says. Penalties and the like apply to p and q alike.

Any drafter that runs on the draft model may stand behind it, such as a cascade, unless it reads
features. Pays like a draft model, and less where the vocabularies differ much: a draft often ends
within a word.

Cost: that of the drafter, and per step two or three short calls of a tokenizer, some 50 us each.
Papers: Timor et al. 2025, arXiv:2502.05202 (by text: SLEM, with greedy drafts; by tokens: TLI).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outpace.config import MethodSpec
from outpace.drafters.base import Drafter, Request, Traits
from outpace.drafters.parts import load_part, split_parts
from outpace.drafters.wrapping import WrappingDrafter
from outpace.errors import ModelError, SpecError
from outpace.methods.cross_vocabulary.follower import Follower, News, Reading
from outpace.methods.cross_vocabulary.mirror import Mirror, to_draft
from outpace.methods.cross_vocabulary.retokenize import retokenized, stretched
from outpace.methods.cross_vocabulary.shared_law import SharedCoins, SharedWarp, in_target_ids
from outpace.methods.cross_vocabulary.spelling import Spelling, shared
from outpace.models.base import Target
from outpace.models.load import load_beside
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.types import Draft, Drawn, Outcome

_WAYS = ("auto", "text", "tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossVocabularyConfig:
    model: str
    """Name, folder, GGUF file or hub id of the draft model."""
    by: str = "auto"
    """``text``; ``tokens`` that both have; or ``auto``: text at temperature 0, else tokens."""
    drafter: str | None = None
    """Spec of the drafter that runs on the draft model; without it, the model itself."""
    dtype: str | None = None
    """float32 or bfloat16; the target's by default."""

    def __post_init__(self) -> None:
        if self.by not in _WAYS:
            raise ValueError(f"by must be one of {', '.join(_WAYS)}, got {self.by}")


@dataclass(slots=True, eq=False)
class State:
    mirror: Mirror
    reading: Reading
    asked: Draft | None = None
    """What the inner drafter said last,"""
    given: Draft | None = None
    """and what became of it."""


class CrossVocabulary(WrappingDrafter[State]):
    """Drafts in another vocabulary.

    Args:
        inner: drafts over the vocabulary of ``model``.
        model: the draft model; its tokenizer is what counts.

    Raises:
        ModelError: no tokenizer, or no shared tokens where only those may be drafted.
        SpecError: an inner drafter that reads features, or drafts in the slots of its target.
    """

    Config = CrossVocabularyConfig
    traits = Traits(default_nodes=5, samples=True)

    def __init__(self, inner: Drafter[Any], model: Target, target: Target, by: str = "auto") -> None:
        who = "drafter 'cross_vocabulary'"
        if inner.traits.taps:
            raise SpecError(
                f"{who}: its drafter reads {', '.join(sorted(inner.traits.taps))} of {model.name}, which "
                "nobody computes; use a language model or a lookup"
            )
        if inner.traits.uses_target_cache:
            raise SpecError(
                f"{who}: its drafter drafts in slots of {model.name}, which nobody lends; use a "
                "language model or a lookup"
            )
        self.drafter, self.model, self.target, self.by = inner, model, target, by
        self.traits = replace(self.traits, samples=inner.traits.samples and by != "text")
        super().__init__([inner])
        self.follower = Follower(inner)
        self.source, self.goal = Spelling.of(model, who), Spelling.of(target, who)
        self.common = shared(self.source, self.goal, model, target.vocab_size)
        if by == "tokens" and not self.common.ordinary:
            raise ModelError(
                f"{who}: draft model {model.name} and target {target.name} share none of their "
                f"{self.source.size} and {self.goal.size} tokens; use by=text"
            )
        self.bridge = to_draft(self.goal, self.source, self.common, by == "tokens")
        self._likeliest = Warp(
            SamplingParams(temperature=0.0).resolved(None), (), frozenset(), model.vocab_size
        )

    @classmethod
    def load(cls, config: CrossVocabularyConfig, target: Target) -> CrossVocabulary:
        """Load the draft model, and the drafter that runs on it.

        Raises:
            ModelError, SpecError, UnknownNameError: as for the class, the model or the drafter.
        """
        model = load_beside(target, config.model, config.dtype)
        specs = [MethodSpec("draft_model", (("model", model.name),))]
        if config.drafter is not None:
            specs = split_parts(config.drafter, "drafter 'cross_vocabulary'")
        if len(specs) > 1:
            raise SpecError(
                f"drafter 'cross_vocabulary': {config.drafter} names {len(specs)} drafters; give "
                "one, such as select[members=A+B]"
            )
        return cls(load_part(specs[0], model), model, target, config.by)

    def inner(self, state: State) -> list[tuple[Drafter[Any], Any]]:
        return [(self.drafter, state.reading.state)]

    def begin(self, request: Request) -> State:
        """Write what the target's cache holds already in draft tokens; the rest comes later."""
        mirror = self.bridge.mirror()
        mirror.extend(request.prompt[: request.num_cached])
        whole = mirror.copy()
        whole.extend(request.prompt[request.num_cached :])
        reference = None
        if request.reference is not None:
            said = self.bridge.mirror()
            said.extend(request.reference)
            reference = tuple(said.ids)
        told = mirror.stable if request.num_cached else 0
        state = self.drafter.begin(
            replace(request, prompt=tuple(whole.ids), num_cached=told, reference=reference)
        )
        return State(mirror, Reading(state, told))

    def propose(self, rows: Sequence[DraftRow[State]]) -> list[Draft]:
        """Ask the inner drafter for the whole batch, and translate."""
        out = [Draft()] * len(rows)
        able = []
        for i, row in enumerate(rows):
            state = row.state
            state.asked = state.given = None
            by_text = self._by_text(row)
            if state.mirror.ids and (by_text or not state.mirror.held):
                able.append((i, row, by_text))
        answers = self.drafter.propose([self._ask(row, by_text) for _, row, by_text in able])
        for (i, row, by_text), answer in zip(able, answers, strict=True):
            if by_text:
                out[i] = retokenized(
                    answer,
                    row.tokens,
                    row.state.mirror.held,
                    row.budget,
                    source=self.source,
                    target=self.goal,
                    common=self.common,
                )
            else:
                out[i] = in_target_ids(answer, self.common, type(self.drafter).__name__)
            row.state.asked, row.state.given = answer, out[i]
        return out

    def _by_text(self, row: DraftRow[State]) -> bool:
        if self.by == "auto":
            return row.drawn is Drawn.CHOSEN or not self.common.ordinary
        return self.by == "text"

    def _ask(self, row: DraftRow[State], by_text: bool) -> DraftRow[Any]:
        """The row as the inner drafter sees it."""
        mirror, reading = row.state.mirror, row.state.reading
        asked = replace(row, state=reading.state, tokens=mirror.ids, lease=None)
        if by_text:
            return replace(
                asked,
                warp=self._likeliest,
                drawn=Drawn.CHOSEN,
                budget=stretched(row.budget, (len(mirror.ids) + 4) / (mirror.read + 4)),
            )
        coins, warp = SharedCoins(row.coins, self.common), SharedWarp(row.warp, self.common)
        return replace(asked, coins=coins, warp=warp)

    def observe(self, states: Sequence[State], outcomes: Sequence[Outcome]) -> None:
        """Write on in draft tokens, and tell the inner drafter."""
        news = []
        for state, outcome in zip(states, outcomes, strict=True):
            emitted, before = outcome.verdict.emitted, len(state.mirror.ids)
            same = state.mirror.extend(outcome.appended)
            ours = state.given is outcome.draft and state.reading.told == before == same
            news.append(
                News(
                    state.reading,
                    state.mirror.ids,
                    same,
                    state.mirror.stable,
                    forced=outcome.forced,
                    ends=bool(emitted) or not outcome.forced,
                    draft=state.asked if ours else None,
                    before=before,
                )
            )
            state.asked = state.given = None
        self.follower.follow(news)
        self.follow()

    def num_uncached(self, state: State, tokens: Sequence[int]) -> int:
        """Counted in tokens of the draft model."""
        return super().num_uncached(state, state.mirror.ids)

    def mark(self, state: State) -> tuple[Mirror, int]:
        """The text so far. Cost: that of copying it."""
        self.follower.pin(state.reading)
        return state.mirror.copy(), state.reading.told

    def rewind(self, state: State, mark: tuple[Mirror, int]) -> State:
        """The inner drafter forgets what it read of a later text."""
        (mirror, told), reading = mark, state.reading
        self.follower.unpin(reading, mirror.common(state.mirror))
        if told:
            ids, ends = mirror.ids, told == len(mirror.ids)
            self.follower.follow([News(reading, ids, len(ids), mirror.stable, ends=ends)])
        return State(mirror, reading)

    def end(self, state: State) -> None:
        self.drafter.end(state.reading.state)
