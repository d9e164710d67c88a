import copy
import json

import pytest

from outpace import Engine
from outpace.bench import formats, workloads
from outpace.methods.cascade.planner import measure, speedup, text_of
from outpace.methods.cascade.probes import probe_k
from outpace.methods.cascade.tally import Part

LEVELS = "draft_model[model=tiny layers=1]+max_gram"
FEW = (
    "analyze",
    "cascade",
    "--model",
    "tiny",
    "--dtype",
    "float32",
    "--limit",
    "2",
    "--max-new-tokens",
    "24",
    "--levels",
    LEVELS,
)
PROMPTS = [
    workloads.Prompt(
        id=f"p{i}", category="edit", messages=({"role": "user", "content": "abc abd abe " * 3 + "xyz"[:i]},)
    )
    for i in range(4)
]


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch):
    monkeypatch.setattr(formats, "builtin", lambda: PROMPTS)


def test_prediction_and_measurement_stand_side_by_side(outpace, tmp_path):
    ran = outpace(*FEW, "--measure", "--k", "2,4/3", "--json", "--out", str(tmp_path / "report"))
    assert ran.code == 0, ran.err
    got = json.loads(ran.out)
    assert json.loads((tmp_path / "report/cascade.json").read_text()) == got
    kinds = [row["kind"] for row in got["configurations"]]
    assert kinds == ["model alone", "vertical", "horizontal", "both", "max_gram alone", "given"]
    assert got["prompts"] == 2 and got["held_out"] == 1
    for row in got["configurations"]:
        assert row["predicted"] > 0 and row["measured"] > 0
        assert row["emitted"] >= 1 <= row["measured_emitted"]
        assert row["seconds"] > 0 and row["measured_seconds"] > 0
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    by_kind = {row["kind"]: row for row in got["configurations"]}
    cascades = [row["predicted"] for row in got["configurations"] if row["kind"] != "max_gram alone"]
    assert by_kind["both"]["predicted"] == max(cascades)
    assert by_kind["max_gram alone"]["k"].startswith("0,") and by_kind["max_gram alone"]["steps"] == [0.0]
    assert "," not in by_kind["vertical"]["k"] and "/" not in by_kind["horizontal"]["k"]
    assert by_kind["given"]["k"] == "2,4/3"
    assert got["leniences"] == [1.0, 2.0, 4.0] and by_kind["horizontal"]["lenience"] == 1.0
    assert all(row["spread"] is None for row in got["configurations"]), "one text was fitted"
    assert got["best"].startswith(f"cascade[levels={LEVELS} k=")
    pairs = {(one["reviewer"], one["level"]) for one in got["acceptance"]}
    small = "tiny[layers=0]"
    assert pairs == {("tiny", small), ("tiny", "max_gram"), (small, "max_gram")}
    for one in got["acceptance"]:
        assert one["drafts"] > 0
        assert all(1 >= a >= b >= 0 for a, b in zip(one["kept"], one["kept"][1:], strict=False))


def test_costs_by_hand_and_lenience(outpace):
    ran = outpace(*FEW, "--measure", "--cost", "draft=0.15", "--lenience", "3", "--json")
    assert ran.code == 0, ran.err
    got = json.loads(ran.out)
    assert got["costs"] == {"draft_model[layers=1 model=tiny]": 0.15}
    assert got["leniences"] == [3.0]
    for row in got["configurations"]:
        assert row["lenience"] == (3.0 if "/" in row["k"] else 1.0), "only inner levels are lenient"
    for row in got["configurations"]:
        alone = row["kind"] == "max_gram alone"
        assert row["measured"] == pytest.approx(row["measured_emitted"]) if alone else row["measured"] > 0


def test_theory_needs_no_model(outpace):
    ran = outpace("analyze", "cascade", "--theory", "--alpha", "0.6,0.3", "--cost", "0.1,0.01", "--json")
    assert ran.code == 0, ran.err
    got = json.loads(ran.out)
    rows = {row["kind"]: row for row in got["rows"]}
    assert list(rows) == ["level 1 alone", "level 2 alone", "vertical", "horizontal"]
    # (1 - 0.6^3) / (1 - 0.6) tokens for 1.2 passes
    assert rows["level 1 alone"]["k"] in ("2", "3")
    best = max((1 - 0.6 ** (g + 1)) / 0.4 / (1 + 0.1 * g) for g in range(1, 9))
    assert rows["level 1 alone"]["speedup"] == pytest.approx(best)
    assert rows["horizontal"]["speedup"] > rows["level 1 alone"]["speedup"]
    assert 0.1 < got["break_even"] < 1


def test_the_tables(outpace):
    ran = outpace(*FEW)
    assert ran.code == 0, ran.err
    for words in ("Share of guesses kept", "Milliseconds of a step", "predicted", "best: cascade["):
        assert words in ran.out
    assert "measured" not in ran.out and "max_gram alone" in ran.out


