"""Closed forms, exact laws and simulation of the same cascades agree."""

import random

import pytest

from outpace.analysis.theory import (
    Ladder,
    at,
    best_k,
    curve,
    emitted,
    horizontal,
    phi,
    plain,
    predict,
    renewal,
    vertical,
)

LONG = 40


def ladder(a, costs, models=1, lookup=True, seconds=None, drafted=None):
    return Ladder(
        survival={pair: curve(value, LONG) for pair, value in a.items()},
        models=models,
        lookup=lookup,
        drafted=drafted or {r: [1.0] * LONG for r in range(models + 1)},
        seconds=seconds or [lambda rows, c=c: c for c in (1.0, *costs)],
    )


def accepted(coins, survival, most):
    """Tokens accepted of a part, drawn from its survival curve one by one."""
    count = 0
    while count < most and coins.random() < at(survival, count + 1) / at(survival, count):
        count += 1
    return count


def simulate(one, k, rounds=60_000, seed=5):
    """Draw every acceptance; give tokens and seconds per pass of the target."""
    coins = random.Random(seed)
    spent = 0.0

    def step(reviewer):
        nonlocal spent
        parts, total, have = [], 0, 0
        for level, quota in enumerate(k[reviewer] if reviewer < len(k) else (), reviewer + 1):
            total += quota
            length = 0
            if level > one.models:
                length = max(0, total - have) if quota else 0
            else:
                while quota and have + length < total:
                    length += step(level)
            parts.append((level, length))
            have += length
        spent += one.seconds[reviewer](1 + have)
        out = 1
        for level, length in parts:
            got = accepted(coins, one.survival[reviewer, level], length)
            out += got
            if got < length:
                break
        return out

    tokens = sum(step(0) for _ in range(rounds))
    return tokens / rounds, spent / rounds


def test_the_generating_function_is_that_of_the_tokens():
    coins = random.Random(1)
    for a, k, x in ((0.4, 4, 0.7), (0.8, 2, 0.3), (0.0, 3, 0.5), (1.0, 3, 0.9), (0.6, 0, 0.2)):
        law = [1 + accepted(coins, curve(a, LONG), k) for _ in range(40_000)] if a else [1]
        assert phi(a, k, x) == pytest.approx(sum(x**n for n in law) / len(law), abs=4e-3)
        assert phi(a, k, 1.0) == 1.0
    slope = (phi(0.6, 5, 1.0) - phi(0.6, 5, 1 - 1e-7)) / 1e-7
    assert slope == pytest.approx(emitted(0.6, 5), rel=1e-5), "its slope at 1 is the mean"


def test_a_known_example():
    """a = 0.7, a' = 0.4, three steps of four guesses: 2.868 tokens."""
    tokens = vertical(0.7, 0.4, 3, 4, 0.0, 0.0)
    assert tokens == pytest.approx(2.868, abs=5e-4)
    ends, steps = renewal({1: 0.6, 2: 0.24, 3: 0.096, 4: 0.0384, 5: 0.0256}, 0, 5)
    assert sum(ends.values()) == pytest.approx(1)
    assert sum(n * share for n, share in ends.items()) == pytest.approx(5.61, abs=5e-3)
    assert steps == pytest.approx(3.40, abs=5e-3)


def test_closed_forms_are_cases_of_the_prediction():
    one = ladder({(0, 1): 0.8}, [0.1], lookup=False)
    assert predict(one, [[5]]).speedup == pytest.approx(plain(0.8, 5, 0.1))
    assert predict(one, [[5]]).steps == pytest.approx((5.0,))
    free = ladder({(0, 1): 0.8, (0, 2): 0.3, (1, 2): 0.5}, [0.1])
    expected = horizontal([0.8] * 3 + [0.3] * 2, [0.1] * 3 + [0.0] * 2)
    assert predict(free, [[3, 2]]).speedup == pytest.approx(expected)
    # One step of the model, whatever it emits: the closed form counts steps, K counts tokens.
    assert predict(free, [[1], [4]]).speedup == pytest.approx(vertical(0.8, 0.5, 1, 4, 0.1, 0.0))
    assert vertical(0.8, 0.0, 5, 3, 0.1, 0.0) == pytest.approx(plain(0.8, 5, 0.1))


