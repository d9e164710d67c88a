"""Traversal on trees of depth 3 with unequal branches: its update was derived, so it is counted."""

import pytest

from outpace.analysis import planted_rules as rules
from outpace.analysis.tables import RIGHT, World, chain, fan, outputs, step_error
from outpace.types import ROOT, Drawn

BLOCK, CHAIN, TREE, TRAVERSAL = (RIGHT[n] for n in ("block", "chain", "tree", "traversal"))


def left_heavy(s):
    """root
      a      b        two draws, without replacement
    c   d             two more
    e                 and one
    """
    a, *_ = s.sample(ROOT, Drawn.DISTINCT, 2)
    c, *_ = s.sample(a, Drawn.DISTINCT, 2)
    s.sample(c, Drawn.IID, 1)


def right_heavy(s):
    """Below the second draw, and below its second."""
    *_, b = s.sample(ROOT, Drawn.DISTINCT, 2)
    *_, d = s.sample(b, Drawn.DISTINCT, 2)
    s.sample(d, Drawn.DISTINCT, 1)


def mixed(s):
    """Draws, a chosen tail and a second drafter side by side, each with something below."""
    (a,) = s.sample(ROOT, Drawn.IID, 1)
    tails = s.top(ROOT, 1)
    s.sample(ROOT, Drawn.DISTINCT, 1, drafter=3)
    (b,) = s.sample(a, Drawn.GREEDY_PLUS_ONE, 1)
    s.top(b, 1)
    for tail in tails:
        s.sample(tail, Drawn.IID, 1)


def shaped_by_what_was_drawn(s):
    """What hangs below the first draw depends on the token of the second, and the reverse."""
    a, *rest = s.sample(ROOT, Drawn.DISTINCT, 2)
    b = rest[0] if rest else a
    if s.path(b) == (0,):
        (c,) = s.sample(a, Drawn.IID, 1)
        s.sample(c, Drawn.IID, 1)
    if s.path(a) == (1,) and b != a:
        s.sample(b, Drawn.IID, 1)


def repeats_with_children(s):
    """A repeated draw names a node that has something below it."""
    for node in dict.fromkeys(s.sample(ROOT, Drawn.IID, 3)):
        (child,) = s.sample(node, Drawn.IID, 1)
        s.top(child, 1)


RECIPES = [left_heavy, right_heavy, mixed, shaped_by_what_was_drawn, repeats_with_children]
SOME = [World(4), World(12)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_deep_and_unequal(recipe):
    assert step_error(TRAVERSAL, recipe, World(2, vocab=2)) < 1e-12
    assert step_error(TRAVERSAL, recipe, World(12)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("seed", [1, 4, 20, 21])
def test_deep_and_unequal_over_three_tokens(recipe, seed):
    assert step_error(TRAVERSAL, recipe, World(seed)) < 1e-12


@pytest.mark.parametrize(
    "wrong", [rules.UNWEIGHED, rules.EVERY_PATH_ALONE], ids=lambda wrong: type(wrong).__name__
)
def test_wrong_updates_show_there(wrong):
    for recipe in (left_heavy, right_heavy, shaped_by_what_was_drawn):
        assert max(step_error(wrong, recipe, world) for world in SOME) > 1e-3


def kept(verifier, recipe, world):
    return outputs(verifier, recipe, world)[1]


def test_it_keeps_at_least_what_the_tree_verifier_keeps():
    gains = []
    for seed in (1, 4, 12):
        for recipe in (fan(Drawn.DISTINCT, 2), chain(Drawn.IID, 2)):
            world = World(seed)
            gains.append(kept(TRAVERSAL, recipe, world) - kept(TREE, recipe, world))
    for world in SOME:
        gains.append(kept(TRAVERSAL, left_heavy, world) - kept(TREE, left_heavy, world))
    assert min(gains) > -1e-12
    assert max(gains) > 0.01


def test_on_chains_it_is_block():
    """And block keeps at least what token-by-token verification keeps; more, on average."""
    gains = []
    for seed in (1, 2, 4, 9, 12):
        world, recipe = World(seed), chain(Drawn.IID, 3 if seed < 3 else 2)
        laws = [outputs(verifier, recipe, world) for verifier in (BLOCK, TRAVERSAL)]
        assert laws[0][0] == pytest.approx(laws[1][0])
        gains.append(laws[0][1] - kept(CHAIN, recipe, world))
    assert min(gains) > -1e-12
    assert max(gains) > 0.01
