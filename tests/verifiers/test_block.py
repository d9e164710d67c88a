import pytest
import torch

from outpace.analysis.agreement import Likely
from outpace.analysis.tables import RIGHT, NodeLaws, Sapling, best, chain
from outpace.coins import Coins, KeyedCoins, Stream
from outpace.errors import SpecError
from outpace.law import Law
from outpace.types import ROOT, Draft, Drawn, Group
from outpace.verifiers.base import TargetLaws

BLOCK, TRAVERSAL = RIGHT["block"], RIGHT["traversal"]


class Falling(Coins):
    """Coins that fall as told, by key; remembers what they were asked."""

    def __init__(self, yes=()):
        self.yes, self.asked = set(yes), []

    def flip(self, prob, *key):
        self.asked.append((key, prob))
        return key in self.yes

    def choose(self, law, *key):
        self.asked.append((key, law))
        return int(law.ids[law.prob_S.argmax()])

    def race(self, law, depth, count=1):
        raise AssertionError("nobody races")


class Given(TargetLaws):
    def __init__(self, laws):
        self.laws, self.read = laws, []

    def law(self, node):
        self.read.append(node)
        return self.laws[node]


def law(*prob):
    return Law(torch.tensor(prob, dtype=torch.float64))


def sampled(tokens, q):
    groups = tuple(Group(i - 1, Drawn.IID, (i,), i) for i in range(len(tokens)))
    return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), groups, tuple(q))


def test_thresholds_by_hand():
    """Two drafted tokens. The second is liked better by p than by q, which helps the first."""
    q, p = [law(0.8, 0.2), law(0.4, 0.6)], {ROOT: law(0.4, 0.6), 0: law(0.8, 0.2), 1: law(1, 0)}
    # w_1 = 0.4 / 0.8; w_2 = min(1, 0.5 * 0.8 / 0.4) = 1: both are certain to be kept,
    # where token by token the first is refused half of the time.
    verdict = BLOCK.judge(sampled([0, 0], q), Given(p), coins := Falling([(1, 0)]))
    assert verdict.kept == (0, 1) and coins.asked[0] == ((1, 0), 1.0)
    # The other second token: w_2 = 0.5 * 0.2 / 0.6 = 1 / 6.
    coins = Falling()
    verdict = BLOCK.judge(sampled([0, 1], q), Given(p), coins)
    # s_1 = [0.5 * (0.8, 0.2) - (0.4, 0.6)]_+ = 0, so h_1 = 0 / (0 + 1 - 0.5).
    flips = [(key, prob) for key, prob in coins.asked if isinstance(prob, float)]
    assert flips == [((1, 0), pytest.approx(1 / 6)), ((0, 0), 0.0)]
    # Nothing kept: the extra token comes from norm([p - q]_+) at the root.
    assert verdict.kept == () and verdict.emitted == (1,)


def test_nothing_is_read_behind_an_impossible_token():
    laws = {ROOT: law(0.5, 0.5), 0: law(1.0, 0.0)}
    given = Given(laws)
    verdict = BLOCK.judge(Draft.chosen([0, 1, 0, 0]), given, Falling([(0, 0)]))
    assert given.read == [ROOT, 0]
    assert (verdict.kept, verdict.emitted) == ((0,), (0, 0))


@pytest.mark.parametrize("drawn", [Drawn.IID, Drawn.DISTINCT, Drawn.CHOSEN])
def test_traversal_decides_alike_on_chains(drawn):
    """Not only in law: with the same coins."""
    lengths = set()
    for seed in range(120):
        world = Likely(seed, (4, 40, 400)[seed % 3])
        sapling = Sapling(world, KeyedCoins(seed, 5, Stream.DRAFT))
        (best([1] * 5) if drawn is Drawn.CHOSEN else chain(drawn, 5))(sapling)
        draft = sapling.done()
        one, other = (
            verifier.judge(draft, NodeLaws(world, draft), KeyedCoins(seed, 5, Stream.JUDGE), want_laws=True)
            for verifier in (BLOCK, TRAVERSAL)
        )
        assert (one.kept, one.emitted, one.laws) == (other.kept, other.emitted, other.laws)
        lengths.add(len(one.kept))
    assert lengths == {0, 1, 2, 3, 4, 5}


def test_what_is_no_chain_is_refused():
    q = law(0.5, 0.5)
    branching = Draft.chosen([0, 1], [ROOT, ROOT])
    repeated = Draft((1,), (ROOT,), (Group(ROOT, Drawn.IID, (0, 0), 0),), (q,))
    for draft in (branching, repeated):
        with pytest.raises(SpecError, match=r"'block' takes .*use verifier=tree"):
            BLOCK.judge(draft, Given({ROOT: q}), Falling())
