"""Lists of operations of drafters give what torch gives, row by row the same bits."""

from array import array

import pytest
import torch
from torch.nn import functional as F

from outpace.cache.dense import DenseCache
from outpace.models.attention import Attention, HeadShape, Span
from outpace.models.packed import Linear
from outpace.models.plan import ALL, WANTED, Plan
from outpace.models.products import KINDS, store_rows, works
from outpace.models.rope import Rope, Rotation
from outpace.models.rowwise import Norm, gated
from outpace.models.seen import Seen
from outpace.models.tiny import tiny
from tests.models.test_products import blocks

WIDE, NARROW = 64, 48
HEADS = HeadShape(2, 2, 16, 0.25, None)
compiled = pytest.mark.skipif(not works(), reason="C cannot be compiled for this machine")


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def net(norm, linear, more):
    """Two rows side by side, normed apart, multiplied, gated, bent; and the formula of it."""
    plan = Plan()
    x, y = plan.lent(WIDE), plan.lent(WIDE)
    both = plan.fresh(2 * WIDE)
    plan.norm(norm, x, plan.columns(both, 0, WIDE))
    right = plan.norm(norm, y, plan.columns(both, WIDE, WIDE))
    wide = plan.product(linear, both)
    out = plan.product(more, plan.gate("silu", wide))
    plan.add(plan.copy(right), out)
    plan.bend(right, out)
    plan.give(plan.pick(out))

    def formula(x_TH, y_TH, picked):
        normed = norm(y_TH.clone())
        got = more(gated("silu", linear(torch.cat([norm(x_TH.clone()), normed], 1))))
        return (got + normed + F.silu(normed))[list(picked)]

    return plan, formula


@compiled
@pytest.mark.parametrize("rows,picked", [(1, [0]), (5, [4, 0, 0]), (40, range(40)), (3, [])])
def test_operations_agree_with_torch(rows, picked):
    norm = Norm(numbers(WIDE, seed=1), tiny().config)
    plan, formula = net(norm, Linear(numbers(2 * NARROW, 2 * WIDE) / 8), Linear(numbers(WIDE, NARROW) / 8))
    x_TH, y_TH = numbers(rows, WIDE, seed=2), numbers(rows, WIDE, seed=3)
    before = x_TH.clone(), y_TH.clone()
    assert plan.ready
    for _ in range(2):  # what is kept from the first run does no harm
        (got,) = plan.run((rows, len(picked)), (x_TH, y_TH), picked)
        torch.testing.assert_close(got, formula(x_TH, y_TH, picked), atol=1e-5, rtol=1e-5)
    assert torch.equal(x_TH, before[0]) and torch.equal(y_TH, before[1]), "what is lent stays as it is"
    assert not got.is_inference()
    for i, row in enumerate(picked):
        (alone,) = plan.run((1, 1), (x_TH[row : row + 1], y_TH[row : row + 1]), [0])
        assert torch.equal(alone[0], got[i])


@compiled
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_beside_its_products_has_the_bits_of_one_after_the_other(kind, parts, set_threads):
    """Each a call of its own; the gate and its factor are one matrix or two. Of many rows two threads have
    some of their own, by matrix units.
    """
    halves = [store_rows(kind, blocks(kind, 256, 512, seed)[0], 512) for seed in range(2)]
    if parts == 1:
        raw = torch.cat([blocks(kind, 256, 512, seed)[0] for seed in range(2)])
        halves = [store_rows(kind, raw, 512)]
    gate_up = Linear.stored(halves, numbers(512, seed=5), torch.float32)
    down = Linear.stored([store_rows(kind, blocks(kind, 72, 256)[0], 256)], None, torch.float32)
    for activation in ("silu", "gelu_tanh"):
        plan = Plan()
        x = plan.lent(512)
        plan.give(plan.product(down, plan.gate(activation, plan.product(gate_up, x))))
        for rows, threads in ((1, 1), (3, 1), (33, 1), (150, 1), (220, 2)):
            set_threads(threads)
            x_TH = numbers(rows, 512, seed=rows)
            (got,) = plan.run((rows, 0), (x_TH,))
            assert torch.equal(got, down(gated(activation, gate_up(x_TH))))
            few = [down(gated(activation, gate_up(some))) for some in x_TH.split(40)]
            assert torch.equal(got, torch.cat(few))


