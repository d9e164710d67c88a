import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest

from outpace import registry
from outpace.cli import methods
from outpace.drafters.trained import read_measured

SHIPPED = Path(registry.__file__).parent / "weights"
KEYS = {"name", "kind", "family", "summary", "paper", "lossless", "trained"}


def test_the_list_is_the_registry(outpace):
    ran = outpace("methods", "--json")
    listed = json.loads(ran.out)
    assert ran.code == 0 and ran.err == ""
    assert [(m["kind"], m["name"]) for m in listed] == [(r.kind, r.name) for r in registry.entries()]
    assert all(set(method) == KEYS for method in listed)
    draft_model = next(m for m in listed if m["name"] == "draft_model")
    assert draft_model["trained"] and draft_model["lossless"]
    assert "2211.17192" in draft_model["paper"]


def test_the_table_names_every_method(outpace):
    ran = outpace("methods")
    assert ran.code == 0
    for row in registry.entries():
        assert row.name in ran.out and row.summary.split()[0] in ran.out


@pytest.mark.parametrize("name", ["prompt_lookup", "auto", "none", "retrieval", "tree"])
def test_a_name_shows_its_settings(outpace, name):
    ran = outpace("methods", name)
    listed = json.loads(outpace("methods", name, "--json").out)
    assert ran.code == 0 and ran.err == ""
    assert [row["kind"] for row in listed] == [r.kind for r in registry.entries() if r.name == name]
    for row in listed:
        config = registry.load(row["kind"], name).Config
        fields = {field.name: field for field in dataclasses.fields(config)}
        assert [one["name"] for one in row["settings"]] == list(fields)
        for one in row["settings"]:
            assert one["meaning"] and one["name"] in ran.out and one["meaning"][:20] in ran.out
            required = fields[one["name"]].default is dataclasses.MISSING
            assert (one["default"] is None) == required


def test_settings_are_those_of_the_source(outpace):
    (row,) = json.loads(outpace("methods", "prompt_lookup", "--json").out)
    assert row["settings"][0] == {
        "name": "max_ngram",
        "kind": "int",
        "default": "4",
        "meaning": "Longest suffix to search for, in tokens. Longer ones are tried first.",
    }
    assert "Chains of 16 unless told otherwise" in outpace("methods", "prompt_lookup").out
    assert "it takes tree, tree_size, verifier, policy." in outpace("methods", "eagle3").out
    auto = outpace("methods", "auto").out
    assert "it takes policy." in auto and "drafter auto" in auto and "policy auto" in auto


def test_an_unknown_name_and_a_name_with_a_model_are_refused(outpace):
    ran = outpace("methods", "prompt_lokup")
    assert ran.code == 2 and "unknown method 'prompt_lokup'; did you mean prompt_lookup" in ran.err
    ran = outpace("methods", "none", "--model", "tiny")
    assert ran.code == 2 and "give NAME or --model" in ran.err


def test_what_a_drafter_lacks_is_said_rightly(outpace):
    found = {
        one["name"]: one["status"] for one in json.loads(outpace("methods", "--model", "tiny", "--json").out)
    }
    for name in ("cascade", "ouroboros", "graph", "cross_vocabulary"):
        assert found[name] == "needs a draft model"
    assert found["retrieval"] == "needs a file made of texts" and found["suffix"] == "ready"
    with_one = {
        one["name"]: one["status"]
        for one in json.loads(outpace("methods", "--model", "smollm2-135m", "--json").out)
    }
    assert with_one["draft_model"] == "shipped" and with_one["cascade"] == "ready"
    assert with_one["cross_vocabulary"] == "needs a draft model"


def test_every_shipped_drafter_says_what_it_gained():
    folders = sorted(path.parent for path in SHIPPED.glob("*/*/config.json"))
    assert folders
    for folder in folders:
        measured = read_measured(folder)
        assert measured is not None, f"{folder} has no 'measured' in its provenance.json"
        assert measured["speedup"] > 0 and measured["mean_emitted"] > 1, folder


def test_names_of_several_kinds_are_listed_once(outpace):
    ran = outpace("methods", "nothing-like-it")
    assert ran.code == 2 and ran.err.count(" auto,") == 1


def test_a_summary_ends_with_one_full_stop(outpace, monkeypatch):
    row = replace(registry.entry("drafter", "suffix"), summary="Follows the newest successor of a token.")
    monkeypatch.setattr(registry, "entries", lambda *kinds: [row])
    ran = outpace("methods", "suffix")
    assert "successor of a token. " in ran.out and ".." not in ran.out.partition("\n")[0]


def test_one_thread_is_no_threads():
    measured = {"speedup": 1.5, "mean_emitted": 2.0, "threads": 1, "dtype": "float32", "cpu": "x"}
    assert methods._figures(measured)[2] == "1 thread, float32, x"


def test_every_method_is_described_in_whole_sentences(capsys):
    for name in sorted({row.name for row in registry.entries()}):
        methods._one(name, as_json=False)
        head = capsys.readouterr().out.partition("\n")[0]
        assert ".." not in head and head.endswith("."), head


def test_a_name_that_several_kinds_share_is_listed_once(outpace):
    ran = outpace("methods", "nobody")
    names = ran.err.strip().partition("known: ")[2].split(", ")
    assert ran.code == 2 and len(names) == len(set(names)) > 20 and "auto" in names


@pytest.mark.parametrize("drafter", [(), ("-d", "auto"), ("-d", "eagle3")])
def test_a_wrong_tree_is_what_is_told_whoever_drafts(outpace, drafter):
    ran = outpace("generate", "hi", "--model", "tiny", "--tree", "4x", *drafter)
    assert ran.code == 2 and "unknown tree '4x'" in ran.err
