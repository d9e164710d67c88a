"""Whether verifiers keep their promises: levels 1 and 2 of losslessness.

Level 1: the distribution of the emitted tokens, by exact enumeration in float64, is the target's, to
1e-12; and known-wrong rules do not pass. Level 2: with the same coins, the fast verifiers decide
as their oracles do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.analysis.agreement import OracleReport as OracleReport
from outpace.analysis.agreement import check_oracle as check_oracle
from outpace.analysis.growths import GROWTHS, WRONG_GROWTHS
from outpace.analysis.planted import PLANTED
from outpace.analysis.sequence_law import CHAINS, PLANTED_CASES, TREES
from outpace.analysis.tables import (
    RIGHT,
    Recipe,
    World,
    best,
    called_chosen,
    called_distinct,
    chain,
    chain_of_both,
    chain_with_tails,
    chosen_then_drawn,
    fan,
    hub_with_tails,
    nothing,
    past_the_support,
    step_error,
    tail_of_the_draw,
    two_and_one,
)
from outpace.errors import UnknownNameError
from outpace.types import Drawn, Law
from outpace.verifiers.base import Verifier
from outpace.verifiers.tree import Tree, TreeConfig

CAUGHT = 1e-3
"""A planted bug counts as caught from this error on; right rules stay below 1e-12."""


@dataclass(frozen=True, slots=True)
class LawReport:
    error: float
    """Largest difference of a sequence's probability from the target's, over all cases."""
    cases: int
    growth_rules: int
    """Ways of growing a draft that were counted under it: all that it is allowed to judge."""
    planted_bugs_caught: int
    planted_bugs: int
    missed: tuple[str, ...]
    """Names of planted bugs that were not caught; empty if the test is worth something."""


def _one_hot(law: Law) -> Law:
    return Law.one_hot(int(law.prob_S.argmax()), law.prob_S.dtype)


def _sparse(law: Law) -> Law:
    at = law.prob_S.topk(2).indices.flip(0)
    return Law(law.prob_S[at] / law.prob_S[at].sum(), at)


def _with_zeros(law: Law) -> Law:
    prob_S = law.prob_S.clone()
    prob_S[law.prob_S.argmin()] = 0
    return Law(prob_S / prob_S.sum())


def _first_two(law: Law) -> Law:
    """A draft distribution over fewer ids than the target has."""
    return Law(law.prob_S[:2] / law.prob_S[:2].sum())


def _last(law: Law) -> Law:
    return Law.one_hot(len(law.prob_S) - 1, law.prob_S.dtype)


def _others(law: Law) -> Law:
    return Law(law.prob_S[:-1] / law.prob_S[:-1].sum())


WORLDS = (
    World(1),
    World(2, vocab=2),
    World(3, vocab=4),
    World(4, same=True),
    World(5, p_edit=_one_hot),
    World(6, q_edit=_one_hot),
    World(7, p_edit=_sparse, q_edit=_sparse),
    World(8, q_edit=_with_zeros),
    World(9, p_edit=_with_zeros, q_edit=_first_two),
    World(10, p_edit=_last, q_edit=_others),
)
"""Ordinary distributions over 3, 2 and 4 tokens, q = p, one-hot and sparse ones, q without some of
p's tokens, disjoint supports."""

