"""Numbers about runs: against slow definitions, and against values known by hand."""

from dataclasses import replace

import numpy as np
import pytest

from outpace.bench import stats
from outpace.bench.records import VERBS, Run
from outpace.engine.results import Counters
from outpace.errors import RequestError


def run(seconds, tokens=11, prefill=1.0, **more):
    return Run(tokens=(tuple(range(tokens)),), seconds=prefill + seconds, prefill_seconds=prefill, **more)


def slow_loops(tokens):
    """The definition, word by word: the text before token t ends in 3 rounds of a period of p
    tokens, and token t goes on with it."""
    found = 0
    for t in range(len(tokens)):
        for p in range(1, 33):
            rounds = tokens[max(0, t - 3 * p) : t]
            if (
                len(rounds) == 3 * p
                and rounds[:p] == rounds[p : 2 * p] == rounds[2 * p :]
                and tokens[t] == rounds[-p]
            ):
                found += 1
                break
    return found


@pytest.mark.parametrize("seed", range(6))
def test_loops_are_those_of_the_definition(seed):
    coins = np.random.default_rng(seed)
    tokens = coins.integers(0, 3, 60).tolist()
    piece = coins.integers(0, 9, int(coins.integers(1, 36))).tolist()
    tokens += piece * 5 + coins.integers(0, 2, 40).tolist()
    assert stats.looping_tokens(tokens) == slow_loops(tokens)


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        ([], 0),
        ([7], 0),
        ([7] * 3, 0),
        ([7] * 4, 1),
        ([1, 2] * 3, 0),
        ([*[1, 2] * 3, 1], 1),
        ([*[1, 2] * 3, 2], 0),
        (list(range(32)) * 4, 32),
        (list(range(33)) * 4, 0),
        (list(range(100)), 0),
    ],
)
def test_a_token_loops_from_the_fourth_round_on(tokens, count):
    assert stats.looping_tokens(tokens) == slow_loops(tokens) == count


def test_texts_that_loop():
    assert stats.looping([[7] * 13, list(range(7))]) == 10 / 20
    assert stats.looping([]) == 0.0
    assert stats.loops([7] * 10) and not stats.loops([7] * 4 + list(range(20)))


def test_ratios_are_those_of_decoding_and_paired():
    plain = {(0, 0): run(10.0), (0, 1): run(20.0), (1, 0): run(10.0)}
    fast = {(0, 0): run(5.0), (0, 1): run(5.0), (1, 0): run(10.0, prefill=9.0)}
    assert stats.paired_ratios(fast, plain) == [[2.0, 4.0], [1.0]]
    whole = stats.paired_ratios(fast, plain, stats.end_to_end_rate)
    assert whole == [pytest.approx([11 / 6, 21 / 6]), pytest.approx([11 / 19])]
    full = {key: replace(one, full_tokens=6, full_seconds=2.0) for key, one in fast.items()}
    slow = {key: replace(one, full_tokens=8, full_seconds=8.0) for key, one in plain.items()}
    assert stats.paired_ratios(full, slow, stats.full_rate) == [[3.0, 3.0], [3.0]]
    assert stats.paired_ratios(fast, slow, stats.full_rate) == []
    with pytest.raises(RequestError, match="unit 1 has no plain run in round 2"):
        stats.paired_ratios({(1, 2): run(1.0)}, plain)


def test_the_interval_over_prompts():
    values = [1.0, 1.2, 0.9, 1.1, 1.0, 1.3, 0.8, 1.1]
    low, high = stats.prompt_interval(values, range(8))
    assert 0.9 < low < np.mean(values) < high < 1.2
    assert (low, high) == stats.prompt_interval(values, range(8))
    expected = 1.96 * np.std(values) / np.sqrt(len(values))
    assert stats.half_width((low, high)) == pytest.approx(expected, rel=0.15)
    assert stats.prompt_interval([1.0], [0]) is None and stats.half_width(None) == float("inf")


def test_answers_to_one_prompt_are_no_new_prompts():
    """Four seeds that agree say as much as one; as prompts of their own they said twice that."""
    values, prompts = [1.0, 1.5, 0.8, 1.1, 1.1], [0, 1, 2, 3, 4]
    once = stats.prompt_interval(values, prompts)
    assert stats.prompt_interval(values * 4, prompts * 4) == pytest.approx(once)
    as_units = stats.prompt_interval(values * 4, range(20))
    assert stats.half_width(as_units) == pytest.approx(stats.half_width(once) / 2, rel=0.15)
    assert stats.prompt_interval(values, [5, 5, 5, 5, 5]) is None
    uneven = stats.prompt_interval([2.0] * 20 + [1.0] * 4, [*range(4)] * 5 + [4] * 4)
    assert uneven == (pytest.approx(32 / 22), 2.0), "a prompt keeps its share of the units"


def test_fewer_than_five_prompts_have_no_interval():
    assert stats.prompt_interval([1.0, 1.5, 0.8, 1.1], range(4)) is None
    assert stats.prompt_interval([1.0, 1.5, 0.8, 1.1, 1.2], range(5)) is not None


def test_the_interval_over_repeats_knows_noise_alone():
    """Prompts that differ a lot, each measured with the same noise."""
    coins = np.random.default_rng(1)
    prompts = np.array([1.0, 2.0, 3.0, 4.0, 5.0])[:, None]
    few, many = (prompts + coins.normal(0, 0.05, (5, rounds)) for rounds in (2, 32))
    wide, narrow = (stats.half_width(stats.repeat_interval(x.tolist())) for x in (few, many))
    assert narrow == pytest.approx(1.96 * 0.05 / np.sqrt(5 * 32), rel=0.2)
    assert narrow < wide < 0.1
    over_prompts = stats.half_width(stats.prompt_interval(many.mean(1), range(5)))
    assert over_prompts > 10 * wide  # the prompts' own spread is no noise
    assert stats.repeat_interval([[1.0], [2.0]]) is None


def test_counters_add_up_to_one_sequence():
    one = Counters(new_tokens=5, passes=2, drafted=6, accepted=2, drafted_at=(2, 2), accepted_at=(1, 1))
    two = Counters(new_tokens=4, passes=3, drafted=3, drafted_at=(3,))
    both = stats.add_up([one, two])
    assert both.mean_emitted == (4 + 3) / 5 and both.acceptance_rate == 2 / 9
    assert both.drafted_at == (5, 2) and both.accepted_at == (1, 1)
    assert stats.drafted_share(both) == 1.0 and stats.drafted_share(Counters(passes=3)) == 0.0
    assert stats.drafted_share(replace(two, passes=4)) == 3 / 4
    assert stats.acceptance_by_depth(both) == [1 / 5, 1 / 2]
    assert stats.acceptance_by_depth(two) == [0.0]
    assert stats.acceptance_by_depth(Counters()) == []


def test_shares_are_of_decoding_and_sum_to_one():
    runs = [
        run(8.0, verb_seconds={"score_pass": 4.0, "judge": 2.0}),
        run(2.0, verb_seconds={"score_pass": 1.0}),
    ]
    shares = stats.verb_shares(runs)
    assert set(shares) == set(VERBS)
    assert shares["score_pass"] == 0.5 and shares["judge"] == 0.2 and shares["plan"] == 0.0
    assert shares["other"] == pytest.approx(0.3)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert stats.verb_shares([run(1.0)]) is None


def test_tokens_past_an_end():
    assert stats.past_end([[1, 2, 0, 4, 5], [1, 2, 3, 4, 0]], {0}) == 2 / 10
    assert stats.past_end([[1, 2]], {0}) == stats.past_end([], {0}) == 0.0
