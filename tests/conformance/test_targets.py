"""Contracts that every target keeps: a row sees the text of its slot and its own ancestors."""

import pytest
import torch

from outpace.errors import ModelError
from outpace.models import base
from outpace.models.base import LAYERS, TAPS, TREE
from outpace.types import Draft, Feed
from tests.conformance.targets import TARGETS

ABILITIES = {value for name, value in vars(base).items() if name.isupper() and isinstance(value, str)}
TEXT = [5, 9, 11, 5, 9, 11, 5, 9, 2, 7]
TREE_OF_FOUR = Draft.chosen([3, 4, 5, 6], [-1, -1, 0, 2])
PATHS = [[], [3], [4], [3, 5], [3, 5, 6]]
"""Tokens down to each row of the tree."""


@pytest.fixture(params=TARGETS)
def target(request):
    return TARGETS[request.param]()


def read(target, cache, tokens):
    """A new slot that holds these tokens; their logits."""
    slot = cache.open()
    logits_TV = target.score([Feed.chain(slot, tokens)], cache).logits_TV.clone()
    cache.keep(slot, range(len(tokens)))
    return slot, logits_TV


def alone(target, tokens):
    """Logits after these tokens, read in one pass by nobody else."""
    return read(target, target.new_cache(), tokens)[1][-1]


def assert_same(got_V, want_V):
    assert torch.allclose(got_V.double(), want_V.double(), atol=2e-4 * float(want_V.abs().max())), (
        (got_V - want_V).abs().max()
    )


def test_it_describes_itself(target):
    _, logits_TV = read(target, target.new_cache(), TEXT)
    assert logits_TV.shape == (len(TEXT), target.vocab_size)
    assert target.name and target.digest and target.max_positions > len(TEXT)
    assert target.can <= ABILITIES


def test_a_text_may_be_read_in_pieces(target):
    whole = read(target, target.new_cache(), TEXT)[1]
    cache = target.new_cache()
    slot = cache.open()
    for start, stop in ((0, 1), (1, 7), (7, 10)):
        got = target.score([Feed.chain(slot, TEXT[start:stop])], cache).logits_TV
        assert_same(got, whole[start:stop])
        cache.keep(slot, range(stop - start))
    assert cache.ids(slot) == TEXT


def test_a_row_sees_its_own_ancestors_and_nothing_else(target):
    assert TREE in target.can, "targets that take chains alone need a case of their own"
    cache = target.new_cache()
    slot, _ = read(target, cache, TEXT[:-1])
    logits_TV = target.score([Feed.tree(slot, TEXT[-1], TREE_OF_FOUR)], cache).logits_TV
    for row, path in enumerate(PATHS):
        assert_same(logits_TV[row], alone(target, [*TEXT, *path]))


def test_what_is_kept_of_a_tree_is_what_follows(target):
    cache = target.new_cache()
    slot, _ = read(target, cache, TEXT[:-1])
    target.score([Feed.tree(slot, TEXT[-1], TREE_OF_FOUR)], cache)
    cache.keep(slot, [0, 1, 3])  # the pending token, 3, 5
    assert cache.ids(slot) == [*TEXT, 3, 5]
    assert_same(target.score([Feed.chain(slot, [8])], cache).logits_TV[-1], alone(target, [*TEXT, 3, 5, 8]))


def test_what_is_dropped_leaves_no_trace(target):
    cache = target.new_cache()
    slot, _ = read(target, cache, TEXT)
    for spoil in (lambda: cache.drop(slot), lambda: cache.truncate(slot, len(TEXT))):
        target.score([Feed.chain(slot, [1, 2, 3])], cache)
        spoil()
    assert_same(target.score([Feed.chain(slot, [8])], cache).logits_TV[-1], alone(target, [*TEXT, 8]))


def test_slots_do_not_see_each_other(target):
    cache = target.new_cache()
    texts = [TEXT, [1], TEXT[:4], [7, 7, 7, 7, 7, 7]]
    slots = [read(target, cache, text)[0] for text in texts]
    feeds = [Feed.chain(slot, [3, 4][: 1 + i % 2]) for i, slot in enumerate(slots)]
    scored = target.score(feeds, cache)
    for i, text in enumerate(texts):
        assert_same(scored.of(i).logits_TV[-1], alone(target, [*text, *[3, 4][: 1 + i % 2]]))


def test_sub_layers_can_be_left_out_over_the_same_cache(target):
    """What is left of it attends to what the whole target left; leaving out whole layers is a variant."""
    if LAYERS not in target.can or target.num_layers < 3:
        pytest.skip("it leaves out no layers")
    cut, few = target.without(attentions=[1], mlps=[1]), target.variant(layers=[0, 2])
    assert cut.weight_bytes == few.weight_bytes < target.weight_bytes
    assert_same(alone(cut, TEXT), alone(few, TEXT))
    for names in ({"attentions": [1], "mlps": []}, {"attentions": [], "mlps": [0, 1]}):
        part = target.without(**names)
        assert not torch.allclose(alone(part, TEXT), alone(target, TEXT))
        cache = target.new_cache()
        slot, _ = read(target, cache, TEXT[:-1])
        logits_TV = part.score([Feed.chain(slot, TEXT[-1:])], cache).logits_TV.clone()
        cache.drop(slot)
        whole_TV = target.score([Feed.chain(slot, TEXT[-1:])], cache).logits_TV
        assert_same(whole_TV[-1], alone(target, TEXT)), "it left no trace"
        assert not torch.allclose(logits_TV[-1], alone(part, TEXT)), "it read the target's keys"
    assert_same(alone(target.without(attentions=[], mlps=[]), TEXT), alone(target, TEXT))


def test_what_it_cannot_do_is_refused(target):
    cache = target.new_cache()
    slot = cache.open()
    if TAPS not in target.can:
        with pytest.raises(ModelError):
            target.score([Feed.chain(slot, TEXT)], cache, taps=frozenset({"attn_in.0"}))
    if LAYERS not in target.can:
        with pytest.raises(ModelError):
            target.variant(layers=[0])
        with pytest.raises(ModelError):
            target.without(attentions=[0], mlps=[])
    missing = frozenset({"telepathy"})
    with pytest.raises(ModelError, match="somebody needs telepathy"):
        target.require(missing, "somebody")


def test_the_test_of_ancestors_can_fail(monkeypatch):
    """A planted bug: the rows of a tree see each other as a chain does."""
    target = TARGETS["decoder"]()
    monkeypatch.setattr(
        Feed, "tree", classmethod(lambda cls, slot, token, draft: Feed.chain(slot, [token, *draft.token_N]))
    )
    with pytest.raises(AssertionError):
        test_a_row_sees_its_own_ancestors_and_nothing_else(target)
