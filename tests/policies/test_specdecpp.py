"""SpecDec++: drafts end by the running product of estimates, and the text keeps its law."""

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from outpace import Engine, ModelError, SpecError
from outpace.analysis.enumeration import EnumeratingCoins, fates
from outpace.analysis.law import CAUGHT
from outpace.analysis.tables import RIGHT, NodeLaws, World, distance
from outpace.coins import KeyedCoins, Stream
from outpace.drafters import trained
from outpace.drafters.base import Request
from outpace.methods.draft_model.acceptance_objective import Acceptance, AcceptanceTraining
from outpace.models.tiny import tiny
from outpace.params import SamplingParams
from outpace.policies.base import PolicyRow
from outpace.policies.specdecpp import LikelyRefused, SpecDecPlusPlus, SpecDecPlusPlusConfig
from outpace.sampling import Warp
from outpace.tree.dynamic import Scale
from outpace.tree.growth import DraftRow, grow
from outpace.tree.shapes import budget, parse_shape
from outpace.types import ROOT, Budget, Draft, Drawn, Feed, Load, Signals

DRAFT = "model=tiny layers=1"
FREE = Scale(level_D=(0.0,))
PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42, 43, 44], [77]]
LONG = {"max_new_tokens": 24, "ignore_eos": True}


def signals(*pairs):
    depth, reach = zip(*pairs, strict=True)
    return Signals(torch.tensor(depth), torch.ones(len(pairs)), torch.tensor(reach))


def test_the_rule():
    rule = LikelyRefused(0.7, 2)
    # Below `least` nothing ends a branch; from there on a refusal likelier than 0.7 does.
    told = signals((1, 0.0), (2, 0.29), (2, 0.31), (5, 0.29), (5, 1.0), (9, 0.31))
    assert rule.more(told).tolist() == [True, False, True, False, True, True]
    assert LikelyRefused(1.0, 2).more(signals((9, 0.0))).tolist() == [True], "1 never ends one"
    assert LikelyRefused(0.0, 1).more(signals((1, 0.99), (1, 1.0))).tolist() == [False, True]
    unknown = Signals(torch.tensor([1, 9]), torch.tensor([0.1, 0.1]))
    assert rule.more(unknown).tolist() == [True, True]


def test_plans_ask_for_estimates_and_keep_the_limit():
    policy = SpecDecPlusPlus(SpecDecPlusPlusConfig(threshold=0.4, least=3))
    row = PolicyRow(None, {"m": Budget(20, 20), "n": Budget(1, 1)}, Budget(9, 7), None)
    (plan,) = policy.plan([row], Load(1, 10))
    assert plan.drafter == "m"
    assert plan.budget == Budget(9, 7, stop=LikelyRefused(0.4, 3), estimate=True)
    for wrong in ({"threshold": 1.1}, {"threshold": -0.1}, {"least": 0}):
        with pytest.raises(ValueError, match="must be"):
            SpecDecPlusPlusConfig(**wrong)


# What growth tells the rule.


def chance(path):
    """What the head of these tests says of the last token of a path."""
    return 0.5 + 0.4 * ((sum(path) + len(path)) % 3 - 1)


class Watching:
    """A rule that notes what it is told, and never ends a branch."""

    def __init__(self):
        self.told = []

    def more(self, signals):
        self.told.append(None if signals.reach_F is None else signals.reach_F.tolist())
        return torch.ones_like(signals.depth_F, dtype=torch.bool)


def path_of(branch, node):
    path = []
    while node != ROOT:
        path.insert(0, branch.token_N[node])
        node = branch.parent_N[node]
    return path


def estimate(branches):
    return torch.tensor([chance(path_of(b, n)) for b in branches for n in b.nodes])


def expand(branches, vocab=6):
    rows = []
    for branch in branches:
        for node in branch.nodes:
            coins = torch.Generator().manual_seed(hash(tuple(path_of(branch, node))) % 2**31)
            rows.append(torch.randn(vocab, generator=coins))
    return torch.stack(rows), None


def row(asked, drawn, seed=0):
    params = SamplingParams(temperature=0.0 if drawn is Drawn.CHOSEN else 1.0).resolved(None)
    return DraftRow(
        None, [1], asked, KeyedCoins(seed, 0, Stream.DRAFT), Warp(params, [1], frozenset(), 6), drawn
    )


