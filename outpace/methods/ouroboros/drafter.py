"""Ouroboros: a draft model works with phrases: they speed it up, and lengthen what it drafts.

    draft model     the cat sat on the          five tokens in two or three passes, since it
                                                checks phrases instead of writing them
    phrases         the cat sat on the --+-- mat . And
                                         +-- red chair
    target          one pass over all of it

A phrase is what came behind a token, in the prompt and in the output so far. It is also found in
the rows of tokens that the target refused. Those were computed. Where the target's best guesses
agree with the tokens that they were made after, they are text that it might have written
elsewhere. Phrases behind the same two tokens come before those behind the same one.

    ouroboros[draft=draft_model[model=M] length=5 phrases=3 tokens=3 faster=true]

Pays where drafts are often kept whole: a phrase counts only then, so it takes shorter drafts than
the draft model alone. The defaults suit a draft model whose guesses are kept one time in three. One that
is right more often wants a ``length`` of 3 to 6, and ``faster=true``, as above. Phrases are chosen, and
hang behind the last token of the draft (of a tree, of the path of its first guesses). Every guess of the
draft model keeps its distribution, also where phrases sped it up, see `cascade`. Of a template the first
``length`` levels are the draft model's. Where chains alone can be checked, one phrase goes on.

Three things differ from the authors' code. Runs of refused rows count from two tokens on, not
only at full length, and predictions made after a wrong token are never stored. The draft model
runs no lookahead window, whose hundreds of extra rows pay on large accelerators alone. And a
phrase that matches whole counts whole.

Cost: that of the drafts; an argmax over the rows of a pass that refused something; some
dictionary operations per token.
Paper: Zhao et al. 2024, arXiv:2402.13720 (greedy there; sampling is ours).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outpace import registry
from outpace.drafters.base import Drafter, Request, Traits
from outpace.drafters.parts import load_part, split_parts
from outpace.drafters.wrapping import WrappingDrafter
from outpace.errors import SpecError
from outpace.methods.ouroboros.phrases import Phrases, Pool, discarded
from outpace.models.base import Target
from outpace.rows import argmax_rows
from outpace.tree.growth import DraftRow
from outpace.types import ROOT, Draft, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class OuroborosConfig:
    draft: str = "draft_model"
    """Spec of the drafter to start from, one that has a distribution: draft_model[model=M]."""
    length: int = 1
    """Tokens, or levels of a tree, that it writes; one step of a model that is sped up may add a
    few more."""
    phrases: int = 1
    """Most phrases side by side."""
    tokens: int = 3
    """Most tokens of a phrase."""
    remembered: int = 16
    """Most phrases remembered per token; the newest stay."""
    faster: bool = False
    """Whether phrases also draft for the draft model, if that is a language model. For one that is
    slow and agrees with the target, since it vetoes phrases. Its drafts are chains then, with
    branches at the first token alone."""
    shared: bool = False
    """One pool for all sequences of a key. Phrases of earlier requests serve later ones, and the
    same seed no longer gives the same sampled text."""

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("phrases", 1), ("tokens", 2), ("remembered", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


@dataclass(slots=True, eq=False)
class _State:
    inner: Any
    """The draft model's own."""
    pool: Pool
    tail: list[int] = field(default_factory=list)
    """The last tokens of the text, which make up no whole phrase."""
    draft: Draft | None = None
    """The last proposal of the draft model."""
    given: Draft | None = None
    """The same with phrases."""


