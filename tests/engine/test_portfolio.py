import itertools
import statistics
import sys
from pathlib import Path

import pytest

from outpace import Engine, SamplingParams, SpecError, UnknownNameError, registry
from outpace.drafters.trained import home, read_measured
from outpace.engine import portfolio
from outpace.methods.draft_model.objective import DraftModelObjective, DraftModelTraining
from outpace.methods.lookup.suffix import Suffix
from outpace.methods.medusa.hydra_objective import Hydra, HydraTraining
from outpace.methods.medusa.objective import Medusa, MedusaTraining
from outpace.types import CostCurve

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42, 43, 44, 40, 41, 42], [77]]
SETTINGS = {"max_new_tokens": 40, "ignore_eos": True, "allowed_tokens": frozenset({3, 1, 4})}
SHIPPED = Path(portfolio.__file__).parents[1] / "weights" / "smollm2-135m"
RULED = "grammar[tree_size=48]"
WITH_MODEL = "auto[drafters=suffix+draft_model[model=tiny]]"


@pytest.fixture
def engine():
    return Engine.load("tiny", drafter="none", dtype="float32")


def watch(engine, prompts, **settings):
    """What listeners are told of every row of every step that is no prompt."""
    rows = []
    engine.listeners.append(lambda r: rows.extend(() if r.prompt else r.rows))
    results = engine.generate(prompts, **{**SETTINGS, **settings})
    engine.listeners.clear()
    return rows, results


def test_lookups_take_part_unasked_and_untrained_methods_do_not(engine):
    method = engine.method("auto")
    assert list(method.members) == ["suffix[tree_size=48]", "recycling", RULED]
    assert "outpace train eagle3" in method.left_out["eagle3"]
    added = engine.method("auto[add=draft_model[model=tiny layers=1]]")
    assert next(iter(added.members)) == "draft_model[layers=1 model=tiny]"
    assert list(added.members)[1:] == ["suffix[tree_size=48]", RULED], "recycling stands in for models"


def test_drafters_for_long_texts_take_part_where_texts_can_be_long(engine):
    able = [row.name for row in registry.able("drafter", registry.LONG_TEXTS)]
    assert able and not set(able) & set(engine.method("auto").members)
    engine.target.max_positions = portfolio.LONG
    long = engine.method("auto[policy=auto]")
    assert set(able) <= set(long.members)
    rows, _ = watch(engine, PROMPTS, drafter=long.spec)
    assert not {row.drafter for row in rows} & set(able), "nothing is asked of them while texts are short"


