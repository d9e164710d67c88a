"""The adapter in training against plain formulas, and its file."""

import json

import pytest
import torch
from safetensors.torch import load_file

from outpace.methods.early_exit.kangaroo_objective import KangarooObjective, KangarooTraining
from outpace.models.tiny import tiny
from outpace.train import losses
from outpace.train.align import DRAFT_MODEL, Aligned
from tests.support import off_start
from tests.train.texts import most_used, written

TAPS = ("hidden.2", "hidden.-1")


@pytest.fixture(scope="module")
def target():
    return tiny(layers=3)


@pytest.fixture(scope="module")
def batches(target):
    return [written(target, 4, seed=seed, new=14, taps=TAPS) for seed in range(2)]


def built(target, vocab=None, noise=0.05, **options):
    config = KangarooTraining(exit_layer=2, **options)
    return off_start(KangarooObjective.build(config, target, vocab), noise)


def rms(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x_TD, base):
    half, place_T1 = x_TD.shape[1] // 2, torch.arange(len(x_TD))[:, None]
    angle = place_T1 * base ** (-torch.arange(half) / half)
    low, high = x_TD.chunk(2, 1)
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], 1)


def plain_outputs(objective, x_TH):
    """y of the last row, from the formulas, one head at a time; nothing comes after it."""
    net, shape = objective.module, objective.shape
    attn, eps, width = net.self_attn, shape.norm_eps, shape.head_dim
    base, groups = shape.ropes[0].theta, shape.num_heads // shape.num_kv_heads
    u_TH, mixed = rms(x_TH, net.input_layernorm.weight, eps), []
    for head in range(shape.num_heads):
        own = slice(head * width, (head + 1) * width)
        theirs = slice(head // groups * width, (head // groups + 1) * width)
        query_TD = rotated(u_TH @ attn.q_proj.weight[own].T, base)
        key_TD = rotated(u_TH @ attn.k_proj.weight[theirs].T, base)
        share_T = (key_TD @ query_TD[-1] * width**-0.5).softmax(0)
        mixed.append(share_T @ (u_TH @ attn.v_proj.weight[theirs].T))
    return rms(x_TH[-1] + attn.o_proj.weight @ torch.cat(mixed), net.norm.weight, eps)


def test_all_rows_at_once_are_what_the_formulas_say_row_by_row(target, batches):
    objective, batch, apart = built(target), batches[0], 0.0
    aligned = Aligned(batch, DRAFT_MODEL)
    with torch.no_grad():
        y_BAH = objective.outputs(batch, aligned)
        for b in range(len(batch.token_BT)):
            for a in (0, 2, 5):
                row = int(aligned.place_BA[b, a])
                wanted = plain_outputs(objective, batch.feature["hidden.2"][b, : row + 1].float())
                torch.testing.assert_close(y_BAH[b, a], wanted, atol=2e-5, rtol=2e-5)
                apart = max(apart, float((y_BAH[b, a + 1] - wanted).abs().max()))
    assert apart > 0.1, "neighbouring rows differ, so that a shift would be seen"


def plain_loss(objective, batch, vocab, name, shift=0):
    """Row by row, from all logits: the state at a place against the law and token after it.

    ``shift`` plants the mistake of a label that is so much further on.
    """
    aligned, total, counted = Aligned(batch, DRAFT_MODEL), 0.0, 0
    y_BAH = objective.outputs(batch, aligned)
    for b, a in aligned.real_BA.nonzero().tolist():
        place = int(aligned.place_BA[b, a]) + shift
        if place + 1 >= int(batch.length_B[b]):
            continue
        label = int(vocab.feed_V[batch.token_BT[b, place + 1]])
        if label < 0:
            continue
        z = (y_BAH[b, a] @ objective.head().T)[None]
        p = objective.target.head(batch.feature["hidden.-1"][b, place][None])
        p = p[:, vocab.to_target_D].softmax(-1)
        hard = name == "ce"
        one = losses.cross_entropy(z, torch.tensor([label])) if hard else losses.ORACLES[name](z, p)
        total, counted = total + one.item(), counted + 1
    return total / counted, counted


@pytest.mark.parametrize("name", ["kl", "ce"])
def test_the_loss_is_that_of_plain_logits(target, batches, name):
    vocab = most_used(batches, 40, target)
    objective, batch = built(target, vocab, loss=name), batches[0]
    step = objective.loss(batch)
    with torch.no_grad():
        wanted, counted = plain_loss(objective, batch, vocab, name)
        shifted, _ = plain_loss(objective, batch, vocab, name, shift=1)
    assert step.tokens == counted > 20
    assert step.loss.item() == pytest.approx(wanted, rel=1e-4)
    assert abs(shifted / wanted - 1) > 1e-3, "planted: labels one token further on"
    step.loss.backward()
    for parameter_name, parameter in objective.module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, parameter_name


def test_acceptance_is_counted_along_chains(target, batches):
    vocab = most_used(batches, 60, target)
    objective, batch = built(target, vocab), batches[1]
    with torch.no_grad():
        step, aligned = objective.evaluate(batch), Aligned(batch, DRAFT_MODEL)
        logits = objective.outputs(batch, aligned) @ objective.head().T
        truth_BT = target.head(batch.feature["hidden.-1"].flatten(0, 1)).argmax(-1)
    guess_BA, truth_BT = vocab.to_target_D[logits.argmax(-1)], truth_BT.view_as(batch.token_BT)
    row_of = {(b, int(aligned.place_BA[b, a])): a for b, a in aligned.real_BA.nonzero().tolist()}
    accepted, counted = [0] * 5, [0] * 5
    for b, place in row_of:
        for i in range(5):
            if (b, place + i) not in row_of:
                break
            counted[i] += 1
            truth = int(truth_BT[b, place + i])
            if int(guess_BA[b, row_of[b, place + i]]) != truth:
                break
            accepted[i] += 1
            if int(batch.token_BT[b, place + i + 1]) != truth:
                break
    assert step.accepted_by_depth.tolist() == accepted and accepted[0] > accepted[1] > 0
    assert step.counted_by_depth.tolist() == counted
    assert 0 < step.overlap_by_depth[0] / step.counted_by_depth[0] < 1


def test_what_is_saved(target, batches, tmp_path):
    vocab = most_used(batches, 40, target)
    objective = KangarooObjective.build(KangarooTraining(exit_layer=2), target, vocab)
    assert KangarooObjective.taps(KangarooTraining(exit_layer=2), target) == TAPS
    objective.save(tmp_path / "adapter", {"command": "test"})
    tensors = load_file(tmp_path / "adapter" / "model.safetensors")
    assert {name: list(one.shape) for name, one in tensors.items()} == {
        "input_layernorm.weight": [64],
        "norm.weight": [64],
        "self_attn.q_proj.weight": [64, 64],
        "self_attn.k_proj.weight": [32, 64],
        "self_attn.v_proj.weight": [32, 64],
        "self_attn.o_proj.weight": [64, 64],
        "d2t": [40],
        "t2d": [target.vocab_size],
    }, "an adapter, and no head"
    theirs = target.checkpoint.tensor("model.layers.2.self_attn.q_proj.weight", torch.bfloat16)
    assert torch.equal(tensors["self_attn.q_proj.weight"], theirs), "starts as the layer after"
    config = json.loads((tmp_path / "adapter" / "config.json").read_text())
    assert (config["method"], config["layer"], config["taps"]) == ("kangaroo", 2, ["hidden.2"])
    assert config["target_digest"] == target.digest
