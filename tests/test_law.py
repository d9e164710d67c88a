import pytest
import torch

from outpace.law import Law
from outpace.types import ROOT, Draft, Drawn, Group

DENSE = Law(torch.tensor([0.1, 0.2, 0.3, 0.4]))
SPARSE = Law(torch.tensor([0.25, 0.75]), torch.tensor([3, 1]))


def test_a_law_reads_the_same_however_it_is_stored():
    ids = torch.tensor([0, 1, 3, 9])
    assert DENSE.at(ids).tolist() == pytest.approx([0.1, 0.2, 0.4, 0.0])
    assert SPARSE.at(ids).tolist() == [0.0, 0.75, 0.25, 0.0]
    assert SPARSE.dense(5).tolist() == [0.0, 0.75, 0.0, 0.25, 0.0]
    assert (SPARSE.prob(1), SPARSE.prob(2), DENSE.prob(9)) == (0.75, 0.0, 0.0)
    assert SPARSE.top(5) == [1, 3] and DENSE.top(2) == [3, 2]
    many = torch.arange(2**14)
    assert SPARSE.at(many).nonzero().flatten().tolist() == [1, 3]


@pytest.mark.parametrize(
    ("tokens", "parents", "groups", "says"),
    [
        ((1, 2), (0, 0), (), "parents must come before children"),
        ((1, 1), (-1, -1), (), "siblings repeat a token"),
        ((1,), (-1,), (), "groups name 0 of them"),
        ((1,), (-1, 0), (), "1 tokens but 2 parents"),
        ((1,), (-1,), (Group(ROOT, Drawn.CHOSEN, (0,), 0),), "must not name its distribution"),
        ((1,), (-1,), (Group(ROOT, Drawn.IID, (0,)),), "must name its distribution"),
        ((1, 2), (-1, 0), (Group(ROOT, Drawn.CHOSEN, (0, 1)),), "another's child"),
    ],
)
def test_a_draft_that_cannot_be_verified_is_refused(tokens, parents, groups, says):
    laws = (DENSE,)
    with pytest.raises(ValueError) as error:
        Draft(tokens, parents, groups, laws)
    assert says in str(error.value)


def test_paths_and_depths():
    draft = Draft.chosen([5, 6, 7, 8], [-1, -1, 0, 2])
    assert draft.depth_N == (1, 1, 2, 3)
    assert draft.path_tokens(3) == (5, 7, 8) and draft.path(ROOT) == ()
    assert [group.nodes for group in draft.groups_of[ROOT]] == [(0, 1)]
