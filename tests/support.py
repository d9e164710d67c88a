"""What tests of several folders share."""

import time

import torch


def until(true, seconds=20.0):
    """Wait for something that happens on another thread or in another process, and not for ever."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"it did not happen within {seconds:g} seconds"
        time.sleep(0.002)


def off_start(objective, noise):
    """A training away from its start, where parts of it are equal or the target's."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return objective
