"""The check is worth something only if it notices: here are engines that lie."""

from dataclasses import replace

import pytest
import torch

from outpace import Engine
from outpace.analysis import check as module
from outpace.analysis.agreement import OracleReport
from outpace.analysis.check import Case, check, sequences_of, standard_specs, with_trees
from outpace.analysis.law import LawReport
from outpace.models.base import Target
from outpace.models.decoder import Decoder
from outpace.models.hf.target import HFTarget
from outpace.models.tiny import TableTarget

SELF = "draft_model[model=tiny]"


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", dtype="float32", drafter="none")


@pytest.fixture(scope="module")
def cases(engine):
    return [Case(str(i), engine.encode(text)) for i, text in enumerate(("ab ab", "one", "x y z"))]


class Liar:
    """An engine that changes one token of one drafter's texts."""

    def __init__(self, engine, at, spec=SELF):
        self.engine, self.at, self.spec, self.target = engine, at, spec, engine.target

    def generate(self, prompts, params, *, drafter):
        results = self.engine.generate(prompts, params, drafter=drafter)
        return [self.lie(result) for result in results] if drafter == self.spec else results

    def lie(self, result):
        tokens = list(result.tokens)
        if self.at < len(tokens):
            tokens[self.at] = (tokens[self.at] + 1) % self.target.vocab_size
        else:
            tokens = tokens[:-1]
        return replace(result, tokens=tuple(tokens))


@pytest.fixture
def no_laws(monkeypatch):
    """Levels 1 and 2 have tests of their own."""
    monkeypatch.setattr(module, "check_laws", dict)
    monkeypatch.setattr(module, "check_oracle", dict)


def test_an_honest_engine_passes(engine, cases, no_laws):
    ticks = []
    report = check(
        engine, cases, ["none", SELF], max_new_tokens=6, tick=lambda part, step: ticks.append(step)
    )
    assert report.broken == [] and report.idle == []
    tally = report.drafters[SELF]
    assert (tally.sequences, tally.equal) == (6, 6) and 0 < tally.accepted <= tally.drafted
    assert report.drafters["none"] is report.plain and report.plain.sequences == 3
    assert sum(ticks) == sequences_of(3, 1) == 12
    assert report.hardware()["share"] == 0.0 and report.hardware()["largest_gap"] is None


def test_a_wrong_token_breaks_the_promise_and_its_gap_is_measured(engine, cases, no_laws):
    report = check(Liar(engine, at=2), cases, [SELF], max_new_tokens=6)
    first = report.to_json()["drafters"][SELF]["first_difference"]
    assert first["position"] == 2 and first["prompt"] == "0" and first["batch"] == 1
    assert first["token"] == (first["plain"] + 1) % engine.target.vocab_size
    assert first["gap"] > 0  # greedy: no other token has a larger logit
    assert report.hardware()["different"] == 6 and report.hardware()["share"] == 6 / 9
    assert report.broken == [f"tokens: {SELF}: 6 of 6 sequences differ from plain decoding"]


def test_a_text_that_ends_early_is_a_difference(engine, cases, no_laws):
    report = check(Liar(engine, at=99), cases, [SELF], max_new_tokens=6)
    first = report.drafters[SELF].differences[0]
    assert first.position == len(first_tokens(engine, cases)) - 1
    assert first.token is None and first.gap is None


def first_tokens(engine, cases):
    return engine.generate(list(cases[0].ids), max_new_tokens=6, temperature=0).tokens


def test_plain_batches_are_checked_as_well(engine, cases, no_laws):
    class Mixes(Liar):
        def generate(self, prompts, params, *, drafter):
            results = self.engine.generate(prompts, params, drafter=drafter)
            return results if len(prompts) == 1 else [self.lie(result) for result in results]

    report = check(Mixes(engine, at=0), cases, [], max_new_tokens=4)
    assert report.broken == ["tokens: none, in batches: 3 of 3 sequences differ from plain decoding"]


def test_where_nothing_is_promised_differences_are_only_measured(engine, cases, no_laws, monkeypatch):
    monkeypatch.setattr(Decoder, "equal_rows", False)
    report = check(Liar(engine, at=0), cases, [SELF], max_new_tokens=4)
    assert report.broken == [] and report.hardware()["different"] == 6


def test_a_drafter_that_guesses_nothing_shows_nothing(engine, cases, no_laws):
    report = check(engine, cases, ["prompt_lookup[min_ngram=40 max_ngram=40]"], max_new_tokens=4)
    assert report.idle == ["prompt_lookup[min_ngram=40 max_ngram=40]"] and report.broken == []


def test_wrong_laws_and_wrong_code_are_broken_promises(engine, cases, no_laws):
    report = check(engine, cases, [], max_new_tokens=2)
    bad = replace(
        report,
        laws={
            "a": LawReport(
                error=1e-9, cases=1, growth_rules=1, planted_bugs_caught=1, planted_bugs=1, missed=()
            ),
            "b": LawReport(
                error=0.0, cases=1, growth_rules=1, planted_bugs_caught=0, planted_bugs=1, missed=("bug",)
            ),
            "c": LawReport(
                error=float("nan"), cases=1, growth_rules=1, planted_bugs_caught=1, planted_bugs=1, missed=()
            ),
        },
        oracles={"d": OracleReport(cases=5, agreed=4)},
    )
    assert [line.split(":")[0] for line in bad.broken] == [
        "distributions",
        "distributions",
        "distributions",
        "code",
    ]
    assert "bug" in bad.broken[1] and "1 of 5" in bad.broken[3]


def test_the_standard_specs(engine):
    specs = standard_specs(engine.target, "tiny")
    assert specs[0] == "prompt_lookup" and "none" not in specs
    assert SELF in specs and "draft_model[model=tiny tree=4x2x1]" in specs
    assert "draft_model[layers=1 model=tiny]" in specs
    assert with_trees(["draft_model[tree=2x1 model=tiny]", "prompt_lookup"], engine.target) == [
        "draft_model[model=tiny tree=2x1]",
        "prompt_lookup",
    ]


def test_only_targets_whose_rows_are_equal_promise_tokens(engine, cases, no_laws):
    """transformers' kernels answer to the shape of the pass, in float32 too."""
    assert engine.target.equal_rows and TableTarget.random(1).equal_rows
    assert not HFTarget.equal_rows.fget(None) and not Target.equal_rows.fget(None)
    kept = check(engine, cases, [], max_new_tokens=2)
    measured = replace(kept, promised=False)
    assert kept.promise.startswith("promised") and kept.hardware()["promise"] == kept.promise
    assert measured.promise.startswith("not promised here, measured")
    engine.target.device, before = torch.device("meta"), engine.target.device
    assert not engine.target.equal_rows
    engine.target.device = before