@pytest.mark.parametrize("drawn", [Drawn.CHOSEN, Drawn.IID])
def test_the_rule_is_told_the_product_of_all_levels_but_the_last(drawn):
    rules = [Watching(), Watching(), Watching()]
    asked = Budget(5, 5, stop=rules[0], estimate=True)
    silent = replace(asked, stop=rules[2], estimate=False, max_nodes=7, max_depth=7)
    rows = [
        row(asked, drawn),
        row(replace(asked, stop=rules[1], max_depth=3), drawn, 1),
        row(silent, drawn, 2),
    ]
    first, second, _ = (draft for draft, _ in grow(rows, expand, FREE, estimate))
    for draft, rule, depth in ((first, rules[0], 5), (second, rules[1], 3)):
        a = [chance(draft.token_N[:k]) for k in range(1, depth)]
        told = [one[0] for one in rule.told]
        assert told == pytest.approx([prod(a[:k]) for k in range(depth - 1)])
        assert told[0] == 1.0, "the newest token has no estimate yet"
        if depth == 5:  # planted: a level forgotten, the last level alone, one level too many
            for wrong in (
                [prod(a[1:k]) for k in range(4)],
                [1.0, *a[:3]],
                [prod(a[:k]) for k in range(1, 5)],
            ):
                assert told != pytest.approx(wrong)
    assert rules[2].told == [None] * 6, "it was not asked for"


@pytest.mark.parametrize("shape", ["3x2x1", "dynamic:3:0"])
def test_every_branch_of_a_tree_has_its_own_product(shape):
    class Checking(Watching):
        def more(self, signals):
            super().more(signals)
            return signals.reach_F > 0.2

    rule = Checking()
    asked = replace(budget(shape, 15, 4), stop=rule, estimate=True)
    ((draft, _),) = grow([row(asked, Drawn.DISTINCT, 3)], expand, FREE, estimate)
    inner = {group.parent for group in draft.groups} - {ROOT}
    for node in inner:
        above = draft.path_tokens(node)[:-1]
        assert prod(chance(above[:k]) for k in range(1, len(above) + 1)) > 0.2
    assert len({one for level in rule.told for one in level}) > 2


# The law.


def emitted_law(verifier, world, asked, after=lambda draft: draft):
    """The exact law of one step whose draft ends by estimates; ``after`` is planted."""
    law = defaultdict(float)
    warp = SimpleNamespace(guess=lambda logits, path, ids: world.q(tuple(path)))

    def blank(branches):
        return torch.zeros(sum(len(b.nodes) for b in branches), world.vocab), None

    def grown(fate):
        coins = EnumeratingCoins(fate, 0, 9, Stream.DRAFT)
        one = DraftRow(None, [0], asked, coins, warp, verifier.draws)
        return after(grow([one], blank, FREE, estimate)[0][0])

    lengths = set()
    for drawing, draft in fates(grown):
        lengths.add(len(draft))

        def judge(fate, draft=draft):
            coins = EnumeratingCoins(fate, 0, 9, Stream.JUDGE)
            return verifier.judge(draft, NodeLaws(world, draft), coins, want_laws=False)

        for judging, verdict in fates(judge, drawing.known):
            law[verdict.emitted] += drawing.weight * judging.weight
    longest = max(len(tokens) for tokens in law)
    return distance(law, world.p, world.vocab, longest + 1), lengths


def first(draft, count):
    """A chain cut after so many nodes."""
    return Draft(draft.token_N[:count], draft.parent_N[:count], draft.groups[:count], draft.laws[:count])


def without_doubted(draft):
    """Planted: the newest token is scored too, and dropped where that is low."""
    own = len(draft) and chance(draft.token_N)
    return first(draft, len(draft) - 1) if own < 0.3 else draft


def foreseeing(draft):
    """Planted: the draft ends before a token that looks back from the token after it."""
    low = (k for k in range(1, len(draft)) if draft.token_N[k] == 0)
    return first(draft, next(low, len(draft)))


