"""Drafting with a Target: a second model, or some layers of the first one.

Its cache follows the committed text by ids, so it may lag and catch up. Guesses that were accepted
keep their keys and values, so a step costs one pass per level and no more. A text of which the
target knew the beginning already is read by portions, and drafted for once it is read. Sequences
that share passes with it wait for a portion between two of their tokens, and not for all of it.

Shape letters: F rows of a level, D columns of the model's logits, W width of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.clock import PassClock
from outpace.drafters.base import ExpandingDrafter, Request
from outpace.drafters.branching import drafts_of, ruled
from outpace.drafters.columns import Columns
from outpace.drafters.descent import levels_of, note, picked, start_of
from outpace.drafters.feeding import feed_nodes
from outpace.models.base import Target
from outpace.models.decoder import Decoder
from outpace.models.passes import PassRows
from outpace.models.program import Programs
from outpace.tree.growth import Branch, DraftRow, Growing, Level
from outpace.types import NOTHING, ROOT, Draft, Feed, Outcome

_LAST = "hidden.-1"
CATCH_UP = 256
"""Tokens that no pass of the target showed, which are read between two passes."""


@dataclass(slots=True, eq=False)
class ModelState:
    """One sequence in the draft model's cache."""

    slot: int
    prompt: tuple[int, ...] = ()
    """The text at its beginning, of which no pass of the target shows the first tokens; empty where
    passes show all of it."""
    draft: Draft | None = None
    """The last proposal, until it is observed."""
    lead: int = 0
    """Tail rows that hold committed tokens, the pending one last."""
    row: dict[int, int] = field(default_factory=dict)
    """Draft node -> its row in the tail of the slot."""


