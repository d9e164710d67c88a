"""Views: compiled attention gives what plain softmax over the rows named gives, and no pass keeps a view."""

import random

import pytest
import torch

from outpace.errors import ModelError
from outpace.kernels import compiled
from outpace.models import fused
from outpace.models.attention import Attention
from outpace.models.fused import FusedAttention
from outpace.models.rope import Rope, Rotation
from outpace.models.tiny import tiny
from outpace.models.views import MEAN, Choice, Rule
from outpace.types import Feed
from tests.models.test_fused import cache_of, fill, heads, span
from tests.support import put_keys

needs_code = pytest.mark.skipif(compiled.library() is None, reason="C cannot be compiled for this machine")
RULES = (
    Rule(sinks=4, window=9),
    Rule(sinks=0, window=1),
    Rule(sinks=3, window=20, count=30),
    Rule(sinks=16, window=40, count=144, run=8, kind=MEAN),
    Rule(sinks=32, window=1, count=64, run=32),
    Rule(sinks=1, window=130, count=7, kind=MEAN, copies=True),
    Rule(sinks=5, window=16, count=150, copies=True),
    Rule(sinks=32, window=16, count=96, run=32, read=16),
    Rule(sinks=3, window=16, count=60, run=3, read=6),
    Rule(sinks=4, window=16, count=60, read=128),
    Rule(sinks=4, window=16, count=60, read=8),
)
TREES = ([-1], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 1, 2, 2, 5])


def spans_of(coins, rule, choices, shape, rotation, choose=True):
    """Rows with and without a view, of several slots."""
    spans, start = [], 0
    for slot, base in enumerate((300, 333, 5)):
        one = span(slot, start, base, coins.choice(TREES))
        if slot and rule.narrows(base):
            object.__setattr__(one, "view", choices[slot].view(base, choose))
        start += len(one.stored)
        spans.append(one)
    return spans


@needs_code
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(3, 3, 64), (1, 2, 128), (2, 1, 32)])
def test_compiled_code_sees_and_chooses_what_torch_does(rule, shape, kept):
    shape = heads(*shape)
    rotation = Rotation(Rope(kind="default", dim=shape.width, theta=1e4), torch.device("cpu"))
    chosen, worst = [], 0.0
    for kind in (Attention, FusedAttention):
        choices = [Choice(rule, 2, shape, rotation) for _ in range(3)]
        spans = spans_of(random.Random(3), rule, choices, shape, rotation)
        cache = cache_of(shape, 3, kept=torch.float32 if kind is Attention else kept)
        for store in (cache.key_store, cache.value_store):
            store.copy_(store.to(kept))
        rows = sum(len(one.stored) for one in spans)
        attend = kind(cache, spans, max(4, rows), shape, frozenset({None, 50}), torch.float32)
        fill(attend)
        attend.head_TXD.copy_(attend.head_TXD.to(kept))
        chosen.append((attend(1, None)[:rows].clone(), attend(1, 50)[:rows].clone(), choices))
    (want, whole, by_torch), (got, same, by_code) = chosen
    for one, other in zip(by_torch, by_code, strict=True):
        assert torch.equal(one.row_LKN, other.row_LKN) or kept is torch.bfloat16
        assert torch.equal(one.anew_L, other.anew_L)
        torch.testing.assert_close(one.query_LX, other.query_LX)
    if all(torch.equal(a.row_LKN, b.row_LKN) for a, b in zip(by_torch, by_code, strict=True)):
        worst = float((got - want).abs().max())
        assert worst < (4e-6 if kept is torch.float32 else 1e-2)
    assert float((whole - same).abs().max()) < (4e-6 if kept is torch.float32 else 1e-2)


