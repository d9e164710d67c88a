"""Drafters of every kind on targets of families that differ from Llama: text is that of plain decoding."""

import pytest

from outpace import Engine, registry
from tests.conformance.specs import write_head
from tests.models.making import LATER, own_target

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [77], list(range(20, 50))]
GREEDY = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}
TRAINED = {"draft_model": {"layers": 3}, "eagle3": {}, "glide": {}, "early_exit": {}, "ppd": {}}
"""They take all layers over, read features, keys and values, or ride on the layers."""


@pytest.mark.parametrize("family", LATER)
def test_greedy_text_is_plain_text(family, tmp_path):
    target = own_target(family)
    engine, accepted = Engine(target, "none"), {}
    plain = [one.tokens for one in engine.generate(PROMPTS, **GREEDY)]
    specs = ["suffix", "layer_skip"]
    for name, options in TRAINED.items():
        kind = registry.load("objective", name)
        write_head(target, tmp_path / name, kind, kind.Config(**options))
        specs.append(f"{name}[model={tmp_path / name}]")
    for spec in specs:
        results = engine.generate(PROMPTS, drafter=spec, **GREEDY)
        assert [one.tokens for one in results] == plain, spec
        accepted[spec.partition("[")[0]] = sum(one.counters.accepted for one in results)
        assert sum(one.counters.drafted for one in results) > 0 or spec == "suffix", spec
    assert accepted["draft_model"] > 16, "it is the target, but for a fifth of the tokens"
