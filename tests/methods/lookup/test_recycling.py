from dataclasses import replace

import numpy as np
import pytest
import torch

from outpace import Engine, ModelError, SpecError
from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.methods.lookup.datastore import write_datastore
from outpace.methods.lookup.pool_trees import fill, halving
from outpace.methods.lookup.recycling import Recycling, RecyclingConfig
from outpace.models.tiny import tiny, tiny_tokenizer
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import parse_shape
from outpace.types import Budget, Draft, Drawn, Outcome, Scored, Shape, Verdict

PARAMS = SamplingParams().resolved(None)
CHAIN = Budget(3, 3)
WIDE = Budget(6, 2, shape=parse_shape("2x2"))


def row(state, pending, budget):
    text = [pending]
    return DraftRow(
        state, text, budget, KeyedCoins(0, 0, Stream.DRAFT), Warp(PARAMS, text, frozenset(), 10), Drawn.CHOSEN
    )


def ask(drafter, state, pending, budget=CHAIN):
    draft = drafter.propose([row(state, pending, budget)])[0]
    return draft.token_N, draft.parent_N


def logits(*best):
    """One row each, over 10 tokens, that ranks the given tokens first."""
    out = torch.zeros(len(best), 10)
    for line, tokens in zip(out, best, strict=True):
        for place, token in enumerate(tokens):
            line[token] = 9.0 - place
    return out


def judged(draft, pending, rows, kept):
    path = [draft.token_N[i] for i in kept]
    emitted = (*path, int(rows[kept[-1] + 1 if kept else 0].argmax()))
    return Outcome(
        draft,
        Scored(rows, (0, len(rows))),
        Verdict(tuple(kept), emitted),
        (pending, *path),
        (0, *(i + 1 for i in kept)),
        0,
    )


def test_every_row_of_a_pass_is_remembered_the_refused_ones_too():
    drafter = Recycling(RecyclingConfig(successors=2))
    state = drafter.begin(Request(prompt=(1,)))
    tree = Draft.chosen([2, 3, 4], [-1, -1, 0])
    drafter.observe([state], [judged(tree, 1, logits([2, 3], [4, 5], [6, 7], [8, 9]), (0,))])
    assert state.after == {1: (2, 3), 2: (4, 5), 3: (6, 7), 4: (8, 9)}
    assert ask(drafter, state, 1) == ((2, 4, 8), (-1, 0, 1))
    assert ask(drafter, state, 1, WIDE) == ((2, 3, 4, 5, 6, 7), (-1, -1, 0, 0, 1, 1))
    assert ask(drafter, state, 5) == ((), ()), "nothing is known of 5"


def test_of_equal_tokens_the_deepest_kept_row_wins():
    drafter = Recycling(RecyclingConfig(successors=1))
    for kept, want in (((), (3,)), ((0,), (4,)), ((0, 1), (5,))):
        state = drafter.begin(Request(prompt=(2,)))
        loop = Draft.chosen([2, 2, 2], [-1, 0, 1])
        drafter.observe([state], [judged(loop, 2, logits([3], [4], [5], [6]), kept)])
        assert state.after == {2: want}


def test_a_prompt_seeds_the_lists_and_its_pieces_belong_together():
    drafter = Recycling(RecyclingConfig(successors=2))
    state = drafter.begin(Request(prompt=(1, 2, 3, 1, 4, 5), num_cached=2))
    for fed, start in (((3, 1), 2), ((4,), 4)):
        drafter.observe(
            [state],
            [
                Outcome(
                    Draft(),
                    Scored(torch.zeros(0, 10), (0, 0)),
                    Verdict((), ()),
                    fed,
                    tuple(range(len(fed))),
                    start,
                    forced=True,
                )
            ],
        )
    assert state.after == {1: (4, 2), 2: (3,), 3: (1,)}
    drafter.observe(
        [state],
        [Outcome(Draft(), Scored(logits([7, 8]), (0, 1)), Verdict((), (7,)), (5,), (0,), 5, forced=True)],
    )
    assert state.after[5] == (7, 8), "the row after the prompt is ranked like any other"


def test_sequences_share_nothing_unless_told_to():
    for shared, want in ((False, ((), ())), (True, ((2,), (-1,)))):
        drafter = Recycling(RecyclingConfig(successors=1, shared=shared))
        one, other = (drafter.begin(Request(prompt=(1,))) for _ in range(2))
        drafter.observe([one], [judged(Draft(), 1, logits([2]), ())])
        assert ask(drafter, other, 1) == want


def test_the_lists_of_the_keys_that_were_used_last_are_remembered():
    drafter = Recycling(RecyclingConfig(successors=1, shared=True))

    def lists(key):
        return drafter.begin(Request(prompt=(1,), key=key)).after

    often, once = lists("often"), lists("once")
    for number in range(50):
        assert lists("often") is often and lists(f"key {number}") == {}
    assert len(drafter._shared) == 16 and lists("once") is not once


