"""Compiled attention gives what products give, and a row the same bits whatever is beside it."""

import random
from itertools import pairwise

import pytest
import torch

from outpace.cache.base import PAGE
from outpace.cache.dense import DenseCache
from outpace.kernels import compiled
from outpace.models import fused
from outpace.models.attention import Attention, HeadShape, Span
from outpace.models.fused import FusedAttention, attention, fits, stored

needs_code = pytest.mark.skipif(compiled.library() is None, reason="C cannot be compiled for this machine")
BASES = (0, 1, 5, 63, 64, 100, 126, 127, 128, 200, 255, 300)
ROWS = 512
GROUPED, WIDE, MANY = (3, 3, 64), (1, 2, 256), (1, 32, 16)


def heads(kv, group, width, softcap=None):
    return HeadShape(kv=kv, group=group, width=width, scale=width**-0.5, softcap=softcap)


def span(slot, start, base, parents, first=0):
    """Rows of a slot, from the ``first`` of its tail on."""
    depths = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    chain = depths == list(range(len(depths)))
    stored = range(base + first, base + len(parents))
    return Span(slot, start, stored, base, parents, depths, chain)


def batch(coins, slots):
    """Chains and trees of some length behind texts of some length."""
    spans, start = [], 0
    for slot in range(slots):
        count, chain = coins.choice((1, 1, 2, 5, 9, 40)), coins.random() < 0.4
        parents = [-1, *(i - 1 if chain else coins.randrange(i) for i in range(1, count))]
        spans.append(span(slot, start, coins.choice(BASES), parents, first=count // 4))
        start += len(spans[-1].stored)
    return spans


def cache_of(shape, slots, seed=0, kept=torch.float32, tiled=False):
    """One of the same keys, in tiles or not."""
    cache = DenseCache(2, shape.kv, shape.width, dtype=kept, tiled=tiled)
    cache.resize(slots, ROWS)
    coins = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, slots, shape.kv, shape.width, ROWS, generator=coins)
    cache.key_store.copy_(keys.unflatten(4, (-1, PAGE)).transpose(3, 4) if tiled else keys)
    cache.value_store.copy_(torch.randn(cache.value_store.shape, generator=coins))
    return cache


def fill(attend, seed=1):
    coins = torch.Generator().manual_seed(seed)
    attend.head_TXD.copy_(torch.randn(attend.head_TXD.shape, generator=coins))


@needs_code
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [GROUPED, WIDE, MANY, (2, 4, 80), (4, 1, 32), (2, 2, 64, 1.5)])
@pytest.mark.parametrize("windows", [(None,), (None, 7), (50, 200)])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
def test_it_gives_what_products_of_matrices_give(shape, windows, kept, flat, tiled):
    """From keys and values in bfloat16 what products give from the same numbers, but for the
    rounding of queries and weights. There is none where all weights are 1.
    """
    shape, worst, sums = heads(*shape), 0.0, []
    for seed in range(6):
        spans = batch(random.Random(seed), 4)
        rows = sum(len(one.stored) for one in spans)
        caches = [cache_of(shape, 4, seed), cache_of(shape, 4, seed, kept, tiled)]
        for store in (caches[0].key_store, caches[0].value_store):
            store.copy_(store.to(kept))
        both = [
            kind(cache, spans, max(4, rows), shape, frozenset(windows), torch.float32)
            for kind, cache in zip((Attention, FusedAttention), caches, strict=True)
        ]
        for attend in both:
            fill(attend, seed)
            new = attend.head_TXD[:, shape.queries :]
            new.copy_(new.to(kept))
            if flat:
                attend.head_TXD[:, : shape.queries] = 0
        for window in windows:
            want, got = (attend(1, window)[:rows].clone() for attend in both)
            worst = max(worst, float((got - want).abs().max()))
            sums.append(float((got - want).abs().mean()))
        stored = [(one.first_keys(1, slice(4), ROWS), one.value_store) for one in caches]
        assert all(torch.equal(one, other.float()) for one, other in zip(*stored, strict=True))
    exact = flat or kept is torch.float32
    assert worst < (4e-6 if exact else 1e-2)
    assert worst > 0.0 or flat, "two ways of computing"
    assert max(sums) < (4e-7 if exact else 1e-3)


@needs_code
def test_new_keys_and_values_are_rounded_to_what_the_cache_keeps():
    shape = heads(*GROUPED)
    cache = cache_of(shape, 1, kept=torch.bfloat16)
    attend = FusedAttention(cache, [span(0, 0, 130, [-1, 0, 1])], 4, shape, frozenset({None}), torch.bfloat16)
    fill(attend)
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625, 0.0])  # halfway: to even
    attend.head_TXD[0, shape.queries, :4] = ties
    attend(1, None)
    new = attend.head_TXD[:3, shape.queries :].to(torch.bfloat16).split(shape.kv, 1)
    for store, want in zip(cache.by_row, new, strict=True):
        assert torch.equal(store[1, 0, 130:133], want)
    assert cache.by_row[0][1, 0, 130, 0, :4].tolist() == [1.0, 1.015625, -1.0, 0.0]


