"""Block drafters without a Markov head, trained to tell how likely a guess is kept."""

import pytest
import torch

from outpace import Engine
from outpace.drafters.trained import read_tensors
from outpace.methods.dflash.export import export
from outpace.methods.dflash.net import CONFIDENCE
from outpace.methods.dflash.objective import DflashTraining
from outpace.models.tiny import tiny
from outpace.train import confidence
from outpace.train.align import EAGLE
from outpace.train.loop import LoopConfig, train
from outpace.train.objective import LAST
from outpace.train.starts import begin_from
from tests.methods.dflash.test_objective import TAPS, built
from tests.train.texts import Listed, most_used, written

PROMPTS = [[5, 9, 11], [3], [40, 41, 42, 43]]
HEAD = {f"{CONFIDENCE}.weight", f"{CONFIDENCE}.bias"}


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def rows(target):
    return [written(target, 16, seed=seed, new=24, taps=TAPS) for seed in range(3)]


@pytest.fixture(scope="module", params=["masks", "jetspec"])
def trained(request, target, rows, tmp_path_factory):
    """Its name, an objective after some steps, and its folder."""
    folder, vocab = tmp_path_factory.mktemp(request.param), most_used(rows, 200, target)
    objective = built(target, vocab, moved=False, kind=request.param, confidence=1.0)
    config = LoopConfig(steps=40, lr=1e-2, bf16=False)
    train(objective, Listed(rows), [], config, out=folder / "head", work=folder / "work")
    return objective.method, objective, folder / "head"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("tree", ["chain", "2x2"])
def test_specdecpp_ends_drafts_by_it(target, trained, temperature, tree):
    """The text stays, and a high threshold drafts more than a low one."""
    method, _, folder = trained
    engine = Engine(target, drafter="none")
    said = {"max_new_tokens": 16, "ignore_eos": True, "temperature": temperature, "seed": 7}
    drafted = {}
    for threshold in (0.02, 0.98):
        policy = f"specdecpp[threshold={threshold} least=1]"
        spec = f"{method}[model={folder} tree={tree} tree_size=6 policy={policy}]"
        found = engine.generate(PROMPTS, drafter=spec, reproducible=True, **said)
        plain = engine.generate(PROMPTS, drafter="none", reproducible=True, **said)
        assert [one.tokens for one in found] == [one.tokens for one in plain]
        drafted[threshold] = sum(one.counters.drafted for one in found)
    assert drafted[0.02] < drafted[0.98]


def test_what_it_says_is_that_of_training(target, trained):
    method, objective, folder = trained
    engine = Engine(target, drafter="none")
    drafter = engine.method(f"{method}[model={folder} quantize=none]").drafter
    hidden_FH = torch.randn(5, target.hidden_size, generator=torch.Generator().manual_seed(0))
    drafter.known = lambda branches: hidden_FH
    with torch.no_grad():
        wanted_F = objective.module.confidence_head["proj"](hidden_FH).squeeze(-1).sigmoid()
    torch.testing.assert_close(drafter.foresee([]), wanted_F, atol=1e-2, rtol=0)


def test_what_the_draft_vocabulary_lacks_refuses_draws(target, rows, monkeypatch):
    """A head that says one half everywhere is moved by its mistake about sum min(p, q), p over all tokens."""
    monkeypatch.setattr(confidence, "SHARE", 1)
    few, batch = most_used(rows, 40, target), rows[0]
    objective = built(target, few, moved=False, kind="masks", confidence=1.0, decay=1e-9)
    aligned, keep_BMA = objective.drawn(batch)
    with torch.no_grad():
        q_RD = (objective.outputs(batch, aligned, keep_BMA) @ objective._head_DH.T).softmax(-1)
        last_RH = aligned.laws_of(batch.feature[LAST])[aligned.law(EAGLE)[keep_BMA[..., 0]]]
        p_RD = target.head(last_RH).softmax(-1)[:, few.to_target_D]
        assert float(p_RD.sum(-1).mean()) < 0.9, "much of the target's distributions lies outside"
        kept_R = torch.minimum(p_RD, q_RD).sum(-1)
    objective.loss(batch).loss.backward()
    bias = objective.module.confidence_head["proj"].bias
    torch.testing.assert_close(bias.grad[0], (0.5 - kept_R).mean())


def test_guesses_learn_nothing_from_it(target, rows):
    vocab = most_used(rows, 200, target)
    one, other = (built(target, vocab, kind="masks", confidence=weight) for weight in (0.0, 5.0))
    other.module.load_state_dict(one.module.state_dict(), strict=False)
    grads = []
    for objective in one, other:
        objective.loss(rows[0]).loss.backward()
        grads.append({name: found.grad for name, found in objective.module.named_parameters()})
    plain, with_head = grads
    assert set(with_head) - set(plain) == HEAD
    assert bool(with_head[f"{CONFIDENCE}.weight"].abs().sum() > 0)
    for name, grad in plain.items():
        assert torch.equal(grad, with_head[name]), name


def test_a_drafter_without_it_can_get_one(target, rows, tmp_path):
    vocab, more = most_used(rows, 200, target), {"kind": "masks", "taps": "2,1"}
    built(target, vocab, **more).save(tmp_path / "plain", {})
    with pytest.raises(Exception, match="needs estimates of acceptance"):
        Engine(target, drafter="none").method(f"dflash[model={tmp_path / 'plain'} policy=specdecpp]")
    head = built(target, vocab, **more, confidence=1.0)
    begin_from(head, tmp_path / "plain")
    head.save(tmp_path / "head", {})
    before, after = (read_tensors(tmp_path / name) for name in ("plain", "head"))
    assert set(after) - set(before) == HEAD
    assert torch.equal(before["fc.weight"], after["fc.weight"])
    export(tmp_path / "head", "speculators", tmp_path / "out", target, "owner/model")
    assert not HEAD & set(read_tensors(tmp_path / "out")), "another program's class has none"


def test_a_weight_below_zero_is_refused():
    with pytest.raises(ValueError, match="confidence must be at least 0"):
        DflashTraining(confidence=-1.0)