@pytest.mark.parametrize(
    ("name", "tree"), [("chain", "chain"), ("block", "chain"), ("tree", "2x1x1"), ("traversal", "2x1x1")]
)
def test_ending_by_estimates_keeps_the_law(name, tree):
    """Estimates that swing with every token drawn, so that the rule ends drafts by their tokens."""
    shape = parse_shape(tree)
    nodes = 3 if shape.parent_N is None else len(shape.parent_N)
    asked = Budget(nodes, 3, shape=shape, stop=LikelyRefused(0.6, 1), estimate=True)
    error, lengths = emitted_law(RIGHT[name], World(1), asked)
    assert error < 1e-12
    assert len(lengths) > 1, "drafts of several lengths"


@pytest.mark.parametrize("bug", [without_doubted, foreseeing])
def test_a_rule_that_drops_a_drawn_token_is_caught(bug):
    asked = Budget(3, 3, stop=LikelyRefused(0.6, 1), estimate=True)
    error, _ = emitted_law(RIGHT["chain"], World(1), asked, bug)
    assert error > max(CAUGHT, 1e-3)


# With a model and a head.


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def head(target, tmp_path_factory):
    """A random head whose estimates differ from token to token, and its folder."""
    folder = tmp_path_factory.mktemp("head") / "acceptance"
    options = AcceptanceTraining(draft="tiny", draft_layers=1, blocks=2, tied=False)
    objective = Acceptance.build(options, target, None)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    objective.save(folder, {})
    return folder


@pytest.fixture(scope="module")
def engine(target):
    return Engine(target, drafter="none")


def plain_estimates(engine, folder, model, tokens):
    """What the stored head says of every token of a text, by hand."""
    cache, stored = model.new_cache(), load_file(folder / "model.safetensors")
    feed = [Feed.chain(cache.open(), tokens)]
    x = model.score(feed, cache, taps=frozenset({"hidden.-1"})).taps["hidden.-1"]
    for i in range(2):
        weight, bias = stored[f"blocks.{i}.weight"].float(), stored[f"blocks.{i}.bias"].float()
        x = x + F.silu(x @ weight.T + bias)
    return (x @ stored["out.weight"].float().T + stored["out.bias"].float()).sigmoid().squeeze(1)


@pytest.mark.parametrize("tree", ["tree=chain tree_size=8", "tree=3x2x1"])
def test_estimates_are_the_heads_of_the_tokens_drafted(engine, head, tree):
    drafter = engine.method(f"draft_model[{DRAFT} acceptance={head} {tree}]").drafter
    assert drafter.traits.estimates and drafter._head.shape.blocks == 2
    seen, real = [], drafter.estimate

    def watching(branches):
        out = real(branches)
        seen.append([(list(b.tokens), path_of(b, n)) for b in branches for n in b.nodes])
        seen.append(out.tolist())
        return out

    drafter.estimate = watching
    passes = drafter.clock.count
    try:
        asked = replace(
            engine.method(f"draft_model[{DRAFT} {tree}]").budget, stop=LikelyRefused(1.0, 1), estimate=True
        )
        rows = [
            replace(
                row(asked, Drawn.CHOSEN),
                state=drafter.begin(Request(prompt=tuple(text))),
                tokens=text,
                warp=Warp(SamplingParams().resolved(None), text, frozenset(), engine.target.vocab_size),
            )
            for text in PROMPTS
        ]
        drafts = drafter.propose(rows)
    finally:
        del drafter.estimate
    depth = drafts[0].depth_N[-1]
    assert drafter.clock.count - passes == depth, "a run of the head is no pass"
    assert len(seen) == 2 * (depth - 2), "none for the pending token, none before the last level"
    shifted = []
    for nodes, told in zip(seen[::2], seen[1::2], strict=True):
        for (text, path), one in zip(nodes, told, strict=True):
            right = plain_estimates(engine, head, drafter.model, [*text, *path])
            assert one == pytest.approx(float(right[-1]), abs=1e-4)
            shifted.append(abs(one - float(right[-2])))
    assert max(shifted) > 0.05, "planted: the state of the token before says something else"


