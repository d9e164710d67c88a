"""Which of several drafts' guesses are checked: rules that read confidences, enumerated over two requests.

Every guess x_k has a confidence c_k that reads the tokens before it. A scheduler sorts all guesses by the
products of their confidences and takes as many as make the most of a pass. Source: DSpark, arXiv:2607.05147.
"""

import pytest
import torch

from outpace.analysis.enumeration import EnumeratingCoins, fates
from outpace.analysis.tables import RIGHT, NodeLaws, World, distance
from outpace.coins import Stream
from outpace.law import Law
from outpace.types import ROOT, Draft, Drawn, Group

P = Law(torch.tensor([0.7, 0.3], dtype=torch.float64))
Q = Law(torch.tensor([0.5, 0.5], dtype=torch.float64))
WORLD = World(0, vocab=2, p_edit=lambda law: P, q_edit=lambda law: Q)
DEPTH = 2


def first_drop(order, rate):
    """Take one guess more while the throughput grows."""
    taken, best = 0, rate(0)
    while taken < len(order) and rate(taken + 1) > best:
        taken, best = taken + 1, rate(taken + 1)
    return taken


def fixed(count):
    """As many as the step before wanted, the likeliest of now."""
    return lambda order, rate: min(count, len(order))


def best_of_all(order, rate):
    """The trap: whether x_1 is checked waits for c_2, which has read x_1."""
    return max(range(len(order) + 1), key=rate)


def lengths(rule, chances_R, speed):
    """How many guesses of every request are checked.

    Args:
        chances_R: per request, for every guess the chance that it and all before are kept.
        speed: passes per second by number of guesses.
    """
    order = sorted(
        ((-chance, number, k) for number, chances in enumerate(chances_R) for k, chance in enumerate(chances))
    )
    total = [len(chances_R)]
    for chance, *_ in order:
        total.append(total[-1] - chance)
    taken = order[: rule(order, lambda n: total[n] * speed[n])]
    return [sum(number == one for _, one, _ in taken) for number in range(len(chances_R))]


def law_of(rule, confidence, speed, requests):
    """The exact law of what the first request emits; ``confidence(number, tokens before)``."""
    out = {}

    def grow(fate):
        chains = []
        for number in range(requests):
            coins = EnumeratingCoins(fate, number, 9, Stream.DRAFT)
            chains.append([coins.choose(Q, k) for k in range(DEPTH)])
        chances_R = []
        for number, chain in enumerate(chains):
            chances = [confidence(number, ())]
            for k in range(1, DEPTH):
                chances.append(chances[-1] * confidence(number, tuple(chain[:k])))
            chances_R.append(chances)
        size = lengths(rule, chances_R, speed)[0]
        groups = tuple(Group(k - 1 if k else ROOT, Drawn.IID, (k,), 0) for k in range(size))
        return Draft(tuple(chains[0][:size]), tuple(range(-1, size - 1)), groups, (Q,))

    for drawing, draft in fates(grow):

        def judge(fate, draft=draft):
            coins = EnumeratingCoins(fate, 0, 9, Stream.JUDGE)
            return RIGHT["chain"].judge(draft, NodeLaws(WORLD, draft), coins)

        for judging, verdict in fates(judge, drawing.known):
            out[verdict.emitted] = out.get(verdict.emitted, 0.0) + drawing.weight * judging.weight
    return out


def first_token(law):
    return sum(weight for tokens, weight in law.items() if tokens[0] == 0)


def by_hand(number, before):
    return 0.8 if not before else (0.9 if before == (0,) else 0.0)


def test_a_search_over_all_lengths_bends_the_law():
    speed = (1.0, 0.5, 0.45)
    assert first_token(law_of(best_of_all, by_hand, speed, 1)) == pytest.approx(0.85)
    for rule in (first_drop, *map(fixed, range(3))):
        law = law_of(rule, by_hand, speed, 1)
        assert first_token(law) == pytest.approx(0.7) and distance(law, WORLD.p, 2, 3) < 1e-12


def test_stopping_early_and_a_fixed_number_keep_the_law_beside_other_requests():
    coins, biased = torch.Generator().manual_seed(1), 0
    for _ in range(12):
        table = torch.rand(2, 3, generator=coins).sqrt().tolist()
        # A step, and little behind it: there a first drop and the best of all differ.
        drop = 0.4 + 0.4 * float(torch.rand((), generator=coins))
        speed = [1.0, *(drop * 0.95**k for k in range(4))]

        def confidence(number, before, table=table):
            return table[number][0] if not before else table[number][1 + before[-1]]

        for rule in (first_drop, fixed(2)):
            assert distance(law_of(rule, confidence, speed, 2), WORLD.p, 2, 3) < 1e-12
        biased += distance(law_of(best_of_all, confidence, speed, 2), WORLD.p, 2, 3) > 1e-3
    assert biased > 0, "the trap would be seen"