def test_a_table_stands_in_until_the_target_has_spoken():
    table = np.array([[-1, -1], [2, 3], [4, -1], [-1, -1], [-1, -1]], np.int32)
    drafter = Recycling(RecyclingConfig(successors=2), table)
    state = drafter.begin(Request(prompt=(1,)))
    assert ask(drafter, state, 1, WIDE) == ((2, 3, 4), (-1, -1, 0))
    drafter.observe([state], [judged(Draft(), 1, logits([0, 2]), ())])
    assert ask(drafter, state, 1, WIDE) == ((0, 2, 4), (-1, -1, 1))


def test_a_table_comes_from_a_datastore_of_the_same_vocabulary(tmp_path):
    file = tmp_path / "a.store"
    write_datastore([[5, 6, 5, 7, 5, 7]], tiny_tokenizer(), file)
    engine = Engine(tiny(), "none")
    drafter = engine.method(f"recycling[table={file} successors=2]").drafter
    assert ask(drafter, drafter.begin(Request(prompt=(5,))), 5, WIDE)[0] == (7, 6, 5, 5)
    with pytest.raises(ModelError, match="no datastore at"):
        engine.method("recycling[table=nowhere.store]")
    with pytest.raises(SpecError, match="successors must be at least 1, got 0"):
        engine.method("recycling[successors=0]")


CYCLE = {1: (2, 3, 4), 2: (3, 4), 3: (1,), 4: ()}


@pytest.mark.parametrize(
    ("budget", "tokens", "parents"),
    [
        (Budget(0, 0), (), ()),
        (Budget(5, 2), (2, 3), (-1, 0)),
        (Budget(2, 5), (2, 3), (-1, 0)),
        (Budget(9, 9, max_rows=1), (2,), (-1,)),
        (Budget(9, 9, shape=parse_shape("2x2")), (2, 3, 3, 4, 1), (-1, -1, 0, 0, 1)),
        # The third child is asked for, the second level of 4 is empty: its nodes go elsewhere.
        (Budget(4, 2, shape=parse_shape("[-1,-1,-1,2,0,0]")), (2, 3, 4, 3), (-1, -1, -1, 0)),
        (Budget(9, 1, shape=parse_shape("3x1")), (2, 3, 4), (-1, -1, -1)),
        # Paths of 1/2, then two of 1/4 and three of 1/8 in the order they were met.
        (Budget(5, 9, shape=Shape(beam=8)), (2, 3, 3, 4, 1), (-1, -1, 0, -1, 1)),
        (Budget(6, 9, shape=Shape(beam=1)), (2, 3, 3, 4, 4, 1), (-1, -1, 0, -1, 0, 2)),
        (Budget(9, 9, shape=Shape(beam=8, least=9 / 5)), (2, 3, 3), (-1, -1, 0)),
        (Budget(9, 1, max_rows=2, shape=Shape(beam=8)), (2, 3), (-1, -1)),
        (Budget(0, 0, shape=Shape(beam=8)), (), ()),
    ],
)
def test_shapes_are_filled_best_first_within_the_budget(budget, tokens, parents):
    draft = fill(budget, 1, lambda token: halving((t, t) for t in CYCLE[token]))
    assert (draft.token_N, draft.parent_N) == (tokens, parents)
    assert all(group.drawn is Drawn.CHOSEN for group in draft.groups)


def test_what_was_emitted_against_the_ranking_comes_first():
    """Settings may forbid all that the model ranks highest, at every step alike."""
    drafter = Recycling(RecyclingConfig(successors=2))
    state = drafter.begin(Request(prompt=(1,)))
    ranked = judged(Draft(), 1, logits([2, 3]), ())
    for emitted, want in ((9, (9, 2)), (3, (2, 3))):
        drafter.observe([state], [replace(ranked, verdict=Verdict((), (emitted,)))])
        assert state.after[1] == want
    stopped = Verdict((0,), (2,), censored=True)  # the text ended on an accepted guess
    tree = judged(Draft.chosen([2]), 1, logits([2, 3], [4, 5]), (0,))
    drafter.observe([state], [replace(tree, verdict=stopped)])
    assert state.after == {1: (2, 3), 2: (4, 5)}
    engine = Engine(tiny(), "none")
    few = {"max_new_tokens": 40, "ignore_eos": True, "allowed_tokens": frozenset({3, 1, 4, 7})}
    assert engine.generate([5, 9, 11], drafter="recycling", **few).counters.passes < 20


def test_guesses_from_what_was_thrown_away_are_accepted():
    engine = Engine(tiny(), "none")
    settings = {"max_new_tokens": 60, "ignore_eos": True}
    plain = engine.generate([5, 9, 11], **settings)
    chain = engine.generate([5, 9, 11], drafter="recycling", **settings)
    tree = engine.generate([5, 9, 11], drafter="recycling[tree=6x1]", **settings)
    assert plain.tokens == chain.tokens == tree.tokens
    assert tree.counters.accepted > chain.counters.accepted > 0
