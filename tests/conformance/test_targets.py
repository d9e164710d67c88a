"""Contracts that every target keeps: a row sees the text of its slot and its own ancestors."""

from dataclasses import replace

import pytest
import torch

from outpace.errors import ModelError
from outpace.models import base
from outpace.models.base import EMBEDDINGS, KV_READ, LAYERS, TAPS, TREE
from outpace.types import ROOT, Draft, Feed, Riders
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


def entering(target, hidden_RH, layer, **more):
    """Riders below the pending token that enter with these states."""
    count = len(hidden_RH)
    return Riders((ROOT,) * count, (-1,) * count, layer=layer, enter=lambda node_RH: hidden_RH, **more)


def test_riders_may_enter_above_layer_0(target):
    """With the state that a token has there, a rider is that token's row; nobody else sees it."""
    if EMBEDDINGS not in target.can or target.num_layers < 3:
        pytest.skip("no riders")
    layer, token = 1, 7
    cache = target.new_cache()
    slot, _ = read(target, cache, TEXT[:-1])
    name = f"hidden.{layer}"
    plain = target.score([Feed.chain(slot, [TEXT[-1], token])], cache, taps=frozenset({name}))
    state_RH, node_H = plain.taps[name][1:].clone(), plain.taps[name][0].clone()
    alone_TV = plain.logits_TV.clone()
    seen = []
    for more in ({}, {"ahead_R": (1,)}, {"through": target}):
        cache.drop(slot)
        riders = entering(target, state_RH, layer, **more)
        riders = replace(riders, enter=lambda x, enter=riders.enter: seen.append(x.clone()) or enter(x))
        feed = replace(Feed.chain(slot, TEXT[-1:]), riders=riders)
        scored = target.score([feed], cache, taps=frozenset({"hidden.0", name, "hidden.-1"}))
        assert torch.equal(scored.logits_TV, alone_TV[:1]), "the pending token does not feel riders"
        assert_same(scored.rider_logits_RV[0], alone_TV[1])
        assert torch.equal(seen[-1], node_H[None]), "they are made of their node's state"
        assert all(len(one) == 1 for one in scored.taps.values()) and torch.equal(
            scored.taps[name][0], node_H
        )
        assert torch.equal(scored.taps["hidden.0"], target.embed(TEXT[-1:]))
    cache.drop(slot)
    later = entering(target, state_RH, layer, ahead_R=(3,))
    scored = target.score([replace(Feed.chain(slot, TEXT[-1:]), riders=later)], cache)
    assert not torch.allclose(scored.rider_logits_RV[0], alone_TV[1], atol=1e-3), "it stands elsewhere"


def test_riders_of_several_sequences_enter_at_layers_of_their_own(target):
    if EMBEDDINGS not in target.can or target.num_layers < 3:
        pytest.skip("no riders")
    cache = target.new_cache()
    slots = [read(target, cache, text)[0] for text in (TEXT[:-1], TEXT[:3], TEXT[:5])]
    pick = torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(0))

    def feeds(some):
        made = []
        for i in some:
            chain = Riders((ROOT, ROOT, 0), (-1, 0, -1), layer=i, enter=lambda x, i=i: x + pick[i])
            ids = Riders((ROOT,), (-1,), token_R=(4,))
            through = replace(chain, through=target) if i == 2 else chain
            made.append(replace(Feed.chain(slots[i], [3, 8]), riders=through if i else ids))
        return made

    together = target.score(feeds(range(3)), cache)
    parts = [together.of(i) for i in range(3)]
    got = [(part.logits_TV.clone(), part.rider_logits_RV.clone()) for part in parts]
    for i, (logits_TV, rider_RV) in enumerate(got):
        cache.drop(slots[i])
        one = target.score(feeds([i]), cache)
        assert_same(one.logits_TV, logits_TV)
        assert_same(one.rider_logits_RV, rider_RV)


def test_riders_that_cannot_enter_are_refused(target):
    if EMBEDDINGS not in target.can:
        pytest.skip("no riders")
    state_RH = torch.zeros(1, target.hidden_size)
    for riders in (
        entering(target, state_RH, 0),
        entering(target, state_RH, target.num_layers),
        replace(entering(target, state_RH, 1), token_R=(3,)),
        Riders((ROOT,), (-1,)),
    ):
        cache = target.new_cache()
        with pytest.raises(ModelError, match="riders"):
            target.score([replace(Feed.chain(cache.open(), TEXT), riders=riders)], cache)


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


def within(part, store):
    """Whether a tensor is a view of another one's memory."""
    return part.untyped_storage().data_ptr() == store.untyped_storage().data_ptr()


def test_keys_and_values_of_committed_rows_can_be_read(target):
    """By path and not by the order fed, without the tail, and without a copy."""
    if KV_READ not in target.can:
        with pytest.raises(ModelError, match="kv_read"):
            target.require(frozenset({KV_READ}), "a drafter")
        return
    cache, fresh = target.new_cache(), target.new_cache()
    slot, _ = read(target, cache, TEXT)
    target.score([Feed.tree(slot, 2, TREE_OF_FOUR)], cache)
    whole = [*TEXT, 2, *PATHS[-1]]
    for layer in range(target.num_layers):
        held = target.read(cache, slot, layer)
        assert len(held) == len(TEXT), "what a draft feeds is not seen"
        assert within(held.key_KDC, cache.key_store) and within(held.value_KCD, cache.value_store)
    before = target.read(cache, slot, 0).key_KDC.clone()
    cache.keep(slot, [0, *(node + 1 for node in TREE_OF_FOUR.path_of(PATHS[-1]))])
    other, _ = read(target, fresh, whole)
    for layer in range(target.num_layers):
        held, wanted = target.read(cache, slot, layer), target.read(fresh, other, layer)
        assert len(held) == len(whole)
        assert_same(held.key_KDC, wanted.key_KDC)
        assert_same(held.value_KCD, wanted.value_KCD)
        assert held.row_CY.shape == (len(whole), held.key_KDC[:, :, 0].numel() * 2)
    held = target.read(cache, slot, 0)
    assert torch.equal(held.key_KDC[:, :, : len(TEXT)], before)
    # Token 5 stands at places 0, 3 and 6: in layer 0 its values are the same, its keys are rotated.
    assert_same(held.value_KCD[:, 3], held.value_KCD[:, 0])
    assert not torch.allclose(held.key_KDC[:, :, 3], held.key_KDC[:, :, 0], atol=1e-3)
    assert len(target.read(cache, cache.open(), 0)) == 0
    with pytest.raises(ModelError, match="layer"):
        target.read(cache, slot, target.num_layers)
