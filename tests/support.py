"""What tests of several folders share."""

import time

import torch

from outpace.cache.base import PAGE


def until(true, seconds=20.0):
    """Wait for something that happens on another thread or in another process, and not for ever."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"it did not happen within {seconds:g} seconds"
        time.sleep(0.002)


def put_keys(cache, layers, slot, rows, keys):
    """Write a number, or keys [layers, heads, width, rows], to rows of a slot, in tiles or not."""
    own = cache.key_store[layers, slot]
    if own.dim() == 4:  # not in tiles
        own[..., rows] = keys
        return
    for i, row in enumerate(torch.as_tensor(rows).tolist()):
        own[:, :, row // PAGE, :, row % PAGE] = keys if isinstance(keys, float) else keys[..., i]


def off_start(objective, noise):
    """A training away from its start, where parts of it are equal or the target's."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return objective
