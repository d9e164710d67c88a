"""Checkpoints come back bit for bit, and damage is one clear line."""

import pytest
import torch
from safetensors.torch import save_file

from outpace.errors import ModelError
from outpace.train import checkpoint


def save(folder, step, value=0.0):
    tensors = {"a": torch.tensor([value, 0.1]), "b": torch.tensor([1.5], dtype=torch.bfloat16)}
    return checkpoint.save(folder, step, tensors, {"step": step, "best": 0.1 + 0.2})


def test_what_is_kept_comes_back(tmp_path):
    path = save(tmp_path / "deep" / "er", 3, float("nan"))
    tensors, state = checkpoint.load(path)
    assert state == {"step": 3, "best": 0.1 + 0.2}
    assert tensors["a"].isnan().tolist() == [True, False]
    assert tensors["b"].dtype is torch.bfloat16 and float(tensors["b"]) == 1.5


def test_the_newest_two_stay(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    for step in (5, 20, 100):
        save(tmp_path, step)
    assert [path.name for path in checkpoint.paths(tmp_path)] == [
        "step-00000020.safetensors",
        "step-00000100.safetensors",
    ]
    assert checkpoint.latest(tmp_path).name == "step-00000100.safetensors"
    assert len(list(tmp_path.iterdir())) == 2, "no temporary files"


@pytest.mark.parametrize("harm", ["cut", "flip", "empty"])
def test_damage_is_found_and_an_older_one_named(tmp_path, harm):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[-1] ^= 1
    path.write_bytes({"cut": data[:-1], "flip": data, "empty": b""}[harm])
    with pytest.raises(ModelError, match=r"00000002.*corrupt.*go on from .*00000001"):
        checkpoint.load(path)
    checkpoint.paths(tmp_path)[0].unlink()
    with pytest.raises(ModelError, match="delete it to begin anew"):
        checkpoint.load(path)


def test_what_a_killed_process_was_writing_is_removed(tmp_path):
    (tmp_path / ".step-00000001.safetensors.99-abcd.part").write_bytes(b"half")
    (tmp_path / "best").mkdir()
    save(tmp_path, 2)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["best", "step-00000002.safetensors"]


def test_counters_that_were_changed_are_noticed(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"a": torch.ones(2)}, {"step": 1234})
    path.write_bytes(path.read_bytes().replace(b"1234", b"1235"))
    with pytest.raises(ModelError, match="its digest does not fit"):
        checkpoint.load(path)


def test_a_checkpoint_of_before_counters_were_in_the_digest_is_read(tmp_path):
    old = {"state": '{"step": 5}', "sha256": checkpoint._digest({"a": torch.ones(2)}, "")}
    save_file({"a": torch.ones(2)}, tmp_path / "step-00000005.safetensors", metadata=old)
    tensors, state = checkpoint.load(tmp_path / "step-00000005.safetensors")
    assert state == {"step": 5} and tensors["a"].tolist() == [1, 1]


def test_what_a_stopped_training_leaves_is_one_line(tmp_path):
    best = tmp_path / "best"
    assert checkpoint.kept(tmp_path, best) == (
        f"stopped: no drafter was made, there is no checkpoint; the same command goes on with what "
        f"{tmp_path.parent} holds"
    )
    assert checkpoint.kept(tmp_path, None) == (
        "stopped: there is no checkpoint; the same command begins the training anew"
    )
    best.mkdir()
    save(tmp_path, 200)
    assert checkpoint.kept(tmp_path, best) == (
        f"stopped: the best drafter so far is in {best}, the last checkpoint is "
        "step-00000200.safetensors; --resume goes on"
    )


def trained(seed):
    torch.manual_seed(seed)
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    for _ in range(3):
        module(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


def test_weights_and_moments_go_back(tmp_path):
    module, optimizer = trained(0)
    other, fresh = trained(1)
    path = checkpoint.save(tmp_path, 3, checkpoint.training_tensors(module, optimizer), {})
    checkpoint.restore(other, fresh, checkpoint.load(path)[0], path)
    for one, twin in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, twin)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[one][key], fresh.state[twin][key]), key
    wrong = torch.nn.Linear(4, 2)
    with pytest.raises(ModelError, match=r"weight has shape \[2, 4\].*shape \[2, 3\]"):
        checkpoint.restore(wrong, torch.optim.AdamW(wrong.parameters()), checkpoint.load(path)[0], path)