@pytest.mark.parametrize(
    "spec", ["tree=chain tree_size=8", "tree=3x2x1", "tree=dynamic tree_size=8", "tree_size=8 verifier=block"]
)
def test_the_text_is_plain_text(engine, head, spec):
    spec = f"draft_model[{DRAFT} acceptance={head} {spec} policy=specdecpp[threshold=0.6]]"
    for more in ({}, {"temperature": 0.9, "seed": 5, "reproducible": "block" not in spec}):
        fast = engine.generate(PROMPTS, drafter=spec, **LONG, **more)
        assert sum(one.counters.accepted for one in fast) > 0
        single = engine.generate(PROMPTS[0], drafter=spec, **LONG, **more)
        assert single.tokens == fast[0].tokens and single.counters == fast[0].counters
        if more.get("reproducible", True):
            plain = engine.generate(PROMPTS, drafter="none", **LONG, **more)
            assert [one.tokens for one in fast] == [one.tokens for one in plain]


def test_drafts_are_as_long_as_threshold_least_and_size_say(engine, head, monkeypatch):
    lengths = {}
    for options in ("threshold=0", "threshold=0 least=4", "threshold=1", "threshold=0.6"):
        chain = f"tree=chain tree_size=7 policy=specdecpp[{options}]"
        spec = f"draft_model[{DRAFT} acceptance={head} {chain}]"
        drafter = engine.method(spec).drafter
        seen, real = lengths.setdefault(options, set()), drafter.propose

        def watching(rows, seen=seen, real=real):
            drafts = real(rows)
            for one, draft in zip(rows, drafts, strict=True):
                if one.budget.max_depth == 7:  # near the end there is room for less
                    seen.add(len(draft))
            return drafts

        monkeypatch.setattr(drafter, "propose", watching)
        engine.generate(PROMPTS, drafter=spec, **LONG)
    assert lengths["threshold=0"] == {2} and lengths["threshold=0 least=4"] == {4}
    assert lengths["threshold=1"] == {7}
    assert len(lengths["threshold=0.6"]) > 1 and min(lengths["threshold=0.6"]) >= 2


def test_the_head_runs_for_this_policy_alone(engine, head, monkeypatch):
    runs = []
    for policy in ("fixed", "confidence", "specdecpp"):
        spec = f"draft_model[{DRAFT} tree=chain acceptance={head} policy={policy}]"
        drafter = engine.method(spec).drafter
        real = drafter._head

        def counting(hidden_FW, real=real, policy=policy):
            runs.append(policy)
            return real(hidden_FW)

        monkeypatch.setattr(drafter, "_head", counting)
        engine.generate(PROMPTS, drafter=spec, **LONG)
    assert set(runs) == {"specdecpp"}


def test_a_head_is_found_by_its_digests_and_others_are_refused(engine, target, head, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTPACE_DATA", str(tmp_path / "data"))
    spec = f"draft_model[{DRAFT} policy=specdecpp]"
    with pytest.raises(SpecError, match=r"specdecpp needs estimates.*outpace train acceptance"):
        Engine(target, drafter="none").generate([1, 2], drafter=spec)
    with pytest.raises(SpecError, match=r"needs estimates.*nor any that is made of others; name one"):
        engine.generate([1, 2], drafter=f"hybrid[head=draft_model[{DRAFT}] policy=specdecpp]")
    home = trained.home("acceptance", target)
    shutil.copytree(head, home)
    found = Engine(target, drafter="none")
    assert found.method(spec).drafter._head.folder == home
    # The same head beside another draft model: not found, and refused if it is named.
    assert not found.method("draft_model[model=tiny]").drafter.traits.estimates
    with pytest.raises(ModelError, match=r"judges the draft model tiny.*, not tiny"):
        engine.generate([1, 2], drafter=f"draft_model[model=tiny acceptance={head}]")
    config = json.loads((home / "config.json").read_text())

    def refused(words, **changes):
        (home / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ModelError, match=words):
            engine.generate([1, 2], drafter=f"draft_model[{DRAFT} acceptance={home}]")

    refused("was trained for", target_digest="0", target_likeness=None)
    refused("'blocks' must be a positive whole number", blocks="2")
    refused(r"'blocks.2.bias' has shape None", blocks=3)
    refused("holds a drafter of method 'medusa'", method="medusa")
