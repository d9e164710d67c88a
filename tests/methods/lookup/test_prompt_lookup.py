import pytest

from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.methods.lookup.prompt_lookup import PromptLookup, PromptLookupConfig
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import parse_shape
from outpace.types import Budget, Drawn

LOOKUP = PromptLookup(PromptLookupConfig(min_ngram=1, max_ngram=2))
PARAMS = SamplingParams().resolved(None)


BUDGET = Budget(3, 3)


def propose(text, budget=BUDGET, lookup=LOOKUP):
    state = lookup.begin(Request(prompt=tuple(text), num_cached=len(text)))
    row = DraftRow(
        state,
        text,
        budget,
        KeyedCoins(0, 0, Stream.DRAFT),
        Warp(PARAMS, text, frozenset(), 100),
        Drawn.CHOSEN,
    )
    return lookup.propose([row])[0].token_N


@pytest.mark.parametrize(
    ("committed", "want"),
    [
        ([1, 2, 3, 9, 1, 2], (3, 9, 1)),  # the suffix 1 2 was seen once
        ([1, 2, 3, 1, 2, 4, 1, 2], (4, 1, 2)),  # seen twice: the newest wins
        ([7, 2, 5, 1, 2, 6, 1, 2], (6, 1, 2)),  # the longer suffix wins over the newer one
        ([5, 5], (5, 5, 5)),  # a match that touches the suffix goes round
        ([8, 9, 8], (9, 8, 9)),
        ([1, 2, 3], ()),  # nothing repeats
        ([7], ()),
        ([], ()),
    ],
)
def test_drafts_what_followed_before(committed, want):
    assert propose(committed) == want


def test_siblings_come_from_shorter_suffixes_and_are_right_where_the_longer_are_wrong():
    text = [7, 2, 5, 1, 2, 6, 7, 2, 9, 1, 2, 8, 3, 2, 4, 1, 2]
    lookup = PromptLookup(PromptLookupConfig(min_ngram=1, max_ngram=2))
    state = lookup.begin(Request(prompt=tuple(text), num_cached=len(text)))
    row = DraftRow(state, text, Budget(2, 1, shape=parse_shape("2")), None, None, Drawn.CHOSEN)
    (draft,) = lookup.propose([row])
    sure = state.trust.chance(2)
    assert draft.token_N == (8, 4)
    assert draft.memo.own_N == pytest.approx((sure, (1 - sure) * state.trust.chance(1)))


def test_budget_and_shortest_suffix_are_respected():
    text = [1, 2, 3, 9, 1, 2]
    assert propose(text, Budget(1, 5)) == (3,) and propose(text, Budget(5, 2)) == (3, 9)
    picky = PromptLookup(PromptLookupConfig(min_ngram=2, max_ngram=2))
    assert propose([5, 9, 5], lookup=picky) == ()
    assert propose(text, lookup=picky) == (3, 9, 1)


def test_a_copy_that_has_gone_on_for_long_gets_more_guesses():
    lookup, room = PromptLookup(PromptLookupConfig()), Budget(16, 16)
    source = list(range(100, 140))
    long = propose([*source, 7, *source[:20]], room, lookup)
    short = propose([*source, 7, *range(300, 316), *source[16:20]], room, lookup)
    assert long[: len(short)] == short == tuple(source[20 : 20 + len(short)])
    assert len(short) < len(long) == 16
