"""GliDe in training: what a row may see, and that it is what a draft sees."""

from dataclasses import replace

import pytest
import torch

from outpace.errors import ModelError
from outpace.methods.glide.drafter import METHOD
from outpace.methods.glide.objective import GlideObjective, GlideTraining
from outpace.models.tiny import tiny
from outpace.train.align import DRAFT_MODEL, EAGLE, Aligned
from outpace.train.capture import compute
from outpace.train.features import FeatureStore
from outpace.train.tokens import TokenSequence
from outpace.types import VocabMap
from tests.conformance.test_trained import exact
from tests.train.texts import written

B = 5


@pytest.fixture(scope="module")
def target():
    return tiny(layers=3)


def built(target, **options):
    """Away from its start."""
    objective = GlideObjective.build(GlideTraining(**options), target, None)
    coins = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=coins))
    return objective


@pytest.fixture(scope="module")
def batch(target):
    objective = built(target)
    return exact(written(target, 3, seed=2, new=23), target, objective.taps(objective.config, target))


def said(objective, batch):
    """What the head reads at the learning rows, their places, and how many keys they see."""
    aligned = Aligned(batch, DRAFT_MODEL)
    seen_BA, _ = objective.blockwise(batch, aligned.place_BA)
    x_BAH = aligned.rows(objective._attended(batch))
    states = objective._states(x_BAH, aligned.place_BA, objective._held(batch), seen_BA)
    return states, aligned.place_BA, seen_BA


def touched(batch, tap, rows):
    """The batch with other keys and values in some rows."""
    other = batch.feature[tap].clone()
    other[:, rows] += 1.0
    return replace(batch, feature={**batch.feature, tap: other})


@torch.no_grad()
def test_a_row_sees_nothing_of_the_target_from_its_own_block_on(target, batch):
    objective = built(target)
    tap = f"kv.{objective.reads}"
    before, place_BA, seen_BA = said(objective, batch)
    assert bool((place_BA - seen_BA).lt(B).all()) and bool((seen_BA <= place_BA).all())
    for first in range(3, batch.token_BT.shape[1]):
        rows = slice(first, first + 1)
        after, _, _ = said(objective, touched(batch, tap, rows))
        same_BA = (before == after).all(-1)
        assert bool(same_BA[seen_BA <= first].all()), "a key of its own block, or of a later one"
        assert not bool(same_BA[seen_BA > first].any()), "a key that is committed before its block"


@torch.no_grad()
def test_blocks_have_all_depths_and_begin_elsewhere_in_other_batches(target, batch):
    objective = built(target)
    place = torch.arange(40)[None]
    phases = set()
    for token in range(12):
        other = replace(batch, token_BT=batch.token_BT + token)
        seen, offset = objective.blockwise(other, place)
        again, _ = objective.blockwise(other, place)
        assert torch.equal(seen, again) and set(offset[0].tolist()) == set(range(B))
        inner = seen[0] > 0
        assert torch.equal((place - offset)[0][inner], seen[0][inner])
        phases.add(int(offset[0, 0]))
    assert phases == set(range(B))


@torch.no_grad()
def test_a_row_at_some_place_of_its_block_is_a_guess_at_that_depth(target, batch):
    """What is learned is what ``states`` says of drafts; the conformance suite compares that with use."""
    objective, checked = built(target), 0
    blocks, place_BA, seen_BA = said(objective, batch)
    drafts = Aligned(batch, EAGLE)
    states = objective.states(batch, drafts)
    for b in range(len(place_BA)):
        at = {int(place): a for a, place in enumerate(drafts.place_BA[b]) if drafts.real_BA[b, a]}
        for a, (place, seen) in enumerate(zip(place_BA[b].tolist(), seen_BA[b].tolist(), strict=True)):
            if seen - 1 in at:
                torch.testing.assert_close(blocks[b, a], states[place - seen][b, at[seen - 1]])
                checked += 1
    assert checked > 30