@needs_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # of what is kept, too
def test_a_row_gets_the_same_bits_whatever_is_beside_it(dtype):
    """Alone, in a batch, as a chain, in a tree over the border of a block, with more threads, in tiles."""
    shape = heads(*GROUPED)
    head = torch.randn(64, 15, 64, generator=torch.Generator().manual_seed(3))

    def run(spans, rows, threads=1, tiled=False):
        cache = cache_of(shape, 3, kept=dtype, tiled=tiled)
        for one in spans:  # what nobody sees does no harm
            cache.value_store[:, one.slot, :, one.stored.stop :] = float("nan")
        attend = FusedAttention(cache, spans, max(4, len(rows)), shape, frozenset({None}), torch.float32)
        attend.head_TXD[: len(rows)] = head[rows]
        attend._threads = threads
        return attend(0, None)[: len(rows)].clone()

    for base in BASES:
        coins = random.Random(base)
        parents = [-1, *(coins.randrange(i) for i in range(1, 20))]
        tree, other = span(1, 4, base, parents), span(0, 0, 77, [-1, 0, 0, 1])
        beside = run([other, tree], [*range(40, 44), *range(20)], threads=2)[4:]
        alone = run([span(1, 0, base, parents)], list(range(20)))
        assert torch.equal(beside, alone), base
        assert torch.equal(run([span(1, 0, base, parents)], list(range(20)), tiled=True), alone), base
        for leaf in set(range(20)) - set(parents):
            path, at = [], leaf
            while at >= 0:
                path.insert(0, at)
                at = parents[at]
            chain = run([span(1, 0, base, list(range(-1, len(path) - 1)))], path)
            assert torch.equal(chain, alone[path]), (base, leaf)


@needs_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("base,most,whole", [(300, 127, 1), (1300, 127, 2), (300, 90, 0)])
def test_many_rows_have_the_same_bits_as_few(dtype, chain, base, most, whole):
    """Of many, all that a row sees is one piece of work, and so are more rows; of few, each block is."""
    shape, coins = heads(*GROUPED), random.Random(base)
    parents = [-1, *(i - 1 if chain else coins.randrange(max(0, i - 9), i) for i in range(1, most))]
    head = torch.randn(most, 15, 64, generator=torch.Generator().manual_seed(3))

    def run(ends, threads):
        cache = DenseCache(1, shape.kv, shape.width, dtype=dtype, tiled=True)
        cache.resize(1, 1536)
        for seed, store in enumerate((cache.key_store, cache.value_store)):
            store.copy_(torch.randn(store.shape, generator=torch.Generator().manual_seed(seed)))
        outs, ways = [], set()
        for first, end in pairwise(ends):
            spans = [span(0, 0, base, parents[:end], first)]
            attend = FusedAttention(cache, spans, end - first, shape, frozenset({None}), torch.float32)
            attend.head_TXD.copy_(head[first:end])
            attend._threads = threads
            outs.append(attend(0, None).clone())
            ways.add(attend._views[None].told.whole)
        return torch.cat(outs), ways

    many, piece = run((0, most), 2)
    few, parts = run((0, 42, 84, most), 1)
    assert (piece, parts) == ({whole}, {0})
    assert torch.equal(many, few)


@needs_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("same", [100, 128, 300])
def test_rows_that_two_slots_share_are_read_from_one(dtype, same):
    """Whole blocks of them: what stands in the own slot there is not looked at, and all else is."""
    shape, parents = heads(*GROUPED), [-1, 0, 0, 1, 2, 4]
    outs = []
    for twins in (False, True):
        cache = cache_of(shape, 2, kept=dtype)
        slots = [cache.open(), cache.open()]
        for store in cache.by_row:
            store[:, 1, :same] = store[:, 0, :same]
            if twins:
                store[:, 1, : same // 128 * 128] = torch.nan
        cache.slot(slots[1]).twin = (0, same if twins else 0)
        attend = FusedAttention(cache, [span(1, 0, 301, parents)], 6, shape, frozenset({None}), dtype)
        fill(attend)
        outs.append(attend(0, None)[:6].clone())
    assert torch.equal(*outs) and bool(torch.isfinite(outs[0]).all())


@needs_code
def test_equal_bits_say_something():
    """Keys in another order have the same softmax, up to rounding."""
    shape = heads(*GROUPED)
    outs = []
    for order in (range(300), [*range(1, 300), 0]):
        cache = cache_of(shape, 1)
        for store in cache.by_row:
            store[:, 0, :300] = store[:, 0, list(order)]
        attend = FusedAttention(cache, [span(0, 0, 300, [-1])], 4, shape, frozenset({None}), torch.float32)
        fill(attend)
        outs.append(attend(0, None)[0].clone())
    assert not torch.equal(*outs)
    torch.testing.assert_close(*outs)


@needs_code
def test_what_it_does_not_know_is_left_to_products(monkeypatch):
    usual = heads(*GROUPED)
    cache = cache_of(usual, 1)
    spans, windows = [span(0, 0, 3, [-1])], frozenset({None})

    def kind(shape=usual, dtype=torch.float32):
        return type(attention(cache, spans, 4, shape, windows, dtype))

    assert kind() is kind(dtype=torch.bfloat16) is FusedAttention
    assert kind(dtype=torch.float64) is Attention
    cpu = torch.device("cpu")
    assert not fits(heads(1, 33, 16), torch.float32, cpu)
    assert not fits(heads(1, 1, 24), torch.float32, cpu)
    assert not fits(usual, torch.float32, torch.device("meta"))
    assert stored(usual, torch.bfloat16, cpu) is torch.bfloat16
    assert stored(usual, torch.float32, cpu) is torch.float32
    monkeypatch.setattr(fused, "library", lambda *name: None)
    assert kind() is Attention
    assert stored(usual, torch.bfloat16, cpu) is torch.float32, "what products multiply"
