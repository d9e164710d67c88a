"""What a guess from text is worth, and how many of them a pass should check.

A lookup knows no distribution, only how long the words before a place agree with the words before now,
and what followed there. That is enough for a fair estimate of whether a guess will be kept:

    chance = count / (total + escape),    escape = doubt * 2.5 / match ** 1.2

``total`` continuations were seen after the last ``match`` tokens, ``count`` of them the guess:
the shape of an escape estimate of text compression. The constants fit greedy answers of a small
chat model to chat, code, editing and extraction prompts (match 1: a quarter is kept, 2: half,
4: three quarters, 16: more than nine in ten); ``doubt`` learns from verdicts how one text differs.

More guesses make a pass dearer, so a draft ends where one more would lower the tokens emitted per
unit of time. That is after three or four where a match is weak, far later where it is strong.

Source of the estimate: Cleary and Witten 1984, "Data compression using adaptive coding and partial
string matching". Of drafts that grow with the match: SuffixDecoding, arXiv:2411.04975.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TypeVar

from outpace.curve import assumed
from outpace.drafters.base import Traits
from outpace.drafters.rowwise import RowwiseDrafter
from outpace.tree.shapes import children
from outpace.types import ROOT, Budget, Draft, Outcome, Verdict

N = TypeVar("N")
S = TypeVar("S")

After = Callable[[N], Iterable[tuple[int, float, N]]]
"""Node -> (token, chance, node) of what may follow it, likeliest first."""

LEAST = 0.05
"""Guesses less likely than this to be reached and kept are not made."""
RATE = 0.2
"""How fast ``doubt`` follows surprises."""


@dataclass(frozen=True, slots=True)
class Chances:
    """The memo of a draft: what its drafter thought of each node."""

    own_N: tuple[float, ...]
    """Chance of being kept, given that the parent is."""
    worth: float
    """Tokens expected to be emitted per unit of cost."""
    owner: int | None = None
    """Whose estimate it is, see ``Trust.own``; None: anybody may learn from it."""


class Trust:
    """How far one sequence follows its own past. Changes in ``learn`` alone."""

    __slots__ = ("doubt", "own")

    def __init__(self) -> None:
        self.doubt = 1.0
        self.own = id(self)
        """Tells its drafts from those of other lookups over the same text; a copy keeps it."""

    def escape(self, match: int) -> float:
        """Weight of "something else" after so many tokens that agree (at least one)."""
        return self.doubt * 2.5 / math.pow(match, 1.2)

    def chance(self, match: int, count: int = 1, total: int = 1) -> float:
        """Chance that a guess is right.

        Args:
            match: tokens before it that agree with a place in the text.
        """
        return count / (total + self.escape(match)) if match > 0 else 0.0

    def doubted(self, chance: float) -> float:
        """Correct a chance that was estimated elsewhere: its odds by what the text taught."""
        return chance / (chance + (1 - chance) * self.doubt) if chance > 0 else 0.0

    def learn(self, outcome: Outcome) -> None:
        """Take in which guesses were kept, if the draft was made here."""
        memo = outcome.draft.memo
        if isinstance(memo, Chances) and memo.owner in (None, self.own):
            for node, right in judged(outcome):
                self._move(memo.own_N[node], right)

    def _move(self, chance: float, right: bool) -> None:
        moved = self.doubt * math.exp(RATE * (chance - right))
        self.doubt = min(16.0, max(1 / 16, moved))


def judged(outcome: Outcome) -> Iterator[tuple[int, bool]]:
    """The likeliest child of every node that was reached, and whether it was kept.

    What a stop cut off teaches nothing and is left out.
    """
    draft, verdict = outcome.draft, outcome.verdict
    kept = set(verdict.kept)
    for parent in (ROOT, *verdict.kept):
        groups = draft.groups_of.get(parent)
        if groups is None:
            continue
        nodes = groups[0].nodes
        if verdict.censored and kept.isdisjoint(nodes):
            return
        yield nodes[0], nodes[0] in kept


def as_own(own: Draft, given: Draft | None, outcome: Outcome) -> Outcome:
    """The outcome of a drafter's own draft, if it left a memo to learn by; else the outcome as it is.

    Args:
        own: what the drafter said.
        given: the draft that was made of it, perhaps with others'.
    """
    if outcome.forced or given is not outcome.draft or own is given or own.memo is None:
        return outcome
    verdict = outcome.verdict
    kept = own.path_of(verdict.emitted)
    return replace(outcome, draft=own, verdict=Verdict(kept, verdict.emitted, censored=verdict.censored))


class Priced(RowwiseDrafter[S]):
    """A lookup whose drafts carry `Chances`: it can tell beforehand what they promise."""

    traits = Traits(previews=True)

    def promise(self, state: S, draft: Draft) -> Sequence[float]:
        return promise(draft)

    def cut(self, state: S, draft: Draft, budget: Budget) -> Draft | None:
        """The first guesses: no later one is likelier."""
        most = min(budget.max_nodes, budget.max_depth, budget.max_rows)
        return (
            draft
            if len(draft) <= most
            else Draft.chosen(draft.token_N[:most], draft.parent_N[:most], memo=draft.memo)
        )


def promise(draft: Draft) -> list[float]:
    """For every node of a draft made here, the chance that it is reached and kept."""
    return reached(draft.memo.own_N if isinstance(draft.memo, Chances) else (), draft.parent_N)


def reached(own_N: Sequence[float], parent_N: Sequence[int]) -> list[float]:
    """The chance that each node is reached and kept, by what each has if its parent is kept."""
    whole: list[float] = []
    for own, parent in zip(own_N, parent_N, strict=True):
        whole.append(own if parent == ROOT else own * whole[parent])
    return whole


def grow(after: After[N], start: N, budget: Budget, owner: int | None = None) -> Draft:
    """The draft that pays best, of those that the budget's shape allows.

    Args:
        after: what may follow a node; asked only where the shape has room.
        start: the node of the pending token.
        budget: a chain follows the likeliest token. A template is filled with siblings; branches
            that have no continuation or do not pay are left out. A dynamic tree is made of all
            that is likely enough.

    Returns:
        A CHOSEN draft with `Chances` as its memo; empty if nothing is likely enough.
    """
    template, beam = budget.shape.parent_N, budget.shape.beam
    if template is None and not beam:
        return _chain(after, start, budget, owner)
    kids = None if template is None else children(template)
    most = min(budget.max_nodes, budget.max_rows)
    free: Iterable[int] = repeat(ROOT)
    least = max(LEAST, budget.shape.least / max(1, most))
    tokens: list[int] = []
    parents: list[int] = []
    own: list[float] = []
    whole: list[float] = []
    level = [(ROOT, ROOT, start, 1.0)]  # node, its place in the template, what follows, chance
    for _ in range(budget.max_depth if most > 0 else 0):
        grown = []
        for node, place, source, reached in level:
            places = free if kids is None else kids.get(place, [])
            if not places:
                continue
            left = 1.0  # of several that are sure of themselves one at most is right
            for spot, (token, chance, then) in zip(places, after(source), strict=False):
                chance = min(chance, left)
                left -= chance
                if reached * chance < least:
                    continue
                grown.append((len(tokens), spot, then, reached * chance))
                tokens.append(token)
                parents.append(node)
                own.append(chance)
                whole.append(reached * chance)
        level = sorted(grown, key=lambda one: -one[3])[:beam] if beam else grown
    return _best(tokens, parents, own, whole, most, owner) if tokens else Draft()


def _chain(after: After[N], start: N, budget: Budget, owner: int | None) -> Draft:
    """The likeliest token after the likeliest, as far as that makes the most of a pass."""
    tokens: list[int] = []
    own: list[float] = []
    whole: list[float] = []
    node = start
    for _ in range(min(budget.max_nodes, budget.max_rows, budget.max_depth)):
        found = next(iter(after(node)), None)
        if found is None:
            break
        token, chance, node = found
        chance = min(chance, 1.0)
        value = chance * (whole[-1] if whole else 1.0)
        if value < LEAST:
            break
        tokens.append(token)
        own.append(chance)
        whole.append(value)
    if not tokens:
        return Draft()
    length, worth = _paying(whole)
    return Draft.chosen(tokens[:length], memo=Chances(tuple(own[:length]), worth, owner))


def _best(
    tokens: Sequence[int],
    parents: Sequence[int],
    own: Sequence[float],
    whole: Sequence[float],
    most: int,
    owner: int | None,
) -> Draft:
    """The likeliest nodes, as many as make the most of a pass.

    A child never comes before its parent: it is no likelier, and it is younger.
    """
    order = sorted(range(len(tokens)), key=lambda node: -whole[node])[:most]
    length, worth = _paying([whole[node] for node in order])
    order = order[:length]
    place = {ROOT: ROOT, **{node: i for i, node in enumerate(order)}}
    return Draft.chosen(
        [tokens[node] for node in order],
        [place[parents[node]] for node in order],
        memo=Chances(tuple(own[node] for node in order), worth, owner),
    )


def _paying(value_N: Sequence[float]) -> tuple[int, float]:
    """How many of the guesses make the most of a pass, and the tokens per unit of cost that it then emits."""
    expected, worth, length = 1.0, 1.0, 0
    for count, value in enumerate(value_N, 1):
        expected += value
        now = expected / assumed(1 + count)
        if now >= worth:
            worth, length = now, count
    return length, worth
