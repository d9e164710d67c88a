"""D-PACE: weights that follow how far a block gets, in the training of all block drafters."""

import pytest
import torch

from outpace.methods.dflash.objective import DflashTraining
from outpace.models.tiny import tiny
from outpace.train import confidence, losses
from outpace.train.align import EAGLE
from outpace.train.loop import LoopConfig, train
from outpace.train.losses import confidences, pace_weights
from outpace.train.objective import LAST
from tests.methods.dflash.test_objective import KINDS, SLOTS, TAPS, built, outputs
from tests.train.texts import Listed, most_used, written


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def batches(target):
    return [written(target, 4, seed=seed, new=14, taps=TAPS) for seed in range(2)]


def by_hand(q_A, smooth, real_A):
    """The formula as it is said: sums over ends of drafts, of products over what they hold."""
    size, out = len(q_A), []
    for j in range(size):
        total = 0.0
        for k in range(j, size):
            product = 1.0
            for i in range(k + 1):
                product *= (smooth + (1 - smooth) * q_A[i]) if real_A[i] else 0.0
            total += product
        out.append(total)
    return out


def some(seed=0):
    """Probabilities [3, 4, 5] and where blocks go on."""
    coins = torch.Generator().manual_seed(seed)
    q_BMA = torch.rand(3, 4, 5, generator=coins, dtype=torch.float64)
    end_BM1 = torch.randint(0, 6, (3, 4, 1), generator=coins)
    return q_BMA, torch.arange(5) < end_BM1


@pytest.mark.parametrize("smooth", [0.0, 0.5, 1.0])
def test_weights_are_those_of_the_formula(smooth):
    q_BMA, real_BMA = some()
    got_BMA = pace_weights(q_BMA, smooth, real_BMA)
    for got_A, q_A, real_A in zip(
        got_BMA.flatten(0, 1), q_BMA.flatten(0, 1), real_BMA.flatten(0, 1), strict=True
    ):
        assert got_A.tolist() == pytest.approx(by_hand(q_A.tolist(), smooth, real_A.tolist()))
    assert bool((got_BMA[~real_BMA] == 0).all()), "behind the text there is nothing to gain"
    assert bool((got_BMA.diff(dim=-1) <= 0).all()), "a guess counts no more than the one before"


def test_they_are_the_gradient_of_the_expected_length():
    """By log q, without smoothing; with it they leave a factor out."""
    q_BMA, real_BMA = some(1)
    log_BMA = q_BMA.log().requires_grad_()
    length = (log_BMA.exp() * real_BMA).cumprod(-1).sum()
    (grad_BMA,) = torch.autograd.grad(length, log_BMA)
    torch.testing.assert_close(pace_weights(q_BMA, 0.0, real_BMA), grad_BMA)
    assert not torch.allclose(pace_weights(q_BMA, 0.1, real_BMA), grad_BMA), "planted"
    assert not pace_weights(q_BMA.requires_grad_(), 0.5, real_BMA).requires_grad


def test_known_weights():
    real_BA = torch.ones(1, 4, dtype=torch.bool)
    assert pace_weights(torch.rand(1, 4), 1.0, real_BA).tolist() == [[4, 3, 2, 1]]
    half_BA = torch.full((1, 4), 0.5)
    # c is 3/4 everywhere: sums of a geometric row.
    wanted = [sum(0.75 ** (k + 1) for k in range(j, 4)) for j in range(4)]
    assert pace_weights(half_BA, 0.5, real_BA)[0].tolist() == pytest.approx(wanted)
    # Nothing is known yet: the usual decay of one half. A sure first guess hands its share on.
    start = pace_weights(torch.zeros(1, 4), 0.5, real_BA)[0]
    assert start.tolist() == [0.9375, 0.4375, 0.1875, 0.0625]
    sure = pace_weights(torch.tensor([[1.0, 0, 0, 0]]), 0.5, real_BA)[0]
    assert sure.tolist() == [1.875, 0.875, 0.375, 0.125]


def test_confidences_are_probabilities_of_labels():
    coins = torch.Generator().manual_seed(3)
    hidden_RH, head_DH = torch.randn(600, 5, generator=coins), torch.randn(9, 5, generator=coins)
    label_R = torch.randint(0, 9, (600,), generator=coins)
    wanted_R = (hidden_RH @ head_DH.T).softmax(-1)[torch.arange(600), label_R]
    torch.testing.assert_close(confidences(hidden_RH, head_DH, label_R), wanted_R)
    assert len(confidences(hidden_RH[:0], head_DH, label_R[:0])) == 0


