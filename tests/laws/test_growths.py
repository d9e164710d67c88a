"""Exact laws of every way to grow a draft, under every verifier that may judge it."""

from dataclasses import replace

import pytest

from outpace import registry
from outpace.analysis.growths import GROWTHS, PROMPT, WRONG_GROWTHS, Growth, TableDrafter
from outpace.analysis.tables import RIGHT, World, outputs, step_error
from outpace.drafters.base import Drafter
from outpace.models.tiny import TableTarget
from outpace.tree.dynamic import Dynamic, draw
from outpace.tree.shapes import parse_shape
from outpace.types import Budget, Draft, Drawn
from outpace.verifiers.tree import Tree, TreeConfig

VERIFIERS = {**RIGHT, "tree[replacement=true]": Tree(TreeConfig(replacement=True))}
WORLD = World(2, vocab=2)


class Words(Drafter):
    """A lookup: chosen guesses that follow from the last token."""

    Config = World

    @classmethod
    def load(cls, config, target):
        return cls()

    def begin(self, request):
        return None

    def propose(self, rows):
        return [self.guess(row) for row in rows]

    def guess(self, row):
        size = min(row.budget.max_nodes, row.budget.max_depth, 2)
        return Draft.chosen([(row.tokens[-1] + i + 1) % 2 for i in range(size)])

    def observe(self, states, outcomes):
        return


def model(world):
    """The draft distributions of a world as a language model."""
    return TableTarget(lambda text: world.q(text[len(PROMPT) :]).dense(world.vocab), world.vocab)


def made(name, *parts, **settings):
    cls = registry.load("drafter", name)
    return cls(cls.Config(**settings), *parts)


def graph(world):
    return made("graph", TableDrafter(world), agree=0)


def cascade(k):
    return lambda world: registry.load("drafter", "cascade")([model(world)], Words(), k)


def select(*members):
    return lambda world: made("select", [member(world) for member in members])


def ouroboros(world):
    return made("ouroboros", TableDrafter(world), tokens=2)


def lookup(name):
    return lambda world: made(name)


TREES = {name: parse_shape(name) for name in ("2x1", "dynamic", "dynamic:1", "dynamic:2:0")}
MADE = {
    "graph": graph,
    "cascade, vertical": cascade([[2], [1]]),
    "cascade, horizontal": cascade([[1, 1]]),
    "select, a model": select(TableDrafter),
    "select, lookups": select(lambda world: Words(), lookup("suffix")),
    "ouroboros": ouroboros,
    "suffix": lookup("suffix"),
    "prompt_lookup": lookup("prompt_lookup"),
    "recycling": lookup("recycling"),
}
"""Drafters made of others, or that choose: as chains and as trees."""
PAIRS = [
    (drafter, shape, verifier)
    for drafter in MADE
    for shape in ("chain", *TREES)
    for verifier in VERIFIERS
    if (shape == "chain" and drafter != "graph") or not VERIFIERS[verifier].chains_only
]


def growth(drafter, shape):
    budget = Budget(3, 3) if shape == "chain" else Budget(4, 2, shape=TREES[shape])
    return Growth(budget, MADE[drafter])


@pytest.mark.parametrize("drafter", MADE)
def test_drafters_made_of_others_leave_the_law_alone(drafter):
    """Every pair of shape and verifier."""
    drafted = 0.0
    for one, shape, name in PAIRS:
        if one == drafter:
            verifier = VERIFIERS[name]
            recipe = growth(drafter, shape).recipe(verifier)
            assert step_error(verifier, recipe, WORLD) < 1e-12, (drafter, shape, name)
            drafted += outputs(verifier, recipe, WORLD)[1]
    assert drafted > 0 or drafter == "recycling"  # which knows nothing before the first pass


def test_siblings_are_counted_before_they_are_drawn(monkeypatch):
    """Where a sibling is added because of what was drawn, the law under `k_seq` is another one."""
    k_seq = RIGHT["k_seq"]
    dynamic = GROWTHS["dynamic:2:0, 3"]
    assert step_error(k_seq, dynamic.recipe(k_seq), World(4)) < 1e-12

    def count_draws(self, logits_FD, id_D, paths, depth):
        law = self.row.warp.law(logits_FD[0], paths[0], id_D)
        picks = draw(law, 1, Drawn.IID, self.row.coins, -1, 1)
        if law.prob(picks[0]) < 0.5:
            picks = draw(law, 2, Drawn.IID, self.row.coins, -1, 1)
        at = {t: self._add(-1, t, law.prob(t), law.prob(t)) for t in dict.fromkeys(picks)}
        self.group(-1, [at[t] for t in picks], law)
        return list(at.values())

    monkeypatch.setattr(Dynamic, "_sample_at_once", count_draws)
    flat = replace(dynamic, budget=replace(dynamic.budget, max_depth=1))
    assert step_error(k_seq, flat.recipe(k_seq), World(4)) > 1e-3


def test_what_the_engine_refuses_is_not_counted():
    for growth_ in GROWTHS.values():
        chain = growth_.budget.shape.parent_N is None and not growth_.budget.shape.beam
        assert growth_.allowed(RIGHT["chain"]) is growth_.allowed(RIGHT["block"]) is chain
        assert growth_.allowed(RIGHT["k_seq"])
    assert {name for _, names, _ in WRONG_GROWTHS for name in names} <= set(RIGHT)
