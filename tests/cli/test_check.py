import json
from dataclasses import replace

import pytest

from outpace.analysis import check as module
from outpace.analysis.law import LawReport
from outpace.bench import workloads
from outpace.cli import check as command
from outpace.errors import ModelError
from outpace.methods.quantized_self import QuantizedSelf
from outpace.models.decoder import Decoder

FEW = ("check", "--model", "tiny", "--dtype", "float32", "--prompts", "5", "--max-new-tokens", "12")
PROMPTS = [
    workloads.Prompt(
        id=f"p{i}",
        category="edit",
        messages=({"role": "user", "content": "abc abd abe " * 3 + "xyz"[: i % 4]},),
    )
    for i in range(8)
]
TALLY = {"sequences", "equal", "drafted", "accepted", "first_difference"}


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch):
    monkeypatch.setattr(workloads, "builtin", lambda: PROMPTS)


def test_json_and_exit_code_of_a_model_that_keeps_its_promises(outpace, enumerated_once, laws):
    ran = outpace(*FEW, "--json")
    assert ran.code == 0, ran.out + ran.err
    got = json.loads(ran.out)
    assert got["broken"] == [] and got["hardware"]["promised"]
    assert {"match", "chain", "tree", "coupled"} <= set(got["distributions"]) == set(laws)
    for law in got["distributions"].values():
        assert law["error"] < 1e-12 and law["planted_bugs_caught"] == law["planted_bugs"] > 0
    specs = list(got["drafters"])
    assert "prompt_lookup" in specs
    assert "draft_model[model=tiny]" in specs and "draft_model[model=tiny tree=4x2x1]" in specs
    assert "draft_model[layers=1 model=tiny tree=4x2x1]" in specs
    for tally in got["drafters"].values():
        assert set(tally) >= TALLY
        assert tally["sequences"] == tally["equal"] == 10 and tally["first_difference"] is None
    assert got["drafters"]["draft_model[model=tiny]"]["accepted"] > 0
    assert got["plain"]["sequences"] == got["plain"]["equal"] == 5


def test_the_text_says_it_level_by_level(outpace, enumerated_once):
    ran = outpace(*FEW, "--drafters", "none,draft_model[model=tiny]")
    assert ran.code == 0
    for words in (
        "1 distributions",
        "2 code",
        "3 tokens",
        "4 hardware",
        "planted bugs caught",
        "draft_model[model=tiny tree=4x2x1]",
        "0 of 25 sequences differ",
        "All promises are kept.",
    ):
        assert words in ran.out
    assert "25/25 answers" not in ran.out and "answers: draft_model[model=tiny]" in ran.err


def test_a_broken_promise_is_exit_code_1(outpace, enumerated_once, monkeypatch):
    wrong = LawReport(
        error=0.5, cases=1, growth_rules=1, planted_bugs_caught=0, planted_bugs=1, missed=("bug",)
    )
    monkeypatch.setattr(module, "check_laws", lambda: {"tree": wrong})
    ran = outpace(*FEW, "--drafters", "none")
    assert ran.code == 1 and "All promises" not in ran.out
    assert [line for line in ran.out.splitlines() if line.startswith("BROKEN")] == [
        "BROKEN  distributions: verifier tree is off by 5.0e-01",
        "BROKEN  distributions: planted bugs not caught under tree: bug",
    ]


def test_shapes_of_a_server_are_checked_if_asked_for(outpace, monkeypatch):
    monkeypatch.setattr(module, "check_laws", dict)
    monkeypatch.setattr(module, "check_oracle", dict)
    monkeypatch.setattr("outpace.serving.service.usual_chunk", lambda target: 20)
    monkeypatch.setattr(command, "_BATCH", 4)
    quick = (*FEW, "--drafters", "none", "--prompts", "1", "--shapes", "serve")
    ran = outpace(*quick, "--json")
    got = json.loads(ran.out)
    assert ran.code == 0 and got["broken"] == [], ran.out
    assert got["shapes"]["chunk"] == 20 and got["shapes"]["max_batch"] == 4
    assert got["shapes"]["steps"]["different"] == got["shapes"]["prompts"]["different"] == 0
    score = Decoder.score

    def dependent(self, feeds, cache, **settings):
        scored = score(self, feeds, cache, **settings)
        return replace(scored, logits_TV=scored.logits_TV + 1e-5 * (len(feeds) == 3))

    monkeypatch.setattr(Decoder, "score", dependent)
    ran = outpace(*quick)
    assert ran.code == 1 and "5 shapes" in ran.out
    (line,) = [line for line in ran.out.splitlines() if line.startswith("BROKEN  shapes")]
    assert "rows of steps are not what they are alone; first: 3 sequences, plain" in line


def test_shapes_that_nobody_has_are_refused(outpace):
    ran = outpace(*FEW, "--shapes", "train")
    assert ran.code == 2 and "unknown shapes 'train'; known: serve" in ran.err


def test_a_drafter_whose_package_is_missing_is_left_out(outpace, monkeypatch, enumerated_once):
    def load(config, target):
        raise ModelError("it needs the package strange; install it: pip install strange")

    monkeypatch.setattr(QuantizedSelf, "load", load)
    few = ("--model", "tiny", "--prompts", "1", "--max-new-tokens", "2")
    ran = outpace("check", *few)
    assert ran.code == 0 and "quantized_self is left out: " in ran.err and "strange" in ran.err
    assert "quantized_self" not in ran.out and "suffix" in ran.out
    ran = outpace("check", *few, "--drafters", "quantized_self")
    assert ran.code == 2 and "pip install strange" in ran.err
    ran = outpace("bench", *few[:2], "--limit", "1", "--max-new-tokens", "2", "--drafters", "all")
    assert ran.code == 0 and "quantized_self takes no part: " in ran.out
