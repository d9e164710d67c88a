"""The best template against all templates, and the size that pays on a machine."""

import itertools
import json

import pytest

from outpace.analysis.best_tree import best_size, expected, optimal
from outpace.errors import SpecError
from outpace.tree.shapes import CHAIN, budget, children, depth, parse_shape, widths
from outpace.types import ROOT, CostCurve, Shape

FALLING = (0.6, 0.15, 0.1)
ODD = (0.2, 0.5, 0.05)
"""A second sibling that is better than the first, which has to be there all the same."""
LAWS = [FALLING, ODD, (0.9,), (0.3, 0.3, 0.3), (0.05, 0.0, 0.9), (0.0, 0.0)]


def trees(nodes):
    """Every table of parents of up to so many nodes; a shape may come more than once."""
    for count in range(nodes + 1):
        yield from itertools.product(*(range(ROOT, node) for node in range(count)))


def best_of_all(acceptance, nodes, levels):
    """The oracle: look at every template that is allowed."""
    return max(
        expected(Shape(parents), acceptance)
        for parents in trees(nodes)
        if depth(parents) <= levels
        and all(len(kids) <= len(acceptance) for kids in children(parents).values())
    )


def test_expected_counts_every_path():
    assert expected(Shape((-1, -1, 0)), (0.6, 0.2)) == pytest.approx(1 + 0.6 + 0.2 + 0.36)
    assert expected(Shape((-1, 0, 0)), (0.6, 0.2)) == pytest.approx(1 + 0.6 + 0.36 + 0.12)
    assert expected(Shape((-1, -1)), (0.6,)) == pytest.approx(1.6), "no entry, never accepted"
    assert expected(Shape(()), (0.6,)) == 1.0
    with pytest.raises(ValueError, match="only a template"):
        expected(CHAIN, (0.6,))


@pytest.mark.parametrize("acceptance", LAWS, ids=str)
def test_it_is_the_best_of_all_templates(acceptance):
    for nodes, levels in itertools.product(range(7), range(4)):
        shape = optimal(acceptance, nodes, levels)
        assert len(shape.parent_N) <= nodes and depth(shape.parent_N) <= levels
        got = expected(shape, acceptance)
        assert got == pytest.approx(best_of_all(acceptance, nodes, levels), abs=1e-12)


def test_the_oracle_tells_good_from_bad():
    """What a user would guess, and what a program gets that forgets that siblings have an order."""
    by_level = widths([2, 1, 1]).parent_N
    assert expected(Shape(by_level), FALLING) < best_of_all(FALLING, 6, 3) - 0.04
    forgetful = optimal(tuple(sorted(ODD, reverse=True)), 6, 3)
    assert expected(forgetful, ODD) < best_of_all(ODD, 6, 3) - 0.05


def test_nodes_that_add_nothing_are_left_out():
    assert optimal((0.5, 0.0), 6, 3).parent_N == (-1, 0, 1)
    assert optimal((0.0, 0.0), 6, 3).parent_N == ()
    assert optimal((0.0, 0.5), 2, 1).parent_N == (-1, -1), "the first is needed for the second"


def test_a_prefix_is_the_best_smaller_template():
    whole = optimal(FALLING, 40, 6).parent_N
    assert len(whole) == 40
    for size in (1, 5, 17, 33):
        smaller = optimal(FALLING, size, 6)
        assert expected(Shape(whole[:size]), FALLING) == pytest.approx(expected(smaller, FALLING))


@pytest.mark.parametrize(
    ("acceptance", "nodes", "levels"),
    [((), 3, 3), ((0.7, 0.4), 3, 3), ((-0.1,), 3, 3), ((0.5,), -1, 3), ((0.5,), 3, -1), ((0.5,), 1025, 3)],
)
def test_wrong_sizes_and_laws_are_refused(acceptance, nodes, levels):
    with pytest.raises(ValueError, match=r"need 0 to|must be probabilities"):
        optimal(acceptance, nodes, levels)


def curve(per_row, base=10.0):
    rows = (1, 64)
    return CostCurve(
        model="m",
        dtype="float32",
        threads=1,
        device="cpu",
        rows_R=rows,
        context_C=(100,),
        seconds_CR=(tuple(base + per_row * (count - 1) for count in rows),),
    )


@pytest.mark.parametrize("per_row", [0.0, 0.3, 2.0, 50.0])
@pytest.mark.parametrize("per_level", [0.0, 1.0, 30.0])
def test_the_size_is_the_one_that_pays_best(per_row, per_level):
    cost = curve(per_row)
    shape, rate = best_size(FALLING, cost, per_level, 100, 6, 3)
    found = {
        parents: expected(Shape(parents), FALLING)
        / (cost.seconds(1 + len(parents), 100) + per_level * depth(parents))
        for parents in trees(6)
        if depth(parents) <= 3 and all(len(kids) <= len(FALLING) for kids in children(parents).values())
    }
    assert rate == pytest.approx(max(found.values()))
    assert rate == pytest.approx(found[shape.parent_N])
    if per_row == 50.0:
        assert shape.parent_N == (), "no guess pays"
    if per_row == per_level == 0.0:
        assert len(shape.parent_N) == 6, "guesses cost nothing"


def test_a_file_is_a_tree_that_users_can_name(tmp_path):
    file = tmp_path / "tree.json"
    whole = optimal(FALLING, 12, 4).parent_N
    file.write_text(json.dumps({"parents": whole, "drafter": "d"}))
    assert parse_shape(str(file)).parent_N == whole
    assert budget(str(file), None, 5).max_nodes == 12
    cut = budget(str(file), 5, 1)
    assert cut.shape == optimal(FALLING, 5, 4), "the first nodes, not the first levels"
    assert (cut.max_nodes, cut.max_depth) == (5, depth(whole[:5]))
    file.write_text("[-1, 0]")
    assert parse_shape(f" {file} ").parent_N == (-1, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read tree file"),
        ("{", "is not JSON"),
        (b"\xff", "is not JSON"),
        ("{}", "holds no list of whole numbers"),
        ('{"parents": "x"}', "holds no list of whole numbers"),
        ("[-1, true]", "holds no list of whole numbers"),
        ("[-1, 0.5]", "holds no list of whole numbers"),
        ("[0]", "node 0 has parent 0"),
        (json.dumps([-1] * 1025), "1025 nodes, more than 1024"),
    ],
)
def test_files_without_a_table_are_refused_in_one_line(tmp_path, text, says):
    file = tmp_path / "tree.json"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SpecError, match=says) as error:
        parse_shape(str(file))
    assert str(file) in str(error.value) and "\n" not in str(error.value)
