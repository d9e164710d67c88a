import random
from collections import Counter

import pytest

from outpace.config import MethodSpec
from outpace.drafters.base import Request
from outpace.engine.method import SingleMethod
from outpace.errors import SpecError
from outpace.methods.lookup.adaptive_ngram import AdaptiveNgram, AdaptiveNgramConfig
from outpace.models.load import load_target
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import budget as budget_of
from outpace.types import Budget, Drawn, Outcome, Verdict

ROOMY = Budget(30, 30)


class Running:
    """A drafter on one sequence."""

    def __init__(self, text, **settings):
        self.drafter = AdaptiveNgram(AdaptiveNgramConfig(**settings))
        self.state = self.drafter.begin(Request(prompt=tuple(text), num_cached=len(text)))

    def propose(self, budget=ROOMY):
        row = DraftRow(self.state, self.state.tokens, budget, None, None, Drawn.CHOSEN)
        return self.drafter.propose([row])[0]

    def observe(self, draft, kept, more=None, censored=False):
        """The first ``kept`` nodes of a chain are kept, then the target adds a token."""
        emitted = (*draft.token_N[:kept], *(() if more is None else (more,)))
        verdict = Verdict(tuple(range(kept)), emitted, censored=censored)
        self.drafter.observe([self.state], [Outcome(draft, None, verdict, (), (), 0)])


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ([1, 2, 3, 9, 1, 2], (3, 9, 1)),
        ([1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2], (3, 1, 2)),  # the commonest, not the newest
        ([1, 2, 3, 1, 2, 4, 1, 2], (4, 1, 2)),  # of equals the newest
        ([7, 2, 5, 2, 5, 1, 2, 6, 1, 2], (6, 1, 2)),  # the longer context first
        ([7, 2, 5, 8, 3, 2], (5, 8, 3)),  # back-off to a shorter one
        ([1, 2, 3], ()),
        ([], ()),
    ],
)
def test_follows_the_commonest_successor_of_the_longest_context(text, want):
    assert Running(text).propose(Budget(3, 3)).token_N == want


def test_counts_are_those_of_counting_everything():
    coins = random.Random(0)
    text = [coins.randrange(3) for _ in range(300)]
    running = Running([], max_order=4)
    running.state.read(text, 4)
    for order in range(1, 5):
        grams = [tuple(text[i : i + order]) for i in range(len(text) - order + 1)]
        counts = Counter(grams)
        assert {g: n for g, n in running.state.count.items() if len(g) == order} == counts
        for context in {gram[:-1] for gram in grams} - {()}:
            most = max(counts[(*context, token)] for token in range(3))
            assert counts[(*context, running.state.best[context])] == most


def test_length_doubles_after_success_and_falls_back_after_a_miss():
    running = Running(list(range(40)) * 3, min_length=4)
    running.state.right = list(running.state.made)  # trusted fully, so the length alone decides
    lengths = []
    for _ in range(3):
        draft = running.propose(Budget(60, 60))
        lengths.append(len(draft))
        running.observe(draft, len(draft), (draft.token_N[-1] + 1) % 40)
    assert lengths == [8, 16, 32] and running.state.length == 64
    draft = running.propose(Budget(60, 60))
    running.observe(draft, 2, 77)
    assert running.state.length == 4
    running.state.length = 32
    running.observe(draft, 9, 78)
    assert running.state.length == 10


def test_a_draft_cut_by_the_budget_does_not_lengthen():
    running = Running(list(range(40)) * 3)
    before = running.state.length
    draft = running.propose(Budget(2, 2))
    running.observe(draft, 2, 0)
    assert len(draft) == 2 and running.state.length == before


def test_an_order_that_misleads_loses_to_a_shorter_one():
    # After "1 2" came 3 once; after "2" alone mostly 4.
    text = [5, 2, 4, 6, 2, 4, 7, 2, 4, 1, 2, 3, 8, 1, 2]
    running = Running(text)
    draft = running.propose(Budget(1, 1))
    assert draft.token_N == (3,)
    for _ in range(6):
        running.state.tokens[-2:] = [1, 2]
        running.observe(draft, 0)
    assert running.propose(Budget(1, 1)).token_N == (4,)
    for _ in range(30):
        running.observe(draft, 1)
    assert running.state.tokens[-1] == 3
    running.state.tokens += [1, 2]
    assert running.propose(Budget(1, 1)).token_N == (3,)


def test_state_changes_in_observe_alone_and_not_by_what_a_stop_cut_off():
    running = Running([1, 2, 3, 9, 1, 2])
    state = running.state
    before = (list(state.right), list(state.made), state.length, dict(state.best))
    draft = running.propose()
    assert running.propose().token_N == draft.token_N
    running.observe(draft, 0, censored=True)
    assert (list(state.right), list(state.made), state.length, dict(state.best)) == before
    running.observe(draft, 1, censored=True)
    order = draft.memo.order_N[0]
    assert order == 3 and state.made[order] == before[1][order] + 1
    assert state.right[order] == before[0][order] + 1
    running.observe(running.propose(), 0, 77)
    assert sum(state.made) == sum(before[1]) + 2


def test_another_drafters_guesses_are_none_of_its_own():
    """One that counts longer n-grams drafts for the same text."""
    one, other = Running([], max_order=3), Running([*range(1, 7), 9, *range(1, 7)])
    before = (list(one.state.right), list(one.state.made), one.state.length)
    draft = other.propose()
    assert max(draft.memo.order_N) > 3
    one.observe(draft, 1, 77)
    other.observe(draft, 1, 77)
    assert (one.state.right, one.state.made, one.state.length) == before
    assert sum(other.state.made) > sum(Running([]).state.made)


def test_siblings_come_from_shorter_contexts():
    text = [5, 2, 4, 6, 2, 4, 7, 2, 4, 1, 2, 3, 8, 1, 2]
    draft = Running(text).propose(budget_of("2x1", None, 0))
    roots = [draft.token_N[node] for node in draft.groups_of[-1][0].nodes]
    assert roots == [3, 4]
    assert all(group.drawn is Drawn.CHOSEN for group in draft.groups)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("adaptive_ngram[max_order=1]", "max_order must be between 2 and 16, got 1"),
        ("adaptive_ngram[min_length=0]", "min_length must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_refused(spec, says):
    with pytest.raises(SpecError, match=says):
        SingleMethod(MethodSpec.parse(spec), load_target("tiny"))
