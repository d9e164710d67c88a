"""Contracts of drafters that expand nodes: what they keep per node belongs to that node.

The first needs no names: it runs every registered drafter that grows trees. The second runs those
that say several depths in one pass.
"""

import pytest
import torch

from outpace import Engine, registry
from outpace.config import MethodSpec
from outpace.drafters.base import ExpandingDrafter
from outpace.drafters.blocks import BlockDrafter
from outpace.tree.shapes import parse_shape
from outpace.types import ROOT, Budget, Drawn
from tests.conformance.specs import specs, write_files
from tests.conformance.test_drafters import PROMPTS, proposal_rows

TEXTS = [PROMPTS[0], PROMPTS[3]]
TREE = Budget(20, 4, shape=parse_shape("2x2x2x1"))


def kind(spec):
    return registry.load("drafter", MethodSpec.parse(spec).name)


def once(base):
    """One spec of every drafter of a kind."""
    found = {}
    for spec in specs():
        if isinstance(made := kind(spec), type) and issubclass(made, base) and "tree=" not in spec:
            found.setdefault(MethodSpec.parse(spec).name, spec)
    return list(found.values())


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", drafter="none", dtype="float32")


@pytest.fixture(scope="module", autouse=True)
def files(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_files(engine.target, folder, TEXTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


@pytest.fixture(scope="module")
def differ():
    """Spec -> how far apart logits of one depth were."""
    return {}


def told(drafter, rows, forced=None, mixed=False):
    """What a drafter says below every node of a draft: (sequence, path) -> logits.

    Args:
        forced: per sequence the one path to follow, whatever the drafter would choose.
        mixed: ask for the nodes of a level in reverse order.
    """
    said = {}

    def between(branches):
        logits_FD, id_D = drafter.expand(branches)
        start = 0
        for branch in branches:
            sequence = next(i for i, row in enumerate(rows) if row.tokens is branch.tokens)
            for i, node in enumerate(branch.nodes):
                path = branch.path_tokens(node)
                said[sequence, path] = logits_FD[start + i].clone()
                if forced is not None and len(path) < len(forced[sequence]):
                    token = forced[sequence][len(path)]
                    column = token if id_D is None else int((id_D == token).nonzero())
                    logits_FD = logits_FD.clone()
                    logits_FD[start + i, column] = 1e6
            start += len(branch.nodes)
        return logits_FD, id_D

    drafter.between = between
    try:
        drafts = drafter.propose(rows)
    finally:
        drafter.between = None
    return drafts, said


@pytest.mark.parametrize("spec", once(ExpandingDrafter))
@torch.no_grad()
def test_what_follows_a_node_depends_on_its_path_alone(engine, differ, spec):
    """State per node: siblings, other branches and other sequences leave no trace in it."""
    drafter = engine.method(spec).preferred.drafter
    if drafter.traits.uses_target_cache:
        pytest.skip("it drafts in the target's slots, which are dropped in between")
    rows = proposal_rows(engine.target, drafter, Drawn.CHOSEN, TREE, 0.0, TEXTS)
    drafts, tree = told(drafter, rows)
    if not any(len(draft) for draft in drafts):
        pytest.skip("it drafts nothing from these texts")
    deepest = [max(draft.depth_N, default=0) for draft in drafts]
    checked, apart = 0, 0.0
    for last in (True, False):  # the paths of the last leaf, and of the first
        paths = []
        for draft, depth in zip(drafts, deepest, strict=True):
            leaves = [node for node, one in enumerate(draft.depth_N) if one == depth]
            paths.append(draft.path_tokens(leaves[-1 if last else 0]) if leaves else ())
        chain = Budget(max(deepest), max(deepest))
        alone = proposal_rows(engine.target, drafter, Drawn.CHOSEN, chain, 0.0, TEXTS)
        for i, row in enumerate(alone):  # one sequence at a time
            _, said = told(drafter, [row], [paths[i]])
            for (_, path), logits_D in said.items():
                if (i, path) in tree:
                    torch.testing.assert_close(logits_D, tree[i, path], atol=1e-3, rtol=1e-3)
                    checked += 1
        for row in alone:
            drafter.end(row.state)
    for row in rows:
        drafter.end(row.state)
    assert checked >= 2
    for depth in {len(path) for _, path in tree} - {0}:
        of_depth = [one for (i, path), one in tree.items() if i == 0 and len(path) == depth]
        apart = max([apart, *(float((one - of_depth[0]).abs().max()) for one in of_depth)])
    if not issubclass(kind(spec), BlockDrafter):  # those may say the same below all nodes
        differ[spec] = apart


def test_the_test_above_can_fail(differ):
    """Planted: where nodes say different things, the state of a sibling would be seen."""
    if not differ:
        pytest.skip("it looks at what the test above found")
    assert max(differ.values()) > 0.1


PLAIN = [spec for spec in once(BlockDrafter) if kind(spec).expand is BlockDrafter.expand]
"""Without those that correct what a block says by the guess above."""


@pytest.mark.parametrize("spec", PLAIN)
@torch.no_grad()
def test_a_block_costs_one_pass_and_is_the_same_below_all_its_nodes(engine, spec):
    drafter = engine.method(spec).preferred.drafter
    rows = proposal_rows(engine.target, drafter, Drawn.CHOSEN, TREE, 0.0, TEXTS)
    asked, real = [], drafter.blocks

    def counted(branches):
        asked.append([node for branch in branches for node in branch.nodes])
        logits_FKD = real(branches)
        assert logits_FKD.shape[:2] == (len(asked[-1]), drafter.block)
        return logits_FKD

    drafter.blocks = counted
    try:
        drafts, tree = told(drafter, rows)
    finally:
        del drafter.blocks
    size = drafter.block
    depth = max(max(draft.depth_N) for draft in drafts)
    assert len(asked) == -(-depth // size), "a pass per block"
    assert asked[0] == [ROOT] * len(TEXTS)
    for (i, path), logits_D in tree.items():
        root = path[: len(path) - len(path) % size]
        alike = [p for j, p in tree if j == i and len(p) == len(path) and p[: len(root)] == root]
        assert all(torch.equal(tree[i, p], logits_D) for p in alike)
    for row in rows:
        drafter.end(row.state)
