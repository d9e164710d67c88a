"""What a seed names: one text of one prompt, and nothing that others share."""

import pytest

from outpace import Engine
from outpace.coins import key_of, later_seed
from outpace.models.tiny import TableTarget

V, COUNT = 5, 400
SETTINGS = {"temperature": 1.0, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def engine():
    return Engine(TableTarget.of({(): [1 / V] * V}), drafter="none")


@pytest.mark.parametrize("drafter", ["none", "suffix", "suffix[verifier=tree]"])
def test_the_same_seed_and_prompt_give_the_same_text(engine, drafter):
    ask = {**SETTINGS, "drafter": drafter, "seed": 7}
    first = engine.generate([0, 1, 0], **ask)
    together = engine.generate([[2, 2], [0, 1, 0], [3]], **ask)
    assert together[1].tokens == first.tokens and first.seed == 7


@pytest.mark.parametrize("drafter", ["none", "suffix[verifier=tree]"])
def test_prompts_of_one_seed_are_independent(engine, drafter):
    """Uniform laws: independent first tokens agree one time in five, shared coins always."""
    same = 0
    for seed in range(COUNT):
        a, b = engine.generate(
            [[0, 1], [2, 3]], **{**SETTINGS, "max_new_tokens": 1}, seed=seed, drafter=drafter
        )
        same += a.tokens == b.tokens
    assert same / COUNT == pytest.approx(1 / V, abs=0.07)


def test_later_answers_share_nothing_with_other_seeds(engine):
    seven, eight = (engine.generate([0, 1], n=4, seed=seed, **SETTINGS) for seed in (7, 8))
    texts = [one.tokens for one in (*seven, *eight)]
    assert len(set(texts)) == len(texts)
    assert seven[0].tokens == engine.generate([0, 1], seed=7, **SETTINGS).tokens
    for one in seven:  # and every answer can be had alone by the seed that it reports
        assert engine.generate([0, 1], seed=one.seed, **SETTINGS).tokens == one.tokens


def test_keys_and_later_seeds_do_not_meet():
    keys = {key_of(seed, prompt) for seed in (0, 1, 2**64 - 1) for prompt in ((), (0,), (0, 0), (1, 2))}
    assert len(keys) == 12 and max(keys) < 1 << 64
    seeds = {later_seed(seed, turn) for seed in range(50) for turn in range(1, 20)}
    assert len(seeds) == 50 * 19 and max(seeds) < 1 << 48
    assert later_seed(7, 0) == 7
