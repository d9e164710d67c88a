"""The acceptance head's training: labels, mixed texts, the loss, and what it leaves behind."""

import math

import pytest
import torch

from outpace.errors import ModelError
from outpace.methods.draft_model.acceptance_head import AcceptanceHead
from outpace.methods.draft_model.acceptance_objective import (
    LABEL,
    STATE,
    Acceptance,
    AcceptanceTraining,
    law,
    weighted_loss,
)
from outpace.methods.draft_model.files import load_trained
from outpace.methods.draft_model.objective import DraftModelObjective, DraftModelTraining
from outpace.models.tiny import TableTarget, tiny
from outpace.train.loop import LoopConfig, train
from outpace.types import Feed
from tests.train.texts import Listed, most_used, written


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def batches(target):
    return [written(target, 6, seed=seed, new=16, temperature=1.0) for seed in range(2)]


@pytest.fixture(scope="module")
def draft(target, batches, tmp_path_factory):
    """A draft model of one layer that knows 120 tokens, in its folder."""
    folder = tmp_path_factory.mktemp("draft") / "draft_model"
    options = DraftModelTraining(layers=1, train_head=True)
    DraftModelObjective.build(options, target, most_used(batches, 120, target)).save(folder, {})
    return folder


def built(target, draft, **options):
    return Acceptance.build(AcceptanceTraining(draft=str(draft), **options), target, None)


def states(model, tokens):
    """Last states of a plain pass over a text, [T, W], rounded as batches hold them."""
    cache = model.new_cache()
    feed = [Feed.chain(cache.open(), tokens, want=())]
    scored = model.score(feed, cache, taps=frozenset({"hidden.-1"}))
    return scored.taps["hidden.-1"].bfloat16()


def plain_labels(objective, target, model, id_D, text, drawn, place, context=None):
    """(min(1, p / q) of the drawn token, sum min(p, q)), both after ``context`` or the text."""
    before = (text if context is None else context)[:place]
    heat = objective.config.temperature
    p_V = law(target.head(states(target, before)[-1:]), heat)[0]
    q_V = torch.zeros(target.vocab_size)
    q_V[id_D] = law(model.head(states(model, before)[-1:]), heat)[0]
    return min(1.0, float(p_V[drawn] / q_V[drawn])), float(torch.minimum(p_V, q_V).sum())


@pytest.mark.parametrize("label", ["token", "overlap"])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_labels_are_of_the_answer_and_states_of_the_mixture(target, batches, draft, label, temperature):
    objective = built(target, draft, label=label, temperature=temperature, mix=0.3)
    model, id_D = load_trained(draft, target, quantize="int8")
    batch, mixed = batches[0], objective.on_policy(batches[0], 7)
    label_BT = mixed.feature[LABEL].squeeze(-1)
    changed = hard = misled = learns = stale = 0
    for b in range(3):
        length = int(batch.length_B[b])
        text, fed = (one.token_BT[b, :length].tolist() for one in (batch, mixed))
        own, along = states(model, fed), states(model, text)
        torch.testing.assert_close(mixed.feature[STATE][b, :length], own)
        for place in range(length):
            told = float(label_BT[b, place])
            if told < 0:
                assert fed[place] == text[place], "what was not drawn is the text's own"
                continue
            assert batch.answer_BT[b, place] and fed[place] in id_D.tolist()
            args = objective, target, model, id_D, text, fed[place], place
            index = 0 if label == "token" else 1
            right, other = plain_labels(*args)[index], plain_labels(*args, context=fed)[index]
            assert told == pytest.approx(right, abs=1e-3)
            learns, changed = learns + 1, changed + (fed[place] != text[place])
            hard += abs(told - round(told)) > 0.05
            misled += abs(other - told) > 0.05
            stale += not torch.equal(own[place], along[place])
    print(learns, changed, hard, misled, stale)
    assert (label_BT[~mixed.answer_BT] < 0).all() and 20 < learns < int(batch.answer_BT[:3].sum())
    assert changed > 10 and stale > 10, "planted: states of the answer, without its drawn tokens"
    assert misled > 3, "planted: labels given the mixture, and not the answer"
    assert (hard > 5) == (temperature > 0), "planted: hard labels; greedy ones are hard by nature"


