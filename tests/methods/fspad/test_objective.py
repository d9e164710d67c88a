"""FSPAD: its parts begin as plain EAGLE, and each learns what it is for."""

import pytest
import torch

from outpace.methods.fspad.objective import Fspad, FspadTraining
from outpace.models.tiny import tiny
from outpace.train.align import EAGLE, Aligned
from outpace.train.capture import compute
from outpace.train.networks import Layer, Turns, plain_shape, take_layer
from tests.train.texts import written

SWITCHES = [(sampling, partial) for sampling in (0.0, 2.0) for partial in (False, True)]


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def batch(target):
    return written(target, 4, seed=1)


def built(target, **options):
    return Fspad.build(FspadTraining(**options), target, None)


def test_with_either_part_training_begins_as_plain_eagle_bit_for_bit(target, batch):
    plain = built(target, sampling=0.0, partial=False).states(batch, Aligned(batch, EAGLE))
    for sampling, partial in SWITCHES:
        states = built(target, sampling=sampling, partial=partial).states(batch, Aligned(batch, EAGLE))
        assert all(torch.equal(one, other) for one, other in zip(states, plain, strict=True))


def test_keys_of_features_are_those_that_the_targets_last_layer_has_of_its_stream(target, batch):
    last = target.num_layers - 1
    ids = [batch.token_BT[0].tolist()]
    (found,) = compute(target, ids, [f"hidden.{last + 1}", "hidden.-1"])
    theirs = Layer(plain_shape(target.config, 1, -1))
    take_layer(theirs, target, last)
    ours = built(target).module.layer
    stream, feature = found[f"hidden.{last + 1}"].float()[None], found["hidden.-1"].float()[None]
    turn = Turns(target.config.ropes[0], target.device).at(torch.arange(stream.shape[1])[None], 64)
    with torch.no_grad():
        wanted = theirs.self_attn.keys(theirs.input_layernorm(stream), turn)
        given = ours.self_attn.keys(feature, turn)
    for one, other in zip(given, wanted, strict=True):
        assert (one - other).abs().max() < 0.05 * other.abs().max()  # features are bfloat16


@pytest.mark.parametrize(("sampling", "partial"), SWITCHES)
def test_every_part_learns(target, batch, sampling, partial):
    objective = built(target, sampling=sampling, partial=partial)
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    objective.loss(batch).loss.backward()
    names = {name for name, one in objective.module.named_parameters() if one.grad is not None}
    assert names == set(dict(objective.module.named_parameters()))
    assert ("gate.weight" in names) == bool(sampling) and ("read.weight" in names) == partial


def test_the_read_out_is_not_held_to_the_features(target, batch):
    """The features' loss alone leaves no gradient in the read-out, and does in the layer."""
    whole, without = (built(target, regression=weight) for weight in (10.0, 0.0))
    grads = []
    for objective in (whole, without):
        objective.loss(batch).loss.backward()
        grads.append({name: one.grad for name, one in objective.module.named_parameters()})
    assert torch.allclose(grads[0]["read.weight"], grads[1]["read.weight"], atol=1e-6)
    assert not torch.allclose(grads[0]["fc.weight"], grads[1]["fc.weight"], atol=1e-4)


def test_bad_options_are_said():
    for wrong in ({"steps": 0}, {"sampling": -1.0}, {"regression": -1.0}):
        with pytest.raises(ValueError, match="must be at least"):
            FspadTraining(**wrong)
