import itertools

import pytest

from outpace.policies import candidates, throughput
from outpace.policies.auto import Auto, AutoConfig
from outpace.policies.base import PolicyRow
from outpace.policies.batch_cost import NONE, Share
from outpace.types import NOTHING, CostCurve, KnownDrafter, Load
from tests.policies.simulator import CURVE, PASS, Bush, Fake, Simulator, best_bush, best_fixed, rate


class Faithful(Auto):
    """Planted bug: stays with the drafter that it picked first."""

    def candidates(self, row):
        found = list(super().candidates(row))
        return [one for one in found if one[0] == row.state.usual] or found


def says(chance, often, nodes=8):
    """A lookup that has something to say in a share of the steps, and knows how sure it is."""
    return lambda coins: [chance] * nodes if coins.random() < often else []


def best_of(drafters, part=0):
    """The best fixed choice of drafter and depth."""
    return max(
        best_fixed(fake.parts[min(part, len(fake.parts) - 1)], fake.level)[0] for fake in drafters.values()
    )


def mean_share(drafters, seeds=4, cls=Auto):
    shares = [
        rate(Simulator(cls(AutoConfig()), drafters, seed).run(500)) / best_of(drafters)
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
def test_regret_is_at_most_five_percent(case):
    assert mean_share(STILL[case]) > 0.95


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
    assert bush_share(case) > 0.95


def test_the_tree_test_can_fail(monkeypatch):
    """Planted bug: a level is asked for with every node, and a node with every level."""
    monkeypatch.setattr(candidates, "cuts", lambda budget: tuple((n, n) for n in range(1, 9)))
    assert bush_share("levels cost much") < 0.95


@pytest.mark.parametrize(("most", "disturbed"), [(throughput.PROBE_LOSS, False), (9.0, True)])
def test_while_a_lookup_copies_well_nobody_is_tried(monkeypatch, most, disturbed):
    """Eight passes may be all that an answer takes; what was not tried by then is not missed."""
    monkeypatch.setattr(throughput, "PROBE_LOSS", most)
    drafters = {"look": Fake([says(0.97, 1.0, nodes=16)]), "m": Fake([0.6], 0.002)}
    steps = Simulator(Auto(AutoConfig()), drafters).run(10)
    assert any(s.drafter == "m" for s in steps) == disturbed


CHANGES = {
    "another is best": {"a": Fake([0.85, 0.1], 0.002), "b": Fake([0.1, 0.85], 0.002)},
    "acceptance collapses": {"a": Fake([0.9, 0.05], 0.002)},
    "one begins to pay": {"a": Fake([0.05, 0.85], 0.001)},
}


def after_change(drafters, cls=Auto, seeds=6):
    """Rate from 32 emitted tokens after the change on, as a share of the best of the new part."""
    shares = []
    for seed in range(seeds):
        simulator = Simulator(cls(AutoConfig()), drafters, seed)
        simulator.run(150)
        emitted = 0
        while emitted < 32:
            emitted += simulator.step(part=1)[0].emitted
        shares.append(rate(simulator.run(40, part=1)) / best_of(drafters, 1))
    return sum(shares) / seeds


@pytest.mark.parametrize("case", CHANGES)
def test_it_follows_the_text_within_32_tokens(case):
    assert after_change(CHANGES[case]) > 0.9


def test_the_change_test_can_fail():
    assert after_change(CHANGES["another is best"], Faithful) < 0.8


def test_a_lookup_is_taken_where_it_has_something_to_say():
    drafters = {"look": Fake([says(0.8, 0.4, nodes=4)]), "m": Fake([0.6], 0.002)}
    steps = Simulator(Auto(AutoConfig()), drafters).run(200)
    later = [s for s in steps[20:] if s.plan.choice.reason not in ("probe", "explore")]
    assert all((s.drafter == "look") == ("look" in s.plan.choice.rates) for s in later)
    alone = {
        name: rate(Simulator(Auto(AutoConfig()), {name: fake}).run(200)) for name, fake in drafters.items()
    }
    assert rate(steps) > 1.05 * max(alone.values())


class Boaster(Fake):
    """Says that it is surer than it is."""

    def says(self, chances):
        return [0.95] * len(chances)


def test_a_lookup_that_boasts_is_found_out():
    drafters = {"look": Boaster([says(0.2, 1.0)]), "m": Fake([0.8], 0.001)}
    simulator = Simulator(Auto(AutoConfig()), drafters)
    first, *_, last = simulator.run(60)
    assert first.plan.choice.rates["look"] > 4 / PASS
    assert last.drafter == "m" and last.plan.choice.rates["look"] < 2.5 / PASS


def test_every_choice_is_explained():
    steps = Simulator(Auto(AutoConfig()), STILL["two models"]).run(200)
    reasons = {s.plan.choice.reason for s in steps}
    assert {"best", "probe"} <= reasons <= {"best", "stay", "probe", "explore"}
    for s in steps:
        rates = s.plan.choice.rates
        assert rates["none"] == pytest.approx(1 / PASS, rel=0.05)
        if s.plan.choice.reason == "best":
            assert s.drafter == max(rates, key=rates.get)


DEAR_ROWS = CostCurve(
    model="simulated",
    dtype="float32",
    threads=1,
    device="none",
    rows_R=(1, 4, 256),
    context_C=(64,),
    seconds_CR=((PASS, PASS, PASS * (1 + 0.16 * 252)),),
    batch_B=(1, 8),
    seconds_CB=((PASS, PASS * (1 + 0.16 * 4)),),
)


class Blind(Auto):
    """Planted bug: never looks at what a pass costs without drafts."""

    def __init__(self, config):
        super().__init__(config)
        self._exploration.pause = lambda batch: False
        self._exploration.due = lambda batch_cost, drafting: False


@pytest.mark.parametrize(("cls", "least", "most"), [(Auto, 0.93, 1.0), (Blind, 0.0, 0.85)])
def test_a_batch_stops_drafting_where_rows_are_dearer_than_was_thought(cls, least, most):
    """Nothing was measured beforehand, and only passes without drafts tell what those cost."""
    drafters = {"a": Fake([0.5], 0.001), "b": Fake([0.4], 0.002)}
    simulator = Simulator(cls(AutoConfig()), drafters, seed=1, curve=DEAR_ROWS, know=False)
    steps = [simulator.step(batch=8) for _ in range(300)][150:]
    found = sum(one.expected for step in steps for one in step) / sum(s[0].seconds for s in steps)
    plain = 8 / DEAR_ROWS.seconds(1, 64, 8)
    assert best_fixed(0.5, 0.001, curve=DEAR_ROWS, batch=8) == (pytest.approx(plain), 0)
    assert least < found / plain <= most + 1e-9


class Startled(Auto):
    """Planted bug: a look makes a batch forget what it had settled on."""

    def plan(self, rows, load):
        plans = super().plan(rows, load)
        if any(plan.choice and plan.choice.reason in ("explore", "pause") for plan in plans):
            for row in rows:
                row.state.share, row.state.usual = Share(), NONE
        return plans


def gain_of_a_batch(cls, chance, batch, seed):
    """Over plain decoding, as a share of what the best depth gains, once all has settled."""
    fake = Fake([chance], 0.004)
    simulator = Simulator(cls(AutoConfig()), {"a": fake}, seed)
    steps = [simulator.step(batch=batch) for _ in range(200)][60:]
    found = sum(one.expected for step in steps for one in step) / sum(s[0].seconds for s in steps)
    best, plain = best_fixed(chance, 0.004, batch=batch)[0], best_fixed(0.0, 0.004, batch=batch)[0]
    return (found - plain) / (best - plain)


@pytest.mark.parametrize(("chance", "batch"), [(0.8, 8), (0.75, 6), (0.7, 8)])
def test_a_batch_goes_on_drafting_where_all_gain(chance, batch):
    gains = [gain_of_a_batch(Auto, chance, batch, seed) for seed in range(6)]
    assert min(gains) > 0.9


def test_the_test_of_going_on_can_fail():
    assert min(gain_of_a_batch(Startled, 0.7, 8, seed) for seed in range(6)) < 0.7


class Restless(Auto):
    """Planted bug: weighs drafts in every pass, whatever they bring."""

    def __init__(self, config):
        super().__init__(config)
        self._exploration.paused = lambda batch: False


def weighed(cls, batch, trouble=0.0003):
    """Of plain decoding: where nothing pays, and then where a text begins that is guessed well."""
    policy = cls(AutoConfig())
    simulator = Simulator(policy, {"a": Fake([0.3, 0.97], 0.002)}, trouble=trouble)
    plain = CURVE.seconds(1, 64, batch) / batch
    found = []
    for part in (0, 1):
        steps = [simulator.step(batch=batch, part=part) for _ in range(200)]
        seconds = sum(step[0].seconds for step in steps[50:])
        found.append(sum(one.expected for step in steps[50:] for one in step) / seconds * plain)
    return found


def test_a_large_batch_rests_where_drafts_are_not_worth_weighing():
    poor, rich = weighed(Auto, 16)
    busy_poor, busy_rich = weighed(Restless, 16)
    assert 0.96 < poor <= 1.0 and busy_poor < 0.9
    assert rich > 0.96 * busy_rich > 1.05, "it wakes up"


def test_looks_grow_rare_and_come_later_where_drafts_gain_more():
    def looks(chance, probe):
        steps = Simulator(Auto(AutoConfig(probe=probe)), {"a": Fake([chance], 0.002)}).run(600)
        return [i for i, s in enumerate(steps) if s.plan.choice.reason == "explore"]

    at = looks(0.75, 0.015)
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert 3 <= len(at) <= 6 and gaps[-1] >= 2 * gaps[0]
    assert looks(0.75, 0.0) == [], "nothing may be spent"
    assert at[0] < looks(0.95, 0.015)[0], "more is lost, so it takes longer to be worth it"


def test_probes_are_bounded():
    """Idle drafters that never pay take their share, a start, and what false alarms cost."""
    drafters = {name: Fake([0.03], 0.004) for name in "abc"}
    steps = Simulator(Auto(AutoConfig(probe=0.015)), drafters).run(1000)
    wasted = sum(s.seconds - PASS for s in steps)
    assert wasted < (2 * 0.015 * 1000 + 5) * PASS
    assert sum(s.drafter != "none" for s in steps[500:]) > 5, "they are still tried"


@pytest.mark.parametrize("know", [True, False])
def test_prices_are_learned_from_steps(know):
    """A dear drafter and a cheap one accept alike: without prices it finds out."""
    drafters = {"dear": Fake([0.7], 0.012), "cheap": Fake([0.7], 0.001)}
    steps = Simulator(Auto(AutoConfig()), drafters, know=know).run(200)
    assert sum(s.drafter == "cheap" for s in steps[50:]) > 120


def begin(drafters, know):
    """Tokens per second of the first steps, as a share of the best."""
    simulator = Simulator(Auto(AutoConfig()), drafters, know=False)
    if know:
        costs = simulator.policy.costs
        costs.later(
            lambda: (
                costs.start(CURVE),
                costs.know(
                    {
                        name: KnownDrafter(
                            call=0.0,
                            level=fake.level,
                            kept_D=tuple(100 * fake.parts[0] ** (d + 1) for d in range(8)),
                            tried_D=tuple(100 * fake.parts[0] ** d for d in range(8)),
                        )
                        for name, fake in drafters.items()
                    }
                ),
            )
        )
    return rate(simulator.run(12)) / best_of(drafters)


def test_it_begins_with_what_was_measured():
    """Among many drafters of which one pays: told beforehand, it need not be found."""
    drafters = {name: Fake([0.15], 0.004) for name in "abcdef"} | {"good": Fake([0.85], 0.001)}
    assert begin(drafters, know=True) > 0.9 > 0.7 > begin(drafters, know=False)


def test_what_was_measured_is_not_believed_forever():
    """On a text where the measured favourite fails, another is found as before."""
    drafters = {"a": Fake([0.1], 0.002), "b": Fake([0.85], 0.002)}
    simulator = Simulator(Auto(AutoConfig()), drafters)
    simulator.policy.costs.know(
        {
            "a": KnownDrafter(call=0.0, level=0.002, kept_D=(900.0,) * 8, tried_D=(1000.0,) * 8),
            "b": KnownDrafter(call=0.0, level=0.002, kept_D=(100.0,), tried_D=(1000.0,)),
        }
    )
    simulator.run(40)
    assert rate(simulator.run(100)) > 0.9 * best_of(drafters)


def test_a_batch_that_grows_and_shrinks_does_not_lose_sequences():
    drafters = {"look": Fake([says(0.9, 0.5)]), "m": Fake([0.7], 0.002)}
    simulator = Simulator(Auto(AutoConfig()), drafters)
    drafted = {}
    for batch in (1, 8, 32, 2):
        taken = [simulator.step(batch=batch) for _ in range(30)]
        assert [len(step) for step in taken] == [batch] * 30
        drafted[batch] = sum(one.depth for step in taken[10:] for one in step) / (20 * batch)
    assert drafted[1] > drafted[8] > drafted[32] and drafted[2] > drafted[8]


def test_no_room_no_draft():
    policy = Auto(AutoConfig())
    row = PolicyRow(policy.begin(), {"m": Fake([0.5]).budget}, NOTHING, None)
    assert policy.plan([row], Load(1, 9))[0].drafter == "none"


def test_only_guesses_that_may_pay_are_wanted():
    """As many times as a lookup may keep its word; a single sequence has rows to spare."""
    policy = Auto(AutoConfig())
    policy.costs.start(DEAR_ROWS)
    one, many = (policy.asks(policy.begin(), Load(batch, 64)) for batch in (1, 8))
    row = DEAR_ROWS.seconds(2, 64, 8) / DEAR_ROWS.seconds(1, 64, 8) - 1
    assert one < 0.01
    assert many is None, "it begins with plain passes"
    policy._exploration.paused = lambda batch: False
    assert policy.asks(policy.begin(), Load(8, 64)) == pytest.approx(row / candidates.MOST_WORTH)


def test_what_was_saved_alone_is_little_in_a_large_batch():
    policy = Auto(AutoConfig(probe=0.015))
    simulator = Simulator(policy, {"a": Fake([0.0], 0.03)})
    simulator.run(40)
    alone = simulator.states[0].allowance
    simulator.step(batch=16)
    policy._exploration.pause = lambda batch: False
    simulator.step(batch=16)
    assert 0 < simulator.states[0].allowance < alone / 8
