"""Compiled sums, norms and gates give what torch gives, and a row the same bits in any company."""

from types import SimpleNamespace

import pytest
import torch

from outpace.models import rowwise
from outpace.models.rowwise import Norm, gated, heads_norm

needs_code = pytest.mark.skipif(rowwise._code() is None, reason="C cannot be compiled for this machine")
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ULP = {torch.float32: 3e-7, torch.bfloat16: 2.0**-8}
"""Relative; torch rounds a gate to bfloat16 once more, see below."""


def rows(count, width, seed=0, dtype=torch.float32):
    coins = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(count, width, generator=coins)).to(dtype)


def norm_of(width, offset=0.0, scale=1.0):
    config = SimpleNamespace(norm_offset=offset, norm_eps=1e-5, residual_scale=scale)
    return Norm(rows(1, width, 7)[0], config)


def by_torch(monkeypatch, work, *values):
    """What the same call gives without compiled code."""
    with monkeypatch.context() as patch:
        patch.setattr(rowwise, "_code", lambda: None)
        return work(*values)


@needs_code
@BOTH
@pytest.mark.parametrize(
    "count, width, scale", [(1, 16, 1.0), (5, 576, 1.0), (40, 48, 1.0), (200, 576, 1.0), (7, 48, 0.22)]
)
def test_a_sum_and_its_norm(dtype, count, width, scale, monkeypatch):
    norm, more = norm_of(width, offset=1.0, scale=scale), rows(count, width, 1, dtype)

    def work(add):
        x_TH, wide_TI = rows(count, width), torch.full((count, 2 * width), 9.0, dtype=dtype)
        got = norm(x_TH, wide_TI[:, width:], add=add)
        assert got.data_ptr() == wide_TI[:, width:].data_ptr()
        assert bool((wide_TI[:, :width] == 9).all()), "it writes where it was told to"
        return x_TH, got.clone(), norm(rows(count, width))

    for add in (None, more):
        for got, want in zip(work(add), by_torch(monkeypatch, work, add), strict=True):
            assert got.dtype is want.dtype
            torch.testing.assert_close(got, want, rtol=4 * ULP[got.dtype], atol=0.0)
    added = rows(count, width) + more.float()
    assert torch.equal(work(more)[0], added) == (scale == 1.0), "a sum of two numbers has one result"


def test_a_norm_over_all_heads_of_a_kind():
    config = SimpleNamespace(
        norm_offset=0.0, norm_eps=1e-2, residual_scale=1.0, num_heads=3, num_kv_heads=2, head_dim=8
    )
    config.wide_qk_norm = True
    weight, x_TXD = rows(1, 40, 3).view(5, 8), rows(50, 40).view(10, 5, 40)[..., :8]
    norm = heads_norm(weight[:3], weight[3:], config)
    got = norm(x_TXD, x_TXD.clone())
    for part in (slice(3), slice(3, 5)):
        flat_TY = x_TXD[:, part].flatten(1)
        want = torch.nn.functional.rms_norm(flat_TY, flat_TY.shape[1:], weight[part].flatten(), 1e-2)
        torch.testing.assert_close(got[:, part].flatten(1), want)
    for row in range(10):
        assert torch.equal(norm(x_TXD[row : row + 1])[0], got[row]), "whatever is beside it"


@needs_code
def test_a_row_of_zeros_has_a_norm():
    assert not norm_of(32)(torch.zeros(4, 32)).any()


@needs_code
@BOTH
@pytest.mark.parametrize("activation", sorted(rowwise.ACTIVATION))
@pytest.mark.parametrize("count, width", [(1, 16), (7, 48), (60, 1536)])
def test_a_gate(dtype, activation, count, width, monkeypatch):
    both_TF = rows(count, 2 * width, 2, dtype)
    ends = torch.tensor([0.0, -0.0, 1e-8, -1e-8, 20.0, -20.0, 100.0, -100.0, 1e4, -1e4])
    both_TF[0, : len(ends)] = ends
    got = gated(activation, both_TF)
    want = by_torch(monkeypatch, gated, activation, both_TF.double())
    assert got.dtype is dtype and got.shape == (count, width)
    torch.testing.assert_close(
        got.double(), want, rtol=ULP[dtype], atol=1e-6 if activation == "gelu_tanh" else 1e-7
    )


@needs_code
@BOTH
def test_a_row_gets_the_same_bits_whatever_is_beside_it(dtype, monkeypatch):
    """Alone, among many, and with one thread or two."""
    norm = norm_of(576)

    def work(part, threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        x_TH, out = rows(100, 576)[part], torch.empty(100, 576, dtype=dtype)[part]
        norm(x_TH, out, add=rows(100, 576, 1, dtype)[part])
        return x_TH, out, gated("silu", rows(100, 576, 2, dtype)[part])

    whole = work(slice(0, 100), 2)
    for row in (0, 37, 99):
        for one, all_ in zip(work(slice(row, row + 1), 1), whole, strict=True):
            assert torch.equal(one[0], all_[row])


@needs_code
def test_what_it_does_not_know_is_left_to_torch(monkeypatch):
    class Refuses:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was called")

    monkeypatch.setattr(rowwise, "_code", Refuses)
    config = SimpleNamespace(norm_offset=0.0, norm_eps=1e-6, residual_scale=1.0)
    Norm(rows(3, 16), config)(rows(12, 16).view(4, 3, 16))  # a norm per head
    norm_of(24)(rows(4, 24))
    norm_of(16)(rows(4, 32)[:, :16])
    norm_of(16)(rows(4, 16).requires_grad_())
    gated("silu", rows(4, 48))  # 24 wide
    gated("silu", rows(4, 32).double())
    gated("silu", rows(4, 32).requires_grad_()).sum().backward()
    with pytest.raises(AssertionError, match="outpace_gate"):
        gated("silu", rows(4, 32))
    with pytest.raises(AssertionError, match="outpace_norm"):
        norm_of(16)(rows(4, 16))
