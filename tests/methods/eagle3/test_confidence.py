"""A head that tells how likely a guess is kept: in training, on disk, and for a policy that reads it."""

import json

import pytest
import torch

from outpace import Engine
from outpace.methods.eagle3.export import export
from outpace.methods.eagle3.net import CONFIDENCE
from outpace.methods.eagle3.objective import Eagle3, Eagle3Config
from outpace.models.tiny import tiny
from outpace.train import confidence
from outpace.train.align import EAGLE, Aligned
from outpace.train.loop import LoopConfig, train
from outpace.train.objective import LAST, whole_laws
from outpace.train.starts import begin_from
from tests.train.texts import Listed, most_used, written

TAPS = ("hidden.2", "hidden.1", "hidden.-1")
PROMPTS = [[5, 9, 11], [3], [40, 41, 42, 43]]


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def rows(target):
    return [written(target, 16, seed=seed, new=24, taps=TAPS) for seed in range(3)]


@pytest.fixture(scope="module")
def trained(target, rows, tmp_path_factory):
    """An objective after some steps, and its folder."""
    folder = tmp_path_factory.mktemp("eagle3")
    objective = Eagle3.build(Eagle3Config(confidence=1.0), target, most_used(rows, 200, target))
    config = LoopConfig(steps=60, lr=4e-3, bf16=False)
    train(objective, Listed(rows), [], config, out=folder / "head", work=folder / "work")
    return objective, folder / "head"


def test_it_learns_how_often_a_draw_is_kept(target, rows, trained):
    """What it says is nearer to the truth than its mean would be, on texts that it has not seen."""
    objective = Eagle3.build(Eagle3Config(confidence=1.0), target, most_used(rows, 200, target))
    begin_from(objective, trained[1])
    tuned = torch.optim.Adam(objective.module.confidence.parameters(), lr=0.02)
    for turn in range(90):  # with guesses that move no more
        tuned.zero_grad()
        objective.loss(rows[turn % 3]).loss.backward()
        tuned.step()
    batch = written(target, 16, seed=99, new=24, taps=TAPS)
    aligned = Aligned(batch, EAGLE)
    with torch.no_grad():
        state_RH = objective.unroll(batch, aligned, 1)[0][aligned.real_BA]
        p_RD, _ = whole_laws(target, objective.vocab, aligned.laws_of(batch.feature[LAST]))
        p_RD = p_RD[aligned.law(EAGLE)[aligned.real_BA]]
        q_RD = objective.module.lm_head(state_RH).float().softmax(-1)
        kept_R = torch.minimum(p_RD, q_RD).sum(-1)
        said_R = objective.module.confidence(state_RH).squeeze(-1).sigmoid()
    error, spread = (said_R - kept_R).square().mean(), kept_R.var()
    assert float(error) < 0.9 * float(spread), (error, spread)


def test_what_the_draft_vocabulary_lacks_refuses_draws(target, rows, monkeypatch):
    """A head that says one half everywhere is moved by its mistake about sum min(p, q), p over all tokens."""
    monkeypatch.setattr(confidence, "SHARE", 1)
    few = most_used(rows, 40, target)
    objective = Eagle3.build(Eagle3Config(confidence=1.0, steps=1, temperature=1.5), target, few)
    batch, aligned = rows[0], Aligned(rows[0], EAGLE)
    with torch.no_grad():
        keep_BA = aligned.teaches(EAGLE) & (few.feed_V[aligned.token(EAGLE)] >= 0)
        state_RH = objective.unroll(batch, aligned, 1)[0][keep_BA]
        q_RD = (state_RH @ objective.module.lm_head.weight.T).softmax(-1)
        last_RH = aligned.laws_of(batch.feature[LAST])[aligned.law(EAGLE)[keep_BA]]
        p_RD = (target.head(last_RH) / 1.5).softmax(-1)[:, few.to_target_D]
        assert float(p_RD.sum(-1).mean()) < 0.9, "much of the target's distributions lies outside"
        kept_R = torch.minimum(p_RD, q_RD).sum(-1)
    objective.loss(batch).loss.backward()
    torch.testing.assert_close(objective.module.confidence.bias.grad[0], (0.5 - kept_R).mean())