CASES = {
    "both": (ladder({(0, 1): 0.8, (0, 2): 0.3, (1, 2): 0.5}, [0.15]), [[4, 3], [5]]),
    "vertical": (ladder({(0, 1): 0.7, (0, 2): 0.2, (1, 2): 0.4}, [0.2]), [[5], [4]]),
    "three levels": (
        ladder(
            {(0, 1): 0.85, (0, 2): 0.6, (0, 3): 0.3, (1, 2): 0.7, (1, 3): 0.35, (2, 3): 0.4},
            [0.3, 0.1],
            models=2,
        ),
        [[5, 3, 4], [2, 3], [4]],
    ),
    "rows cost": (
        ladder(
            {(0, 1): 0.8, (0, 2): 0.3, (1, 2): 0.5},
            [],
            seconds=[lambda rows: 1 + 0.05 * rows, lambda rows: 0.1 + 0.01 * rows],
        ),
        [[4, 3], [5]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_prediction_and_simulation_agree(name):
    one, k = CASES[name]
    tokens, seconds = simulate(one, k)
    found = predict(one, k)
    assert found.emitted == pytest.approx(tokens, rel=0.01)
    assert found.seconds == pytest.approx(seconds, rel=0.01)
    assert found.speedup == pytest.approx(tokens * one.seconds[0](1) / seconds, rel=0.015)


def test_the_simulation_would_notice():
    """Counting steps in place of tokens, or the wrong reviewer's acceptance, is far off."""
    one, k = CASES["vertical"]
    tokens, _ = simulate(one, k, rounds=20_000)
    counted = vertical(0.7, 0.4, 5, 4, 0.0, 0.0)
    assert abs(counted - tokens) > 0.03
    mixed = ladder({(0, 1): 0.7, (0, 2): 0.4, (1, 2): 0.2}, [0.2])
    assert abs(predict(mixed, k).seconds - predict(one, k).seconds) > 0.02


def test_a_silent_lookup_costs_no_rows():
    a = {(0, 1): 0.8, (0, 2): 0.3, (1, 2): 0.5}
    per_row = [lambda rows: 1 + 0.1 * rows, lambda rows: 0.2]
    loud = predict(ladder(a, [], seconds=per_row), [[2, 6], [4]])
    quiet = predict(
        ladder(a, [], seconds=per_row, drafted={0: [1.0, 0.2, 0.1, 0.0], 1: [1.0]}), [[2, 6], [4]]
    )
    assert quiet.emitted == loud.emitted and quiet.seconds < loud.seconds


def test_the_best_k_beats_its_neighbours():
    one = ladder(
        {(0, 1): 0.8, (0, 2): 0.4, (1, 2): 0.5},
        [],
        seconds=[lambda rows: 1 + 0.03 * rows, lambda rows: 0.12 + 0.004 * rows],
    )
    k, best = best_k(one)
    assert best == predict(one, k) and best.speedup > 1.5
    for other in ([[5], []], [[4], [4]], [[1, 2], [2]], [[8, 16], [16]], [[2, 4], [0]]):
        assert predict(one, other).speedup <= best.speedup + 1e-9
    only, model = best_k(one, lambda reviewer, level: level == 1)
    assert only[0][1] == only[1][0] == 0 and model.speedup < best.speedup
    dear = ladder({(0, 1): 0.1, (0, 2): 0.05, (1, 2): 0.1}, [0.9])
    assert best_k(dear)[0][0][0] <= 1, "a dear drafter that is refused is hardly asked"


def test_curves_go_on_beyond_what_was_measured():
    assert at((1.0, 0.5, 0.4), 2) == 0.4
    assert at((1.0, 0.5, 0.4), 4) == pytest.approx(0.4 * 0.8**2)
    assert at((1.0, 0.0), 5) == 0.0
    assert curve(0.5, 2) == (1.0, 0.5, 0.25)
