"""Streams: they enter where they were trained to, with weights of their own; no row of the target changes."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from outpace import Engine, ModelError
from outpace.methods.draft_model.on_policy import features
from outpace.methods.streaming.drafter import Coral, Streaming, StreamingConfig
from outpace.methods.streaming.files import read_streams
from outpace.methods.streaming.objective import Coral as CoralObjective
from outpace.methods.streaming.objective import CoralTraining, StreamingTraining
from outpace.methods.streaming.objective import Streaming as StreamingObjective
from outpace.models.tiny import tiny
from outpace.train.batches import Batch
from outpace.tree.shapes import widths
from outpace.types import ROOT, Budget, Draft, Drawn, Feed
from tests.conformance.test_drafters import proposal_rows
from tests.train.texts import losses_of

LONG = {"max_new_tokens": 24, "ignore_eos": True}
PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42], [77]]
KINDS = {
    "streaming": (StreamingObjective, StreamingTraining(layers=2, rank=4, places=8), Streaming),
    "coral": (CoralObjective, CoralTraining(rank=4, places=8), Coral),
}


@pytest.fixture(scope="module")
def target():
    return tiny(layers=6)


@pytest.fixture(scope="module")
def engine(target):
    return Engine(target, drafter="none")


@pytest.fixture(scope="module", params=KINDS)
def made(request, target, tmp_path_factory):
    """A method's name, streams whose weights do something, and their folder."""
    kind, config, _ = KINDS[request.param]
    torch.manual_seed(0)
    made, folder = kind.build(config, target, None), tmp_path_factory.mktemp("streams")
    with torch.no_grad():
        for name, one in made.module.named_parameters():
            one.add_(torch.randn_like(one) * (0.001 if "moved" in name else 0.02)).copy_(one.bfloat16())
    made.save(folder, {})
    return request.param, made, folder


def texts():
    rows = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42, 43, 44, 1, 2, 3]]
    return Batch(
        token_BT=torch.tensor(rows),
        length_B=torch.tensor([8, 8]),
        answer_BT=torch.ones(2, 8, dtype=torch.bool),
    )


@pytest.mark.parametrize("settings", ["", " tree=chain", " tree=2x2x1 rows=40", " tree=dynamic tree_size=6"])
def test_the_text_is_plain_text(engine, made, settings):
    name, _, folder = made
    for more in ({}, {"temperature": 0.8, "seed": 5, "reproducible": True}):
        plain = engine.generate(PROMPTS, drafter="none", **LONG, **more)
        fast = engine.generate(PROMPTS, drafter=f"{name}[model={folder}{settings}]", **LONG, **more)
        assert [one.tokens for one in fast] == [one.tokens for one in plain]
        assert sum(one.counters.drafted for one in fast) > 0


@pytest.mark.parametrize("rows", [2, 4, 6, 13])
def test_a_pass_has_no_more_rows_than_it_may(engine, made, rows):
    name, _, folder = made
    passed = []
    engine.listeners.append(lambda record: passed.append(record.prompt or record.passed_rows))
    engine.generate(PROMPTS[:1], drafter=f"{name}[model={folder} rows={rows} prune=0]", **LONG)
    engine.listeners.pop()
    assert max(passed) <= rows


def test_what_drafts_is_what_was_trained(target, made):
    """Streams of a pass give the states of the network in training; rows of the target feel nothing."""
    name, trained, folder = made
    drafter = KINDS[name][2].load(StreamingConfig(model=str(folder), rows=64), target)
    batch = texts()
    aligned = trained.chosen(batch)
    with torch.no_grad():
        y_BGKH = torch.stack(trained.guesses(batch, aligned)[0][:-1], 2)
    at = aligned.place_BA[0].tolist().index(5)
    ids = batch.token_BT[0, :6].tolist()
    cache = target.new_cache()
    slot = cache.open()
    target.score([Feed.chain(slot, ids[:3])], cache)
    cache.keep(slot, range(3))
    draft = Draft.chosen([ids[4], 77, ids[5]], [ROOT, ROOT, 0])
    plain_TV = target.score([Feed.tree(slot, ids[3], draft)], cache).logits_TV.clone()
    cache.drop(slot)
    riders, start = drafter._make_riders((0, 3), 4)
    ridden = Draft(draft.token_N, draft.parent_N, draft.groups, riders=riders)
    scored = target.score([Feed.tree(slot, ids[3], ridden)], cache)
    assert torch.equal(scored.logits_TV, plain_TV)
    got_KH = scored.rider_hidden_RH[start[3] : start[3] + 3]
    torch.testing.assert_close(got_KH, y_BGKH[0, at], atol=2e-3, rtol=2e-3)


