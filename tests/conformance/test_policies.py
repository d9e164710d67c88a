"""Contracts that every registered policy keeps, those of plug-ins too."""

from dataclasses import replace

import pytest

from outpace import registry
from outpace.coins import KeyedCoins, Stream
from outpace.policies.base import Evidence, PolicyRow
from outpace.types import NOTHING, Budget, Load

NAMES = [entry.name for entry in registry.entries("policy")]
DRAFTERS = {"first": Budget(max_nodes=8, max_depth=4), "second": Budget(max_nodes=3, max_depth=3)}
LIMITS = [Budget(1 << 20, 1 << 20), Budget(5, 2), Budget(1, 1), NOTHING]


@pytest.fixture(params=NAMES)
def policy(request):
    return registry.make("policy", request.param)


def rows(policy, states, step, limits=LIMITS):
    return [
        PolicyRow(
            state,
            DRAFTERS,
            limits[(i + step) % len(limits)],
            KeyedCoins(i, step, Stream.POLICY),
            {"second": [0.9, 0.5, 0.2]} if policy.reads_previews else {},
        )
        for i, state in enumerate(states)
    ]


def evidence(plan, step):
    """What came of a plan: a third of its levels, now and then cut short by a stop."""
    depth = min(plan.budget.max_depth, 4) if plan.budget.max_nodes else 0
    return Evidence(plan.drafter, depth, depth, depth // 3, step % 7 == 6)


def run(policy, count, steps=25, limits=LIMITS):
    """Plans of some sequences, step by step, as a policy learns."""
    states, plans = [policy.begin() for _ in range(count)], []
    for step in range(steps):
        views = rows(policy, states, step, limits)
        plans.append(policy.plan(views, Load(count, 100 + step)))
        policy.learn(views, [evidence(plan, step) for plan in plans[-1]])
        yield views, plans[-1]


def test_every_sequence_gets_a_plan_within_its_limit(policy):
    for views, plans in run(policy, 6):
        assert len(plans) == len(views)
        for view, plan in zip(views, plans, strict=True):
            assert plan.drafter in {*view.drafters, "none"}
            assert 0 <= plan.budget.max_nodes <= view.limit.max_nodes
            assert 0 <= plan.budget.max_depth <= view.limit.max_depth


def test_it_drafts_where_there_is_room(policy):
    plans = [plan for _, planned in run(policy, 1, limits=LIMITS[:1]) for plan in planned]
    assert any(plan.budget.max_nodes > 0 for plan in plans)


def test_nobody_drafts_without_room(policy):
    for _, plans in run(policy, 3, steps=3, limits=[NOTHING]):
        assert all(not plan.budget.max_nodes or not plan.budget.max_depth for plan in plans)


def test_plans_of_a_deterministic_policy_follow_from_the_sequence_alone(policy):
    if not policy.deterministic:
        assert type(policy).deterministic is False
        return
    together = [plans[0] for _, plans in run(policy, 5, limits=LIMITS[:1])]
    alone = [plans[0] for _, plans in run(registry.make("policy", policy_name(policy)), 1, limits=LIMITS[:1])]
    assert together == alone


def test_previews_are_asked_for_by_those_who_read_them(policy):
    assert policy.wants_previews(policy.begin(), Load(1, 10)) == policy.reads_previews


def policy_name(policy):
    return next(name for name in NAMES if registry.load("policy", name) is type(policy))


def test_the_test_of_limits_can_fail(monkeypatch):
    """A planted bug: a policy that grants what the drafter asks for."""
    policy = registry.make("policy", "fixed")
    real = type(policy).plan
    monkeypatch.setattr(
        type(policy),
        "plan",
        lambda self, views, load: [replace(p, budget=DRAFTERS["first"]) for p in real(self, views, load)],
    )
    with pytest.raises(AssertionError):
        test_every_sequence_gets_a_plan_within_its_limit(policy)
