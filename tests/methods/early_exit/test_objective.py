"""The layer behind an exit in training: its arithmetic and its file."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from outpace.methods.early_exit.kangaroo_objective import DOUBT
from outpace.methods.early_exit.objective import EarlyExitObjective, EarlyExitTraining
from outpace.models.tiny import tiny
from outpace.train.align import DRAFT_MODEL, Aligned
from outpace.train.starts import begin_from
from tests.support import off_start
from tests.train.texts import most_used, written

TAPS = ("hidden.2", "hidden.-1")


@pytest.fixture(scope="module")
def target():
    return tiny(layers=3)


@pytest.fixture(scope="module")
def batch(target):
    return written(target, 4, seed=0, new=14, taps=TAPS)


def built(target, vocab=None, noise=0.05, **options):
    config = EarlyExitTraining(exit_layer=2, **options)
    return off_start(EarlyExitObjective.build(config, target, vocab), noise)


def test_it_starts_as_the_layer_of_the_target_that_reads_the_same(target, batch):
    """Behind two layers of three the third makes the target's own last state."""
    objective = built(target, noise=0.0)
    with torch.no_grad():
        aligned = Aligned(batch, DRAFT_MODEL)
        y_BAH = objective.outputs(batch, aligned)
        whole_BAH = aligned.rows(batch.feature["hidden.-1"].float())
    real = aligned.real_BA
    assert real.sum() > 20
    torch.testing.assert_close(y_BAH[real] / DOUBT, whole_BAH[real], atol=0.02, rtol=0.02)


def test_the_mlp_stands_between_attention_and_norm(target):
    objective = built(target)
    net, eps = objective.module, objective.shape.norm_eps
    z_RH = torch.randn(5, target.hidden_size)
    mlp, behind = net.norm.mlp, net.norm

    def rms(x_RH, weight_H):
        return x_RH * (x_RH.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_H

    with torch.no_grad():
        u_RH = rms(z_RH, behind.post_attention_layernorm.weight)
        inner = F.silu(u_RH @ mlp.gate_proj.weight.T) * (u_RH @ mlp.up_proj.weight.T)
        wanted = rms(z_RH + inner @ mlp.down_proj.weight.T, behind.weight)
        torch.testing.assert_close(behind(z_RH), wanted, atol=1e-5, rtol=1e-5)
        assert (wanted - rms(z_RH, behind.weight)).abs().max() > 0.05, "the MLP is seen"


def test_every_weight_learns_and_is_saved_by_its_name(target, batch, tmp_path):
    vocab = most_used([batch], 40, target)
    objective = built(target, vocab)
    objective.loss(batch).loss.backward()
    for name, parameter in objective.module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    EarlyExitObjective.build(EarlyExitTraining(exit_layer=2), target, vocab).save(
        tmp_path / "exit", {"command": "test"}
    )
    tensors = load_file(tmp_path / "exit" / "model.safetensors")
    assert set(tensors) == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "norm.weight",
        *(f"self_attn.{one}_proj.weight" for one in "qkvo"),
        *(f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")),
        "d2t",
        "t2d",
    }, "a layer, and no head"
    for name in ("mlp.gate_proj.weight", "self_attn.o_proj.weight"):
        theirs = target.checkpoint.tensor(f"model.layers.2.{name}", torch.bfloat16)
        assert torch.equal(tensors[name], theirs)
    config = json.loads((tmp_path / "exit" / "config.json").read_text())
    assert (config["method"], config["layer"], config["taps"]) == ("early_exit", 2, ["hidden.2"])
    begin_from(objective, tmp_path / "exit")
    assert len(objective.named()) == len(tensors) - 2
    for name, tensor in objective.named().items():
        assert torch.equal(tensor, tensors[name].float()), "a training goes on from what is saved"


def test_the_layer_learns_from_the_last_states_too_if_asked(target, batch):
    """The distance is what is said, over the rows that count, and its gradient ends in the layer."""
    plain, asked = built(target), built(target, states=0.5)
    aligned = Aligned(batch, DRAFT_MODEL)
    with torch.no_grad():
        y_BAH = asked.outputs(batch, aligned)
    last_BAH, teaches_BA = aligned.rows(batch.feature["hidden.-1"].float()), aligned.teaches(DRAFT_MODEL)
    apart = (y_BAH - last_BAH)[teaches_BA].square().mean()
    before, after = plain.loss(batch), asked.loss(batch)
    assert apart > 0 and before.tokens == after.tokens
    torch.testing.assert_close(after.loss - before.loss, 0.5 * apart)
    (after.loss - before.loss.detach()).backward()
    before.loss.backward()
    more = [
        a.grad - b.grad for a, b in zip(asked.module.parameters(), plain.module.parameters(), strict=True)
    ]
    assert all(bool(one.any()) for one in more), "every weight of the layer feels it"
    wanted = torch.autograd.grad(
        0.5 * (asked.outputs(batch, aligned) - last_BAH)[teaches_BA].square().mean(),
        list(asked.module.parameters()),
    )
    for one, other in zip(more, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)
    with pytest.raises(ValueError, match="states must be 0 or more, got -1"):
        EarlyExitTraining(states=-1.0)
