"""Sorted exits: who goes deeper, that nothing is computed twice, and that the text stays the same."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from outpace import Engine, ModelError
from outpace.drafters.trained import read_config, read_tensors
from outpace.methods.s2d.drafter import S2d, S2dConfig
from outpace.methods.s2d.files import BINS, read_exits, trusting
from outpace.methods.s2d.objective import S2d as Training
from outpace.methods.s2d.objective import S2dTraining
from outpace.models.tiny import tiny
from outpace.train.align import DRAFT_MODEL, Aligned
from outpace.train.batches import Batch
from outpace.tree.shapes import widths
from outpace.types import Budget, Drawn, Feed
from tests.conformance.test_drafters import proposal_rows
from tests.train.texts import losses_of

LONG = {"max_new_tokens": 24, "ignore_eos": True}
PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42], [77]]
NEVER = (((1.0, 1.0),) * BINS,) * 3
"""The next exit is never better."""
ALWAYS = (((0.0, 1.0),) * BINS,) * 3


@pytest.fixture(scope="module")
def target():
    return tiny(layers=6)


@pytest.fixture(scope="module")
def engine(target):
    return Engine(target, drafter="none")


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exits")
    Training.build(S2dTraining(exits="1+3+5"), target, None).save(folder, {})
    return folder


def told(engine, folder, settings, right):
    """The drafter of a spec, with other beliefs in its exits."""
    spec = f"s2d[model={folder} threshold=0{settings}]"
    drafter = engine.method(spec).drafter
    drafter.exits = replace(drafter.exits, right=right)
    return spec, drafter


@pytest.mark.parametrize(
    "settings", ["", " tree=3x2x1", " tree=dynamic:8:0 tree_size=6", " policy=confidence"]
)
def test_the_text_is_plain_text_at_every_exit(engine, folder, settings):
    for right in (NEVER, ALWAYS, read_exits(str(folder), engine.target).right):
        spec, _ = told(engine, folder, settings, right)
        for more in ({}, {"temperature": 0.8, "seed": 5, "reproducible": True}):
            plain = engine.generate(PROMPTS, drafter="none", **LONG, **more)
            fast = engine.generate(PROMPTS, drafter=spec, **LONG, **more)
            assert [one.tokens for one in fast] == [one.tokens for one in plain]
            assert sum(one.counters.accepted for one in fast) > 0


def watched(drafter):
    """Layers at which its drafts are verified from now on."""
    seen = []

    def propose(rows):
        drafts = S2d.propose(drafter, rows)
        seen.extend(one.resume.layer for one in drafts if one.resume is not None)
        return drafts

    drafter.propose = propose
    return seen


def test_a_deeper_exit_is_taken_where_it_is_right_more_often(engine, folder):
    layers = {}
    for name, right in (("never", NEVER), ("always", ALWAYS)):
        spec, drafter = told(engine, folder, "", right)
        seen = watched(drafter)
        engine.generate(PROMPTS, drafter=spec, **LONG)
        layers[name] = set(seen)
        del drafter.propose
    assert layers == {"never": {1}, "always": {5}}


def test_every_layer_runs_once_per_drafted_token(engine, target, folder, monkeypatch):
    """Also where a draft went deeper on the way."""
    rows = [0] * target.num_layers
    spec, _ = told(engine, folder, "", ALWAYS)
    plain = type(target)._pass

    def counted(self, passed, cache, depth, taps):
        for layer in range(depth):
            rows[layer] += len(passed.running(layer)[1])
        return plain(self, passed, cache, depth, taps)

    monkeypatch.setattr(type(target), "_pass", counted)
    results = engine.generate(PROMPTS, drafter=spec, **LONG)
    passed = sum(one.counters.passes + one.counters.drafted for one in results)
    assert rows == [sum(len(one) for one in PROMPTS) + passed] * target.num_layers


@pytest.mark.parametrize("right", [NEVER, ALWAYS])
def test_the_law_recorded_is_that_of_the_exit_that_spoke(engine, target, folder, right):
    """Recomputed from the text and the path of each node, exit by exit; another exit's is another law."""
    _, drafter = told(engine, folder, "", right)
    ids, level = PROMPTS[0], 0 if right is NEVER else 2
    asked = Budget(7, 3, shape=widths((2, 2, 1)))
    (row,) = proposal_rows(target, drafter, Drawn.DISTINCT, asked, 0.9, [ids])
    (draft,) = drafter.propose([row])
    assert len(draft) == 7 and draft.resume.layer == drafter.exits.layers[level]
    for group in draft.groups:
        text, apart = [*ids, *draft.path_tokens(group.parent)], []
        for i, layers in enumerate(drafter.exits.layers):
            cache = target.new_cache()
            taps = frozenset({f"hidden.{layers}"})
            scored = target.score([Feed.chain(cache.open(), text)], cache, taps=taps, layers=layers)
            want_V = (drafter._logits(i, scored.taps[f"hidden.{layers}"][-1:])[0] / 0.9).softmax(0)
            apart.append(float((draft.laws[group.law].prob_S - want_V).abs().max()))
        assert apart[level] < 1e-5 and min(apart[:level] + apart[level + 1 :]) > 1e-3