def test_the_share_of_own_tokens_and_the_draws(target, batches, draft):
    kept = total = 0
    objective, whole = built(target, draft, mix=0.3), built(target, draft, mix=0.0)
    for seed in range(6):
        label_BT = objective.on_policy(batches[0], seed).feature[LABEL].squeeze(-1)
        kept += int((label_BT[batches[0].answer_BT] < 0).sum())
        total += int(batches[0].answer_BT.sum())
        every = whole.on_policy(batches[0], seed).feature[LABEL].squeeze(-1)
        assert (every >= 0).equal(batches[0].answer_BT)
    # 576 coins: six standard deviations are 0.11.
    assert abs(kept / total - 0.3) < 0.11
    one, same, other = (objective.on_policy(batches[0], s).token_BT for s in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


def plain_loss(s, a, w, hard=False):
    """The formula, term by term; ``hard`` is planted."""
    top = below = 0.0
    for guess, truth in zip(s, a, strict=True):
        truth = round(truth) if hard else truth
        top -= w * (1 - truth) * math.log(1 - guess) + truth * math.log(guess)
        below += w * (1 - truth) + truth
    return top / below


def test_the_loss_is_the_formula(target, batches, draft):
    objective = built(target, draft, weight=6.0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    batch = objective.on_policy(batches[0], 1)
    state_RW, a_R = objective.rows(batch)
    with torch.no_grad():
        s = objective.module(state_RW).sigmoid().tolist()
    step, a = objective.loss(batch), a_R.tolist()
    assert step.tokens == len(a) > 50
    assert step.loss.item() == pytest.approx(plain_loss(s, a, 6.0), rel=1e-5)
    for wrong in (plain_loss(s, a, 1.0), plain_loss(s, a, 6.0, hard=True)):
        assert abs(wrong / step.loss.item() - 1) > 0.02, "planted: no weight; hard labels"
    measured = objective.evaluate(batch)
    weights = [(6.0 * (1 - one), one) for one in a]
    score = sum(no * (1 - g * g) + yes * (1 - (1 - g) ** 2) for (no, yes), g in zip(weights, s, strict=True))
    assert measured.accepted_by_depth.item() == pytest.approx(score, rel=1e-5)
    assert measured.counted_by_depth.item() == pytest.approx(sum(map(sum, weights)), rel=1e-5)
    step.loss.backward()
    for name, parameter in objective.module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_the_weight_moves_the_best_estimate():
    """The loss is least where s / (1 - s) = a / (w (1 - a)): below a, for w above 1."""
    a = torch.full((4,), 0.75)
    for weight in (1.0, 6.0):
        best = 0.75 / (0.75 + weight * 0.25)
        at = {
            s: float(weighted_loss(torch.full((4,), math.log(s / (1 - s))), a, weight))
            for s in (best - 0.05, best, best + 0.05)
        }
        assert min(at, key=at.get) == best
    assert best == pytest.approx(1 / 3)


@pytest.mark.parametrize("tied", [True, False])
def test_what_was_trained_is_what_estimates(target, batches, draft, tmp_path, tied):
    objective = built(target, draft, blocks=2, tied=tied)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
            parameter.copy_(parameter.bfloat16())  # as it is stored
    objective.save(tmp_path / "head", {"command": "test"})
    head = AcceptanceHead(tmp_path / "head", objective.draft, target)
    state_RW, _ = objective.rows(batches[0])
    with torch.no_grad():
        wanted = objective.module(state_RW).sigmoid()
    torch.testing.assert_close(head(state_RW), wanted, atol=1e-5, rtol=1e-5)
    assert wanted.std() > 0.05
    assert (tmp_path / "head" / "model.safetensors").stat().st_size < (1 + (not tied)) * 10_000
    other = built(target, "tiny", draft_layers=1).draft
    with pytest.raises(ModelError, match="judges the draft model"):
        AcceptanceHead(tmp_path / "head", other, target)


def test_a_short_training_tells_refusals_from_acceptances(target, tmp_path):
    """The draft model mistakes half of the tokens for each other, and the head finds out which."""
    mistaken = DraftModelObjective.build(DraftModelTraining(train_head=True), target, None)
    rows_VH = mistaken.module.lm_head.weight
    coins = torch.Generator().manual_seed(0)
    with torch.no_grad():
        ids = (rows_VH @ torch.randn(rows_VH.shape[1], generator=coins) > 0).nonzero().squeeze(1)
        rows_VH[ids] = rows_VH[ids.roll(1)].clone()
    mistaken.save(tmp_path / "draft", {})
    rows = [written(target, 10, seed=seed, new=20, temperature=1.0) for seed in range(5)]
    held_out = written(target, 10, seed=99, new=20, temperature=1.0)
    objective = built(target, tmp_path / "draft", weight=1.0)
    start, seen = objective.evaluate(held_out), []
    config = LoopConfig(steps=30, lr=1e-2, evaluate_every=100, bf16=False)
    train(
        objective,
        Listed(rows),
        [held_out],
        config,
        out=tmp_path / "head",
        work=tmp_path / "work",
        report=seen.append,
    )
    state_RW, a_R = objective.rows(held_out)
    with torch.no_grad():
        s_R = objective.module(state_RW).sigmoid()
    together = torch.corrcoef(torch.stack([s_R, a_R]))[0, 1]
    print(seen[-1].line(), float(a_R.mean()), float(s_R.mean()), float(together))
    assert start.accepted_by_depth / start.counted_by_depth == pytest.approx(0.75), "one half"
    assert together > 0.4, "texts that training has not seen"
    assert float(s_R.mean()) == pytest.approx(float(a_R.mean()), abs=0.1)
    assert seen[-1].acceptance[0] > 0.79 and (tmp_path / "head" / "config.json").is_file()


def test_what_cannot_be_built_is_said(target):
    with pytest.raises(ModelError, match="acceptance needs embeddings, taps"):
        Acceptance.build(AcceptanceTraining(), TableTarget.random(0), None)
    with pytest.raises(ModelError, match="no trained draft_model"):
        Acceptance.build(AcceptanceTraining(), target, None)
    for wrong in ({"blocks": -1}, {"weight": 0.0}, {"mix": 1.0}, {"temperature": -1.0}):
        with pytest.raises(ValueError, match=r"weight above 0"):
            AcceptanceTraining(**wrong)
    with pytest.raises(ValueError, match="label must be one of token, overlap"):
        AcceptanceTraining(label="hard")
