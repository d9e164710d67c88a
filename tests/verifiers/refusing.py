"""Coins that never come up, for what only rounding can bring about."""

import pytest
import torch

from outpace.coins import Coins


class Refusing(Coins):
    """Refuses everything, even what is certain, and remembers the keys."""

    def __init__(self):
        self.keys = []

    def flip(self, prob, *key):
        self.keys.append(key)
        assert prob == prob, "not a number"
        return False

    def choose(self, law, *key):
        self.keys.append(key)
        assert bool(torch.isfinite(law.prob_S).all())
        assert float(law.prob_S.sum()) == pytest.approx(1, abs=1e-5)
        return int(law.ids[law.prob_S.argmax()])

    def race(self, law, depth, count=1):
        raise AssertionError("only `coupled` races")
