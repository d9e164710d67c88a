import pytest
import torch

from outpace.errors import SpecError
from outpace.tree.mask import ancestors
from outpace.tree.shapes import CHAIN, budget, depth, parse_shape
from outpace.types import Budget, Shape


def test_shapes_as_users_write_them():
    assert parse_shape("chain") == CHAIN
    assert parse_shape("2x1").parent_N == (-1, -1, 0, 1)
    assert parse_shape("1x1x1").parent_N == (-1, 0, 1)
    assert parse_shape("[-1, -1, 0]").parent_N == (-1, -1, 0)
    assert parse_shape("dynamic") == Shape(beam=8, least=0.5)
    assert parse_shape("dynamic:3") == Shape(beam=3, least=0.5)
    assert parse_shape("dynamic:3:0") == Shape(beam=3, least=0.0)
    assert parse_shape("dynamic:12:1.25") == Shape(beam=12, least=1.25)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "star",
        "0x2",
        "2x-1",
        "[0]",
        "[-1,1]",
        "[-2]",
        "99x99",
        "dynamic:",
        "dynamic:0",
        "dynamic:-1",
        "dynamic:2:",
        "dynamic:2:-1",
        "dynamic::0",
        "dynamic 3",
    ],
)
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
