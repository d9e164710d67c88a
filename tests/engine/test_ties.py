"""Exact ties: the lowest id wins, in plain decoding and in verification."""

import itertools

import pytest
import torch

from outpace import Engine
from outpace.models.tiny import TableTarget

V = 6
GREEDY = {"temperature": 0.0, "max_new_tokens": 12}
EDITED = {
    "plain": {},
    "penalty": {"repetition_penalty": 1.0001, "presence_penalty": 1e-9},
    "allowed": {"allowed_tokens": {5, 3, 2, 1}},
    "banned": {"banned_tokens": {0}},
}


def tied(context):
    """Two or three tokens of the same, largest probability; which ones depends on the context."""
    at = sum((i + 1) * token for i, token in enumerate(context[-2:])) % V
    law = torch.full((V,), 0.02, dtype=torch.float64)
    law[[at, (at + 2) % V, (at + 3) % V]] = 1.0
    return law / law.sum()


@pytest.fixture(scope="module")
def engine():
    return Engine(TableTarget(tied, V), drafter="none")


def lowest(ids):
    """Plain decoding by hand."""
    text = list(ids)
    for _ in range(GREEDY["max_new_tokens"]):
        law = tied(text)
        text.append(int((law == law.max()).nonzero()[0]))
    return tuple(text[len(ids) :])


SPECS = ["suffix", "recycling", *(f"suffix[verifier={v}]" for v in ("match", "chain", "block", "traversal"))]
SPECS += [f"suffix[verifier={v}]" for v in ("k_seq", "greedy_plus_one", "spechub", "coupled")]


@pytest.mark.parametrize("settings", EDITED)
def test_the_lowest_id_wins_whoever_drafts(engine, settings):
    prompts = [list(text) for text in itertools.product(range(4), repeat=3)][:24]
    for text in prompts[:2] if settings == "plain" else ():
        assert engine.generate(text, **GREEDY).tokens == lowest(text)
    plain = [one.tokens for one in engine.generate(prompts, **GREEDY, **EDITED[settings])]
    for spec in SPECS:
        drafted = engine.generate(prompts, **GREEDY, **EDITED[settings], drafter=spec)
        assert [one.tokens for one in drafted] == plain, spec
        assert sum(one.counters.drafted for one in drafted) > 0
