import random
from collections import Counter
from dataclasses import replace

import pytest

from outpace.drafters.base import Request
from outpace.drafters.worth import LEAST, Trust, grow, promise
from outpace.methods.lookup.adaptive_ngram import AdaptiveNgram, AdaptiveNgramConfig
from outpace.methods.lookup.max_gram import MaxGram, MaxGramConfig
from outpace.methods.lookup.prompt_lookup import PromptLookup, PromptLookupConfig
from outpace.methods.lookup.reference import Reference, ReferenceConfig
from outpace.methods.lookup.suffix import Suffix, SuffixConfig
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import budget as budget_of
from outpace.types import Budget, Draft, Drawn, Outcome, Scored, Shape, Verdict


def refused(draft):
    """An outcome in which nothing of a draft was kept."""
    return Outcome(draft, Scored(None, (0,)), Verdict((), (5,)), (1,), (0,), 3)


def test_a_lookup_learns_from_its_own_drafts_alone():
    mine, other = Trust(), Trust()
    draft = grow(lambda n: [(n + 1, 0.9, n + 1)], 0, Budget(4, 4), mine.own)
    assert len(draft) > 0
    other.learn(refused(draft))
    assert other.doubt == 1.0
    mine.learn(refused(draft))
    assert mine.doubt > 1.0
    anybodys = replace(draft, memo=replace(draft.memo, owner=None))
    other.learn(refused(anybodys))
    assert other.doubt > 1.0


def random_laws(coins):
    """What may follow a path of at most three guesses, and all chances of being reached."""
    laws, whole = {}, {}

    def spread(path, reached):
        left, out = 1.0, []
        for token in range(4):
            chance = left * coins.random()
            left -= chance
            whole[(*path, token)] = reached * chance
            out.append((token, chance, (*path, token)))
        laws[path] = sorted(out, key=lambda item: -item[1])
        for _, chance, then in out if len(path) < 2 else ():
            spread(then, reached * chance)

    spread((), 1.0)
    return (lambda path: laws.get(path, [])), whole


def paths(draft):
    return [draft.path_tokens(node) for node in range(len(draft))]


def test_a_dynamic_tree_is_made_of_the_likeliest_paths_of_all():
    coins, bushes = random.Random(5), 0
    for _ in range(30):
        after, whole = random_laws(coins)
        draft = grow(after, (), Budget(9, 3, shape=Shape(beam=99)))
        ranked = sorted(whole, key=lambda path: -whole[path])[: len(draft)]
        assert set(paths(draft)) == set(ranked)
        assert promise(draft) == pytest.approx([whole[path] for path in paths(draft)])
        assert all(whole[path] >= LEAST for path in ranked)
        dear = grow(after, (), Budget(9, 3, shape=Shape(beam=99, least=2.7)))
        assert all(chance >= 0.3 for chance in promise(dear)), "2.7 of 9 nodes"
        narrow = grow(after, (), Budget(9, 3, shape=Shape(beam=1)))
        expanded = Counter(narrow.depth_N[parent] for parent in set(narrow.parent_N) - {-1})
        assert max(expanded.values(), default=0) <= 1
        bushes += len(draft.groups_of) > len(draft.groups_of[-1][0].nodes)
    assert bushes, "some of them branch below the first guess"


def test_of_siblings_that_are_all_sure_one_at_most_is_right():
    def after(node):
        return [(1, 0.7, 1), (2, 0.6, 2), (3, 0.5, 3)] if node == 0 else []

    draft = grow(after, 0, budget_of("3", None, 0))
    assert draft.token_N == (1, 2) and draft.memo.own_N == pytest.approx((0.7, 0.3))


class Pairs:
    """A bigram table."""

    def after(self, token):
        return [(50, 0.9)] if token == 2 else []


TEXT = [1, 2, 3, 7, 8, 1, 2, 3, 8, 8, 2, 4, 9, 9, 1, 2, 4, 7, 3, 5, 2, 6, 6, 1, 2]


@pytest.mark.parametrize(
    "drafter",
    [
        Suffix(SuffixConfig()),
        MaxGram(MaxGramConfig(), Pairs()),
        AdaptiveNgram(AdaptiveNgramConfig()),
        Reference(ReferenceConfig()),
        PromptLookup(PromptLookupConfig()),
    ],
    ids=lambda drafter: type(drafter).__name__,
)
def test_lookups_honour_a_dynamic_tree(drafter):
    """They offer all that they think likely, not the first of it alone; a chain stays a chain."""
    state = drafter.begin(Request(prompt=tuple(TEXT), num_cached=len(TEXT)))
    if isinstance(drafter, Reference):
        told = Outcome(Draft(), None, Verdict((), (1, 2)), (), (), 0)
        drafter.observe([state], [told])

    def fan(tree):
        row = DraftRow(state, TEXT, budget_of(tree, None, 20), None, None, Drawn.CHOSEN)
        (draft,) = drafter.propose([row])
        assert len(draft) <= row.budget.max_nodes
        return max(len(group.nodes) for group in draft.groups)

    assert fan("dynamic") > 1 and fan("chain") == 1


def test_a_draft_is_cut_to_what_is_planned():
    """Its first guesses stay, and it still says whose it is; one that fits stays itself."""
    drafter = Suffix(SuffixConfig())
    text = [*range(30), *range(9)]
    state = drafter.begin(Request(prompt=tuple(text), num_cached=len(text)))
    (whole,) = drafter.propose([DraftRow(state, text, Budget(12, 12), None, None, Drawn.CHOSEN)])
    assert len(whole) > 4 and drafter.cut(state, whole, Budget(12, 12)) is whole
    cut = drafter.cut(state, whole, Budget(9, 4))
    assert cut.token_N == whole.token_N[:4] == (9, 10, 11, 12) and cut.memo is whole.memo
    before = state.trust.doubt
    drafter.observe([state], [Outcome(cut, None, Verdict((0, 1, 2, 3), (9, 10, 11, 12, 7)), (), (), 0)])
    assert state.trust.doubt < before
