"""Golden traces: every step of fixed runs, as numbers. A change that "changes no numbers" keeps
them; one that means to change them says so and writes them anew:

    python tests/golden/test_traces.py
"""

import json
from pathlib import Path

import pytest

from outpace import Engine
from outpace.methods.draft_model.drafter import DraftModel
from outpace.models.tiny import TableTarget

FILE = Path(__file__).with_name("traces.json")
TARGET = TableTarget.random(seed=3, vocab_size=12, order=2, sharpness=1.5)
DRAFT = TARGET.mixed(TableTarget.random(seed=4, vocab_size=12), 0.35)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [7, 7, 5], [4]]
CASES = {
    "none": ("none", {}),
    "lookup": ("prompt_lookup[min_ngram=1 tree_size=5]", {}),
    "lookup, sampled": ("prompt_lookup[min_ngram=1 tree_size=5]", {"temperature": 0.9}),
    "chain": ("none[tree_size=4]", {}),
    "chain, sampled": ("none[tree_size=4 verifier=chain]", {"temperature": 1.0}),
    "tree": ("none[tree=3x2x1]", {}),
    "tree, sampled": ("none[tree=3x2x1]", {"temperature": 0.8, "top_p": 0.95}),
    "tree, replacement": ("none[tree=2x2 verifier=tree[replacement=true]]", {"temperature": 1.0}),
    "coupled": ("none[tree=2x1x1 verifier=coupled]", {"temperature": 0.7, "top_k": 6}),
    "confidence, penalised": (
        "none[tree_size=8 policy=confidence[threshold=0.5]]",
        {"temperature": 0.6, "repetition_penalty": 1.2},
    ),
}


def trace(spec, settings):
    """Steps of a run: per sequence (drafted, depth, accepted, emitted)."""
    engine = Engine(TARGET, drafter="none")
    if spec.startswith("none["):
        # The plan of the spec, with a drafter over another table.
        engine.method(spec).drafter = DraftModel(DRAFT, TARGET.vocab_size)
    steps = []
    engine.listeners.append(
        lambda record: steps.append(
            [[r.sequence, r.drafted, r.depth, r.accepted, list(r.emitted)] for r in record.rows]
        )
    )
    # Whatever verifier the spec has, as it is: not the one that a seed asks for.
    engine.generate(PROMPTS, drafter=spec, seed=5, max_new_tokens=16, reproducible=False, **settings)
    return steps


@pytest.mark.parametrize("name", CASES)
def test_runs_are_what_they_were(name):
    assert trace(*CASES[name]) == json.loads(FILE.read_text())[name]


if __name__ == "__main__":
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(trace(*case))}" for name, case in CASES.items())
    FILE.write_text("{\n" + lines + "\n}\n")