def test_a_drafter_that_cannot_begin_leaves_no_state_of_the_others(engine, monkeypatch):
    spec = "auto[drafters=prompt_lookup+suffix]"
    first, second = (one.drafter for one in engine.method(spec).members.values())
    ended: list[object] = []

    def fail(request):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(first, "end", ended.append, raising=False)
    monkeypatch.setattr(second, "begin", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate(PROMPTS[:1], drafter=spec, **SETTINGS)
    assert len(ended) == 1 and engine.cache.slots == 0


def test_of_what_ships_eagle3_emits_most():
    made = {folder.name: read_measured(folder) for folder in SHIPPED.iterdir() if folder.is_dir()}
    emitted = {name: one["mean_emitted"] for name, one in made.items() if one and name != "max_gram"}
    assert len(emitted) > 2 and max(emitted, key=emitted.__getitem__) == "eagle3", "wheels carry it"


def test_of_trained_models_the_one_that_emits_most_takes_part(engine, monkeypatch, tmp_path):
    monkeypatch.setenv("OUTPACE_DATA", str(tmp_path))
    trained = {
        "medusa": (Medusa, MedusaTraining(heads=2), 1.2),
        "hydra": (Hydra, HydraTraining(heads=2), 1.4),
        "draft_model": (DraftModelObjective, DraftModelTraining(layers=1), "2.0"),
    }
    for name, (objective, config, emitted) in trained.items():
        measured = {} if emitted is None else {"measured": {"mean_emitted": emitted}}
        built = objective.build(config, engine.target, None)
        built.save(home(name, engine.target), measured)
    method = engine.method("auto")
    assert list(method.members) == ["suffix[tree_size=48]", RULED, "hydra", "medusa", "draft_model"], (
        "all of the user's"
    )
    monkeypatch.setattr(portfolio, "home", lambda method, target: tmp_path / "elsewhere")
    shipped = Engine.load("tiny", drafter="none", dtype="float32").method("auto")
    assert list(shipped.members) == ["suffix[tree_size=48]", RULED, "hydra"]
    assert shipped.left_out["medusa"] == "hydra emits more per pass"
    assert shipped.left_out["draft_model"].endswith("name it with auto[add=draft_model]")
    assert "outpace train eagle3" in method.left_out["eagle3"], "there is none"
    (home("hydra", engine.target) / "model.safetensors").write_bytes(b"broken")
    spoiled = Engine.load("tiny", drafter="none", dtype="float32").method("auto")
    assert "medusa" in spoiled.members, "the next best stands in"
    assert "hydra" in spoiled.left_out


def test_a_draft_model_of_the_users_takes_part():
    engine = Engine.load("tiny", drafter="none", dtype="float32", draft_model="tiny")
    assert list(engine.method("auto").members) == ["draft_model[model=tiny]", "suffix[tree_size=48]", RULED]
    exactly = engine.method("auto[drafters=suffix]")
    assert list(exactly.members) == ["suffix"], "who names members means these"
    expected = engine.generate(PROMPTS, drafter="none", **SETTINGS)
    assert [r.tokens for r in engine.generate(PROMPTS, drafter="auto", **SETTINGS)] == [
        r.tokens for r in expected
    ]


def test_a_draft_model_that_is_not_there_is_told_when_the_engine_loads():
    with pytest.raises(UnknownNameError, match="unknown model 'wrong'"):
        Engine.load("tiny", draft_model="wrong")


def test_members_are_loaded_with_the_first_request(monkeypatch):
    loaded = []
    load = Suffix.load.__func__
    monkeypatch.setattr(
        Suffix,
        "load",
        classmethod(lambda cls, config, target: (loaded.append(1), load(cls, config, target))[1]),
    )
    engine = Engine.load("tiny", drafter="auto", dtype="float32")
    assert not loaded
    engine.generate([PROMPTS[0]] * 2, max_new_tokens=3)
    assert loaded == [1, 1], "its own, and the one of `grammar`"


def test_trees_that_grow_by_price_may_be_larger_unless_their_spec_says_a_size(engine):
    tree, small, chain = (f"draft_model[{more}model=tiny]" for more in ("", "tree_size=3 ", "tree=1x1x1 "))
    found = engine.method(f"auto[drafters={tree}+{small}+{chain}+suffix]")
    larger = {name for name, one in found.members.items() if found.budget_of(one) != one.budget}
    assert len(found.members) == 4 and larger == {tree}
    alone = engine.method(tree)
    assert found.budget_of(alone).max_nodes == portfolio.LARGEST
    assert alone.budget_of(alone).max_nodes < portfolio.LARGEST, "alone it does not know what rows cost"


def test_choices_reach_listeners_and_say_what_was_expected(engine):
    rows, _ = watch(engine, PROMPTS, drafter=WITH_MODEL)
    assert {"suffix", "draft_model[model=tiny]"} >= {r.drafter for r in rows} - {"none"} != set()
    weighed = [r for r in rows if r.choice.reason != "pause"]
    assert weighed and all(r.choice.rates["none"] > 0 for r in weighed)
    assert {r.choice.reason for r in rows} <= {"best", "probe", "pause"}
    assert all(r.drafter in r.choice.rates for r in rows)
    plain, _ = watch(engine, PROMPTS, drafter="prompt_lookup")
    assert all(r.choice is None for r in plain)


def test_dear_drafters_are_left_alone(engine):
    """Where a pass costs nothing, but a level of the draft model does, only lookups are asked."""
    engine.costs.start(
        CostCurve(
            model="tiny",
            dtype="float32",
            threads=1,
            device="d",
            rows_R=(1, 64),
            context_C=(0,),
            seconds_CR=((1e-3, 1.01e-3),),
        )
    )
    engine.costs.watch = lambda record: None
    engine.costs.suppose("draft_model[model=tiny]", (1000.0,))
    rows, _ = watch(engine, PROMPTS[1], drafter=WITH_MODEL)
    assert "suffix" in {r.drafter for r in rows}
    assert "draft_model[model=tiny]" not in {r.drafter for r in rows}
    engine.costs.suppose("draft_model[layers=1 model=tiny]", (0.001,))
    spec = "auto[drafters=suffix+draft_model[model=tiny layers=1]]"
    rows, _ = watch(engine, [77], drafter=spec)
    assert "draft_model[layers=1 model=tiny]" in {r.drafter for r in rows}


def test_costs_are_watched_for_policies_that_read_them(engine):
    watch(engine, PROMPTS[0], drafter="prompt_lookup")
    assert not engine.costs.known, "nobody asked"
    watch(engine, PROMPTS[0], drafter="draft_model[model=tiny layers=1 policy=goodput]")
    assert 0 < engine.costs.passed(1, 0, 1) < 0.5
    assert engine.costs._drafts["draft_model[layers=1 model=tiny policy=goodput]"]


def test_a_seed_is_a_promise_whatever_the_clock_says(monkeypatch, engine):
    """Prices that jump about change who drafts, and not the text of a seeded request."""
    sampled = {"temperature": 0.9, "max_new_tokens": 30, "seed": 4, "ignore_eos": True}
    expected = engine.generate(PROMPTS, **sampled, drafter="none", reproducible=True)
    ways = set()
    for level in (0.0, 10.0):
        monkeypatch.setattr(engine.costs, "price", lambda *_, level=level: level)
        rows, results = watch(engine, PROMPTS, **sampled, drafter=WITH_MODEL, allowed_tokens=None)
        assert [r.tokens for r in results] == [r.tokens for r in expected]
        ways.add(tuple(r.drafter for r in rows))
    assert len(ways) == 2, "drafting did differ"


def test_every_member_of_a_batch_gives_back_its_states(engine):
    spec = "auto[drafters=draft_model[model=tiny]+suffix]"
    engine.generate(PROMPTS * 2, drafter=spec, max_new_tokens=9)
    assert not engine.method(spec).preferred.drafter.cache._slots and not engine.cache._slots


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("auto[tree_size=4]", SpecError, "belongs to its members"),
        ("auto[drafters=auto]", SpecError, "cannot be a member of itself"),
        ("auto[drafters=sufix]", UnknownNameError, "did you mean suffix"),
        ("auto[policy=goodput[weight=7]]", SpecError, r"weight must be in \(0, 1\]"),
        ("auto[many=3]", UnknownNameError, "many"),
        ("auto[policy=specdecpp]", SpecError, r"specdecpp steers one .*draft_model\["),
    ],
)
def test_bad_portfolios_are_refused_at_once(engine, spec, error, says):
    with pytest.raises(error, match=says):
        engine.method(spec)


