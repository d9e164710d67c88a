"""What each verifier takes, keeps and emits; level 2: the same coins, the same verdict."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.analysis.agreement import Likely, check_oracle
from outpace.analysis.tables import RIGHT, NodeLaws, Sapling, World, best, chain, fan
from outpace.coins import KeyedCoins, Stream
from outpace.errors import SpecError
from outpace.law import Law
from outpace.types import ROOT, Draft, Drawn, Group
from outpace.verifiers.base import TargetLaws
from outpace.verifiers.tree import Tree
from tests.verifiers.refusing import Refusing

CHAIN, MATCH, TREE, COUPLED = (RIGHT[name] for name in ("chain", "match", "tree", "coupled"))


class Given(TargetLaws):
    """Laws by node; remembers which were read."""

    def __init__(self, laws):
        self.laws = laws
        self.read = []

    def law(self, node):
        self.read.append(node)
        return self.laws[node] if isinstance(self.laws, dict) else self.laws


def judge_coins(seed=0, position=5):
    return KeyedCoins(seed, position, Stream.JUDGE)


def grown(recipe, world, seed=0):
    sapling = Sapling(world, KeyedCoins(seed, 5, Stream.DRAFT))
    recipe(sapling)
    return sapling.done()


# Level 2 --------------------------------------------------------------------------------------


def test_fast_verifiers_decide_as_their_oracles(oracles):
    for name, report in oracles.items():
        assert report.agreed == report.cases > 150, name


def test_the_comparison_with_the_oracle_can_fail(monkeypatch):
    class Backwards(Tree):
        def _pick(self, draft, groups, p, coins):
            return super()._pick(draft, groups[::-1], p, coins)

    monkeypatch.setitem(RIGHT, "tree", Backwards())
    report = check_oracle(seed=0, cases=40)["tree"]
    assert report.agreed < report.cases


@pytest.mark.parametrize("drawn", [Drawn.IID, Drawn.DISTINCT, Drawn.CHOSEN])
def test_tree_equals_chain_on_chains(drawn):
    lengths = set()
    for seed in range(150):
        world = Likely(seed, (4, 40, 400)[seed % 3])
        recipe = best([1] * 5) if drawn is Drawn.CHOSEN else chain(drawn, 5)
        draft = grown(recipe, world, seed)
        one, other = (
            verifier.judge(draft, NodeLaws(world, draft), judge_coins(seed), want_laws=True)
            for verifier in (CHAIN, TREE)
        )
        assert (one.kept, one.emitted, one.laws) == (other.kept, other.emitted, other.laws)
        lengths.add(len(one.kept))
    assert lengths == {0, 1, 2, 3, 4, 5}


# What comes out -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RIGHT)
def test_greedy_follows_the_argmax(name):
    #       0 - 1 - 2      tokens 5, 6, 7; the target says 5, 6, 8
    draft = Draft.chosen([5, 6, 7])
    laws = {ROOT: Law.one_hot(5), 0: Law.one_hot(6), 1: Law.one_hot(8)}
    given = Given(laws)
    verdict = RIGHT[name].judge(draft, given, judge_coins(), want_laws=True)
    assert verdict.kept == (0, 1)
    assert verdict.emitted == (5, 6, 8)
    assert verdict.laws == (laws[ROOT], laws[0], laws[1])
    assert given.read == [ROOT, 0, 1], "laws are read once, at visited nodes only"


@pytest.mark.parametrize("name", ["match", "tree", "coupled"])
def test_greedy_finds_the_branch(name):
    draft = Draft.chosen([1, 2, 3, 4, 5], [ROOT, ROOT, 1, 1, 3])
    laws = {ROOT: Law.one_hot(2), 1: Law.one_hot(4), 3: Law.one_hot(9)}
    verdict = RIGHT[name].judge(draft, Given(laws), judge_coins())
    assert (verdict.kept, verdict.emitted, verdict.laws) == ((1, 3), (2, 4, 9), None)


@pytest.mark.parametrize("name", RIGHT)
def test_the_empty_draft_is_plain_decoding(name):
    law = Law(torch.tensor([0.25, 0.75]))
    counts = [0, 0]
    for position in range(400):
        verdict = RIGHT[name].judge(Draft(), Given(law), judge_coins(0, position))
        assert verdict.kept == ()
        counts[verdict.emitted[0]] += 1
    assert abs(counts[1] / 400 - 0.75) < 0.07  # 3 standard deviations; the coins are fixed


def generate(world, verifier, recipe_at, seed, length=40):
    """Tokens over many steps, with the draft that ``recipe_at(step)`` makes; how many were kept."""

    class Later:
        """The world after the tokens so far."""

        def __init__(self, tokens):
            self.vocab, self.tokens = world.vocab, tokens

        def p(self, path):
            return world.p((self.tokens + path)[-2:])

        def q(self, path, drafter=1):
            return world.q((self.tokens + path)[-2:], drafter)

    tokens, kept, step = (0, 1), 0, 0
    while len(tokens) < length:
        later = Later(tokens)
        position = len(tokens) - 1
        sapling = Sapling(later, KeyedCoins(seed, position, Stream.DRAFT))
        recipe_at(step)(sapling)
        draft = sapling.done()
        verdict = verifier.judge(draft, NodeLaws(later, draft), KeyedCoins(seed, position, Stream.JUDGE))
        tokens += verdict.emitted
        kept += len(verdict.kept)
        step += 1
    return tokens[:length], kept


@pytest.mark.parametrize("seed", range(3))
def test_coupled_text_depends_on_the_seed_alone(seed):
    world = World(seed, vocab=7)
    plain, none = generate(world, COUPLED, lambda step: best([]), seed)
    recipes = [
        lambda step: chain(Drawn.COUPLED, 1 + step % 4),
        lambda step: fan(Drawn.COUPLED, 3, 2),
        lambda step: best([3, 2]),
        lambda step: (chain(Drawn.COUPLED, 2), best([2, 1]), best([]))[step % 3],
    ]
    assert none == 0
    for recipe_at in recipes:
        text, kept = generate(world, COUPLED, recipe_at, seed)
        assert text == plain
        assert kept > 5
    assert generate(world, COUPLED, recipes[0], seed + 100)[0] != plain


def test_drafter_and_judge_race_alike():
    world = World(3, vocab=50, same=True)
    for seed in range(20):
        draft = grown(chain(Drawn.COUPLED, 6), world, seed)
        verdict = COUPLED.judge(draft, NodeLaws(world, draft), judge_coins(seed))
        assert len(verdict.kept) == 6


# What is taken --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("match", {Drawn.CHOSEN}),
        ("chain", {Drawn.CHOSEN, Drawn.IID, Drawn.DISTINCT}),
        ("tree", set(Drawn) - {Drawn.COUPLED}),
        ("coupled", {Drawn.CHOSEN, Drawn.COUPLED}),
    ],
)
def test_wrong_groups_are_refused_by_name(name, takes):
    assert RIGHT[name].takes == takes
    q = Law(torch.tensor([0.5, 0.5]))
    for drawn in Drawn:
        chosen = drawn is Drawn.CHOSEN
        group = Group(ROOT, drawn, (0,), None if chosen else 0)
        draft = Draft((1,), (ROOT,), (group,), () if chosen else (q,))
        if drawn in takes:
            RIGHT[name].judge(draft, Given(q), judge_coins())
        else:
            right = "coupled" if drawn is Drawn.COUPLED else "tree"
            with pytest.raises(SpecError, match=f"{drawn.value}.*verifier={right}"):
                RIGHT[name].judge(draft, Given(q), judge_coins())


def test_chain_refuses_what_is_no_chain():
    q = Law(torch.tensor([0.5, 0.5]))
    branching = Draft.chosen([0, 1], [ROOT, ROOT])
    repeated = Draft((1,), (ROOT,), (Group(ROOT, Drawn.IID, (0, 0), 0),), (q,))
    twice = Draft((1,), (ROOT,), (Group(ROOT, Drawn.IID, (0,), 0), Group(ROOT, Drawn.CHOSEN, (0,))), (q,))
    for draft in (branching, repeated, twice):
        with pytest.raises(SpecError, match="verifier=tree"):
            CHAIN.judge(draft, Given(q), judge_coins())
        TREE.judge(draft, Given(q), judge_coins())


# Numbers --------------------------------------------------------------------------------------


def test_refusals_never_leave_nothing():
    """Rounding may refuse what has almost all the mass; the extra token still comes from p."""
    tiny = 1e-30
    p = Law(torch.tensor([1 - 2**-23, tiny, 2**-23]))
    nearly = Law(p.prob_S * (1 - 2**-22))
    for q in (p, nearly, Law(p.prob_S[:1]), Law.one_hot(2), Law(torch.tensor([0.0, 1.0]))):
        for drawn in (Drawn.IID, Drawn.DISTINCT, Drawn.GREEDY_PLUS_ONE, Drawn.HUB):
            draft = Draft((0, 1, 2), (ROOT,) * 3, (Group(ROOT, drawn, (0, 1, 2), 0),), (q,))
            verdict = TREE.judge(draft, Given(p), Refusing())
            assert verdict.emitted[0] in (0, 1, 2)
        for token in (0, 1, 2):
            draft = Draft((token,), (ROOT,), (Group(ROOT, Drawn.IID, (0,), 0),), (q,))
            assert CHAIN.judge(draft, Given(p), Refusing()).emitted[0] in (0, 1, 2)
    chosen = Draft.chosen([0, 1, 2], [ROOT] * 3)
    assert TREE.judge(chosen, Given(p), Refusing()).emitted == (2,), "the last that had any mass"
    alone = Law(torch.tensor([1 - 2**-23]), torch.tensor([4]))
    for verifier in (CHAIN, TREE):
        assert verifier.judge(Draft.chosen([4]), Given(alone), Refusing()).emitted == (4,)


def test_every_coin_of_a_step_has_its_own_key():
    world = World(1, vocab=30)

    def crowded(s):
        first = s.sample(ROOT, Drawn.IID, 4)
        s.sample(ROOT, Drawn.DISTINCT, 3, drafter=2)
        s.top(ROOT, 2)
        s.sample(first[0], Drawn.GREEDY_PLUS_ONE, 3)

    coins = Refusing()
    draft = grown(crowded, world)
    TREE.judge(draft, NodeLaws(world, draft), coins)
    assert len(coins.keys) == len(set(coins.keys)) == 4 + 3 + 2 + 1
    assert {key[0] for key in coins.keys} == {ROOT}


def test_nothing_is_changed():
    world = World(2, vocab=20)
    draft = grown(fan(Drawn.DISTINCT, 4, 2), world)
    before = [law.prob_S.clone() for law in (*draft.laws, world.p(()))]
    first = TREE.judge(draft, NodeLaws(world, draft), judge_coins())
    again = TREE.judge(draft, NodeLaws(world, draft), judge_coins())
    assert (first.kept, first.emitted) == (again.kept, again.emitted)
    for old, law in zip(before, (*draft.laws, world.p(())), strict=True):
        assert torch.equal(old, law.prob_S)


class Passes(TorchDispatchMode):
    """Counts operations that write a whole vocabulary."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += isinstance(out, torch.Tensor) and out.numel() >= self.size
        return out


def passes(draft, law, size=5000):
    with Passes(size) as seen:
        TREE.judge(draft, Given(law), Refusing())
    return seen.count


def test_refused_chosen_siblings_cost_no_pass_over_the_vocabulary():
    size = 5000
    dense = Law(torch.full((size,), 1 / size))
    one, many = (passes(Draft.chosen(range(k), [ROOT] * k), dense) for k in (1, 12))
    assert one == many
    sparse = Law(torch.tensor([0.5, 0.5]), torch.tensor([3, 4000]))
    q = Law(torch.full((size,), 1 / size))
    sampled = Draft((3, 7), (ROOT, ROOT), (Group(ROOT, Drawn.IID, (0, 1), 0),), (q,))
    assert passes(sampled, sparse) == 0, "residuals live on the support of p"
