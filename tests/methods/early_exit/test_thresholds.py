"""Thresholds that are learned: what a mixture makes of guesses, and what reaches drafts and policies."""

import pytest
import torch

from outpace import Engine
from outpace.methods.early_exit.thresholds import BetaMixture, given, said_of
from outpace.models.tiny import tiny

LONG = {"max_new_tokens": 40, "ignore_eos": True}
PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [77]]


def learned(chance, seed=0):
    """A mixture that saw guesses of all confidences, right with a chance that depends on them."""
    coins = torch.Generator().manual_seed(seed)
    mixture = BetaMixture()
    for _ in range(20):
        sure = torch.rand(16, generator=coins).tolist()
        luck = torch.rand(16, generator=coins).tolist()
        mixture.learn([(x, u < chance(x)) for x, u in zip(sure, luck, strict=True)])
    return mixture


def test_it_begins_with_more_trust_than_an_exit_has_in_itself():
    x_S = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    torch.testing.assert_close(BetaMixture().chance(x_S), 3 * x_S / (1 + 2 * x_S), atol=1e-6, rtol=0)
    assert BetaMixture().chance(torch.tensor([BetaMixture().least])).item() == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize("edge", [0.3, 0.7])
def test_the_threshold_is_where_guesses_turn_right(edge):
    mixture = learned(lambda x: 0.95 if x > edge else 0.05)
    assert mixture.least == pytest.approx(edge, abs=0.15)
    chance_S = mixture.chance(torch.tensor([edge - 0.25, edge + 0.25]))
    assert chance_S[0] < 0.4 < chance_S[1]


def test_an_exit_that_is_always_right_is_never_doubted_and_one_that_never_is_always():
    assert learned(lambda x: 1.0).least < 0.1 < 0.9 < learned(lambda x: 0.0).least


def test_what_is_known_of_tokens():
    logits_FD = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]])
    (said,) = said_of(logits_FD, torch.tensor([10, 11, 12, 13, 14]))
    assert said[0] == (11, 13, 12, 10)
    assert given(said, 13) == pytest.approx(float(logits_FD.softmax(-1)[0, 3]))
    assert given(said, 14) == said[1][-1], "a token outside the first few is at most as likely as the last"


def test_drafts_get_shorter_where_the_exit_is_wrong_and_the_text_stays():
    engine = Engine(tiny(layers=6), drafter="none")
    plain = engine.generate(PROMPTS, drafter="none", **LONG)
    for more in ("", " tree=2x2x2"):
        drafted = []
        for spec in (f"early_exit[layer=1 threshold=0{more}]", f"early_exit[layer=1{more}]"):
            results = engine.generate(PROMPTS, drafter=spec, **LONG)
            assert [one.tokens for one in results] == [one.tokens for one in plain]
            drafted.append(sum(one.counters.drafted for one in results))
        assert drafted[1] < drafted[0], "guesses of a random first layer are soon doubted"


def test_estimates_reach_policies():
    engine = Engine(tiny(layers=6), drafter="none")
    plain = engine.generate(PROMPTS, drafter="none", **LONG)
    drafted = []
    for threshold in (0.2, 0.999):
        spec = f"early_exit[layer=5 threshold=0 policy=specdecpp[threshold={threshold}]]"
        results = engine.generate(PROMPTS, drafter=spec, **LONG)
        assert [one.tokens for one in results] == [one.tokens for one in plain]
        drafted.append(sum(one.counters.drafted for one in results))
    assert drafted[0] < drafted[1]