def test_prices_by_hand_are_told_in_words(outpace):
    ran = outpace(*FEW, "--cost", "draft=0.15")
    assert ran.code == 0, ran.err
    assert " at 0.15 of a pass of the target\n" in ran.out and "{" not in ran.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--levels", "max_gram"), "max_gram is no language model"),
        (("--k", "3/4/5"), "row 3 for 2 levels"),
        (("--max-new-tokens", "3"), "must be at least 8, got 3"),
        (("--limit", "0"), "--limit must be at least 1, got 0"),
        (("--cost", "max=x"), "--cost is LEVEL=SHARE"),
        (("--lenience", "0.5"), "lenience must be a number from 1, got 0.5"),
        (("--theory",), "--alpha is needed, such as 0.6,0.3"),
        (("--theory", "--alpha", "1,x"), "--alpha must be numbers"),
        (("--theory", "--alpha", "0.5", "--cost", "0.1,0.2"), "one or two levels"),
    ],
)
def test_bad_input_is_one_line(outpace, arguments, says):
    ran = outpace(*FEW, *arguments)
    assert ran.code == 2
    assert says in ran.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("levels", "says"),
    [
        ("draft_modle+max_gram", "did you mean draft_model"),
        ("draft_model+max_grm", "unknown drafter 'max_grm'; did you mean max_gram"),
        ("draft_model[modle=tiny]", "unknown setting 'modle' of drafter 'draft_model'"),
        ("draft_model[layers=0]", "layers must be at least 1, got 0"),
        ("draft_model+", "has an empty part"),
        ("draft_model[tree=chain]", "says tree, which the whole decides"),
        ("max_gram+draft_model", "max_gram is no language model; every level but the last"),
        ("draft_model+suffix+draft_model", "suffix is no language model"),
        ("early_exit[layer=1]+max_gram", "early_exit[layer=1] is no language model"),
        ("draft_model+medusa", "medusa samples and is no language model; the last level"),
        ("auto+max_gram", "auto picks among drafters; name one of them"),
        ("draft_model --k 3 --k x", "k must be rows of whole numbers such as 5,10/10, "),
    ],
)
def test_wrong_levels_are_refused_before_a_model_is_loaded(outpace, levels, says):
    """Nobody has the model: whatever loads it first would say so."""
    ran = outpace("analyze", "cascade", "--model", "./nowhere", "--levels", *levels.split())
    assert ran.code == 2 and ran.out == ""
    assert ran.err.startswith("outpace: error: ") and ran.err.count("\n") == 1
    assert says in ran.err


@pytest.mark.parametrize(
    "levels",
    [
        "draft_model",
        "layer_skip+recycling",
        "draft_model+select[members=suffix+max_gram]",
        "draft_model+quantized_self",
        "draft_model+cross_vocabulary[model=x by=text]",
    ],
)
def test_levels_that_may_do_are_left_to_the_drafter(outpace, levels):
    ran = outpace("analyze", "cascade", "--model", "./nowhere", "--levels", levels)
    assert ran.code == 2 and "no model at ./nowhere" in ran.err


def test_parts_count_what_was_reached():
    part = Part()
    part.add(3, 3, 3)
    part.add(3, 2, 2)  # silent at the third place: a refusal
    part.add(3, 3, 0)
    part.add(3, 3, None)  # never reached
    assert part.asked == [0, 3, 2, 2] and part.kept == [0, 2, 2, 1]
    assert part.survival == pytest.approx((1, 2 / 3, 2 / 3, 1 / 3))
    assert part.drafted == (1.0, 1.0, 1.0, 0.75) and part.drafts == 4


def test_few_drafts_promise_no_certainty():
    part = Part()
    for _ in range(20):
        part.add(3, 3, 1)
    part.add(3, 3, 3)  # the only one that came so far
    assert part.survival[3] == part.survival[2] == pytest.approx(1 / 21)
    ratio = part.expected[3] / part.expected[2]
    assert 0 < part.expected[2] < 0.25 and ratio < 0.5, "one in one is no sure thing"
    many = Part()
    for _ in range(4000):
        many.add(3, 3, 2)
    assert many.expected == pytest.approx((1, 1, 1, 0), abs=0.01)
    both = Part()
    both.add(3, 3, 1)
    before = copy.deepcopy(both)
    both.add(4, 4, 4)
    assert both.less(before).asked == [0, 1, 1, 1, 1] and both.less(before).drafts == 1


def test_k_as_text():
    assert text_of([[5, 10], [10]]) == "5,10/10"
    assert text_of([[5, 0], [0]]) == text_of([[5], []]) == "5" and text_of([[5, 0], [4]]) == "5/4"
    assert probe_k(2, True) == [[5, 5, 8], [3, 8], [8]]


def test_the_tally_counts_what_the_engine_counts_and_leaves_no_trace():
    engine = Engine.load("tiny", drafter="none", dtype="float32")
    prompts = [[5, 9, 11] * 4, [3, 1, 4, 1] * 3]
    levels = "draft_model[model=tiny layers=1]"
    found = measure(engine, levels, prompts, max_new_tokens=30)
    method = engine.method(f"cascade[levels={levels} k=5]")
    results = [
        engine.generate(list(p), drafter=method.spec, max_new_tokens=30, ignore_eos=True, temperature=0.0)
        for p in prompts
    ]
    drafted = [sum(r.counters.drafted_at[i] for r in results) for i in range(2)]
    kept = [sum(r.counters.accepted_at[i] for r in results) for i in range(2)]
    part = found.parts[0, 1]
    assert abs(part.drafts - drafted[0]) <= 2 and abs(part.kept[1] - kept[0]) <= 2
    assert 0 < part.kept[2] <= part.kept[1] < part.asked[1]
    assert type(method.verifier).__name__ == "Tree" and not engine.listeners
    level = method.drafter.models[0]
    assert type(level.verifier).__name__ == "Tree" and level.machine.listeners == ()
    assert list(found.predicted()) == ["model alone"]
    error = found.spread([[5]])
    assert error is not None and 0 < error < 1 and len(found.without) == 2
    lenient = measure(engine, levels, prompts, max_new_tokens=10, lenience=3.0, base=found)
    assert lenient.lenience == 3.0 and lenient.ladder.seconds is found.ladder.seconds
    dear, cheap = (found.priced({1: share}).predicted()["model alone"][1].speedup for share in (0.9, 0.01))
    assert dear < cheap
    assert found.ladder.seconds[0](8) > 0
    assert len(speedup(engine, [method.spec], prompts, max_new_tokens=10)) == 1
