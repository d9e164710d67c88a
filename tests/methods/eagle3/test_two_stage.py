"""Features chosen by a weak probe, then frozen."""

import pytest
import torch

from outpace import registry
from outpace.errors import ModelError
from outpace.methods.eagle3.objective import Eagle3, Eagle3Config
from outpace.methods.eagle3.probe import Rows, probe, read, read_rows, solved, unit, write
from outpace.models.tiny import tiny
from outpace.train.align import EAGLE, Aligned
from outpace.train.tokens import TokenSequence
from outpace.types import Budget, Drawn
from tests.conformance.test_drafters import proposal_rows
from tests.conformance.test_growth import told
from tests.conformance.test_trained import exact
from tests.train.texts import written


@pytest.fixture(scope="module")
def target():
    return tiny(layers=3)


def texts(target, seed, count=6):
    ids = written(target, count, seed=seed, new=40).token_BT.numpy().astype("int32")
    return [TokenSequence(number=i, prompt=6, temperature=0.0, ids=one) for i, one in enumerate(ids)]


@pytest.fixture(scope="module")
def found(target):
    return probe(target, read_rows(target, texts(target, 1), 200), read_rows(target, texts(target, 2), 80), 2)


def test_the_map_has_the_least_squares():
    coins = torch.Generator().manual_seed(0)
    x_RF = torch.randn(500, 7, generator=coins)
    map_FH = torch.randn(7, 3, generator=coins)
    # A penalty of 1 % of the rows shrinks the map by that.
    torch.testing.assert_close(solved(x_RF, x_RF @ map_FH), map_FH, atol=0.05, rtol=0.02)


def test_a_layer_that_tells_the_token_is_chosen_first(target):
    """Planted: one stream holds what is asked, the others are noise."""
    coins = torch.Generator().manual_seed(0)
    hidden = target.hidden_size

    def rows(count):
        wanted = torch.randn(count, hidden, generator=coins)
        states = torch.randn(4, count, hidden, generator=coins)
        states[2] = unit(wanted) + 0.05 * states[2]
        return Rows(states.bfloat16(), torch.randn(count, hidden, generator=coins), wanted)

    found = probe(target, rows(600), rows(150), 1)
    assert found.layers == (2,)
    assert found.alone_L[2] > 0.5 > 2 * max(found.alone_L[i] for i in (0, 1, 3))


def test_what_is_guessed_is_two_tokens_ahead(target):
    (one,) = texts(target, 3, 1)
    rows = read_rows(target, [one], 1000)
    assert len(rows.embed_RH) == len(one.ids) - one.prompt + 1
    torch.testing.assert_close(rows.embed_RH[0], target.embed([int(one.ids[one.prompt - 1])])[0])
    with pytest.raises(ModelError, match="no answers to probe"):
        read_rows(target, [], 10)


def test_the_chosen_mix_stays_and_the_rest_learns(target, found, tmp_path):
    file = tmp_path / "probe.safetensors"
    write(found, file, target)
    assert read(file, target)[0] == found.layers and len(found.alone_L) == 4
    config = Eagle3Config(two_stage=str(file))
    assert Eagle3.taps(config, target)[:-1] == tuple(f"hidden.{layer}" for layer in found.layers)
    objective = Eagle3.build(config, target, None)
    batch = written(target, 3, seed=4, taps=Eagle3.taps(config, target))
    objective.loss(batch).loss.backward()
    frozen = {name for name, one in objective.module.named_parameters() if one.grad is None}
    assert frozen == {"fc.weight", *(f"fc_norm.{i}.weight" for i in range(len(found.layers)))}
    assert torch.equal(objective.module.fc.weight, found.fc_HF)


@torch.no_grad()
def test_the_drafter_fuses_as_its_objective_does(target, found, tmp_path):
    write(found, tmp_path / "probe.safetensors", target)
    objective = Eagle3.build(Eagle3Config(two_stage=str(tmp_path / "probe.safetensors")), target, None)
    for parameter in objective.module.state_dict().values():
        parameter.copy_(parameter.to(torch.bfloat16))
    objective.save(tmp_path / "made", {})
    made = registry.load("drafter", "eagle3")
    drafter = made.load(made.Config(model=str(tmp_path / "made"), quantize=None), target)
    batch = exact(written(target, 2, seed=5), target, Eagle3.taps(objective.config, target))
    aligned, checked = Aligned(batch, EAGLE), 0
    (states,) = objective.unroll(batch, aligned, 1)
    for b, text in enumerate(batch.token_BT.tolist()):
        for a in range(0, int(aligned.real_BA[b].sum()), 4):
            end = int(aligned.place_BA[b, a]) + 2
            (row,) = proposal_rows(target, drafter, Drawn.CHOSEN, Budget(1, 1), 0.0, [text[:end]])
            _, said = told(drafter, [row])
            wanted = states[b, a] @ objective.module.lm_head.weight.T
            torch.testing.assert_close(said[0, ()], wanted, atol=2e-3, rtol=2e-3)
            checked += 1
    assert checked > 6


def test_wrong_files_are_said_in_one_line(target, found, tmp_path):
    file = tmp_path / "probe.safetensors"
    with pytest.raises(ModelError, match=r"there is no .*probe.safetensors"):
        read(file, target)
    file.write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="is no probe") as caught:
        read(file, target)
    assert "\n" not in str(caught.value)
    write(found, file, target)
    with pytest.raises(ModelError, match="was not made for"):
        read(file, tiny(layers=2))
    with pytest.raises(ValueError, match="leave taps out"):
        Eagle3Config(two_stage="a", taps="1,2")
