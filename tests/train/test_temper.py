"""Temperatures at which a drafter's probabilities are those of being kept."""

import torch

from outpace.train.temper import LEAST, Tempering


def rows(count, sharp, seed=0):
    """Hidden states whose logits are ``sharp`` times the log odds of their labels, and the labels."""
    coins = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(count, 12, generator=coins)
    label = torch.multinomial(z.softmax(-1), 1, generator=coins).squeeze(1)
    return sharp * z, label


def test_the_temperature_undoes_what_is_wrong():
    for sharp in (0.5, 1.0, 2.0):
        temper = Tempering()
        for seed in range(8):
            hidden, label = rows(256, sharp, seed)
            temper.add(0, hidden, torch.eye(12), label)
        assert abs(temper.found()[0] - sharp) <= 0.25 * sharp
        temper.clear()
        assert temper.found() == []


def test_tokens_that_cannot_be_drafted_make_it_modest():
    both = []
    for lost in (0, 100):
        temper = Tempering()
        for seed in range(8):
            hidden, label = rows(256, 1.0, seed)
            label[:lost] = -1
            temper.add(0, hidden, torch.eye(12), label)
        both += temper.found()
    assert both[1] > both[0]


def test_few_rows_say_nothing():
    temper = Tempering()
    hidden, label = rows(LEAST, 1.0)
    temper.add(0, hidden, torch.eye(12), label)
    temper.add(1, hidden[:3], torch.eye(12), label[:3])
    assert len(temper.found()) == 1