def test_features_of_a_batch_spare_the_pass_over_its_texts(target, made, monkeypatch):
    name, trained, _ = made
    kind, config, _ = KINDS[name]
    batch, taps = texts(), kind.taps(config, target)
    assert len([tap for tap in taps if tap.startswith("kv.")]) == len(trained.net.layers)
    given = features(target, batch.token_BT, batch.length_B.tolist(), taps)
    kept = replace(batch, feature=given)
    aligned = trained.chosen(batch)
    with torch.no_grad():
        guesses, last_BTH = trained.guesses(batch, aligned)
        monkeypatch.setattr(target, "score", lambda *_, **more: pytest.fail("no pass is needed"))
        others, other_BTH = trained.guesses(kept, aligned)
    for one, other in zip([*guesses, last_BTH], [*others, other_BTH], strict=True):
        assert (one - other).abs().max() < 0.03 * one.abs().max()  # features are bfloat16
    assert torch.isfinite(trained.loss(kept).loss)


def test_the_law_recorded_is_that_of_the_stream(target, made):
    """One per level, of the streams of the row at which verification ended."""
    name, _, folder = made
    drafter = KINDS[name][2].load(StreamingConfig(model=str(folder)), target)
    asked = Budget(7, 3, shape=widths((2, 2, 1)))
    (row,) = proposal_rows(target, drafter, Drawn.DISTINCT, asked, 0.9, [PROMPTS[0]])
    row.state.hidden_KH = torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(1))
    row.state.end = len(PROMPTS[0]) - 1
    (draft,) = drafter.propose([row])
    want_KV = (target.head(row.state.hidden_KH) / 0.9).softmax(1)
    for group in draft.groups:
        apart_K = (want_KV - draft.laws[group.law].prob_S).abs().amax(1)
        depth = len(draft.path(group.parent))
        assert float(apart_K[depth]) < 1e-6 and int((apart_K > 1e-4).sum()) == 2
    assert draft.resume is None and draft.riders is not None, "what was drawn is not pruned"


def test_an_early_exit_prunes_what_was_chosen_and_hands_on_its_work(engine, made):
    """Where guesses are unlikely at the exit, fewer rows are verified; what was drawn stays."""
    name, _, folder = made
    plain = engine.generate(PROMPTS, drafter="none", **LONG)
    drafted, seen = {}, set()
    for prune in ("0", "0.02", "0.9"):
        spec = f"{name}[model={folder} tree=3x2x1 prune={prune}]"
        fast = engine.generate(PROMPTS, drafter=spec, **LONG)
        assert [one.tokens for one in fast] == [one.tokens for one in plain]
        drafted[prune] = sum(one.counters.drafted for one in fast)
        sampled = engine.generate(PROMPTS, drafter=spec, temperature=0.8, seed=1, reproducible=True, **LONG)
        seen.add(sum(one.counters.drafted for one in sampled))
    assert drafted["0"] > drafted["0.02"] > drafted["0.9"] and len(seen) == 1


def test_likely_nodes_carry_streams(target, made):
    name, _, folder = made
    drafter = KINDS[name][2].load(StreamingConfig(model=str(folder), rows=13), target)
    draft = Draft.chosen([1, 2, 3, 4], [ROOT, ROOT, 0, 1])
    order = sorted(range(5), key=lambda row: (drafter._late(draft, row), row))
    assert order == [0, 1, 3, 2, 4], "first children before second ones"


def test_streams_learn(target, made):
    name, _, _ = made
    kind, config, _ = KINDS[name]
    fresh, batch = kind.build(config, target, None), texts()
    losses = losses_of(fresh, batch, 20)
    assert losses[-1] < 0.7 * losses[0]
    assert all(bool(one.any()) for one in fresh.module.parameters()), "everything moved"
    fresh.evaluate(batch)
    assert len(fresh.ranks.acceptance()) == 3


def test_what_does_not_fit_is_said(target, made, tmp_path):
    name, _, folder = made
    kind, config, _ = KINDS[name]
    with pytest.raises(ModelError, match="has 5 above its first"):
        kind.build(type(config)(layers=6), target, None)
    with pytest.raises(ValueError, match="rank must be at least 1"):
        type(config)(rank=0)
    for key, value, words in (
        ("layer", 6, "layer and rank are 6"),
        ("exit", 9, "exit must be a layer up to"),
        ("rank", 5, "holds no streams of this target"),
        ("acceptance", ["x"], "must be numbers"),
    ):
        other = tmp_path / key
        shutil.copytree(folder, other)
        said = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**said, key: value}))
        with pytest.raises(ModelError, match=words):
            read_streams(name, str(other), target)
