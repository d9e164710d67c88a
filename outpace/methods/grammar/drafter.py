"""Grammar: drafts what the form of an answer leaves no choice about, and lets another drafter go on.

    form    {"name": TEXT, "age": NUMBER}
    text    {"name": "Ann
    draft   ", --- "age --- ": --- 3        certain or spelled as usual; then a guess of the other drafter

Where one token alone is allowed, p = 1 whatever the model says: every verifier keeps it, at any temperature.
Where the text is fixed and its spelling is not, the usual spelling is a guess: it is judged, never written.

The other drafter goes on behind the span, if it can read the span and take it back, as lookups and language
models can. One that needs features of the target drafts where nothing is spelled. Behind its guesses the form
may spell on: the quote after a value is free. Guesses that the form forbids are left out where they were
chosen. What is drawn is drawn from q under the form, since q and p go through one warp.

Pays where much of an answer is form: keys, braces, enumerations. In requests without a form it takes no part,
unless nobody else does.

Source: jump-forward decoding (Zheng et al. 2024, SGLang, arXiv:2312.07104), as speculation.
Law: tests/methods/grammar/test_law.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outpace.coins import Stream
from outpace.drafters.ahead import CoinsAhead, WarpAhead, written
from outpace.drafters.base import Drafter, Request, Traits
from outpace.drafters.parts import load_part, split_parts
from outpace.drafters.worth import Chances, as_own, judged, promise
from outpace.drafters.wrapping import WrappingDrafter
from outpace.errors import SpecError
from outpace.methods.grammar.spelling import spell
from outpace.models.base import Target
from outpace.tree.growth import DraftRow
from outpace.types import ROOT, Budget, Draft, Drawn, Group, Outcome

USUAL, DOUBT = 0.9, 10.0
"""Chance of a usual spelling, and the guesses that it counts as before what was kept overrules it."""
LEAST = 0.3
"""A branch less likely than this to be kept is not spelled on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarConfig:
    """Settings of the drafter."""

    drafter: str = "suffix"
    """Spec of the drafter that goes on behind what is spelled, and drafts elsewhere; ``none``: nobody."""


@dataclass(slots=True, eq=False)
class _State:
    inner: Any
    kept: float = USUAL * DOUBT
    seen: float = DOUBT
    """Usual spellings that were judged, and those that were kept."""
    own: Draft = field(default_factory=Draft)
    """What the other drafter said last, if nothing was spelled before it."""
    given: Draft | None = None
    guesses: frozenset[int] = frozenset()
    """Nodes that are usual spellings."""

    @property
    def usual(self) -> float:
        return self.kept / self.seen