@pytest.mark.parametrize("name", ["kl", "ce"])
def test_the_loss_is_that_of_plain_logits_weighed(target, batches, name):
    vocab, batch = most_used(batches, 40, target), batches[0]
    objective = built(target, vocab, dpace=0.5, decay=0.7, anchors=0.8, loss=name)
    step = objective.loss(batch)
    aligned, keep_BMA = objective.drawn(batch)
    y_BMAH = outputs(objective, batch, aligned)
    q_BMA, loss_BMA = torch.zeros(keep_BMA.shape), torch.zeros(keep_BMA.shape)
    for b, a, i in keep_BMA.nonzero().tolist():
        place = int(aligned.place_BA[b, a]) + 2 + i
        label = int(vocab.feed_V[batch.token_BT[b, place]])
        z_D = target.head(y_BMAH[b, a, i][None])[0, vocab.to_target_D]
        p_D = target.head(batch.feature[LAST][b, place - 1][None])[0, vocab.to_target_D].softmax(-1)
        q_BMA[b, a, i] = z_D.softmax(-1)[label]
        plain = losses.cross_entropy(z_D[None], torch.tensor([label])) if name == "ce" else None
        loss_BMA[b, a, i] = losses.ORACLES["kl"](z_D[None], p_D[None]) if plain is None else plain
    ends_BM = batch.length_B[:, None] - aligned.place_BA - 2
    weight_BMA = torch.zeros(keep_BMA.shape)
    for b, a in aligned.real_BA.nonzero().tolist():
        real_A = [i < int(ends_BM[b, a]) for i in range(SLOTS)]
        weight_BMA[b, a] = torch.tensor(by_hand(q_BMA[b, a].tolist(), 0.5, real_A))
    # All of them together weigh what is left of so many guesses by the decay.
    usual = sum(0.7**i * int(keep_BMA[..., i].sum()) for i in range(SLOTS))
    weight_BMA *= usual / weight_BMA[keep_BMA].sum()
    assert step.tokens == int(keep_BMA[..., 0].sum()) > 10
    wanted = float((weight_BMA * loss_BMA).sum()) / step.tokens
    assert step.loss.item() == pytest.approx(wanted, rel=1e-3)
    fixed = sum(0.7**i * float(loss_BMA[..., i].sum()) for i in range(SLOTS)) / step.tokens
    assert abs(fixed - wanted) > 0.005 * wanted, "planted: weights of the decay"


@pytest.mark.parametrize("kind", KINDS)
def test_every_guess_of_a_block_is_learned(target, batches, kind):
    objective = built(target, most_used(batches, 40, target), kind=kind, dpace=0.5, decay=0.1)
    aligned, keep_BMA = objective.drawn(batches[0])
    labels = [objective._labels(aligned, i) for i in range(SLOTS)]
    known = [aligned.teaches(EAGLE + i) & (one >= 0) for i, one in enumerate(labels)]
    assert torch.equal(keep_BMA, torch.stack(known, -1))
    objective.loss(batches[0]).loss.backward()
    for name, one in objective.module.named_parameters():
        assert one.grad is not None and bool(one.grad.abs().sum() > 0), name


def test_the_confidence_head_weighs_alike(target, batches, monkeypatch):
    """A head that says one half everywhere is moved by its mistake, weighed."""
    monkeypatch.setattr(confidence, "SHARE", 1)
    objective = built(target, moved=False, kind="masks", confidence=1.0, dpace=0.5)
    batch = batches[0]
    aligned, keep_BMA = objective.drawn(batch)
    with torch.no_grad():
        y_RH = objective.outputs(batch, aligned, keep_BMA)
        q_RD = (y_RH @ objective._head_DH.T).softmax(-1)
        law_BMA = torch.stack([aligned.law(EAGLE + i) for i in range(SLOTS)], -1)
        p_RD = target.head(aligned.laws_of(batch.feature[LAST])[law_BMA[keep_BMA]]).softmax(-1)
        kept_R = torch.minimum(p_RD, q_RD).sum(-1)
        label_BMA = torch.stack([aligned.token(EAGLE + i) for i in range(SLOTS)], -1)
        said_R = q_RD[torch.arange(len(q_RD)), label_BMA[keep_BMA]]
        weight_R = objective.paced(aligned, keep_BMA, said_R)
    step = objective.loss(batch)
    step.loss.backward()
    bias = objective.module.confidence_head["proj"].bias
    torch.testing.assert_close(bias.grad[0], (weight_R * (0.5 - kept_R)).sum() / step.tokens)


class Stopped(Exception):
    pass


class Short(Listed):
    def since(self, epoch=0, index=0):
        for count, one in enumerate(super().since(epoch, index)):
            if count == 5:
                raise Stopped
            yield one


@pytest.mark.parametrize("kind", ["masks", "dspark", "jetspec"])
def test_it_goes_on_to_the_same_bits(target, batches, tmp_path, kind):
    vocab = most_used(batches, 40, target)
    config = LoopConfig(steps=8, evaluate_every=2, checkpoint_every=3, lr=1e-2, bf16=False)

    def run(name, source, **more):
        objective = built(target, vocab, moved=False, kind=kind, dpace=more.pop("dpace", 0.5))
        places = {"out": tmp_path / name, "work": tmp_path / f"{name}-work"}
        train(objective, source, batches[:1], config, **places, **more)
        return {key: one.clone() for key, one in objective.module.state_dict().items()}

    whole = run("whole", Listed(batches))
    with pytest.raises(Stopped):
        run("parts", Short(batches))
    parts = run("parts", Listed(batches), resume=True)
    assert all(torch.equal(one, whole[name]) for name, one in parts.items())
    usual = run("usual", Listed(batches), dpace=None)
    assert not all(torch.equal(one, whole[name]) for name, one in usual.items())


def test_a_smoothing_that_cannot_be_is_refused():
    for wrong in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"dpace must be in \(0, 1\]"):
            DflashTraining(dpace=wrong)