class Ouroboros(WrappingDrafter[_State]):
    """Lengthens the drafts of another drafter with phrases.

    Args:
        draft: it; draws where it is asked to.
    """

    Config = OuroborosConfig
    traits = Traits(default_nodes=32, samples=True)  # the settings say how many nodes; 32 is a bound

    def __init__(self, config: OuroborosConfig, draft: Drafter[Any]) -> None:
        self.config = config
        self.phrases = Phrases(config.tokens, config.remembered, config.phrases, config.shared)
        self.draft, self.sped = draft, False
        if config.faster and draft.language_model is not None:
            cascade = registry.load("drafter", "cascade")
            k = [[config.length], [config.phrases * config.tokens]]
            self.draft, self.sped = cascade([draft.language_model], self.phrases, k), True
        deterministic = draft.traits.deterministic and not config.shared
        self.traits = replace(self.traits, deterministic=deterministic)
        super().__init__([self.draft])

    @classmethod
    def load(cls, config: OuroborosConfig, target: Target) -> Ouroboros:
        """Load the drafter to start from.

        Raises:
            SpecError: none, several, or one without a distribution.
            ModelError: as it raises it.
        """
        who = "drafter 'ouroboros'"
        spec, *more = split_parts(config.draft, who)
        draft = load_part(spec, target)
        if more or not draft.traits.samples:
            raise SpecError(
                f"{who}: draft must be one drafter that has a distribution, such as "
                f"draft_model[model=M], got {config.draft}; select joins lookups"
            )
        return cls(config, draft)

    def inner(self, state: _State) -> list[tuple[Drafter[Any], Any]]:
        return [(self.draft, state.inner)]

    def begin(self, request: Request) -> _State:
        """A pool with the phrases of what is held already."""
        inner = self.draft.begin(request)
        pool = inner.reading.state if self.sped else self.phrases.begin(request)
        state = _State(inner, pool)
        pool.read(state.tail, request.prompt[: request.num_cached])
        return state

    def propose(self, rows: Sequence[DraftRow[_State]]) -> list[Draft]:
        """What the draft model says, and phrases behind it."""
        drafts = self.draft.propose([self._asked(row) for row in rows])
        out = []
        for row, draft in zip(rows, drafts, strict=True):
            row.state.draft = draft
            row.state.given = given = self._lengthened(row, draft)
            out.append(given)
        return out

    def _asked(self, row: DraftRow[_State]) -> DraftRow[Any]:
        """The draft model's part of the budget."""
        budget, config = row.budget, self.config
        nodes, depth = min(budget.max_nodes, budget.max_rows), min(config.length, budget.max_depth)
        if budget.shape.beam:
            nodes -= min(config.phrases * config.tokens, nodes // 4)
        elif self.sped and budget.shape.parent_N is None:
            depth = budget.max_depth  # its last step ends when it ends
        asked = replace(budget, max_nodes=nodes, max_depth=depth)
        return replace(row, state=row.state.inner, budget=asked)

    def _lengthened(self, row: DraftRow[_State], draft: Draft) -> Draft:
        budget, config, node = row.budget, self.config, ROOT
        while (groups := draft.groups_of.get(node)) is not None:
            node = groups[0].nodes[0]
        text = [*row.tokens[-2:], *draft.path_tokens(node)]
        written = len(text) - len(row.tokens[-2:])
        if budget.stop is not None and written < min(config.length, budget.max_depth):
            return draft  # it was stopped
        riders = 0 if draft.riders is None else len(draft.riders.node_R)
        left = min(budget.max_nodes, budget.max_rows - riders) - len(draft)
        room = min(left, config.phrases * config.tokens)
        return self.phrases.lengthened(
            draft, node, text, row.state.pool, room, budget.max_depth - written, row.chain
        )

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        """Collect phrases; tell the draft model what became of its part.

        Cost: one host sync per sequence of which something was refused.
        """
        for state, outcome in zip(states, outcomes, strict=True):
            draft, kept = outcome.draft, outcome.verdict.kept
            if len(kept) < len(draft) and len(outcome.scored.logits_TV) == len(draft) + 1:
                best_J = argmax_rows(outcome.scored.logits_TV).tolist()
                for found in discarded(draft, best_J, kept, outcome.fed[0], self.config.tokens):
                    state.pool.add(*found)
            state.pool.read(state.tail, outcome.appended)
        own = [_own(state, outcome) for state, outcome in zip(states, outcomes, strict=True)]
        self.draft.observe([state.inner for state in states], own)
        self.follow()
        for state in states:
            state.draft = state.given = None


def _own(state: _State, outcome: Outcome) -> Outcome:
    """An outcome with the draft model's own draft. Its nodes come first, so they keep their
    numbers, and what hangs on them (riders, resumed rows) its place.
    """
    draft = state.draft
    if draft is None or draft is outcome.draft or state.given is not outcome.draft:
        return outcome
    kept = tuple(node for node in outcome.verdict.kept if node < len(draft))
    return replace(outcome, draft=draft, verdict=replace(outcome.verdict, kept=kept))
