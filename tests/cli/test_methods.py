import json

from outpace import registry

KEYS = {"name", "kind", "family", "summary", "paper", "lossless", "trained"}


def test_the_list_is_the_registry(outpace):
    ran = outpace("methods", "--json")
    listed = json.loads(ran.out)
    assert ran.code == 0 and ran.err == ""
    assert [(m["kind"], m["name"]) for m in listed] == [(r.kind, r.name) for r in registry.rows()]
    assert all(set(method) == KEYS for method in listed)
    draft_model = next(m for m in listed if m["name"] == "draft_model")
    assert draft_model["trained"] and draft_model["lossless"]
    assert "2211.17192" in draft_model["paper"]


def test_the_table_names_every_method(outpace):
    ran = outpace("methods")
    assert ran.code == 0
    for row in registry.rows():
        assert row.name in ran.out and row.summary.split()[0] in ran.out