def test_deciding_is_cheap(engine, monkeypatch):
    """Counted in calls, not in seconds; a model that ran, or a text that was read, would show."""
    policy, calls = engine.method("auto").policy, []

    def plan(views, load, real=policy.plan):
        count, before = itertools.count(), sys.getprofile()
        sys.setprofile(lambda frame, event, what: event in ("call", "c_call") and next(count))
        try:
            return real(views, load)
        finally:
            sys.setprofile(before)
            calls.append(next(count))

    monkeypatch.setattr(policy, "plan", plan)
    medians = []
    for prompt in (PROMPTS[0], PROMPTS[0] * 40):
        calls.clear()
        engine.generate(prompt, drafter="auto", **SETTINGS)
        medians.append(statistics.median(calls))
    assert max(medians) < 2000, medians


def test_a_member_that_names_a_verifier_has_decided(engine):
    """As where it is named alone: a seed then asks for no other verifier."""
    method = engine.method("auto[drafters=suffix+draft_model[model=tiny layers=1 verifier=block]]")
    seeded = SamplingParams(seed=1)
    assert engine.verifier(method, None, seeded) is method.verifier
    kinds = {one.name for one in method.verifiers(method.verifier).values()}
    assert kinds == {"tree", "block"}
    with pytest.raises(SpecError, match="needs verifier=coupled, not block; drop one of the two"):
        engine.verifier(method, True, seeded)
    assert engine.verifier(engine.method(WITH_MODEL), None, seeded).name == "coupled"
    with pytest.raises(SpecError, match="coupled judges all drafts of a text or none"):
        engine.method("auto[drafters=suffix[verifier=coupled]]")


def test_a_lookup_proposes_once_a_step(engine, monkeypatch):
    """What it made before the policy planned is what is drafted, whole or cut."""
    made, propose = [], Suffix.propose

    def listen(self, rows):
        made.append(propose(self, rows))
        return made[-1]

    monkeypatch.setattr(Suffix, "propose", listen)
    steps = []
    engine.listeners.append(lambda record: steps.append(record))
    engine.generate(PROMPTS[0], drafter="auto[drafters=suffix]", **SETTINGS)
    engine.listeners.clear()
    steps = [step for step in steps if not step.prompt]
    drafted = [step.rows[0].drafted for step in steps]
    assert len(made) == len(steps) and sum(drafted) > 0
    assert all(0 <= count <= len(one) for count, (one,) in zip(drafted, made, strict=True))
