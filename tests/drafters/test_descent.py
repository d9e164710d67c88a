"""Chains whose levels run in one call are those that grow level by level, to the bit."""

import pytest
import torch

from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.methods.draft_model.drafter import DraftModel
from outpace.models.products import works
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.types import Budget, Drawn
from tests.methods.eagle3.test_drafter import made, show, tied

TEXTS = [[5, 9, 11, 40, 7, 150, 5, 9], [40, 41, 42], [77, 8, 9, 10, 11]]
WARPS = {
    "greedy": (Drawn.CHOSEN, {"temperature": 0}),
    "likeliest": (Drawn.CHOSEN, {"temperature": 0.8}),
    "coins": (Drawn.DISTINCT, {"temperature": 0.8}),
    "races": (Drawn.COUPLED, {"temperature": 1.2}),
    "truncated": (Drawn.IID, {"temperature": 0.8, "top_k": 5}),
    "penalized": (Drawn.DISTINCT, {"temperature": 0.8, "repetition_penalty": 1.3}),
}
MIXED = {
    "greedy and coins": ("greedy", "coins", "greedy"),
    "coins and greedy": ("coins", "greedy", "likeliest"),
    "greedy and races": ("greedy", "races", "races"),
}
pytestmark = pytest.mark.skipif(not works("cpu"), reason="nothing is compiled here")


def eagle():
    """A drafter and its sequences, which have seen their texts."""
    target = tied()
    drafter, _ = made(target, quantize="int8")
    states = [drafter.begin(Request(prompt=tuple(text))) for text in TEXTS]
    for state, text in zip(states, TEXTS, strict=True):
        show(drafter, state, target, text[:-1])
    return drafter, states, target.vocab_size


def second():
    """A draft model and its sequences."""
    own = tied()
    drafter = DraftModel(own, own.vocab_size)
    return drafter, [drafter.begin(Request(prompt=tuple(text))) for text in TEXTS], own.vocab_size


def proposed(made_of, kind, depths, descends):
    """Drafts, and how many levels were gone down in one call."""
    kinds = [WARPS[one] for one in MIXED.get(kind, (kind,) * len(TEXTS))]
    drafter, states, size = made_of()
    gone, descend, spread = [], drafter.descend, drafter.spread

    def counting(*given):
        gone.append(descend(*given) if descends else ())
        return gone[-1]

    def spreading(*given):
        found = spread(*given) if descends else None
        gone.append(range(max(map(len, found))) if found else ())
        return found

    drafter.descend, drafter.spread = counting, spreading
    rows = [
        DraftRow(
            state,
            text,
            Budget(max_nodes=depth, max_depth=depth),
            KeyedCoins(3, len(text) - 1, Stream.DRAFT),
            Warp(SamplingParams(**settings), text, frozenset(), size),
            drawn,
        )
        for state, text, depth, (drawn, settings) in zip(states, TEXTS, depths, kinds, strict=True)
    ]
    drafts = [drafter.propose(rows) for _ in range(2)]
    assert all(
        torch.equal(a.prob_S, b.prob_S)
        for one, other in zip(*drafts, strict=True)
        for a, b in zip(one.laws, other.laws, strict=True)
    ), "a draft leaves nothing behind"
    return drafts[0], drafter.clock.count, sum(map(len, gone))


@pytest.mark.parametrize("made_of", [eagle, second])
@pytest.mark.parametrize("kind", [*WARPS, *MIXED])
@pytest.mark.parametrize("depths", [(5, 5, 5), (6, 3, 1), (2, 2, 4), (1, 2, 2)])
def test_a_descent_gives_the_same_drafts(made_of, kind, depths):
    ours, count, gone = proposed(made_of, kind, depths, True)
    theirs, expected, none = proposed(made_of, kind, depths, False)
    assert (gone > 0) == (kind not in ("truncated", "penalized") and depths != (1, 2, 2)) and none == 0
    assert count == expected
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.token_N, mine.parent_N, mine.groups) == (other.token_N, other.parent_N, other.groups)
        for law, same in zip(mine.laws, other.laws, strict=True):
            assert torch.equal(law.prob_S, same.prob_S)
            assert law.id_S is same.id_S is None or torch.equal(law.id_S, same.id_S)


@pytest.mark.parametrize("kind", ["greedy", "coins", "races"])
def test_the_number_of_threads_changes_no_bit(kind, monkeypatch):
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        drafts, _, gone = proposed(eagle, kind, (5, 5, 5), True)
        assert gone
        found.append([(one.token_N, [law.prob_S.tolist() for law in one.laws]) for one in drafts])
    assert found[0] == found[1] == found[2]


def test_the_first_level_of_features_goes_along():
    _, passes, gone = proposed(eagle, "greedy", (5, 5, 5), True)
    assert passes == gone == 10, "two drafts of five levels, all of them in one call each"