def test_a_guess_costs_what_it_reads(target, folder):
    drafter = S2d.load(S2dConfig(model=str(folder)), target)
    assert drafter.prices == tuple(sorted(drafter.prices)) and drafter.prices[-1] < 1
    assert drafter.threshold == drafter.prices[0]


def batch(target):
    """Two texts with the features that the objective asks for."""
    texts, parts = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42, 43, 44, 1, 2, 3]], []
    taps = Training.taps(S2dTraining(exits="1+3+5"), target)
    for text in texts:
        cache = target.new_cache()
        parts.append(target.score([Feed.chain(cache.open(), text)], cache, taps=frozenset(taps)).taps)
    return Batch(
        token_BT=torch.tensor(texts),
        length_B=torch.tensor([8, 8]),
        answer_BT=torch.ones(2, 8, dtype=torch.bool),
        feature={name: torch.stack([one[name] for one in parts]) for name in taps},
    )


def test_all_exits_learn_together_and_are_measured(target, tmp_path):
    made, some = Training.build(S2dTraining(exits="1+3+5"), target, None), batch(target)
    losses = losses_of(made, some, 30)
    assert losses[-1] < 0.6 * losses[0]
    assert all(bool(one.any()) for one in made.module.linears.detach()), "every exit moved"
    made.evaluate(some)
    made.save(tmp_path, {})
    found = read_exits(str(tmp_path), target)
    assert found.layers == (1, 3, 5) and found.right != trusting(3)
    assert all(0 <= share <= 1 for row in found.right for pair in row for share in pair)
    # What drafts is what was trained.
    drafter = S2d(found, target)
    y_BAH = made.outputs(some, Aligned(some, DRAFT_MODEL))[1]
    h_TH = some.feature["hidden.3"][0, :7].float()
    want = (y_BAH[0] @ made._head_DH.T)[:7]
    torch.testing.assert_close(drafter._logits(1, h_TH), want, atol=0.2, rtol=0.05)


def test_what_does_not_fit_is_said(target, folder, tmp_path):
    with pytest.raises(ModelError, match="is left after layer 1 to 5"):
        S2dTraining(exits="3+6").layers(target)
    with pytest.raises(ValueError, match="exits must be numbers of layers"):
        S2dTraining(exits="a+b")
    for key, value, words in (
        ("exits", [3, 1, 5], "are not layers 1 to 5"),
        ("exits", [1, 3], "its config needs"),
        ("right", [[1]], "right must"),
    ):
        other = tmp_path / f"{key}{len(str(value))}"
        shutil.copytree(folder, other)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ModelError, match=words):
            read_exits(str(other), target)
    assert read_config(folder, target)["exits"] == [1, 3, 5] and "norms" in read_tensors(folder)
