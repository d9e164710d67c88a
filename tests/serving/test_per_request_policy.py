"""Policies of their own in one batch: what each is told, and what load does to drafts."""

import pytest

from outpace.coins import KeyedCoins, Stream
from outpace.policies.auto import Auto, AutoConfig
from outpace.policies.base import Evidence, Policy, PolicyRow
from outpace.policies.costs import Costs
from outpace.policies.fixed import Fixed, FixedConfig
from outpace.policies.goodput import Goodput, GoodputConfig
from outpace.serving.per_request_policy import Own, PerRequestPolicy
from outpace.types import Budget, Load, Plan
from tests.policies.simulator import CURVE

OWN, ROOMY = Budget(max_nodes=6, max_depth=6), Budget(max_nodes=100, max_depth=100)


class Spy(Policy):
    """Takes a fixed number of guesses and remembers what it was told."""

    deterministic = False

    def __init__(self, nodes):
        super().__init__(None)
        self.nodes, self.told, self.learned = nodes, [], []

    def plan(self, rows, load):
        self.told.append((load, [row.state for row in rows]))
        return [Plan("d", Budget(self.nodes, self.nodes)) for _ in rows]

    def learn(self, rows, evidence):
        pairs = zip(rows, evidence, strict=True)
        self.learned.append([(row.state, seen.accepted) for row, seen in pairs])


def row(policy, state=None):
    return PolicyRow(Own(policy, state), {"d": OWN}, ROOMY, KeyedCoins(0, 0, Stream.POLICY))


def test_every_policy_gets_its_own_sequences_and_hears_of_the_others():
    fixed, a, b, mixed = Fixed(FixedConfig()), Spy(2), Spy(3), PerRequestPolicy()
    rows = [row(a, "a0"), row(fixed), row(b, "b0"), row(a, "a1"), row(fixed)]
    plans = mixed.plan(rows, Load(5, 100))
    assert [plan.budget.max_nodes for plan in plans] == [2, 6, 3, 2, 6]
    # Fixed ones are settled first; the others still count as they were a step ago.
    assert a.told == [(Load(5, 100, beside=7 + 7 + 1), ["a0", "a1"])]
    assert b.told == [(Load(5, 100, beside=7 + 7 + 3 + 3), ["b0"])]
    mixed.plan(rows, Load(5, 100))
    assert a.told[-1][0].beside == 7 + 7 + 4
    mixed.learn(rows, [Evidence("d", 2, 2, n, False) for n in range(5)])
    assert a.learned == [[("a0", 0), ("a1", 3)]] and b.learned == [[("b0", 2)]]


def test_previews_are_asked_for_where_they_are_read():
    mixed = PerRequestPolicy()
    auto = Auto(AutoConfig())
    load = Load(1, 100)
    assert mixed.wants_previews(Own(auto, auto.begin()), load)
    assert not mixed.wants_previews(Own(Fixed(FixedConfig()), None), load)


@pytest.mark.parametrize("make", [lambda: Goodput(GoodputConfig()), lambda: Auto(AutoConfig())])
def test_drafts_shrink_when_others_fill_the_pass(make):
    def nodes(load):
        policy = make()
        policy.costs = Costs(CURVE)
        policy.costs.suppose("d", (0.0,))
        one = PolicyRow(policy.begin(), {"d": OWN}, ROOMY, KeyedCoins(0, 0, Stream.POLICY))
        return policy.plan([one], load)[0].budget.max_nodes

    crowd = [nodes(Load(1 + n, 100, beside=n)) for n in (0, 4, 16, 32)]
    assert crowd == sorted(crowd, reverse=True) and crowd[0] > crowd[-1]