class Grammar(WrappingDrafter[_State]):
    """Drafts what rules spell out, before and behind the guesses of another drafter.

    Args:
        drafter: the other one.
    """

    Config = GrammarConfig
    traits = Traits(default_nodes=32, previews=True, for_rules=True)

    def __init__(self, drafter: Drafter[Any]) -> None:
        self.drafter, its = drafter, drafter.traits
        silent = not its.samples and not its.default_nodes
        self.traits = replace(
            self.traits,
            samples=its.samples,
            previews=its.previews or silent,
            default_tree=its.default_tree,
            level_D=its.level_D,
            temper_D=its.temper_D,
        )
        self._follows = (its.previews and not its.samples) or drafter.language_model is not None
        """Whether it can read what is spelled, and take it back."""
        super().__init__([drafter])

    @classmethod
    def load(cls, config: GrammarConfig, target: Target) -> Grammar:
        """Load the other drafter.

        Raises:
            SpecError: several.
            ModelError: as it raises it.
        """
        found = split_parts(config.drafter, "drafter 'grammar'")
        if len(found) != 1:
            raise SpecError(f"drafter 'grammar': drafter must be one drafter, got {config.drafter}")
        return cls(load_part(found[0], target))

    def inner(self, state: _State) -> list[tuple[Drafter[Any], Any]]:
        return [(self.drafter, state.inner)]

    def begin(self, request: Request) -> _State:
        return _State(self.drafter.begin(request))

    def promise(self, state: _State, draft: Draft) -> Sequence[float]:
        return sorted(promise(draft), reverse=True)

    def cut(self, state: _State, draft: Draft, budget: Budget) -> Draft | None:
        """Whole or not at all: what was proposed last is what it learns from."""
        return Drafter.cut(self, state, draft, budget)

    def propose(self, rows: Sequence[DraftRow[_State]]) -> list[Draft]:
        runs = [self._run(row) for row in rows]
        own = [replace(row, state=row.state.inner) for row in rows]
        plain = [i for i, (tokens, _) in enumerate(runs) if not tokens]
        behind = [i for i, (tokens, _) in enumerate(runs) if tokens and self._follows]
        drafts = [Draft()] * len(rows)
        here = self.drafter.propose([own[i] for i in plain]) if plain else []
        ahead = self._propose_behind([rows[i] for i in behind], [runs[i][0] for i in behind])
        for i, draft in zip((*plain, *behind), (*here, *ahead), strict=True):
            drafts[i] = draft
        out = []
        for row, run, draft in zip(rows, runs, drafts, strict=True):
            row.state.own = Draft() if run[0] else draft
            out.append(_Tree(row, *run, draft).finish())
        return out

    def _run(self, row: DraftRow[_State]) -> tuple[list[int], list[float]]:
        """What is spelled behind the pending token."""
        budget = row.budget
        most = min(budget.max_nodes, budget.max_depth, budget.max_rows)
        return spell(row.warp, (), most, row.state.usual, LEAST) if row.warp.ruled else ([], [])

    def _propose_behind(self, rows: Sequence[DraftRow[_State]], runs: Sequence[list[int]]) -> list[Draft]:
        """What the other drafter says once it has read what is spelled; then it forgets that."""
        if not rows:
            return []
        states = [row.state for row in rows]
        marks = [self.drafter.mark(state.inner) for state in states]
        # The pending token was read when it was emitted.
        read = [
            written((row.tokens[-1], *run[:-1]), run, len(row.tokens) - 1)
            for row, run in zip(rows, runs, strict=True)
        ]
        self.drafter.observe([state.inner for state in states], read)
        drafts = self.drafter.propose([_behind(row, run) for row, run in zip(rows, runs, strict=True)])
        for state, mark in zip(states, marks, strict=True):
            state.inner = self.drafter.rewind(state.inner, mark)
        bare = [one.riders is None and one.resume is None and one.view is None for one in drafts]
        return [draft if fits else Draft() for draft, fits in zip(drafts, bare, strict=True)]

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        """Tell the other drafter what became of its own guesses; learn how usual usual spellings are."""
        owned = []
        for state, outcome in zip(states, outcomes, strict=True):
            if state.given is outcome.draft and not outcome.forced:
                for node, right in judged(outcome):
                    if node in state.guesses:
                        state.seen += 1
                        state.kept += right
            owned.append(_as_inner(state, outcome))
            state.own, state.given, state.guesses = Draft(), None, frozenset()
        self.drafter.observe([state.inner for state in states], owned)
        self.follow()

    def mark(self, state: _State) -> Any:
        return self.drafter.mark(state.inner), state.kept, state.seen

    def rewind(self, state: _State, mark: Any) -> _State:
        inner, kept, seen = mark
        return _State(self.drafter.rewind(state.inner, inner), kept, seen)


def _behind(row: DraftRow[_State], run: list[int]) -> DraftRow[Any]:
    """The row of the other drafter behind a span: its own state, and what is left of the budget."""
    warp, budget, used = WarpAhead(row.warp, chosen=False), row.budget, len(run)
    warp.advance(run)
    left = replace(
        budget,
        max_nodes=budget.max_nodes - used,
        max_depth=budget.max_depth - used,
        max_rows=budget.max_rows - used,
    )
    coins = CoinsAhead(row.coins, 1, used, Stream.DRAFT)
    tokens = [*row.tokens, *run]
    return replace(row, state=row.state.inner, tokens=tokens, warp=warp, budget=left, coins=coins, lease=None)