@compiled
def test_rows_of_another_width_are_refused():
    norm = Norm(numbers(WIDE, seed=1), tiny().config)
    plan, _ = net(norm, Linear(numbers(2 * NARROW, 2 * WIDE)), Linear(numbers(WIDE, NARROW)))
    with pytest.raises(AssertionError):
        plan.run((2, 1), (numbers(2, WIDE), numbers(2, NARROW)), [0])


@compiled
def test_what_it_cannot_do_is_not_ready():
    norm = Norm(numbers(WIDE, seed=1), tiny().config)
    plain = Linear(numbers(WIDE, NARROW), packed=False)
    assert not net(norm, Linear(numbers(2 * NARROW, 2 * WIDE)), plain)[0].ready
    narrow = Plan()
    narrow.norm(Norm(numbers(20), tiny().config), narrow.lent(20))
    assert not narrow.ready


def begun(length):
    """Two slots of random keys and values, one of them ``length`` long."""
    cache = DenseCache(1, HEADS.kv, HEADS.width)
    for slot, count in enumerate((length, 7)):
        cache.open()
        cache.append(slot, [0] * count, range(-1, count - 1))
        cache.keep(slot, range(count))
        for i, store in enumerate(cache.by_row):
            store[0, slot, :count] = numbers(count, HEADS.kv, HEADS.width, seed=slot + 2 * i)
    return cache


def spans_of(cache, feeds):
    """Spans of tails with these parents."""
    out, start = [], 0
    for slot, parents in feeds:
        base = len(cache.slot(slot).ids)
        stored = cache.append(slot, [0] * len(parents), parents)
        depths = list(cache.slot(slot).tail_depths)
        out.append(Span(slot, start, stored, base, list(parents), depths, depths == list(range(len(depths)))))
        start += len(parents)
    return out


@compiled
@pytest.mark.parametrize("wanted", [None, [2], [0, 3, 6], [1, 2, 3, 4, 5], [5]])
@pytest.mark.parametrize("length", [3, 140])
def test_attention_agrees_with_torch(wanted, length):
    rotation = Rotation(Rope(kind="default", theta=1e4, dim=16), torch.device("cpu"))
    plan = Plan(HEADS, rotation)
    out = plan.attend(plan.copy(plan.lent(8 * 16)))
    plan.give(plan.pick(out) if wanted else out)
    feeds, offsets = [(0, [-1, 0, 0, 2]), (1, [-1, 0, 1])], [5, 0]
    given = numbers(7, 8 * 16, seed=9)
    caches = [begun(length) for _ in range(2)]
    spans = [spans_of(cache, feeds) for cache in caches]
    counts = (7, len(wanted) if wanted else 0)
    at = array("q", [o + p for span, o in zip(spans[1], offsets, strict=True) for p in span.positions])
    rows = None if wanted is None else array("q", wanted)
    seen = Seen(cache=caches[0], spans=spans[0], positions=at, wanted=rows)
    (got,) = plan.run(counts, (given,), wanted or (), seen)
    attend = Attention(caches[1], spans[1], 7, HEADS, frozenset({None}), torch.float32)
    attend.head_TXD.copy_(given.view(7, 8, 16))
    attend.turned_TXE.mul_(rotation.at(at))
    want = attend(0, None)
    torch.testing.assert_close(got, want if wanted is None else want[wanted], atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(caches[0].by_row, caches[1].by_row, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


@compiled
def test_counts_are_told_apart():
    """As many rows behind ``pick`` as were picked, also where others are many."""
    plan = Plan()
    x = plan.lent(WIDE, WANTED)
    plan.give(plan.copy(x))
    assert (x.count, ALL) == (WANTED, 0)
    (got,) = plan.run((300, 2), (numbers(2, WIDE),))
    assert torch.equal(got, numbers(2, WIDE))


@compiled
def test_rows_behind_others_are_part_of_them():
    plan = Plan()
    stream = plan.copy(plan.lent(WIDE))
    last = plan.behind(stream, 2, WANTED)
    plan.add(plan.product(Linear(numbers(WIDE, WIDE)), last), last)
    plan.give(stream)
    x_TH = numbers(9, WIDE, seed=4)
    (got,) = plan.run((9, 3, 6), (x_TH,))
    torch.testing.assert_close(got[6:], x_TH[6:] + x_TH[6:] @ numbers(WIDE, WIDE).T, atol=1e-4, rtol=1e-5)
    assert torch.equal(got[:6], x_TH[:6])
