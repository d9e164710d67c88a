"""Hybrid: guesses from text and of a trained head, in one tree.

A lookup costs nothing and is long where the text repeats something; a head is steady, short, and costs
passes. Every step asks the lookup first. The chances that it states are corrected by what was kept of such
lately, and then

    alone      the lookup, where its first guess is so likely that the head's would not pay for its pass
    together   one tree (`outpace.methods.hybrid.union`), at any temperature
    alone      the head, where the text says nothing

    hybrid[lookup=suffix head=eagle3]
    hybrid[lookup=prompt_lookup head=dflash]

Where chains alone can be checked, or the user's own processors say what may follow, the one that promises
more drafts. The head is any drafter that expands nodes, the lookup any that states chances. Both see every
step.

Pays where texts repeat in part: questions about a passage, edits, code. Where nothing repeats it is the
head, and a look-up more.

Sources: SAM-Decoding, arXiv:2411.10666 (a head where the match is short); RASD, arXiv:2503.03434 (merging).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from outpace.drafters.base import Drafter, ExpandingDrafter, Request, Traits
from outpace.drafters.parts import load_part, split_parts
from outpace.drafters.worth import Chances, as_own
from outpace.drafters.wrapping import WrappingDrafter
from outpace.errors import SpecError
from outpace.methods.hybrid.union import Joint, Planted, Union
from outpace.models.base import Target
from outpace.tree.growth import DraftRow
from outpace.types import ROOT, Draft, Drawn, Outcome, Price

BINS = 8
"""Stated chances are corrected by eighths."""
DOUBT = 6.0
"""Guesses that a stated chance counts as before what was kept overrules it; as in `auto`."""
FORGET = 0.995
"""What is left of a guess's weight after the next one of its kind."""
KEPT, RATE = 1.0, 0.1
"""What is assumed of the head: tokens kept per draft where the text is wrong; how fast that follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridConfig:
    """Settings of the drafter."""

    lookup: str = "suffix"
    """Spec of a drafter that guesses from text, and states chances."""
    head: str = "eagle3"
    """Spec of a drafter that expands nodes."""


class Table:
    """What stated chances were worth: guesses kept over those stated, by how sure they were."""

    __slots__ = ("kept", "stated")

    def __init__(self) -> None:
        self.kept, self.stated = [0.0] * BINS, [0.0] * BINS

    def chance(self, stated: float) -> float:
        i = min(BINS - 1, int(BINS * stated))
        return min(0.99, stated * (self.kept[i] + DOUBT) / (self.stated[i] + DOUBT))

    def learn(self, stated: float, kept: bool) -> None:
        i = min(BINS - 1, int(BINS * stated))
        self.kept[i] = FORGET * self.kept[i] + kept
        self.stated[i] = FORGET * self.stated[i] + stated


@dataclass(slots=True, eq=False)
class _State:
    text: Any
    head: Any
    table: Table = field(default_factory=Table)
    joint: Joint = field(default_factory=Joint)
    kept: float = KEPT
    found: Draft = field(default_factory=Draft)
    """What the lookup said last."""
    planted: Planted = field(default_factory=Planted)
    given: Draft | None = None
    asked: bool = False
    """Whether the head drafted."""


class Hybrid(WrappingDrafter[_State]):
    """One tree of a lookup and a head.

    Args:
        lookup: states chances (`outpace.drafters.worth`).
        head: grows trees.
    """

    Config = HybridConfig
    traits = Traits(default_nodes=24, samples=True)

    def __init__(self, lookup: Drafter[Any], head: ExpandingDrafter[Any]) -> None:
        self.lookup, self.head = lookup, head
        scale = head.traits
        self.traits = replace(self.traits, level_D=scale.level_D, temper_D=scale.temper_D)
        super().__init__((lookup, head))

    @classmethod
    def load(cls, config: HybridConfig, target: Target) -> Hybrid:
        """Load both.

        Raises:
            SpecError: a lookup that states no chances, or a head that does not expand nodes.
            ModelError: as the parts raise it.
        """
        loaded = []
        for part, spec in (("lookup", config.lookup), ("head", config.head)):
            found = split_parts(spec, f"drafter 'hybrid', {part}")
            if len(found) != 1:
                raise SpecError(f"drafter 'hybrid': {part} must be one drafter, got {spec}")
            loaded.append(load_part(found[0], target))
        lookup, head = loaded
        if not lookup.traits.previews or lookup.traits.samples:
            raise SpecError(f"drafter 'hybrid': {config.lookup} states no chances; use lookup=suffix")
        if not isinstance(head, ExpandingDrafter):
            raise SpecError(f"drafter 'hybrid': {config.head} expands no nodes; use a trained head")
        return cls(lookup, head)

    def inner(self, state: _State) -> list[tuple[Drafter[Any], Any]]:
        return [(self.lookup, state.text), (self.head, state.head)]

    def begin(self, request: Request) -> _State:
        return _State(self.lookup.begin(request), self.head.begin(request))

    def propose(self, rows: Sequence[DraftRow[_State]]) -> list[Draft]:
        found = self.lookup.propose([replace(row, state=row.state.text) for row in rows])
        out = list(found)
        asked: list[tuple[int, DraftRow[Any]]] = []
        for i, (row, draft) in enumerate(zip(rows, found, strict=True)):
            state = row.state
            state.found, state.planted = draft, self._planted(row, draft)
            out[i] = _only(draft, len(state.planted.token_N))
            state.asked = self._asks(row)
            if state.asked:
                mine = replace(row, state=state.head)
                if not _apart(row):
                    mine = replace(mine, grower=partial(Union, planted=state.planted))
                asked.append((i, mine))
        answers = self.head.propose([row for _, row in asked]) if asked else []
        for (i, _), answer in zip(asked, answers, strict=True):
            if len(answer):
                out[i] = answer
        for row, draft in zip(rows, out, strict=True):
            row.state.given = draft
        return out

    def _price(self, row: DraftRow[_State]) -> Price:
        return row.budget.price or Price.assumed(self.head.traits.level_D)

    def _planted(self, row: DraftRow[_State], draft: Draft) -> Planted:
        """The text's guesses that are worth their rows, decided before anything is drawn."""
        memo, state, price = draft.memo, row.state, self._price(row)
        if not isinstance(memo, Chances):
            return Planted(joint=state.joint)
        own_N = tuple(state.table.chance(stated) for stated in memo.own_N)
        whole = Planted(draft.token_N, draft.parent_N, own_N, state.joint)
        value_N = whole.value_N
        count = next(
            (n for n, value in enumerate(value_N) if value <= price.row(n)), min(len(value_N), len(draft))
        )
        return whole.first(count)

    def _asks(self, row: DraftRow[_State]) -> bool:
        """Whether the head should bring more than its first level costs."""
        state, planted = row.state, row.state.planted
        first = sum(
            own for own, parent in zip(planted.own_N, planted.parent_N, strict=True) if parent == ROOT
        )
        if _apart(row):
            return state.kept - self._price(row).level(0) > sum(planted.value_N)
        return (1.0 - first) * state.kept > self._price(row).level(0)

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        """Tell the lookup what became of its own guesses, and the head of all."""
        owned = [as_own(state.found, state.given, one) for state, one in zip(states, outcomes, strict=True)]
        self.lookup.observe([state.text for state in states], owned)
        self.head.observe([state.head for state in states], outcomes)
        for state, outcome in zip(states, outcomes, strict=True):
            if state.given is outcome.draft and not outcome.forced:
                _learn(state, outcome)
            state.found, state.planted, state.given = Draft(), Planted(joint=state.joint), None
        self.follow()

    def mark(self, state: _State) -> Any:
        learned = copy.deepcopy((state.table, state.joint, state.kept))
        return self.lookup.mark(state.text), self.head.mark(state.head), learned

    def rewind(self, state: _State, mark: Any) -> _State:
        text, head, learned = mark
        return _State(self.lookup.rewind(state.text, text), self.head.rewind(state.head, head), *learned)


