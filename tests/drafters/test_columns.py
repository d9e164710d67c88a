"""Targets that stand before a model claim only what they pass on."""

import pytest

from outpace.drafters.columns import Columns
from outpace.methods.cascade.ahead import Reader
from outpace.models.base import EMBEDDINGS, TAPS, TREE
from outpace.models.tiny import tiny


@pytest.mark.parametrize("before", [lambda m: Columns(m, m.vocab_size), lambda m: Reader(m, m.clock)])
def test_abilities_are_those_of_passes(before):
    model = tiny()
    target = before(model)
    assert target.can == {TREE, TAPS, EMBEDDINGS} < model.can
