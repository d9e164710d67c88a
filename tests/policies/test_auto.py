from dataclasses import replace

import pytest

from outpace.drafters.trained import read_acceptance
from outpace.policies.acceptance import KEPT, Pool
from outpace.policies.auto import NONE, Auto, AutoConfig
from outpace.policies.base import Evidence, PolicyRow
from outpace.policies.offers import Offer, Prices
from outpace.policies.tuning import Tuning
from outpace.types import NOTHING, Budget, KnownDrafter, Load, RowRecord, StepRecord
from tests.policies.simulator import CURVE, PASS, ROOMY, Bush, Fake, Simulator, best_bush, best_fixed, rate


class Deaf(Auto):
    """Planted bug: never tries a drafter that is idle."""

    def _trial(self, *given):
        return None


def says(chance, often, nodes=8):
    """A lookup that has something to say in a share of the steps, and knows how sure it is."""
    return lambda coins: [chance] * nodes if coins.random() < often else []


def best_of(drafters, part=0):
    """The best fixed choice of drafter and depth."""
    return max(
        best_fixed(fake.parts[min(part, len(fake.parts) - 1)], fake.level)[0] for fake in drafters.values()
    )


def mean_share(drafters, seeds=4, cls=Auto, know=True):
    shares = [
        rate(Simulator(cls(AutoConfig()), drafters, seed, know=know).run(500)) / best_of(drafters)
        for seed in range(seeds)
    ]
    return sum(shares) / seeds


STILL = {
    "two models": {"a": Fake([0.8], 0.003), "b": Fake([0.5], 0.001)},
    "a cheap one is best": {"a": Fake([0.8], 0.009), "b": Fake([0.6], 0.001)},
    "none is best": {"a": Fake([0.1], 0.003), "b": Fake([0.15], 0.002)},
    "one is free": {"a": Fake([0.7], 0.004), "b": Fake([0.55], 0.0), "c": Fake([0.2], 0.002)},
}


@pytest.mark.parametrize("case", STILL)
def test_regret_is_at_most_six_percent(case):
    assert mean_share(STILL[case]) > 0.94


@pytest.mark.parametrize("case", list(STILL)[:3])
def test_what_costs_nobody_measured_are_learned(case):
    assert mean_share(STILL[case], know=False) > 0.92


BUSHES = {
    "levels cost little": (Bush([0.5], 0.0005), 1),
    "levels cost much": (Bush([0.5], 0.003), 1),
    "a good one": (Bush([0.75], 0.0015), 1),
    "rows cost more": (Bush([0.5], 0.002), 8),
}