def _as_inner(state: _State, outcome: Outcome) -> Outcome:
    """The outcome as the other drafter would have had it, without what was spelled behind its guesses."""
    own, given = state.own, state.given
    if own is given or given is not outcome.draft or outcome.forced or not len(own):
        return outcome
    if own.memo is not None and isinstance(own.memo, Chances):
        return as_own(own, given, outcome)
    kept = tuple(node for node in outcome.verdict.kept if node < len(own))
    return replace(outcome, draft=own, verdict=replace(outcome.verdict, kept=kept))


class _Tree:
    """One draft under construction: a span, the other drafter's guesses, and what is spelled behind them."""

    def __init__(self, row: DraftRow[_State], run: list[int], own: list[float], draft: Draft) -> None:
        self.row, self.draft = row, draft
        self.tokens, self.parents, self.own = list(run), list(range(ROOT, len(run) - 1)), list(own)
        self.spelled = set(range(len(run)))
        self.groups = [Group(node - 1, Drawn.CHOSEN, (node,)) for node in self.spelled]
        self.told = draft.memo.own_N if isinstance(draft.memo, Chances) else None
        self._hang(draft)

    def _hang(self, draft: Draft) -> None:
        """Put the other drafter's guesses behind the span; chosen ones that are not allowed are left out."""
        place = {ROOT: len(self.tokens) - 1}  # ROOT where nothing is spelled
        chosen = all(group.drawn is Drawn.CHOSEN for group in draft.groups)
        bare = draft.riders is None and draft.resume is None
        drops = chosen and bare and self.told is not None and self.row.warp.ruled
        for node, (token, parent) in enumerate(zip(draft.token_N, draft.parent_N, strict=True)):
            if parent not in place or (drops and not self.row.warp.allows(self.path(place[parent]), token)):
                continue
            place[node] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(place[parent])
            self.own.append(self.told[node] if self.told is not None else 0.5)
        for group in draft.groups:
            nodes = tuple(place[node] for node in group.nodes if node in place)
            if nodes:
                self.groups.append(replace(group, parent=place[group.parent], nodes=nodes))

    def path(self, node: int) -> tuple[int, ...]:
        up = []
        while node != ROOT:
            up.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(up))

    def finish(self) -> Draft:
        row, state, draft = self.row, self.row.state, self.draft
        if row.warp.ruled:
            self._spell_on()
        if not self.spelled and len(self.tokens) == len(draft):
            state.given, state.guesses = draft, frozenset()
            return draft
        told = not len(draft) or self.told is not None
        memo = Chances(tuple(self.own), 1.0, id(state)) if told else None
        state.guesses = frozenset(node for node in self.spelled if self.own[node] < 1.0)
        state.given = given = Draft(
            tuple(self.tokens),
            tuple(self.parents),
            tuple(self.groups),
            draft.laws,
            draft.riders,
            draft.resume,
            draft.view,
            memo,
        )
        return given

    def _spell_on(self) -> None:
        """Spell on behind leaves, the likeliest first."""
        budget = self.row.budget
        riders = 0 if self.draft.riders is None else len(self.draft.riders.node_R)
        whole: list[float] = []
        depth: list[int] = []
        for own, parent in zip(self.own, self.parents, strict=True):
            whole.append(own * (1.0 if parent == ROOT else whole[parent]))
            depth.append(1 if parent == ROOT else depth[parent] + 1)
        inner = set(self.parents)
        leaves = [node for node in range(len(self.tokens)) if node not in inner]
        for leaf in sorted(leaves, key=lambda node: -whole[node]):
            left = min(budget.max_nodes, budget.max_rows - riders) - len(self.tokens)
            most = min(left, budget.max_depth - depth[leaf])
            if whole[leaf] < LEAST or most <= 0 or leaf in self.spelled:
                continue
            tokens, chances = spell(
                self.row.warp, self.path(leaf), most, self.row.state.usual, LEAST / whole[leaf]
            )
            at = leaf
            for token, chance in zip(tokens, chances, strict=True):
                node = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(at)
                self.own.append(chance)
                self.groups.append(Group(at, Drawn.CHOSEN, (node,)))
                self.spelled.add(node)
                at = node
