import itertools
import math

import torch

from outpace.coins import KeyedCoins, Stream
from outpace.kernels.draws import exponentials
from outpace.law import Law

LAW = Law(torch.tensor([0.5, 0.2, 0.0, 0.3]))


def coins(seed=1, position=7, stream=Stream.JUDGE):
    return KeyedCoins(seed, position, stream)


def test_every_part_of_the_name_changes_the_coin():
    names = itertools.product((0, 1, 2**60), (0, 1, 500), (Stream.DRAFT, Stream.JUDGE))
    values = [
        coins(seed, position, stream).uniform(*key)
        for seed, position, stream in names
        for key in ((), (0,), (-1,), (0, 0), (0, 1), (1, 0))
    ]
    assert len(set(values)) == len(values)
    assert all(0.0 <= value < 1.0 for value in values)


def test_uniforms_are_uniform():
    """Chi-square over 64 cells of 20000 coins; a fair source fails once in a million."""
    count, cells = 20000, [0] * 64
    for i in range(count):
        cells[int(coins(position=i).uniform(3) * 64)] += 1
    chi = sum((n - count / 64) ** 2 / (count / 64) for n in cells)
    assert chi < 63 + 4.75 * math.sqrt(2 * 63) + 8


def test_choose_and_race_follow_the_law_and_skip_impossible_tokens():
    count = 6000
    chosen = [coins(position=i).choose(LAW, 0) for i in range(count)]
    raced = [coins(position=i).race(LAW, 1)[0] for i in range(count)]
    for picks in (chosen, raced):
        for token, prob in enumerate(LAW.prob_S.tolist()):
            # Five standard deviations: a false alarm in about one of two million.
            spread = 5 * math.sqrt(max(prob * (1 - prob), 1e-12) / count)
            assert abs(picks.count(token) / count - prob) <= spread


def test_a_race_depends_on_the_absolute_position_and_the_token_alone():
    assert coins(position=7).race(LAW, 3) == coins(position=9, stream=Stream.DRAFT).race(LAW, 1)
    shrunk = Law(torch.tensor([0.6, 0.4]), torch.tensor([0, 3]))
    noise = dict(enumerate(exponentials(5, torch.arange(4)).tolist()))
    assert exponentials(5, shrunk.ids).tolist() == [noise[0], noise[3]]
    order = coins().race(LAW, 1, count=9)
    assert sorted(order) == [0, 1, 3], "runners-up are distinct and possible"


def test_certain_flips_take_no_coin():
    assert coins().flip(1.0) and coins().flip(1.5)
    assert not coins().flip(0.0) and not coins().flip(-0.1)