def bush_share(case, seeds=3):
    fake, batch = BUSHES[case]
    found = 0.0
    for seed in range(seeds):
        simulator = Simulator(Auto(AutoConfig()), {"tree": fake}, seed)
        steps = [simulator.step(batch=batch) for _ in range(400 // batch)]
        tokens = sum(one.expected for step in steps for one in step)
        found += tokens / sum(step[0].seconds for step in steps) / best_bush(fake, batch=batch)
    return found / seeds


@pytest.mark.parametrize("case", BUSHES)
def test_trees_are_as_wide_and_as_deep_as_pays(case):
    assert bush_share(case) > 0.8


def test_the_tree_test_can_fail(monkeypatch):
    """Planted bug: every tree has one level."""
    monkeypatch.setattr(Pool, "sizes_to_weigh", lambda self, budget: [(8, 1)])
    assert bush_share("a good one") < 0.8


CHANGES = {
    "another is best": {"a": Fake([0.85, 0.1], 0.002), "b": Fake([0.1, 0.85], 0.002)},
    "acceptance collapses": {"a": Fake([0.9, 0.05], 0.002)},
    "one begins to pay": {"a": Fake([0.05, 0.85], 0.001)},
}


def after_change(drafters, cls=Auto, seeds=6, tokens=96):
    """Rate from some emitted tokens after the change on, as a share of the best of the new part."""
    shares = []
    for seed in range(seeds):
        simulator = Simulator(cls(AutoConfig()), drafters, seed)
        simulator.run(150)
        emitted = 0
        while emitted < tokens:
            emitted += simulator.step(part=1)[0].emitted
        shares.append(rate(simulator.run(60, part=1)) / best_of(drafters, 1))
    return sum(shares) / seeds


@pytest.mark.parametrize("case", CHANGES)
def test_it_follows_the_text(case):
    assert after_change(CHANGES[case]) > 0.8


def test_the_change_test_can_fail():
    assert after_change(CHANGES["one begins to pay"], Deaf) < 0.75


def test_a_step_has_to_beat_no_other_step():
    """Where a lookup copied well, time seems dear: a drafter that pays in this step is asked all the same."""
    copies = Fake([lambda coins: [0.97] * 16, lambda coins: []])
    simulator = Simulator(Auto(AutoConfig()), {"lookup": copies, "model": Fake([0.6], 0.2 * PASS)})
    simulator.run(40, part=1)
    assert rate(simulator.run(60)) > 4 / PASS
    hard = simulator.step(part=1)[0]
    assert (hard.drafter, hard.plan.choice.reason) == ("model", "best")


def taught(policy, state, kept, drafter="m"):
    """Has a policy see what became of drafts of one guess."""
    row = PolicyRow(state, {drafter: Budget(1, 1)}, Budget(9, 9), None)
    for hit in kept:
        state.asked = Offer(0.0, drafter, 1, 1, 0.6, 1)
        policy.learn([row], [Evidence(drafter, 1, 1, hit, False)])


def test_what_a_first_text_teaches_counts_once():
    policy = Auto(AutoConfig())
    state = policy.begin()
    taught(policy, state, [n % 3 == 0 for n in range(30)])
    assert policy._here(state, "m") == pytest.approx(1.0, abs=0.07)
    other = policy.begin()
    taught(policy, other, [True] * 30)
    assert policy._here(other, "m") > 1.2


def test_texts_under_rules_teach_only_each_other():
    policy = Auto(AutoConfig())
    taught(policy, policy.begin(ruled=True), [True] * 30)
    assert policy.learned() == {}
    ratio = [policy._pool(policy.begin(ruled=ruled), "m").ratio(KEPT) for ruled in (False, True)]
    assert ratio[0] == 1.0 < ratio[1]


class Boaster(Fake):
    """Says that it is surer than it is."""

    def says(self, chances):
        return [0.95] * len(chances)


def test_a_lookup_that_boasts_is_found_out():
    drafters = {"look": Boaster([says(0.1, 1.0)]), "m": Fake([0.8], 0.001)}
    steps = Simulator(Auto(AutoConfig()), drafters).run(120)
    assert steps[0].drafter == "look"
    assert sum(one.drafter == "m" for one in steps[60:]) > 45


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_it_loses_next_to_nothing_where_nothing_pays(batch):
    """Rows that cost as much as passes, as where a target feeds them one by one."""
    dear = replace(CURVE, rows_R=(1, 256), seconds_CR=((PASS, 256 * PASS),))
    drafters = {"look": Fake([says(0.6, 0.5)]), "m": Fake([0.6], 0.002)}
    for know in (True, False):
        simulator = Simulator(Auto(AutoConfig()), drafters, curve=dear, know=know)
        steps = [simulator.step(batch=batch)[0] for _ in range(400)]
        spent = sum(one.seconds for one in steps)
        tokens = 400 * batch + simulator.kept
        assert tokens / spent > 0.965 / PASS


def test_rows_of_unknown_cost_are_asked_for_a_few_at_a_time():
    steps = Simulator(Auto(AutoConfig()), {"look": Fake([says(0.97, 1.0, 64)])}, know=False).run(6)
    depths = [one.depth for one in steps]
    assert depths[0] == Tuning().first and all(
        later <= 2 * most for later, most in zip(depths[1:], depths, strict=False)
    )
    known = Simulator(Auto(AutoConfig()), {"look": Fake([says(0.97, 1.0, 16)])}).run(1)
    assert known[0].depth == 16


def test_trials_stay_within_their_share():
    drafters = {"m": Fake([0.05], 0.004), "n": Fake([0.05], 0.003)}
    steps = Simulator(Auto(AutoConfig()), drafters).run(2000)[200:]
    tried = [one for one in steps if one.drafter != NONE]
    assert {one.drafter for one in tried} == {"m", "n"}, "both in turn"
    assert all(one.plan.choice.reason == "probe" for one in tried)
    assert rate(steps) > 0.985 / PASS


def test_a_bad_moment_is_not_believed_for_ever():
    """After a slow start rows seem to cost as much as passes: a trial has to be saved for."""
    policy = Auto(AutoConfig())
    for rows, seconds in ((1, PASS), (5, 9 * PASS)) * 4:
        one = RowRecord(0, NONE, rows - 1, 0, (0,), rows - 1, False)
        policy.costs.watch(StepRecord(0, (one,), {"score": seconds}, rows, context=64))
    steps = Simulator(policy, {"look": Fake([says(0.8, 1.0, 4)])}, know=False).run(900)
    drafts = [one.depth > 0 for one in steps]
    assert not any(drafts[:50]) and sum(drafts[-200:]) > 180


def test_sequences_without_drafts_are_looked_at_less_often():
    policy = Auto(AutoConfig())
    simulator = Simulator(policy, {"look": Fake([says(0.01, 1.0)])})
    for _ in range(40):
        simulator.step(batch=16)
    asked = 0
    for _ in range(64):
        asked += policy.wants_previews(simulator.states[3], Load(16, 64))
        simulator.step(batch=16)
    assert asked == 64 // 2 ** Tuning().quiet
    alone = Simulator(policy, {"look": Fake([says(0.01, 1.0)])})
    alone.run(40)
    assert policy.wants_previews(alone.states[0], Load(1, 64)), "a single sequence is always looked at"


@pytest.mark.parametrize(("level", "drafts"), [(0.003, True), (0.03, False)])
def test_levels_that_all_share_are_paid_for_together(level, drafts):
    """One of four sequences alone would never begin; four together do, if it pays for four."""
    simulator = Simulator(Auto(AutoConfig()), {"m": Fake([0.8], level)})
    steps = [simulator.step(batch=4) for _ in range(80)]
    drafting = [sum(one.depth > 0 for one in step) for step in steps[20:]]
    assert (best_fixed(0.8, level, batch=4)[1] > 0) == drafts
    assert (sum(drafting) / 60 > 2) if drafts else (sum(drafting) / 60 < 0.5)


def test_every_choice_is_explained():
    steps = Simulator(Auto(AutoConfig()), STILL["two models"]).run(200)
    for one in steps:
        assert one.plan.choice.rates[NONE] > 0 and one.drafter in one.plan.choice.rates
    assert {one.plan.choice.reason for one in steps} == {"best", "probe"}


def test_no_room_means_no_draft():
    policy = Auto(AutoConfig())
    policy.costs.start(CURVE)
    row = PolicyRow(policy.begin(), {"a": Fake([0.9]).budget}, NOTHING, None, {"a": [0.9, 0.8]})
    assert policy.plan([row], Load(1, 64))[0].budget == NOTHING


def test_what_was_learned_can_be_handed_on():
    teacher = Simulator(Auto(AutoConfig()), {"m": Fake([0.05], 0.003)})
    teacher.run(300)
    learned = teacher.policy.learned()
    for taught in (True, False):
        policy = Auto(AutoConfig())
        if taught:
            policy.recall(learned)
        steps = Simulator(policy, {"m": Fake([0.05], 0.003)}, seed=3).run(10)
        # A sequence may be thought better than most, once; nobody knows that before the first draft.
        assert (sum(one.depth for one in steps) <= 3) == taught
    for broken in (
        {"greedy": {"m": 3}},
        {"greedy": {"m": [[["kept", float("inf")], 1, 2]]}},
        {"greedy": {"m": [[["kept", 0], -1, 2]]}},
        {"greedy": {"m": [[["other"], 1, 2]]}},
        {"greedy": 1},
        [],
    ):
        policy = Auto(AutoConfig())
        policy.recall(broken)
        assert Simulator(policy, {"m": Fake([0.5], 0.001)}).run(3)


def test_what_a_key_taught_serves_that_key_alone():
    policy = Auto(AutoConfig())
    for key, greedy in (("", True), ("a", True), ("", False)):
        state = policy.begin(key, greedy)
        policy._pool(state, "m").add(0.0, 200.0, KEPT)
    assert policy.begin("a", True).pools["m"].ratio(KEPT) < 0.1
    assert not policy.begin("b", True).pools and not policy.begin("a", False).pools
    assert policy.learned().keys() == {"greedy", "drawn"}, "what has a key is not kept"
    again = Auto(AutoConfig())
    again.recall(policy.learned())
    assert again._pool(again.begin(), "m").ratio(KEPT) < 0.1
    assert again._pool(again.begin("b"), "m").ratio(KEPT) == 1.0
    for number in range(200):
        policy.begin(str(number))
    assert len(policy._pools) <= Tuning().most


def test_constants_are_few_and_explained():
    assert len(Tuning.__slots__) <= 12


def test_a_draft_stays_within_the_limit_of_its_sequence():
    policy = Auto(AutoConfig())
    policy.costs.start(CURVE)
    limit = type(ROOMY)(2, 2)
    row = PolicyRow(policy.begin(), {"a": Fake([0.9]).budget}, limit, None, {"a": [0.9] * 9})
    assert policy.plan([row], Load(1, 64))[0].budget.max_nodes == 2


def test_what_training_found_is_where_a_drafter_begins(tmp_path):
    """What was found poor is asked less often than what nobody knows, what was found good for more."""
    (tmp_path / "provenance.json").write_text('{"held_out": {"acceptance": [0.1, 0.2]}}')
    assert read_acceptance(tmp_path) == (0.1, 0.2)
    for broken in (
        '{"held_out": {"acceptance": [2.0]}}',
        '{"held_out": 3}',
        '{"held_out": {"acceptance": 1}}',
        "x",
    ):
        (tmp_path / "provenance.json").write_text(broken)
        assert read_acceptance(tmp_path) == ()
    first, drafts = {}, {}
    for share in (0.05, None, 0.9):
        policy = Auto(AutoConfig())
        if share is not None:
            count = Tuning().text / 2
            told = KnownDrafter(call=0.0, level=0.0, kept_D=(share * count,), tried_D=(count,))
            policy.costs.know({"m": told})
        steps = Simulator(policy, {"m": Fake([0.1], 0.003)}, know=False).run(12)
        first[share], drafts[share] = steps[0].depth, sum(one.depth > 0 for one in steps)
    assert first[0.9] > first[None] and drafts[0.05] < drafts[None]


def test_sequences_that_rest_share_a_level():
    """A level is paid for once: all of a batch are weighed for it, those that drafted nothing lately too."""
    policy = Auto(AutoConfig())
    policy.costs.start(CURVE)
    policy.costs.suppose("m", (0.1,))
    for resting in (0, 7):
        rows = [PolicyRow(policy.begin(), {"m": Fake([0.6]).budget}, Budget(64, 64), None) for _ in range(8)]
        for row in rows[:resting]:
            row.state.quiet = 3
        policy._tick = 1
        plans = policy.plan(rows, Load(8, 64))
        assert [plan.drafter for plan in plans] == ["m"] * 8


def test_a_trial_counts_what_the_first_rows_of_a_pass_cost():
    """Row 65 costs a tenth of a pass: trials of three idle drafters take some hundredths of the time."""
    stair = replace(CURVE, rows_R=(1, 64, 65, 256), seconds_CR=((PASS, PASS, 1.1 * PASS, 1.15 * PASS),))
    simulator = Simulator(Auto(AutoConfig()), {name: Fake([0.05]) for name in "abc"}, curve=stair)
    steps = [simulator.step(batch=64)[0].seconds for _ in range(400)][100:]
    assert PASS * 300 < sum(steps) < 1.02 * PASS * 300


def test_sequences_that_are_alike_are_weighed_once(monkeypatch):
    weighed, weigh = [], Prices._weigh
    monkeypatch.setattr(Prices, "_weigh", lambda *given: weighed.append(given) or weigh(*given))
    simulator = Simulator(Auto(AutoConfig()), {"a": Fake([0.05])})
    for page in range(64):
        simulator.step(batch=16, context=64 * page)
    assert 0 < len(weighed) < 64 * 16 / 4


def test_each_of_many_sequences_pays_its_share_of_a_level():
    """What a tree is told of the price of a level: with a level for eight together, an eighth of it."""
    paid = {}
    for batch in (1, 8):
        policy = Auto(AutoConfig())
        policy.costs.start(CURVE)
        policy.costs.suppose("m", (0.1,))
        rows = [
            PolicyRow(policy.begin(), {"m": Fake([0.6]).budget}, Budget(64, 64), None) for _ in range(batch)
        ]
        plans = policy.plan(rows, Load(batch, 64))
        assert [plan.drafter for plan in plans] == ["m"] * batch
        prices = Prices(policy.costs, Load(batch, 64), batch, 0)
        told = plans[0].budget.price
        paid[batch] = told.level_D[0] / (told.row_R[9] / prices._row_R[9])
    assert paid[8] == pytest.approx(paid[1] / 8)


def test_nodes_that_a_tree_never_has_cost_nothing():
    """A drafter that was asked for four nodes and stopped behind one: its rows are priced as one."""
    pool, budget = Pool(), replace(Bush([0.6], 0.001).budget, max_nodes=4)
    assert budget.shape.beam
    costs = Auto(AutoConfig()).costs
    costs.start(CURVE)
    before = {
        (nodes, depth): rest for nodes, depth, *rest in Prices(costs, Load(1, 64), 1, 0)._sized(budget, pool)
    }
    for _ in range(200):
        pool.grew(4, 2, 1, 1)
    after = {
        (nodes, depth): rest for nodes, depth, *rest in Prices(costs, Load(1, 64), 1, 0)._sized(budget, pool)
    }
    assert before[4, 2][2] == 4 and after[4, 2][2] == pytest.approx(1.0, abs=0.15)
    assert after[4, 2][4] < before[4, 2][4]
    assert Pool.from_json(pool.to_json()).ratio("drafted", 4, 2) == pool.ratio("drafted", 4, 2)