class ModelDrafter(ExpandingDrafter[ModelState]):
    """A drafter that is a language model; a method adds where it comes from.

    Args:
        model: shares the vocabulary of the target; its cache is this drafter's own.
        vocab_size: of the target; columns beyond it are padding of the model.
        id_D: target ids of the columns, if the model knows a part of the vocabulary only.
        head: estimates from the model's last hidden states [F, W] how likely the tokens that it
            read are accepted, [F]; None makes no estimates.
    """

    def __init__(
        self,
        model: Target,
        vocab_size: int,
        id_D: Tensor | None = None,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model = model
        self._vocab_size, self._id_D = vocab_size, id_D
        self.cache = model.new_cache()
        self.traits = replace(self.traits, estimates=head is not None)
        self._head, self._taps = head, frozenset({_LAST} if head is not None else ())
        self._hidden: list[Tensor] = []  # of the nodes expanded last, sequence by sequence

    @property
    def clock(self) -> PassClock:
        """The draft model's own; where the target drafts for itself, the target's."""
        return self.model.clock

    @property
    def language_model(self) -> Target | None:
        """The draft model over the target's tokens, for a drafter that speeds it up."""
        if self._id_D is None and self.model.vocab_size == self._vocab_size:
            return self.model
        return Columns(self.model, self._vocab_size, self._id_D)

    def begin(self, request: Request) -> ModelState:
        """Take a slot of the draft model's cache."""
        fits = len(request.prompt) <= self.model.max_positions
        return ModelState(self.cache.open(), request.prompt if request.num_cached and fits else ())

    def propose(self, rows: Sequence[DraftRow[ModelState]]) -> list[Draft]:
        """Grow drafts; a sequence that outgrew the draft model's context gets an empty one, and so
        does one that is still being read by portions.
        """
        fits = [
            row
            if len(row.tokens) + row.budget.max_depth <= self.model.max_positions
            and self._behind(row.state) <= CATCH_UP
            else replace(row, budget=NOTHING)
            for row in rows
        ]
        for row in fits:
            self._forget(row.state)
        drafts = super().propose(fits)
        for row, draft in zip(fits, drafts, strict=True):
            row.state.draft = draft
        return drafts

    def expand(self, branches: Sequence[Branch[ModelState]]) -> tuple[Tensor, Tensor | None]:
        """One pass of the draft model over what it has not seen, then over the new nodes."""
        scored = self.model.score(self.feeds(branches), self.cache, taps=self._taps)
        if self._head is not None:
            ends = scored.tap_start_B[1:]
            self._hidden = [
                scored.taps[_LAST][end - len(branch.nodes) : end]
                for branch, end in zip(branches, ends, strict=True)
            ]
        return scored.logits_TV[:, : self._vocab_size], self._id_D

    def descend(
        self, rows: Sequence[DraftRow[ModelState]], branches: Sequence[Branch[ModelState]], levels: int
    ) -> Sequence[Level]:
        """Several passes of the draft model in one call, where it is a decoder whose passes are compiled."""
        programs, cache = self._programs, self.cache
        picks = None if branches[0].nodes == (ROOT,) else picked(rows, branches, levels)
        if picks is None or programs is None or not isinstance(cache, DenseCache):
            return ()
        start = start_of(cache, branches, levels, [0] * len(branches))
        with self.clock:
            found = programs.descend(start, picks, self._id_D, self._vocab_size)
        self.clock.count += found.levels - 1
        note(cache, branches, found)
        return levels_of(found, rows, self._id_D)

    @property
    def _programs(self) -> Programs | None:
        """What runs several of its passes in one call."""
        model, own = self.model, type(self).expand is ModelDrafter.expand
        return model.at_once if own and isinstance(model, Decoder) else None

    def spread(
        self, trees: Sequence[Growing], branches: Sequence[Branch[ModelState]]
    ) -> Sequence[Draft] | None:
        """All passes of the draft model in one call, where it is such a decoder, and the rule is compiled."""
        programs, cache = self._programs, self.cache
        asked = None if programs is None or self._head is not None else ruled(trees)
        if programs is None or asked is None or not isinstance(cache, DenseCache):
            return None
        feeds = self.feeds(branches)
        begun = [rule.begins.token_P for rule in asked.rule_B if rule.begins is not None]
        if not all(map(programs.knows, [*[feed.token_J for feed in feeds], *begun])):
            return None
        fed = PassRows(feeds, cache, self.model.num_layers)
        start = start_of(cache, branches, asked.seats, [0] * len(branches))
        with self.clock:
            found = programs.spread(fed, start, asked, self._id_D, self._vocab_size)
        self.clock.count += found.levels - 1
        made = drafts_of(found, trees, self._id_D)
        for branch, (nodes, tokens, parents) in zip(branches, found.tail_B3R, strict=True):
            if made is None:
                cache.drop(branch.state.slot)
                continue
            cache.append(branch.state.slot, tokens, parents)
            rows = enumerate(nodes, branch.state.lead)
            branch.state.row |= {node: row for row, node in rows if node >= 0}
        return made

    def feeds(self, branches: Sequence[Branch[ModelState]]) -> list[Feed]:
        """What a level feeds; notes which rows of the slots it will stand in."""
        feeds = []
        for branch in branches:
            state = branch.state
            if branch.nodes == (ROOT,):
                behind = branch.tokens[self.cache.length(state.slot) :]
                state.lead = len(behind)
                state.row = {ROOT: state.lead - 1}
                feeds.append(Feed.chain(state.slot, behind, want=(state.lead - 1,)))
                continue
            feeds.append(feed_nodes(branch, state.slot, state.row, len(state.row) - 1 + state.lead))
        return feeds

    def estimate(self, branches: Sequence[Branch[ModelState]]) -> Tensor:
        """What the head says of the nodes that the last pass read. Cost: one run of the head."""
        assert self._head is not None, "a drafter without a head makes no estimates"
        with self.clock:
            chance_F = self._head(torch.cat(self._hidden))
        self.clock.count -= 1  # part of the level, and no pass of its own
        return chance_F

    def renumber(self, state: ModelState, numbers: Sequence[int]) -> None:
        """Follow the nodes that stayed in a draft to their rows."""
        rows = {node: state.row[old] for node, old in enumerate(numbers) if old in state.row}
        state.row = {ROOT: state.row[ROOT], **rows}

    def observe(self, states: Sequence[ModelState], outcomes: Sequence[Outcome]) -> None:
        """Keep the rows that were committed; read a prompt along with the target, and a portion of
        what it knew already.
        """
        prompts, left = [], CATCH_UP
        for state, outcome in zip(states, outcomes, strict=True):
            if outcome.forced:
                end = outcome.start + len(outcome.fed)
                if self.cache.length(state.slot) == outcome.start and end <= self.model.max_positions:
                    prompts.append(Feed.chain(state.slot, outcome.fed, want=()))
            elif state.draft is outcome.draft and state.lead:
                committed = [row - 1 for row in outcome.row_F[1:]]
                path = [state.row[node] for node in committed if node in state.row]
                self.cache.keep(state.slot, [*range(state.lead), *path])
            self._forget(state)
            held = self.cache.length(state.slot)
            missed = state.prompt[held : min(outcome.start, held + left)]
            if missed:  # then nothing was read along, which goes on where this ends
                prompts.append(Feed.chain(state.slot, missed, want=()))
                left -= len(missed)
        if prompts:
            self.model.score(prompts, self.cache)
            for feed in prompts:
                self.cache.keep(feed.slot, range(len(feed.token_J)))

    def num_uncached(self, state: ModelState, tokens: Sequence[int]) -> int:
        """The pending token, and what its cache lacks."""
        return len(tokens) - self.cache.length(state.slot)

    def _behind(self, state: ModelState) -> int:
        """Tokens that are still to be read by portions."""
        return len(state.prompt) - self.cache.length(state.slot)

    def _forget(self, state: ModelState) -> None:
        """Drop a proposal that was never observed, or is done with."""
        self.cache.drop(state.slot)
        state.draft, state.lead, state.row = None, 0, {}

    def mark(self, state: ModelState) -> int:
        """How much of the text the model has read. Cost: none."""
        return self.cache.length(state.slot)

    def rewind(self, state: ModelState, mark: int) -> ModelState:
        self._forget(state)
        self.cache.truncate(state.slot, min(mark, self.cache.length(state.slot)))
        return state

    def end(self, state: ModelState) -> None:
        self.cache.close(state.slot)
