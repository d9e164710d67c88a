"""Masks behind a gap in the layers: what a slot sees, what is handed on, and that the text stays the same."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from outpace import Engine, ModelError
from outpace.drafters.features import TrainedConfig
from outpace.methods.s3d.drafter import S3d
from outpace.methods.s3d.files import read_masks
from outpace.methods.s3d.objective import S3d as Training
from outpace.methods.s3d.objective import S3dTraining
from outpace.models.tiny import tiny
from outpace.train.batches import Batch
from outpace.tree.shapes import widths
from outpace.types import Budget, Drawn
from tests.conformance.test_drafters import proposal_rows
from tests.train.texts import losses_of

LONG = {"max_new_tokens": 24, "ignore_eos": True}
PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42], [77]]
OPTIONS = S3dTraining(skip="2-3", masks=2, places=8)


@pytest.fixture(scope="module")
def target():
    return tiny(layers=6)


@pytest.fixture(scope="module")
def engine(target):
    return Engine(target, drafter="none")


@pytest.fixture(scope="module")
def made(target):
    """Masks that were moved and matrices that do something."""
    torch.manual_seed(0)
    made = Training.build(OPTIONS, target, None)
    with torch.no_grad():
        made.module.linears.copy_((0.01 * torch.randn_like(made.module.linears)).bfloat16())
        made.module.start_KH.copy_(made.module.start_KH.bfloat16())
    return made


@pytest.fixture(scope="module")
def folder(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks")
    made.save(folder, {})
    return folder


def texts():
    rows = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42, 43, 44, 1, 2, 3]]
    return Batch(
        token_BT=torch.tensor(rows),
        length_B=torch.tensor([8, 8]),
        answer_BT=torch.ones(2, 8, dtype=torch.bool),
    )


@pytest.mark.parametrize("settings", ["", " tree=chain", " tree=3x2x1", " tree=dynamic:8:0 tree_size=6"])
def test_the_text_is_plain_text(engine, folder, settings):
    for more in ({}, {"temperature": 0.8, "seed": 5, "reproducible": True}):
        plain = engine.generate(PROMPTS, drafter="none", **LONG, **more)
        fast = engine.generate(PROMPTS, drafter=f"s3d[model={folder}{settings}]", **LONG, **more)
        assert [one.tokens for one in fast] == [one.tokens for one in plain]
        assert sum(one.counters.accepted for one in fast) > 0


def test_what_drafts_is_what_was_trained(target, made, folder):
    """The slots of a draft give the logits of the network in training; one pass, whatever the depth."""
    drafter = S3d.load(TrainedConfig(model=str(folder), quantize=None), target)
    batch = texts()
    aligned = made.chosen(batch)
    with torch.no_grad():
        y_BGSH = torch.stack(made.guesses(batch, aligned)[0], 2)
    places = aligned.place_BA[0].tolist()
    place = places.index(5)
    ids = batch.token_BT[0, :6].tolist()
    (row,) = proposal_rows(target, drafter, Drawn.CHOSEN, Budget(3, 3), 0.0, [ids])
    before = target.clock.count
    (draft,) = drafter.propose([row])
    assert target.clock.count == before + 1 and draft.resume.layer == 2 and draft.resume.row_K == (0,)
    got_SD = row.state.logits_SD
    torch.testing.assert_close(got_SD, y_BGSH[0, place] @ made.head_DH.T, atol=2e-3, rtol=2e-3)
    assert list(draft.token_N) == got_SD.argmax(1).tolist()


def test_the_law_recorded_is_that_of_the_slot(target, folder):
    """The same below all nodes of a level, and another one at another level."""
    drafter = S3d.load(TrainedConfig(model=str(folder), quantize=None), target)
    asked = Budget(10, 3, shape=widths((2, 2, 1)))
    (row,) = proposal_rows(target, drafter, Drawn.DISTINCT, asked, 0.9, [PROMPTS[0]])
    (draft,) = drafter.propose([row])
    want_SV = (row.state.logits_SD / 0.9).softmax(1)
    seen = set()
    for group in draft.groups:
        depth = len(draft.path(group.parent))
        apart_S = (want_SV - draft.laws[group.law].prob_S).abs().amax(1)
        assert float(apart_S[depth]) < 1e-6 and int((apart_S > 1e-4).sum()) == 2
        seen.add(depth)
    assert seen == {0, 1, 2}


def test_sequences_of_a_batch_have_slots_of_their_own(target, folder):
    drafter = S3d.load(TrainedConfig(model=str(folder), quantize=None), target)
    both = [[5, 9, 11, 5], [40, 41, 42, 43, 44]]
    budgets = (Budget(3, 3), Budget(2, 1))
    drafts = []
    for some in ([0, 1], [0], [1]):
        rows = proposal_rows(target, drafter, Drawn.CHOSEN, Budget(3, 3), 0.0, [both[i] for i in some])
        rows = [replace(row, budget=budgets[i]) for i, row in zip(some, rows, strict=True)]
        drafts.append([one.token_N for one in drafter.propose(rows)])
    assert drafts[0] == drafts[1] + drafts[2] and [len(one) for one in drafts[0]] == [3, 1]


def test_masks_and_matrices_learn(target):
    made, batch = Training.build(OPTIONS, target, None), texts()
    losses = losses_of(made, batch, 20)
    assert losses[-1] < 0.7 * losses[0] and bool(made.module.moved_KH.any(1).all())
    made.evaluate(batch)
    assert len(made.ranks.acceptance()) == 3
    assert all(p.grad is None for layer in made.net.layers.values() for p in layer.parameters())
    assert sorted(made.net.layers) == [0, 1, 4, 5]


def test_what_does_not_fit_is_said(target, folder, tmp_path):
    for options in ({"skip": "0-2"}, {"skip": "4-6"}):
        with pytest.raises(ModelError, match="cannot skip layers"):
            S3dTraining(**options).gap(target)
    assert S3dTraining().gap(target) == (1, 4)
    with pytest.raises(ValueError, match="skip must be two layers"):
        S3dTraining(skip="3")
    for key, value, words in (
        ("skip", [4, 2], "is no gap in 6 layers"),
        ("skip", "2", "must be two layers"),
        ("acceptance", "x", "must be numbers"),
    ):
        other = tmp_path / f"{key}{len(str(value))}"
        shutil.copytree(folder, other)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ModelError, match=words):
            read_masks(str(other), target)
