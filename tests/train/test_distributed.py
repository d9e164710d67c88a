"""Every process of several computes on a GPU of its own. No GPU is needed to see which."""

import pytest
import torch

from outpace import RequestError
from outpace.train.distributed import check_device, take_device


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, and the second of two processes on this machine (the fourth in all)."""
    taken = [0]
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: taken[-1])
    return taken


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_cuda_is_the_one_of_the_local_rank(gpus, device):
    with pytest.raises(RequestError, match=r"process 3 computes on cuda:0, .* is cuda:1; give"):
        check_device(torch.device("cuda"))
    take_device(device)
    assert gpus == [0, 1]
    check_device(torch.device("cuda"))
    with pytest.raises(RequestError, match="without a number"):
        check_device(torch.device("cuda:0"))


def test_too_few_gpus_are_said(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RequestError, match=r"process 1 .* there are 1; .*--nproc-per-node 1"):
        take_device("cuda")


def test_one_process_and_the_cpu_are_left_alone(gpus, monkeypatch):
    for device in (None, "cpu", "cuda:1"):
        take_device(device)
    check_device(torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    take_device("cuda")
    check_device(torch.device("cuda:1"))
    assert gpus == [0]