def test_guesses_learn_nothing_from_it(target, rows):
    vocab = most_used(rows, 200, target)
    grads = []
    for weight in (0.0, 5.0):
        objective = Eagle3.build(Eagle3Config(confidence=weight), target, vocab)
        objective.loss(rows[0]).loss.backward()
        grads.append({name: one.grad for name, one in objective.module.named_parameters()})
    plain, with_head = grads
    assert set(with_head) - set(plain) == set(CONFIDENCE)
    assert bool(with_head[CONFIDENCE[0]].abs().sum() > 0)
    for name, grad in plain.items():
        assert torch.equal(grad, with_head[name]), name


def test_a_head_of_an_older_drafter_is_added(target, rows, trained, tmp_path):
    _, folder = trained
    plain = Eagle3.build(Eagle3Config(), target, most_used(rows, 200, target))
    plain.save(tmp_path / "plain", {})
    assert "confident" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    more = Eagle3.build(Eagle3Config(confidence=1.0), target, most_used(rows, 200, target))
    begin_from(more, tmp_path / "plain")
    assert float(more.module.confidence.weight.detach().abs().sum()) == 0
    begin_from(more, folder)
    assert float(more.module.confidence.weight.detach().abs().sum()) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("tree", ["chain", "2x2"])
def test_specdecpp_ends_drafts_by_it(target, trained, temperature, tree):
    """The text stays; a high threshold drafts more than a low one; an estimate is that of the formula."""
    objective, folder = trained
    engine = Engine(target, drafter="none")
    said = {"max_new_tokens": 16, "ignore_eos": True, "temperature": temperature, "seed": 7}
    drafted = {}
    for threshold in (0.02, 0.98):
        policy = f"specdecpp[threshold={threshold} least=1]"
        spec = f"eagle3[model={folder} tree={tree} tree_size=6 policy={policy}]"
        found = engine.generate(PROMPTS, drafter=spec, reproducible=True, **said)
        plain = engine.generate(PROMPTS, drafter="none", reproducible=True, **said)
        assert [one.tokens for one in found] == [one.tokens for one in plain]
        drafted[threshold] = sum(one.counters.drafted for one in found)
    assert drafted[0.02] < drafted[0.98]
    net = engine.method(f"eagle3[model={folder}]").drafter.net
    out_RH = torch.randn(5, target.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rounded = {n: p.bfloat16().float() for n, p in objective.named().items() if n in CONFIDENCE}
        normed_RH = objective.module.norm(out_RH)
        odds_R = normed_RH @ rounded[CONFIDENCE[0]][0] + rounded[CONFIDENCE[1]]
    torch.testing.assert_close(net.foresee(out_RH), odds_R.sigmoid(), atol=2e-2, rtol=0)


def test_a_drafter_without_it_is_refused_by_the_policy(target, rows, tmp_path):
    plain = Eagle3.build(Eagle3Config(), target, most_used(rows, 200, target))
    plain.save(tmp_path / "plain", {})
    with pytest.raises(Exception, match="needs estimates of acceptance"):
        Engine(target, drafter="none").method(f"eagle3[model={tmp_path / 'plain'} policy=specdecpp]")


def test_other_programs_get_none_of_it(target, trained, tmp_path):
    from outpace.drafters.trained import read_tensors

    export(trained[1], "speculators", tmp_path / "out", target, "owner/model")
    assert not set(CONFIDENCE) & set(read_tensors(tmp_path / "out"))


def test_a_loss_without_distributions_is_refused():
    with pytest.raises(ValueError, match="needs a loss that reads distributions"):
        Eagle3Config(confidence=1.0, loss="ce")


def test_a_new_vocabulary_keeps_the_rows_of_the_old_one(target, rows, trained):
    """Rows of other tokens stay as the target has them; the vocabulary of the folder's own gives its rows."""
    older, folder = trained
    more = Eagle3.build(Eagle3Config(confidence=1.0), target, most_used(rows, 230, target))
    fresh = more.module.lm_head.weight.detach().clone()
    begin_from(more, folder)
    place_D = older.vocab.feed_V[more.vocab.to_target_D]
    held, new = older.module.lm_head.weight.detach(), more.module.lm_head.weight.detach()
    assert 0 < int((place_D < 0).sum()) < 60
    assert torch.equal(new[place_D < 0], fresh[place_D < 0])
    assert torch.allclose(new[place_D >= 0], held[place_D[place_D >= 0]], atol=2e-2)
    assert torch.equal(
        more.module.layer.mlp.down_proj.weight, older.module.layer.mlp.down_proj.weight.bfloat16().float()
    )
