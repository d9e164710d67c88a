"""Adapters in one call of compiled code give what torch gives, rounded or not."""

from dataclasses import replace

import pytest
import torch

from outpace.methods.early_exit.adapter import Adapter, adapter_shapes
from outpace.models.passes import PassRows
from outpace.models.products import works
from outpace.models.tiny import tiny
from outpace.types import Feed

pytestmark = pytest.mark.skipif(not works(), reason="C cannot be compiled for this machine")


@pytest.fixture(scope="module")
def target():
    return tiny()


def tensors_of(config, mlp):
    coins = torch.Generator().manual_seed(1)
    out = {}
    for name, size in adapter_shapes(config, mlp).items():
        out[name] = torch.randn(size, generator=coins) * (size[-1] ** -0.5 if len(size) == 2 else 0.3)
        out[name] += len(size) == 1
    return out


def outputs(adapter, feeds):
    """What it says to two sequences in turn, and the rows that are wanted of a tree."""
    cache = adapter.new_cache()
    hidden = torch.randn(40, adapter.config.hidden_size, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        cache.open()
    out, start = [], 0
    for feed in feeds:
        stop = start + len(feed.token_J)
        rows = PassRows([feed], cache, 1)
        out.append(adapter.run(rows, cache, [3 * feed.slot], hidden[start:stop]).float())
        if start < 10:  # the rest is the tail
            cache.keep(feed.slot, range(len(feed.token_J)))
        start = stop
    return out


FEEDS = [
    Feed.chain(0, [1, 2, 3, 4], want=()),
    Feed.chain(1, [5, 6, 7], want=(2,)),
    Feed.chain(0, [1] * 5, want=(0, 4)),
    Feed(0, (1, 2, 3, 4), (-1, 0, 0, 2)),
    Feed(0, (1, 2), (1, 3)),
]


@pytest.mark.parametrize("mlp", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_compiled_adapters_agree_with_torch(target, mlp, qk_norm):
    config = replace(target.config, num_layers=1, windows=(None,), rope_of_layer=(0,), qk_norm=qk_norm)
    tensors = tensors_of(config, mlp)
    compiled, plain = (Adapter(config, tensors, target, packed) for packed in (True, False))
    assert compiled._plan.ready and not plain._plan.ready
    mine, theirs = outputs(compiled, FEEDS), outputs(plain, FEEDS)
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    assert [len(one) for one in mine] == [0, 1, 2, 4, 2]
    rounded = outputs(Adapter(config, tensors, target, quantize="int8"), FEEDS)
    apart = max(float((x - y).abs().max()) for x, y in zip(rounded, mine, strict=True) if len(x))
    assert 0 < apart < 0.1
