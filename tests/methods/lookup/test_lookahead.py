import pytest
import torch

from outpace import Engine, ModelError, SpecError
from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.methods.lookup.lookahead import Lookahead, LookaheadConfig, Pool, comb
from outpace.models.base import EMBEDDINGS, TREE
from outpace.models.tiny import TableTarget, tiny
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import parse_shape
from outpace.types import ROOT, Budget, Draft, Drawn, Feed, Outcome, Riders, Scored, Verdict

PARAMS = SamplingParams().resolved(None)
TREE_BUDGET = Budget(6, 2, shape=parse_shape("3x1"))


def row(state, text, budget):
    return DraftRow(
        state,
        text,
        budget,
        KeyedCoins(0, 0, Stream.DRAFT),
        Warp(PARAMS, text, frozenset(), 100),
        Drawn.CHOSEN,
    )


def test_the_pool_keeps_the_newest_and_is_bounded():
    pool = Pool(guesses=2, size=3)
    for ngram in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7]):
        pool.add(ngram)
    assert pool.after(1) == [(6, 7), (2, 3)] and len(pool) == 2  # 4 5 was the oldest
    pool.add([2, 8, 8])
    pool.add([1, 2, 3])  # used again, so 2 is now the longest unused
    pool.add([3, 9, 9])
    pool.add([4, 9, 9])
    assert len(pool) <= 3 and pool.after(2) == [] and pool.after(4) == [(9, 9)]
    assert pool.after(77) == []


def window_of(paths, riders, target):
    """The tokens that each rider sees below the committed text, itself the last, by its chain."""
    out = []
    for token, after in zip(riders.token_R, riders.after_R, strict=True):
        out.append([*(out[after] if after >= 0 else paths), token])
    return out


def test_a_rider_sees_level_0_up_to_its_column_and_its_own_column():
    """The mask of the paper, and the logits of a plain pass over just these tokens."""
    a, b, c = [20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43]
    riders = comb(list(zip(a, b, c, strict=True)))
    seen = window_of([20], riders, None)
    by_hand = [
        *([*a[: i + 1]] for i in range(1, 4)),
        *([*a[: i + 1], b[i]] for i in range(4)),
        *([*a[: i + 1], b[i], c[i]] for i in range(4)),
    ]
    assert seen == by_hand and set(riders.node_R) == {ROOT}
    target, text = tiny(), [5, 9, 11]
    cache = target.new_cache()
    slot = cache.open()
    target.score([Feed.chain(slot, text)], cache)
    cache.keep(slot, range(3))
    draft = Draft.chosen([50, 60, 51], [-1, -1, 0])
    alone = target.score([Feed.tree(slot, 20, draft)], cache).logits_TV.clone()
    cache.drop(slot)
    ridden = Draft(draft.token_N, draft.parent_N, draft.groups, riders=riders)
    scored = target.score([Feed.tree(slot, 20, ridden)], cache).of(0)
    assert torch.equal(scored.logits_TV, alone), "nobody sees a rider"
    fresh = target.new_cache()
    paths = [
        Feed.chain(fresh.open(), [*text, *tokens], want=(len(text) + len(tokens) - 1,)) for tokens in by_hand
    ]
    expected = target.score(paths, fresh).logits_TV
    torch.testing.assert_close(scored.rider_logits_RV, expected, atol=2e-4, rtol=2e-4)
    assert not torch.allclose(scored.rider_logits_RV, expected.roll(1, 0), atol=0.1)


def test_the_window_is_harvested_and_moves_with_the_text():
    drafter = Lookahead(LookaheadConfig(window=3, ngram=3))
    state = drafter.begin(Request(prompt=(1, 2)))
    state.columns = [[0, 11], [20, 21], [30, 31]]
    draft = drafter.propose([row(state, [1, 2], Budget(4, 4))])[0]
    assert len(draft) == 0 and draft.riders.token_R == (20, 30, 11, 21, 31)
    scored = torch.zeros(5, 50)
    for rider, token in zip((2, 3, 4), (12, 22, 32), strict=True):  # the deepest level
        scored[rider, token] = 1.0
    for emitted, want in (
        ((3,), [[11, 12], [21, 22], [31, 32]]),
        ((3, 4), [[21, 22], [31, 32], [32, 32]]),  # position p + 4 is 32's in both columns
        ((3, 4, 5, 6, 7), [[31, 32], [32, 32], [32, 32]]),  # all settled: any start will do
    ):
        state.columns = [[0, 11], [20, 21], [30, 31]]
        state.tail.clear()
        kept = tuple(range(len(emitted) - 1))
        drafter.observe(
            [state],
            [
                Outcome(
                    draft,
                    Scored(torch.zeros(1, 50), (0, 1), rider_logits_RV=scored),
                    Verdict(kept, emitted),
                    (2, *emitted[:-1]),
                    (0,),
                    1,
                )
            ],
        )
        assert state.columns == want
    assert state.pool.after(2) == [(11, 12)] and state.pool.after(30) == [(31, 32)]
    drafter.observe(
        [state], [Outcome(Draft(), Scored(torch.zeros(1, 50), (0, 1)), Verdict((), (8,)), (7,), (0,), 6)]
    )
    assert state.columns == want, "no riders, no news"
    other = Lookahead(LookaheadConfig(window=5))
    (draft,) = other.propose([row(other.begin(Request(prompt=(1, 2))), [1, 2], Budget(4, 4))])
    assert draft.memo.width == 5
    drafter.observe(
        [state],
        [
            Outcome(
                draft,
                Scored(torch.zeros(1, 50), (0, 1), rider_logits_RV=torch.zeros(9, 50)),
                Verdict((), (8,)),
                (7,),
                (0,),
                6,
            )
        ],
    )
    assert state.columns == want, "another one's window is none of its own"


