import pytest
import torch

from outpace.errors import SpecError
from outpace.tree.mask import ancestors
from outpace.tree.shapes import CHAIN, budget, depth, parse_shape
from outpace.types import Budget


def test_shapes_as_users_write_them():
    assert parse_shape("chain") == CHAIN
    assert parse_shape("2x1").parent_N == (-1, -1, 0, 1)
    assert parse_shape("1x1x1").parent_N == (-1, 0, 1)
    assert parse_shape("[-1, -1, 0]").parent_N == (-1, -1, 0)


@pytest.mark.parametrize("text", ["", "star", "0x2", "2x-1", "[0]", "[-1,1]", "[-2]", "99x99"])
def test_other_shapes_are_refused_in_one_line(text):
    with pytest.raises(SpecError) as error:
        parse_shape(text)
    assert "\n" not in str(error.value)


def test_budgets_of_specs():
    assert budget(None, None, 5) == Budget(5, 5)
    assert budget("chain", 3, 5) == Budget(3, 3)
    cut = budget("2x2", 3, 5)
    assert (cut.max_nodes, cut.max_depth) == (3, 2)
    assert depth(()) == 0
    with pytest.raises(SpecError, match="tree_size"):
        budget(None, -1, 5)


def test_ancestors_of_a_tree():
    seen = ancestors([-1, 0, 0, 1, 2])
    want = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    assert seen.equal(torch.tensor(want, dtype=torch.bool))
