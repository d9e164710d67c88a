"""Features of passes: cut by sequence without tensors, joined without a copy of each part."""

import pytest
import torch

from outpace.models.room import Strip
from outpace.models.taps import SideBySide, cut, joined
from outpace.types import Scored

NAMES = ("hidden.2", "hidden.5")


def taken(rows, start, names=NAMES):
    """Features of a pass, as compiled code and as torch leave them."""
    wide = torch.arange(start, start + rows * 6.0).view(rows, 6)
    plain = {name: wide[:, 3 * i : 3 * i + 3] for i, name in enumerate(names)}
    return SideBySide(names, Strip.of(wide)), plain


@pytest.mark.parametrize("rows", [None, slice(0, 2), [0, 3], [3, 1]])
def test_cut(rows):
    beside, plain = taken(4, 0.0)
    for name in NAMES:
        assert torch.equal(cut(beside, rows)[name], cut(plain, rows)[name])


@pytest.mark.parametrize("second", [NAMES, NAMES[::-1]])
def test_joined_in_any_order(second):
    (a, plain_a), (b, plain_b) = taken(4, 0.0), taken(3, 100.0, second)
    found = joined([(a, [0, 2]), (b, None), (a, slice(0, 1))], NAMES)
    assert isinstance(found, SideBySide) == (second == NAMES)
    for name in NAMES:
        wanted = torch.cat([plain_a[name][[0, 2]], plain_b[name], plain_a[name][:1]])
        assert torch.equal(found[name], wanted)


def test_part_of_a_batch_shares_memory():
    beside, plain = taken(5, 0.0)
    scored = Scored(torch.zeros(3, 2), (0, 1, 3), beside, tap_start_B=(0, 2, 5))
    part = scored.of(1)
    assert part.tap_start_B == (0, 3)
    for name in NAMES:
        assert torch.equal(part.taps[name], plain[name][2:5])
        assert part.taps[name].data_ptr() == beside[name][2:].data_ptr()
        assert torch.equal(cut(part.taps, [2])[name], plain[name][4:5])
        assert torch.equal(cut(part.taps, slice(0, 2))[name], plain[name][2:4])
    assert joined([(part.taps, None), (part.taps, [1])], NAMES)[NAMES[0]].tolist() == [
        *plain[NAMES[0]][2:5].tolist(),
        plain[NAMES[0]][3].tolist(),
    ]