def test_drafts_are_the_ngrams_of_the_pending_token_as_a_tree():
    drafter = Lookahead(LookaheadConfig(window=1, ngram=3, guesses=3))
    state = drafter.begin(Request(prompt=(1, 2, 3, 1, 4, 5, 1, 4, 6, 1), num_cached=10))
    draft = drafter.propose([row(state, [1], TREE_BUDGET)])[0]
    assert (draft.token_N, draft.parent_N) == ((4, 2, 6, 3), (-1, -1, 0, 1))
    chain = drafter.propose([row(state, [1], Budget(9, 9))])[0]
    assert chain.token_N == (4, 6)  # the newest; no longer than an n-gram
    assert all(group.drawn is Drawn.CHOSEN for group in draft.groups)
    assert len(drafter.propose([row(state, [9], TREE_BUDGET)])[0]) == 0


@pytest.mark.parametrize(
    ("max_rows", "positions", "width"),
    [
        (1 << 30, 1000, 4),
        (2, 1000, 0),
        (3, 1000, 1),
        (6, 1000, 2),
        (9, 1000, 3),
        (11, 1000, 3),
        (12, 1000, 4),
        (99, 11, 4),
        (99, 9, 3),
        (99, 7, 1),
        (99, 6, 0),
    ],
)
def test_riders_keep_to_the_rows_and_the_context_that_are_left(max_rows, positions, width):
    drafter = Lookahead(LookaheadConfig(window=4, ngram=4), max_positions=positions)
    text = [1, 2, 3, 1, 2]
    state = drafter.begin(Request(prompt=tuple(text), num_cached=5))
    draft = drafter.propose([row(state, text, Budget(1, 1, max_rows=max_rows))])[0]
    riders = draft.riders or Riders((), (), ())
    count = len(riders.token_R)
    assert count == max(0, width - 1 + width * 2)
    assert len(draft) == 1 and count + 1 <= max_rows
    depth = max((len(path) for path in window_of([], riders, None)), default=0)
    assert len(text) - 1 + depth < positions
    assert not drafter.propose([row(state, text, Budget(0, 0))])[0].riders


def test_a_text_may_begin_with_nothing():
    """A prompt that `cross_vocabulary` cannot spell in the tokens of its model."""
    drafter = Lookahead(LookaheadConfig(window=1, ngram=3))
    draft = drafter.propose([row(drafter.begin(Request(prompt=())), [1], TREE_BUDGET)])[0]
    assert len(draft) == 0 and draft.riders is not None


def test_a_target_without_riders_is_refused_by_name():
    assert Lookahead.traits.needs == {TREE, EMBEDDINGS}
    with pytest.raises(ModelError, match="'lookahead' needs embeddings, which table:0"):
        Engine(TableTarget.random(0, 5), "lookahead")
    with pytest.raises(SpecError, match="ngram must be at least 3, got 2"):
        Engine(tiny(), "lookahead[ngram=2]")


def test_guesses_of_the_window_are_accepted():
    """More than of the n-grams of the text alone, and the text stays the same."""
    engine = Engine(tiny(), "none")
    settings = {"max_new_tokens": 60, "ignore_eos": True}
    plain = engine.generate([5, 9, 11], **settings)
    spec = "lookahead[window=6 tree=4x1]"
    fast = engine.generate([5, 9, 11], drafter=spec, **settings)
    engine.method(spec).drafter._max_positions = 0  # no room for riders
    alone = engine.generate([5, 9, 11], drafter=spec, **settings)
    assert fast.tokens == alone.tokens == plain.tokens
    assert fast.counters.accepted > alone.counters.accepted
