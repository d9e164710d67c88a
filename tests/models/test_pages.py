"""Memory for weights: apart, aligned, and freed with the last tensor that lies in it."""

from __future__ import annotations

import gc
import itertools
import sys
import threading

import pytest
from torch import Tensor

from outpace.models.pages import Pages


def test_tensors_are_apart_and_start_at_a_line() -> None:
    own = Pages()
    sizes = [1, 63, 64, 65, 4096, 1 << 20, (1 << 26) + 5, 7, 0]
    taken = [own.take(size) for size in sizes]
    for number, tensor in enumerate(taken):
        tensor.fill_(number)
    for number, (size, tensor) in enumerate(zip(sizes, taken, strict=True)):
        assert len(tensor) == size
        assert size == 0 or tensor.data_ptr() % 64 == 0
        assert bool((tensor == number).all())


def test_threads_get_different_memory() -> None:
    own, taken = Pages(), list[Tensor]()
    threads = [
        threading.Thread(target=lambda: taken.extend(own.take(100) for _ in range(200))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts = sorted(tensor.data_ptr() for tensor in taken)
    assert len(starts) == 800 and min(b - a for a, b in itertools.pairwise(starts)) >= 100


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what Linux tells of memory")
def test_memory_is_given_back() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    own, before = Pages(), resident()
    taken = [own.take(1 << 20).fill_(1) for _ in range(100)]
    assert resident() - before > 90 << 20
    del taken
    gc.collect()
    assert resident() - before < 20 << 20
