"""Fast losses against plain ones, gradients against finite differences, closed forms."""

import math

import pytest
import torch

from outpace.errors import UnknownNameError
from outpace.train import losses


def laws(rows, size, seed, spread=2.0):
    coins = torch.Generator().manual_seed(seed)
    z_RD, p_RD = (spread * torch.randn(rows, size, generator=coins, dtype=torch.float64) for _ in range(2))
    return z_RD, p_RD.softmax(-1)


@pytest.mark.parametrize("name", losses.ORACLES)
def test_fast_is_plain_in_value_and_gradient(name):
    z_RD, p_RD = laws(40, 17, seed=1)
    z_RD.requires_grad_()
    plain_R = losses.ORACLES[name](z_RD, p_RD)
    (plain_RD,) = torch.autograd.grad(plain_R.sum(), z_RD)
    fast_R, fast_RD = losses.LAWS[name](z_RD.detach().clone(), p_RD)
    torch.testing.assert_close(fast_R, plain_R.detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(fast_RD, plain_RD, atol=1e-12, rtol=1e-12)
    for other in losses.ORACLES:  # planted: no other loss passes for this one
        if other != name:
            wrong_R, wrong_RD = losses.LAWS[other](z_RD.detach().clone(), p_RD)
            assert (wrong_R - plain_R).abs().max() > 1e-3
            assert (wrong_RD - plain_RD).abs().max() > 1e-3


@pytest.mark.parametrize("name", [n for n in losses.ORACLES if n != "lk_mix"])
def test_gradients_are_those_of_finite_differences(name):
    z_RD, p_RD = laws(3, 5, seed=2)
    z_RD.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: losses.ORACLES[name](z, p_RD), (z_RD,))


def test_the_mixture_weighs_without_a_gradient_of_the_weight():
    """At a point its gradient is that of the sum with the weight held fixed."""
    z_RD, p_RD = laws(3, 5, seed=3)
    share_R = (-3 * losses.acceptance(z_RD, p_RD)).exp()

    def held(z):
        return share_R * losses.kl(z, p_RD) + (1 - share_R) * losses.tv(z, p_RD)

    z_RD.requires_grad_()
    assert torch.autograd.gradcheck(held, (z_RD,))
    (plain,) = torch.autograd.grad(held(z_RD).sum(), z_RD)
    torch.testing.assert_close(losses.LAWS["lk_mix"](z_RD.detach().clone(), p_RD)[1], plain)


@pytest.mark.parametrize("name", losses.ORACLES)
def test_no_loss_where_the_laws_are_equal(name):
    _, p_RD = laws(6, 9, seed=4)
    for loss in (losses.ORACLES[name](p_RD.log(), p_RD), losses.LAWS[name](p_RD.log(), p_RD)[0]):
        assert loss.abs().max() < 1e-12


def test_closed_forms_of_two_laws():
    p, q = [0.5, 0.25, 0.25, 0.0, 0.0], [0.25, 0.25, 0.25, 0.125, 0.125]
    p_RD = torch.tensor([p], dtype=torch.float64)
    z_RD = torch.tensor([q], dtype=torch.float64).log()
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

    def divergence(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x)

    expected = {
        "kl": divergence(p, q),
        "tv": 0.25,
        "lk": -math.log(0.75),
        "jsd": (divergence(p, m) + divergence(q, m)) / 2,
        "lk_mix": math.exp(-2.25) * divergence(p, q) + (1 - math.exp(-2.25)) * 0.25,
    }
    for name, value in expected.items():
        assert float(losses.ORACLES[name](z_RD, p_RD)) == pytest.approx(value, abs=1e-12)
        assert float(losses.LAWS[name](z_RD.clone(), p_RD)[0]) == pytest.approx(value, abs=1e-12)


def test_acceptance_is_what_is_left_of_total_variation():
    z_RD, p_RD = laws(8, 11, seed=5)
    torch.testing.assert_close(losses.acceptance(z_RD, p_RD), 1 - losses.tv(z_RD, p_RD))


def test_impossible_tokens_give_finite_losses():
    p_RD = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
    z_RD = torch.tensor([[-200.0, 200.0, 0.0], [300.0, -300.0, 0.0]])
    for name, fast in losses.LAWS.items():
        loss_R, grad_RD = fast(z_RD.clone(), p_RD)
        assert loss_R.isfinite().all() and grad_RD.isfinite().all(), name