@torch.no_grad()
def test_rows_behind_nothing_glimpse_at_nothing(target, batch):
    objective = built(target)
    x_BTH, held = objective._attended(batch), objective._held(batch)
    place, none = torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)
    got = objective._states(x_BTH[:, :1], place, held, none)
    objective.module.glimpse.o_proj.weight.zero_()
    assert torch.equal(got, objective._states(x_BTH[:, :1], place, held, none))
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("loss", ["kl", "ce", "tv"])
def test_everything_learns_and_stays_finite(target, batch, loss):
    objective = built(target, loss=loss, decay=0.8)
    step = objective.loss(batch)
    step.loss.backward()
    for name, one in objective.module.named_parameters():
        assert one.grad is not None and bool(one.grad.isfinite().all()) and bool(one.grad.any()), name


def test_a_mixed_label_is_a_mixed_loss(target, batch):
    """Gradients of ``kl`` with labels are those of both losses by their shares."""
    grads = {}
    for name, options in {"mix": {"labels": 0.3}, "kl": {"labels": 0.0}, "ce": {"loss": "ce"}}.items():
        objective = built(target, **options)
        objective.loss(batch).loss.backward()
        grads[name] = objective.module.glimpse.q_proj.weight.grad
    torch.testing.assert_close(grads["mix"], 0.7 * grads["kl"] + 0.3 * grads["ce"], atol=1e-5, rtol=1e-3)
    assert not torch.allclose(grads["kl"], grads["ce"], atol=1e-4)


def test_training_makes_it_better(target, batch):
    objective = GlideObjective.build(GlideTraining(), target, None)
    before = objective.evaluate(batch)
    optimizer = torch.optim.AdamW(objective.module.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        step = objective.loss(batch)
        step.loss.backward()
        optimizer.step()
        losses.append(float(step.loss.detach()))
    after = objective.evaluate(batch)
    assert losses[-1] < 0.7 * losses[0]
    assert after.accepted_by_depth.sum() > 1.3 * before.accepted_by_depth.sum()
    assert len(after.counted_by_depth) == B


@torch.no_grad()
def test_what_is_learned_from_is_what_the_cache_holds(target, tmp_path):
    """The store keeps the rows of a reader, rounded, also of a text that needs several passes."""
    taps = ("hidden.-1", "kv.1")
    ids = written(target, 1, seed=5, new=30).token_BT[0].numpy().astype("int32")
    one = TokenSequence(number=4, prompt=2, temperature=0.0, ids=ids)
    from outpace.types import Feed

    cache = target.new_cache()
    slot = cache.open()
    target.score([Feed.chain(slot, ids.tolist())], cache)
    cache.keep(slot, range(len(ids)))
    wanted = target.read(cache, slot, 1).row_CY
    (found,) = compute(target, [ids.tolist()], taps, rows=8)
    torch.testing.assert_close(found["kv.1"].float(), wanted, atol=2e-2, rtol=1e-2)
    store = FeatureStore(target, tmp_path, taps, 1 << 40)
    (first,) = store.of([one])
    store.flush()
    (again,) = FeatureStore(target, tmp_path, taps, 1 << 40).of([one])
    assert torch.equal(first["kv.1"], again["kv.1"]) and again["kv.1"].shape == wanted.shape
    assert torch.equal(first["hidden.-1"], again["hidden.-1"])


def test_bad_options_are_said(target):
    for wrong in ({"block": 0}, {"labels": 1.5}, {"decay": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            GlideTraining(**wrong)
    for wrong in ({"layer": 3}, {"start": 7}):
        with pytest.raises(ModelError, match="tiny has 0 to 2"):
            GlideObjective.build(GlideTraining(**wrong), target, None)


def test_a_folder_tells_what_it_reads(target, tmp_path):
    known = torch.tensor([i for i in range(target.vocab_size) if i % 5])
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[known] = torch.arange(len(known))
    objective = GlideObjective.build(GlideTraining(layer=1), target, VocabMap(known, feed_V))
    objective.save(tmp_path, {})
    said = (tmp_path / "config.json").read_text()
    assert f'"method": "{METHOD}"' in said and '"layer": 1' in said
