"""The LSTM along a text is the step of one token, taken again and again; its gradients too."""

import pytest
import torch

from outpace.methods.falcon.net import LSTM_LAYERS, lstm_step
from outpace.methods.falcon.objective import FalconNet
from outpace.models.tiny import tiny

LENGTH = 9


@pytest.fixture(scope="module")
def net():
    return FalconNet(tiny().config, 0.02, 0)


def one_by_one(net, x_BTI):
    state = x_BTI.new_zeros(len(x_BTI), 2 * LSTM_LAYERS * net.lstm[0].weight.shape[0] // 4)
    outs, states = [], []
    for x_BI in x_BTI.unbind(1):
        out, state = lstm_step(net.product, x_BI, state)
        outs.append(out)
        states.append(state)
    return torch.stack(outs, 1), torch.stack(states, 1)


def gradients(net, along, x_BTI, weighing):
    x_BTI = x_BTI.clone().requires_grad_()
    out, state = along(net, x_BTI)
    loss = (out * weighing[0]).sum() + (state.sin() * weighing[1]).sum()
    given = torch.autograd.grad(loss, [x_BTI, *net.lstm.parameters()])
    return [out.detach(), state.detach(), *given]


def test_a_text_at_once_is_its_tokens_one_by_one(net):
    coins = torch.Generator().manual_seed(3)
    hidden = net.lstm[0].weight.shape[0] // 4
    x_BTI = torch.randn(2, LENGTH, 2 * hidden, generator=coins)
    weighing = [torch.randn(2, LENGTH, n * hidden, generator=coins) for n in (1, 2 * LSTM_LAYERS)]
    at_once = gradients(net, FalconNet.along, x_BTI, weighing)
    for one, other in zip(at_once, gradients(net, one_by_one, x_BTI, weighing), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_it_is_the_same_up_to_rounding(net):
    coins = torch.Generator().manual_seed(4)
    x_BTI = torch.randn(2, LENGTH, 2 * net.lstm[0].weight.shape[0] // 4, generator=coins)
    whole, _ = net.along(x_BTI)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = net.along(x_BTI)
    assert 0 < (rounded - whole).abs().max() < 0.02
