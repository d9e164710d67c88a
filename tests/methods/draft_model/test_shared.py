"""Draft models are loaded once, however many specs name them, and freed with the engine."""

import gc
import shutil
import weakref

import pytest

from outpace import Engine
from outpace.methods.draft_model.objective import DraftModelObjective as Objective
from outpace.methods.draft_model.objective import DraftModelTraining
from outpace.models.load import load_beside, load_target
from outpace.models.tiny import tiny
from tests.models.making import save_hf


def models(engine):
    return [method.drafter.model for method in engine._methods.values() if hasattr(method, "drafter")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, and a copy of it elsewhere."""
    first = tmp_path_factory.mktemp("draft") / "first"
    save_hf(first, "llama", vocab_size=286)
    shutil.copytree(first, first.parent / "second")
    return first, first.parent / "second"


def test_specs_share_a_draft_model_by_digest_and_free_it_with_the_engine(folders):
    target = tiny()
    specs = [f"draft_model[model={folders[0]} tree={tree}]" for tree in ("2x1", "chain")]
    specs.append(f"draft_model[model={folders[1]}]")
    engine = Engine(target, specs[0])
    for spec in specs:
        engine.generate([5, 9, 11], drafter=spec, max_new_tokens=4)
    first, second, third = models(engine)
    assert first is second is third and first is not target
    assert len({id(method.drafter.cache) for method in engine._methods.values()}) == 3
    alone = engine.method(f"draft_model[model={folders[0]} dtype=bfloat16]").drafter.model
    assert alone is not first
    held = [weakref.ref(first), weakref.ref(alone)]
    del engine, first, second, third, alone
    gc.collect()
    assert [one() for one in held] == [None, None]


def test_trained_and_rounded_ones_are_shared_too(tmp_path):
    target = tiny()
    Objective.build(DraftModelTraining(layers=1), target, None).save(tmp_path / "trained", {})
    specs = [f"draft_model[model={tmp_path / 'trained'} tree={tree}]" for tree in ("2x1", "chain")]
    specs += [f"quantized_self[tree={tree}]" for tree in ("2x1", "chain")]
    engine = Engine(target, "none")
    made = [engine.method(spec).drafter.model for spec in specs]
    assert made[0] is made[1] and made[2] is made[3] and made[0] is not made[2]


def test_the_target_by_another_name_is_the_target(folders):
    target = load_target(folders[0], dtype="float32")
    assert load_beside(target, str(folders[1])) is target
