"""Contracts that every registered verifier keeps, those of plug-ins too. Whether it keeps the
distribution is counted in tests/laws; here is what the step and its neighbours rely on.
"""

import pytest

from outpace import registry
from outpace.analysis.tables import NodeLaws, Sapling, World, best, chain, fan
from outpace.coins import KeyedCoins, Stream
from outpace.errors import SpecError
from outpace.law import Law
from outpace.types import ROOT, Draft, Drawn
from outpace.verifiers.base import TargetLaws

NAMES = [entry.name for entry in registry.entries("verifier")]
SEEDS = range(40)


def coins(seed, stream=Stream.JUDGE):
    return KeyedCoins(seed, 7, stream)


def drafts(verifier, world, seed):
    """Drafts as drafters make them for this verifier, and one that is empty."""
    if verifier.draws is Drawn.CHOSEN:
        recipes = [best([1, 1]), best([2, 1])]
    else:
        recipes = [chain(verifier.draws), fan(verifier.draws, 2)]
    for recipe in recipes[:1] if verifier.chains_only else recipes:
        sapling = Sapling(world, coins(seed, Stream.DRAFT))
        recipe(sapling)
        yield sapling.done()
    yield Draft()


@pytest.fixture(params=NAMES)
def verifier(request):
    return registry.make("verifier", request.param)


def cases(verifier, seeds=SEEDS, **world):
    for seed in seeds:
        one = World(seed, vocab=4, **world)
        for draft in drafts(verifier, one, seed):
            yield one, draft, seed


def test_it_says_what_it_is(verifier):
    entry = registry.entry("verifier", verifier.name)
    assert type(verifier) is registry.load("verifier", entry.name)
    assert verifier.draws in verifier.takes and verifier.lossless == entry.lossless


def test_a_path_is_kept_and_one_token_is_added(verifier):
    kept = 0
    for world, draft, seed in cases(verifier):
        verdict = verifier.judge(draft, NodeLaws(world, draft), coins(seed))
        parent = ROOT
        for node, token in zip(verdict.kept, verdict.emitted, strict=False):
            assert draft.parent_N[node] == parent and draft.token_N[node] == token
            parent = node
        assert len(verdict.emitted) == len(verdict.kept) + 1
        assert NodeLaws(world, draft).law(parent).prob(verdict.emitted[-1]) > 0
        kept += len(verdict.kept)
    assert kept > 0


def test_the_same_coins_give_the_same_verdict(verifier):
    for world, draft, seed in cases(verifier, range(8)):
        before = repr(draft)
        first = verifier.judge(draft, NodeLaws(world, draft), coins(seed))
        again = registry.make("verifier", verifier.name).judge(draft, NodeLaws(world, draft), coins(seed))
        assert (first.kept, first.emitted) == (again.kept, again.emitted)
        assert repr(draft) == before


def test_where_the_target_is_sure_its_token_comes(verifier):
    sure = {"p_edit": lambda law: Law.one_hot(law.top(1)[0])}
    for world, draft, seed in cases(verifier, range(12), **sure):
        verdict = verifier.judge(draft, NodeLaws(world, draft), coins(seed))
        for count, token in enumerate(verdict.emitted):
            assert token == world.p(verdict.emitted[:count]).top(1)[0]


def test_laws_are_told_if_they_are_wanted(verifier):
    for world, draft, seed in cases(verifier, range(8)):
        verdict = verifier.judge(draft, NodeLaws(world, draft), coins(seed), want_laws=True)
        assert len(verdict.laws) == len(verdict.emitted)
        assert all(law.prob(token) > 0 for law, token in zip(verdict.laws, verdict.emitted, strict=True))
        assert verifier.judge(draft, NodeLaws(world, draft), coins(seed)).emitted == verdict.emitted


def test_drafts_that_it_cannot_judge_are_refused(verifier):
    world = World(0, vocab=4)
    refused = 0
    for drawn in set(Drawn) - verifier.takes:
        sapling = Sapling(world, coins(0, Stream.DRAFT))
        chain(drawn)(sapling)
        with pytest.raises(SpecError, match="use verifier="):
            verifier.check(sapling.done())
        refused += 1
    if verifier.chains_only:
        with pytest.raises(SpecError, match="use verifier=tree"):
            verifier.check(Draft.chosen([1, 2], [ROOT, ROOT]))
        refused += 1
    assert refused or verifier.takes == set(Drawn)


def test_reproducible_text_does_not_depend_on_the_draft(verifier):
    if not verifier.reproduces:
        return
    for world, draft, seed in cases(verifier):
        plain, text = [], verifier.judge(draft, NodeLaws(world, draft), coins(seed)).emitted
        for position in range(7, 7 + len(text)):
            law = _Only(world.p(tuple(plain)))
            plain += verifier.judge(Draft(), law, KeyedCoins(seed, position, Stream.JUDGE)).emitted
        assert tuple(plain) == text


class _Only(TargetLaws):
    """One law, of the pending token."""

    def __init__(self, law):
        self._law = law

    def law(self, node):
        assert node == ROOT
        return self._law
