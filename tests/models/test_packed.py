import pytest
import torch
from torch.nn import functional as F

from outpace.models import onednn, packed
from outpace.models.onednn import MIN_ROWS, packing_works
from outpace.models.packed import Linear
from outpace.models.room import ROOM, Room

DTYPES = [torch.float32, torch.bfloat16]


def problem(dtype, rows, outputs=72, inputs=40, bias=True):
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, inputs, generator=generator) for n in (rows, outputs))
    offset = torch.randn(outputs, generator=generator) if bias else None
    return x.to(dtype), weight.to(dtype), None if offset is None else offset.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_agrees_with_plain(dtype, rows, bias):
    x, weight, offset = problem(dtype, rows, bias=bias)
    got, want = Linear(weight, offset)(x), F.linear(x, weight, offset)
    assert got.dtype == dtype
    assert got.shape == want.shape
    # Two sums of 40 products in different order, each rounded to the dtype.
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_matrix_can_be_had_back(dtype):
    _, weight, offset = problem(dtype, 1)
    for wants in (True, False):
        linear = Linear(weight, offset, packed=wants)
        assert torch.equal(linear.dense(), weight)
        assert linear.nbytes == weight.nbytes + offset.nbytes
        assert (linear.outputs, linear.inputs) == (72, 40)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_feel_the_others(dtype):
    if not packing_works(dtype):
        pytest.skip("weights cannot be packed on this machine")
    x, weight, offset = problem(dtype, 33, 96, 1536)
    linear = Linear(weight, offset)
    whole = linear(x)
    for rows in range(1, 33):
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows
        assert torch.equal(linear(x[rows : rows + 1]), whole[rows : rows + 1]), rows


def test_what_cannot_be_packed_is_multiplied_plainly(monkeypatch):
    assert not packing_works(torch.float64)
    x, weight, offset = problem(torch.float64, MIN_ROWS)
    assert torch.equal(Linear(weight, offset)(x), F.linear(x, weight, offset))

    def broken(weight_OI):
        raise RuntimeError("could not create a primitive")

    packing_works.cache_clear()
    monkeypatch.setattr(packed, "works", lambda: False)
    monkeypatch.setattr(onednn, "pack", broken)
    try:
        assert not packing_works(torch.float32)
        x, weight, offset = problem(torch.float32, MIN_ROWS)
        linear = Linear(weight, offset)
        assert not linear.packed
        assert torch.equal(linear(x), F.linear(x, weight, offset))
    finally:
        packing_works.cache_clear()


def test_a_packing_that_multiplies_wrong_is_not_used(monkeypatch):
    right = onednn.multiply
    packing_works.cache_clear()
    monkeypatch.setattr(onednn, "multiply", lambda x, weight, bias: right(x, weight, bias) + 1)
    try:
        assert not packing_works(torch.float32)
    finally:
        packing_works.cache_clear()


def test_logits_of_the_next_pass_take_the_same_memory():
    """In use, where a result holds until the next; nowhere else."""
    room, first, second = Room(), *torch.randn(2, 6, 9).bfloat16()
    with torch.inference_mode():
        a = room.widened(first)
        assert torch.equal(a, first.float())
        b = room.widened(second[:5])
        assert torch.equal(b, second[:5].float()) and b.data_ptr() == a.data_ptr()
        assert not torch.equal(a, first.float()), "which is why it holds no longer"
        c = room.widened(torch.cat([first, second]))
        assert torch.equal(c, torch.cat([first, second]).float()), "more rows than before"
        large = first[:1].expand(ROOM + 1, 9)
        d = room.widened(large)
        assert d.data_ptr() != room.widened(large).data_ptr(), "too many to keep"
        exact = first.float()
        assert room.widened(exact) is exact
    a = room.widened(first)
    room.widened(second)
    assert torch.equal(a, first.float()), "who trains keeps what he has"