@pytest.fixture(params=[pytest.param("compiled", marks=needs_code), "torch"])
def target(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(fused, "library", lambda: None)
    return tiny(layers=3)


def text_of(target, length):
    coins = random.Random(1)
    cache = target.new_cache()
    slot = cache.open()
    text = [coins.randrange(target.vocab_size) for _ in range(length)]
    target.score([Feed.chain(slot, text, want=())], cache)
    cache.keep(slot, range(length))
    return cache, slot


def logits(target, cache, slot, view):
    feed = Feed(slot, (3, 4, 5, 6), (-1, 0, 0, 1), view=view)
    got = target.score([feed], cache).logits_TV.clone()
    cache.drop(slot)
    return got


@pytest.mark.parametrize("rule", RULES[2:])
def test_what_a_view_leaves_out_is_not_seen_and_what_it_shows_is(target, rule):
    """Rows left out may hold anything; those seen may not."""
    cache, slot = text_of(target, 300)
    choice = target.choice(rule)
    first = logits(target, cache, slot, choice.view(300))
    seen = {int(i) for i in choice.row_LKN.flatten()} | set(range(rule.start(300), 300))
    kept = [store.clone() for store in (cache.key_store, cache.value_store)]
    again = choice.view(300)
    assert again.choice is None, "chosen already"
    for harmed, same in ((sorted(set(range(300)) - seen), True), ([0], False)):
        put_keys(cache, slice(None), slot, harmed, 7.0)
        cache.value_store[:, slot, :, harmed] = 7.0
        kept_apart = rule.copies and fused.library() is not None
        assert torch.equal(first, logits(target, cache, slot, again)) == (same or kept_apart), harmed
        cache.key_store.copy_(kept[0])
        cache.value_store.copy_(kept[1])


def test_a_view_that_shows_all_gives_what_no_view_gives(target):
    cache, slot = text_of(target, 200)
    whole = logits(target, cache, slot, None)
    rule = Rule(sinks=8, window=1, count=184, run=8)
    assert rule.narrows(201) and not Rule(sinks=8, window=8, count=184).narrows(200)
    seen = logits(target, cache, slot, target.choice(rule).view(200))
    torch.testing.assert_close(seen, whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("least, anew", [(2.0, True), (-1.0, False)])
def test_a_choice_is_kept_while_queries_point_the_same_way(target, least, anew):
    cache, slot = text_of(target, 300)
    choice = target.choice(Rule(sinks=2, window=8, count=16, least=least))
    logits(target, cache, slot, choice.view(300))
    assert choice.anew_L.all(), "nothing was chosen before"
    rows = choice.row_LKN.clone()
    logits(target, cache, slot, choice.view(300, choose=True))
    assert bool(choice.anew_L.all()) == bool(choice.anew_L.any()) == anew
    assert torch.equal(rows, choice.row_LKN)


def test_copies_are_made_anew_with_the_choice(target):
    """Until then nothing is read where it lay."""
    cache, slot = text_of(target, 300)
    rules = [Rule(sinks=2, window=8, count=140, copies=copies) for copies in (False, True)]
    lying, kept = (target.choice(rule) for rule in rules)
    assert torch.equal(
        logits(target, cache, slot, lying.view(300)), logits(target, cache, slot, kept.view(300))
    )
    put_keys(cache, slice(None), slot, range(200), cache.first_keys(slice(None), slot, 200).flip(3))
    cache.value_store[:, slot, :, :200] = cache.value_store[:, slot, :, :200].flip(2)
    stale = logits(target, cache, slot, kept.view(300))
    assert torch.equal(stale, logits(target, cache, slot, lying.view(300))) == (fused.library() is None)
    anew = [logits(target, cache, slot, one.view(300, choose=True)) for one in (lying, kept)]
    assert torch.equal(*anew)


def test_votes_do_not_see_how_high_the_scores_of_a_head_lie():
    """A head whose scores are all higher has no more votes: TokenSelect's soft vote."""
    shape = heads(1, 2, 32)
    rotation = Rotation(Rope(kind="default", dim=32, theta=1e4), torch.device("cpu"))
    rows = {}
    for lift in (0.0, 50.0):
        cache = cache_of(shape, 1)
        choice = Choice(Rule(sinks=0, window=1, count=20), 2, shape, rotation)
        one = span(0, 0, 300, [-1])
        object.__setattr__(one, "view", choice.view(300))
        attend = Attention(cache, [one], 4, shape, frozenset({None}), torch.float32)
        fill(attend)
        cache.key_store[1, 0, 0, 0] = 1.0  # a coordinate in which all keys agree
        attend.head_TXD[0, 0, 0] = lift  # lifts all scores of the first head
        attend(1, None)
        rows[lift] = choice.row_LKN[1].clone()
    assert torch.equal(rows[0.0], rows[50.0])


def test_views_that_do_not_fit_are_refused(target):
    cache, slot = text_of(target, 100)
    choice = target.choice(Rule(sinks=2, window=8, count=16))
    assert choice.view(20) is None, "all is seen"
    view = choice.view(100)
    cache.truncate(slot, 60)
    with pytest.raises(ModelError, match="does not fit 60 committed tokens"):
        logits(target, cache, slot, view)
    assert choice.view(60).choice is choice, "chosen anew"
    with pytest.raises(ValueError, match="multiples of 8"):
        Rule(sinks=2, window=8, count=16, run=8)
