"""Level 1 of losslessness: exact laws of what is emitted, and proof that the test can fail."""

import pytest
import torch

from outpace.analysis.enumeration import EnumeratingCoins, fates
from outpace.analysis.growths import GROWTHS
from outpace.analysis.law import CAUGHT, WORLDS, check_laws
from outpace.analysis.tables import RIGHT, World, best, chain, distance, fan, outputs
from outpace.coins import Stream
from outpace.errors import UnknownNameError
from outpace.law import Law
from outpace.types import Drawn
from outpace.verifiers.tree import Tree, TreeConfig

TREE = RIGHT["tree"]


@pytest.mark.parametrize("name", RIGHT)
def test_the_output_has_the_targets_law(laws, name):
    assert laws[name].cases > 50
    assert laws[name].growth_rules == (4 if RIGHT[name].chains_only else len(GROWTHS))
    assert laws[name].error < 1e-12


@pytest.mark.parametrize(
    ("name", "bugs"),
    [
        ("match", 5),
        ("chain", 15),
        ("tree", 23),
        ("block", 17),
        ("k_seq", 23),
        ("greedy_plus_one", 10),
        ("spechub", 19),
        ("traversal", 25),
        ("coupled", 5),
    ],
)
def test_known_wrong_rules_are_caught(laws, name, bugs):
    report = laws[name]
    assert report.missed == ()
    assert report.planted_bugs_caught == report.planted_bugs == bugs


def test_unknown_verifiers_are_refused():
    with pytest.raises(UnknownNameError, match="did you mean tree"):
        check_laws(["three"])


def coins(fate, position=3, stream=Stream.JUDGE):
    return EnumeratingCoins(fate, 0, position, stream)


def test_a_coin_used_twice_is_the_same_uniform():
    law = Law(torch.tensor([0.5, 0.5], dtype=torch.float64))

    def run(fate):
        first = coins(fate).flip(0.3, 1)
        same = coins(fate).choose(law, 1)
        other = [
            coins(fate).choose(law, 2),
            coins(fate, 4).choose(law, 1),
            coins(fate, 3, Stream.DRAFT).choose(law, 1),
        ]
        return first, same, *other

    found = [(value, fate.weight) for fate, value in fates(run)]
    assert sum(weight for _, weight in found) == pytest.approx(1, abs=1e-15)
    together = {}
    for (first, same, *_), weight in found:
        together[first, same] = together.get((first, same), 0) + weight
    # The uniform is below 0.3, in [0.3, 0.5), or above: never true and 1 at once.
    assert together == pytest.approx({(True, 0): 0.3, (False, 0): 0.2, (False, 1): 0.5})
    assert len(found) == 3 * 2**3


def test_what_earlier_runs_learned_is_kept():
    learned = [(dict(f.known), f.weight) for f, yes in fates(lambda f: coins(f).flip(0.3)) if yes]
    ((known, weight),) = learned
    again = [(yes, f.weight) for f, yes in fates(lambda f: coins(f).flip(0.6), known)]
    assert (weight, again) == (0.3, [(True, 1.0)])


def test_races_are_shared_by_position_and_have_the_law():
    p = Law(torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64))
    backwards = Law(p.prob_S.flip(0), torch.tensor([2, 1, 0]))

    def run(fate):
        early = coins(fate, 3, Stream.DRAFT).race(p, 2, 3)
        assert sorted(early) == [0, 1, 2]
        assert coins(fate, 4).race(backwards, 1, 3) == early
        return early[0], coins(fate, 4).race(p, 2)[0]

    law = {}
    for fate, pair in fates(run):
        law[pair] = law.get(pair, 0) + fate.weight
    assert law == pytest.approx(
        {(a, b): float(p.prob_S[a] * p.prob_S[b]) for a in range(3) for b in range(3)}
    )


def test_distance_sees_small_changes_and_lost_mass():
    world = World(1)
    right, _ = outputs(TREE, chain(Drawn.IID), world)
    assert distance(right, world.p, 3, 3) < 1e-15
    tokens = next(iter(right))
    assert distance({**right, tokens: right[tokens] - 1e-9}, world.p, 3, 3) > 1e-10


def kept(recipe, world, verifier=TREE):
    return outputs(verifier, recipe, world)[1]


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"world{world.seed}")
def test_how_much_is_kept(world):
    p, q = (law.dense(world.vocab) for law in (world.p(()), world.q(())))
    overlap = float(torch.minimum(p, q).sum())
    assert kept(chain(Drawn.IID, 1), world) == pytest.approx(overlap)
    # Without replacement from the whole vocabulary, the target's token is always among them.
    whole = int((q > 0).sum())
    reach = float(p[q > 0].sum())
    all_kept = kept(fan(Drawn.DISTINCT, whole, 0), world)
    assert all_kept == pytest.approx(reach)
    # More draws keep more, and draws that do not repeat keep most.
    two_iid, two_distinct = (kept(fan(d, 2, 0), world) for d in (Drawn.IID, Drawn.DISTINCT))
    assert overlap - 1e-12 <= two_iid <= two_distinct + 1e-12
    assert two_distinct <= all_kept + 1e-12
    # Greedy plus one keeps what its optimal coupling keeps (arXiv:2502.18779).
    top = world.q(()).top(1)
    rest = q.clone()
    rest[top] = 0
    if rest.sum() > 0:
        rest /= rest.sum()
        best_possible = float(p[top].sum() + torch.minimum(p, rest).sum())
        assert kept(fan(Drawn.GREEDY_PLUS_ONE, 2, 0), world) == pytest.approx(best_possible)


def test_chosen_siblings_are_kept_with_the_mass_they_hold():
    for world in WORLDS:
        tokens = world.q((), 2).top(2)
        mass = float(world.p(()).dense(world.vocab)[tokens].sum())
        for name in ("match", "tree", "coupled"):
            assert kept(best([2]), world, RIGHT[name]) == pytest.approx(mass)


def test_caught_bugs_are_far_above_rounding():
    assert CAUGHT > 1e8 * 1e-12
    assert Tree().draws is Drawn.DISTINCT
    assert Tree(TreeConfig(replacement=True)).draws is Drawn.IID