def plain_head_loss(hidden, head, name, p, row, label):
    z_RD = hidden @ head.T
    if name == "ce":
        return losses.cross_entropy(z_RD, label).sum()
    return losses.ORACLES[name](z_RD, p[row]).sum()


@pytest.mark.parametrize("name", losses.LOSSES)
@pytest.mark.parametrize("rows", [7, 2 * losses.CHUNK + 3])
def test_head_loss_is_the_loss_of_all_logits(name, rows):
    coins = torch.Generator().manual_seed(6)
    hidden, head = (
        torch.randn(n, 8, generator=coins, dtype=torch.float64).requires_grad_() for n in (rows, 13)
    )
    _, p_ND = laws(20, 13, seed=7)
    row_R = torch.randint(20, (rows,), generator=coins)
    label_R = torch.randint(13, (rows,), generator=coins)
    fast = losses.head_loss(hidden, head, name, p_ND=p_ND, row_R=row_R, label_R=label_R)
    plain = plain_head_loss(hidden, head, name, p_ND, row_R, label_R)
    assert fast.item() == pytest.approx(plain.item(), rel=1e-6)
    for a, b in zip(
        torch.autograd.grad(3 * fast, (hidden, head)),
        torch.autograd.grad(3 * plain, (hidden, head)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_head_loss_with_a_frozen_head_and_without_gradients():
    hidden, head = torch.randn(5, 8).requires_grad_(), torch.randn(11, 8)
    p_ND = torch.randn(5, 11).softmax(-1)
    kept = {"p_ND": p_ND, "row_R": torch.arange(5)}
    loss = losses.head_loss(hidden, head, "kl", **kept)
    loss.backward()
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0 and head.grad is None
    with torch.no_grad():
        assert losses.head_loss(hidden, head, "kl", **kept).item() == pytest.approx(loss.item())


def test_head_loss_under_autocast_is_near():
    coins = torch.Generator().manual_seed(8)
    hidden, head = (torch.randn(n, 32, generator=coins).requires_grad_() for n in (40, 50))
    kept = {"p_ND": torch.randn(40, 50, generator=coins).softmax(-1), "row_R": torch.arange(40)}
    exact = losses.head_loss(hidden, head, "kl", **kept)
    with torch.autocast("cpu", torch.bfloat16):
        rough = losses.head_loss(hidden, head, "kl", **kept)
    assert rough.dtype is torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=0.02) and rough.item() != exact.item()
    a, b = (torch.autograd.grad(one, hidden)[0] for one in (exact, rough))
    assert (a - b).norm() < 0.02 * a.norm()


def test_features_are_regressed_smoothly():
    a, b = torch.tensor([[0.5, 3.0]]), torch.zeros(1, 2)
    assert float(losses.smooth_l1(a, b)) == pytest.approx((0.125 + 2.5) / 2)
    a, b = torch.randn(9, 6).mul_(2).requires_grad_(), torch.randn(9, 6)
    fast, plain = losses.feature_loss(a, b), losses.smooth_l1(a, b)
    torch.testing.assert_close(fast, plain)
    grads = [torch.autograd.grad(one.sum(), a)[0] for one in (fast, plain)]
    torch.testing.assert_close(*grads)


def test_depths_weigh_less_and_less():
    assert losses.depth_weights(3, 0.5) == (1.0, 0.5, 0.25)
    total = losses.weighted([torch.tensor(2.0), torch.tensor(4.0)], (1.0, 0.5))
    assert float(total) == 4.0


def test_unknown_losses_are_named():
    assert losses.check("kl") == "kl"
    with pytest.raises(UnknownNameError, match="rkl"):
        losses.check("rkll")


def test_deep_states_find_the_closest_shallow_ones_in_order():
    """From the last one on; each layer below the one before it, or that again where none is left."""
    shallow = [torch.full((2, 3), float(value), requires_grad=True) for value in (1, 5, 3, 9)]
    deep = [torch.full((2, 3), float(value), requires_grad=True) for value in (4, 3)]
    loss = losses.state_loss(shallow, deep)
    assert loss.item() == (0.0 + 1.0) / 2, "3 finds the third, then 4 the second"
    loss.backward()
    grads = [None if one.grad is None else float(one.grad.sum()) for one in (*shallow, *deep)]
    assert grads == [None, 1.0, 0.0, None, None, None]
    again = losses.state_loss(shallow, [deep[1], deep[1], deep[1].new_full((2, 3), 1.0)])
    assert again.item() == pytest.approx((0 + 4 + 4) / 3)