_CHOSEN: tuple[Recipe, ...] = (nothing, best([1, 1, 1]), best([2, 1]), best([3]), called_chosen)
_TREES: tuple[Recipe, ...] = (
    *_CHOSEN,
    chain(Drawn.IID),
    fan(Drawn.IID, 3, 0),
    fan(Drawn.IID, 2),
    chain_with_tails,
    fan(Drawn.DISTINCT, 2),
    fan(Drawn.DISTINCT, 3, 0),
    past_the_support,
    called_distinct,
    fan(Drawn.GREEDY_PLUS_ONE, 1),
    fan(Drawn.GREEDY_PLUS_ONE, 3, 0),
    fan(Drawn.HUB, 2),
    tail_of_the_draw,
    chosen_then_drawn,
)
RECIPES: dict[str, tuple[Recipe, ...]] = {
    "match": _CHOSEN,
    "chain": (nothing, best([1, 1]), chain(Drawn.IID), chain(Drawn.DISTINCT), chain(Drawn.IID, 3)),
    "tree": _TREES,
    "traversal": _TREES,
    "block": (
        nothing,
        best([1, 1]),
        best([1, 1, 1]),
        chain(Drawn.IID),
        chain(Drawn.DISTINCT),
        chain(Drawn.IID, 3),
        chain_of_both,
    ),
    "k_seq": (
        *_CHOSEN,
        chain(Drawn.IID),
        fan(Drawn.IID, 3, 0),
        two_and_one,
        chain_with_tails,
        tail_of_the_draw,
    ),
    "greedy_plus_one": (
        *_CHOSEN,
        chain(Drawn.GREEDY_PLUS_ONE),
        fan(Drawn.GREEDY_PLUS_ONE, 1),
        fan(Drawn.GREEDY_PLUS_ONE, 2),
        fan(Drawn.GREEDY_PLUS_ONE, 3, 0),
    ),
    "spechub": (
        *_CHOSEN,
        chain(Drawn.HUB),
        fan(Drawn.HUB, 1),
        fan(Drawn.HUB, 2),
        fan(Drawn.HUB, 2, 2),
        hub_with_tails,
    ),
    "coupled": (*_CHOSEN, chain(Drawn.COUPLED, 3), fan(Drawn.COUPLED, 2)),
}
"""Verifier -> drafts that it must be right for."""


class _AskingForGreedyPlusOne(Tree):
    """The tree verifier, with drafters that draw as this rule wants it."""

    draws = Drawn.GREEDY_PLUS_ONE


_GROWN = (World(4), World(2, vocab=2))
"""Where the growing of drafts is counted."""
_ALSO: dict[str, tuple[Verifier, ...]] = {
    "tree": (Tree(TreeConfig(replacement=True)), _AskingForGreedyPlusOne())
}
"""Other settings of a verifier, for whole generations."""


def check_laws(names: Sequence[str] | None = None) -> dict[str, LawReport]:
    """Compare the exact distribution of the output with the target's, and try to be fooled.

    Args:
        names: of verifiers with known cases; None: all of them.

    Returns:
        Verifier name -> report.

    Raises:
        UnknownNameError: a verifier without known cases.

    Cost: about 25 seconds for all on one core; no model, no seed, no chance.
    """
    return {name: _report(name) for name in (RIGHT if names is None else names)}


def _report(name: str) -> LawReport:
    if name not in RIGHT:
        raise UnknownNameError("verifier with enumerated distributions", name, RIGHT)
    right = RIGHT[name]
    errors = [step_error(right, recipe, world) for recipe in RECIPES[name] for world in WORLDS]
    cases = CHAINS if right.chains_only else CHAINS + TREES
    allowed = [growth for growth in GROWTHS.values() if growth.allowed(right)]
    for verifier in (right, *_ALSO.get(name, ())):
        errors += [step_error(verifier, one.recipe(verifier), world) for one in allowed for world in _GROWN]
        errors += [case.error(verifier) for case in cases]
    planted = {
        bug.name: max(bug.error(name, world) for world in bug.worlds or WORLDS[:2])
        for bug in PLANTED
        if name in bug.verifiers
    }
    planted |= {bug: case.error(right) for bug, verifiers, case in PLANTED_CASES if name in verifiers}
    planted |= {
        bug: max(step_error(right, growth.recipe(right), world) for world in _GROWN)
        for bug, verifiers, growth in WRONG_GROWTHS
        if name in verifiers
    }
    missed = tuple(bug for bug, error in planted.items() if error < CAUGHT)
    return LawReport(max(errors), len(errors), len(allowed), len(planted) - len(missed), len(planted), missed)