def _learn(state: _State, outcome: Outcome) -> None:
    """Correct what is stated: the token that came is a draw from the target, whoever guessed it."""
    found, emitted, said_N = state.found, outcome.verdict.emitted, state.planted.said_N
    path = found.path_of(emitted)
    came = dict(zip((ROOT, *path), emitted, strict=False))
    own_N = found.memo.own_N if isinstance(found.memo, Chances) else ()
    for node, (own, parent) in enumerate(zip(own_N, found.parent_N, strict=False)):
        if parent in came:
            right = found.token_N[node] == came[parent]
            state.table.learn(own, right)
            if node < len(said_N) and said_N[node] >= 0.0:
                state.joint.learn(state.table.chance(own), said_N[node], right)
    if state.asked and not path and not outcome.verdict.censored:
        state.kept += RATE * (len(outcome.verdict.kept) - state.kept)


def _apart(row: DraftRow[_State]) -> bool:
    """Whether lookup and head draft alone. A processor need not know texts that it forbids, so nothing is
    expanded below guesses that it was not asked about.
    """
    return row.chain or bool(row.warp.params.processors)


def _only(draft: Draft, count: int) -> Draft:
    """The first guesses of a chosen draft; itself where all stay."""
    if count == len(draft):
        return draft
    assert all(group.drawn is Drawn.CHOSEN for group in draft.groups)
    return Draft.chosen(draft.token_N[:count], draft.parent_N[:count])
