"""PPD: what riders see, whose guess becomes which law, the state machine, what it decides."""

import itertools
import json
import random
from dataclasses import replace

import pytest
import torch

from outpace import Engine, ModelError, SpecError
from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.drafters.riding import RidersMemo
from outpace.law import VocabMap
from outpace.methods.ppd import trees as ppd_trees
from outpace.methods.ppd.drafter import STOCK, Ppd, PpdConfig
from outpace.methods.ppd.files import Prompts, read_prompts
from outpace.methods.ppd.objective import Ppd as PpdObjective
from outpace.methods.ppd.objective import PpdTraining
from outpace.methods.ppd.trees import ends, evaluate, pass_seconds, reaches, solve
from outpace.models.tiny import TableTarget, tiny
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import budget
from outpace.types import ROOT, Budget, Draft, Drawn, Feed, Outcome, Riders, Verdict

TEXT = [5, 9, 11, 40, 7, 150, 5, 9, 12, 77, 8]
RIDERS = 3
PARENTS = (-1, -1, 0, 0, 2)
COUNTS = (3, 2, 0, 1, 3, 2)
"""Riders below the pending token and the five nodes."""
RATES = ((0.5, 0.2, 0.1), (0.3, 0.15, 0.1), (0.2, 0.1, 0.05))


@pytest.fixture(scope="module")
def target():
    return tiny()


def half(target):
    """A draft vocabulary of the even tokens."""
    ids = torch.arange(0, target.vocab_size, 2)
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[ids] = torch.arange(len(ids))
    return VocabMap(ids, feed_V)


def made(target, ensemble=1, **machine):
    """A drafter with random prompt tokens."""
    coins = torch.Generator().manual_seed(5)
    embed_KEH = 0.2 * torch.randn(RIDERS, ensemble, target.hidden_size, generator=coins)
    drafter = Ppd(Prompts(embed_KEH=embed_KEH, vocab=half(target), rate_KB=RATES), target)
    if machine:
        drafter = Ppd(drafter.prompts, target, replace(drafter.machine, **machine))
    return drafter


def ridden(drafter, target, text=TEXT, parents=PARENTS, counts=COUNTS):
    """One pass over a text, a tree and riders; the draft, and what came back."""
    draft = Draft.chosen([20 + i for i in range(len(parents))], parents)
    riders, start = drafter._hang(tuple(counts))
    draft = replace(draft, riders=riders, memo=RidersMemo(drafter, start, tuple(counts)))
    cache = target.new_cache()
    slot = cache.open()
    target.score([Feed.chain(slot, text[:-1], want=())], cache)
    cache.keep(slot, range(len(text) - 1))
    return draft, target.score([Feed.tree(slot, text[-1], draft)], cache)


def alone(drafter, target, tokens, riders, ensemble=0):
    """Hidden states of one chain of riders behind a text, with nothing else in the pass."""
    cache = target.new_cache()
    embed_KH = drafter.prompts.embed_KEH[:riders, ensemble]
    chain = Riders((ROOT,) * riders, tuple(range(-1, riders - 1)), embed_RH=embed_KH)
    slot = cache.open()
    target.score([Feed.chain(slot, tokens[:-1], want=())], cache)
    cache.keep(slot, range(len(tokens) - 1))
    feed = replace(Feed.tree(slot, tokens[-1], Draft()), riders=chain)
    return target.score([feed], cache).rider_hidden_RH.clone()


@pytest.mark.parametrize("ensemble", [1, 2])
def test_a_rider_sees_its_nodes_path_and_its_own_chain_alone(target, ensemble):
    drafter = made(target, ensemble)
    draft, scored = ridden(drafter, target)
    apart = 1.0
    for place, count in enumerate(COUNTS):
        node, first = place - 1, draft.memo.start[place]
        tokens = [*TEXT, *draft.path_tokens(node)]
        for chain in range(ensemble if count else 0):
            got = scored.rider_hidden_RH[first + chain * count : first + (chain + 1) * count]
            wanted = alone(drafter, target, tokens, count, chain)
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
            # Planted: a rider that sees a guess after its node, and one of another chain.
            later = alone(drafter, target, [*tokens, 21], count, chain)
            apart = min(apart, float((later - wanted).abs().max()))
            if ensemble > 1:
                other = alone(drafter, target, tokens, count, 1 - chain)
                apart = min(apart, float((other - wanted).abs().max()))
    assert apart > 0.01, "wrong chains and paths would be seen"


def test_guesses_do_not_feel_riders(target):
    drafter = made(target)
    draft, scored = ridden(drafter, target)
    cache = target.new_cache()
    slot = cache.open()
    target.score([Feed.chain(slot, TEXT[:-1], want=())], cache)
    cache.keep(slot, range(len(TEXT) - 1))
    bare = replace(draft, riders=None)
    assert torch.equal(target.score([Feed.tree(slot, TEXT[-1], bare)], cache).logits_TV, scored.logits_TV)


def committed(drafter, state, draft, scored, kept, text=TEXT, emitted=None):
    """Tell a drafter that a path was kept; the text with what was emitted."""
    emitted = (*(draft.token_N[node] for node in kept), 33) if emitted is None else emitted
    rows = (0, *(node + 1 for node in kept[: len(emitted) - 1]))
    fed = (text[-1], *emitted[:-1])
    outcome = Outcome(draft, scored.of(0), Verdict(tuple(kept), emitted), fed, rows, len(text) - 1)
    drafter.observe([state], [outcome])
    return [*text, *emitted]


def proposed(drafter, state, text, asked, drawn=Drawn.CHOSEN, temperature=0.0, seed=3):
    params = SamplingParams(temperature=temperature, seed=seed).resolved(None)
    row = DraftRow(
        state,
        text,
        asked,
        KeyedCoins(seed, len(text) - 1, Stream.DRAFT),
        Warp(params, text, frozenset(), 10**6),
        drawn,
    )
    with torch.no_grad():
        return drafter.propose([row])[0]


@pytest.mark.parametrize("ensemble", [1, 2])
@pytest.mark.parametrize("tree", ["chain", "3x2x1", "dynamic"])
@pytest.mark.parametrize("kept", [(), (0,), (0, 2), (0, 3)])
def test_recorded_laws_are_those_of_the_riders_of_the_last_node(target, ensemble, tree, kept):
    """Level k of the next draft has the law of rider k below the node where verification ended."""
    drafter = made(target, ensemble)
    state = drafter.begin(Request(prompt=tuple(TEXT)))
    draft, scored = ridden(drafter, target)
    text = committed(drafter, state, draft, scored, kept)
    node = kept[-1] if kept else ROOT
    asked = replace(budget(tree, 15, 15), max_depth=9)
    new = proposed(drafter, state, text, asked, Drawn.IID, 0.8)
    count = COUNTS[node + 1]
    deep = max(new.depth_N)
    assert deep == count or (tree == "dynamic" and 0 < deep < count), "as many levels as riders"
    path = [*TEXT, *draft.path_tokens(node)]
    hidden_EKH = torch.stack([alone(drafter, target, path, count, e) for e in range(ensemble)])
    logits_KV = torch.stack([target.head(one) for one in hidden_EKH]).mean(0)
    law_KD = (logits_KV[:, drafter.prompts.vocab.to_target_D] / 0.8).softmax(-1)
    apart = 1.0
    for group in new.groups:
        level = 0 if group.parent == ROOT else new.depth_N[group.parent]
        law = new.laws[group.law].prob_S
        torch.testing.assert_close(law, law_KD[level], atol=1e-5, rtol=1e-3)
        if count > 1:  # planted: q of another rider of the chain
            other = law_KD[(level + 1) % count]
            apart = min(apart, float((other - law).abs().max()))
    assert apart > 0.01


def test_every_state_has_its_tree_and_riders(target):
    """States are forced: 0 to 3 guesses; a censored text ends one row earlier."""
    drafter = made(target)
    stock = budget(STOCK, None, 4)
    for kept, emitted, levels in (
        ((1,), None, 0),
        ((0, 2), None, 1),
        ((0,), None, 2),
        ((), None, 3),
        ((0, 2, 4), None, 2),
        ((0, 2), (20, 22), 2),
    ):
        state = drafter.begin(Request(prompt=tuple(TEXT)))
        draft, scored = ridden(drafter, target)
        text = committed(drafter, state, draft, scored, kept, emitted=emitted)
        new = proposed(drafter, state, text, stock)
        tree = drafter.machine.tree_S[levels]  # its nodes are numbered level by level in drafts
        assert sorted(reaches(new.parent_N, RATES)) == sorted(reaches(tree, RATES))
        assert sum(new.memo.count) == sum(drafter.machine.riders(tree))
        assert new.memo.count == drafter.machine.riders(new.parent_N)
        rows = 1 + len(new) + sum(new.memo.count)
        assert rows <= len(drafter.machine.seconds_R)
        assert new.riders.node_R == tuple(
            node for node, n in enumerate(new.memo.count, start=-1) for _ in range(n)
        )
    first = proposed(drafter, drafter.begin(Request(prompt=tuple(TEXT))), TEXT, stock)
    assert len(first) == 0 and first.riders is not None, "riders come with the first step"


def test_states_that_are_out_of_step_draft_nothing(target):
    drafter = made(target)
    state = drafter.begin(Request(prompt=tuple(TEXT)))
    draft, scored = ridden(drafter, target)
    text = committed(drafter, state, draft, scored, (0,))
    mark = drafter.mark(state)
    (full,) = (proposed(drafter, state, text, Budget(4, 4)),)
    assert len(full) == 2
    assert len(proposed(drafter, state, [*text, 3], Budget(4, 4))) == 0
    # A step of another drafter leaves no riders behind.
    cache = target.new_cache()
    passed = target.score([Feed.chain(cache.open(), [33])], cache)
    other = Outcome(Draft(), passed.of(0), Verdict((), (3,)), (33,), (0,), len(text) - 1)
    drafter.observe([state], [other])
    assert len(proposed(drafter, state, [*text, 3], Budget(4, 4))) == 0
    again = proposed(drafter, drafter.rewind(state, mark), text, Budget(4, 4))
    assert again.token_N == full.token_N
    # The riders of another drafter of this kind are none of its own.
    twin, scored = ridden(made(target), target)
    committed(drafter, state, twin, scored, (0,))
    assert state.hidden_KH is None


def test_budgets_hold_for_riders_too(target):
    drafter = made(target)
    for rows, longest in ((0, 0), (2, 2), (7, 7)):
        draft, scored = ridden(drafter, target)
        state = drafter.begin(Request(prompt=tuple(TEXT)))
        text = committed(drafter, state, draft, scored, ())
        asked = replace(budget(STOCK, None, 4), max_rows=rows)
        new = proposed(drafter, state, text, asked)
        count = 0 if new.riders is None else len(new.riders.node_R)
        assert len(new) + count <= longest
    short = made(tiny(max_positions=len(TEXT) + 3))
    for text, riders in ((TEXT, 2), ([*TEXT, 4], 2), ([*TEXT, 4, 5], 1)):
        state = short.begin(Request(prompt=tuple(text)))
        new = proposed(short, state, text, budget(STOCK, None, 4))
        assert new.memo.count == (riders,), "positions end at 13"


def test_ends_of_verification_by_simulation():
    coins, counts = random.Random(0), [0] * (len(PARENTS) + 1)
    for _ in range(20_000):
        at = ROOT
        while True:
            kids = [node for node, parent in enumerate(PARENTS) if parent == at]
            depth = 0 if at == ROOT else (1 if PARENTS[at] == ROOT else 2 if at != 4 else 3)
            one, moved = coins.random(), False
            for rank, kid in enumerate(kids):
                one -= RATES[depth][rank]
                if one < 0:
                    at, moved = kid, True
                    break
            if not moved:
                break
        counts[at + 1] += 1
    wanted = ends(PARENTS, reaches(PARENTS, RATES))
    assert sum(wanted) == pytest.approx(1.0)
    for count, one in zip(counts, wanted, strict=True):
        assert count / 20_000 == pytest.approx(one, abs=0.012)


def test_the_choice_is_the_best_of_all():
    """Every tree and every number of riders, for every state, of a small machine."""
    rates, seconds = ((0.5, 0.2), (0.3, 0.1)), [1.0, 1.02, 1.05, 1.1, 1.3, 1.8]
    choices = []
    for state in range(3):
        trees = [(), (-1,), (-1, -1)] if state else [()]
        trees += [(-1, 0), (-1, -1, 0)] if state == 2 else []
        choices.append(
            [
                (tree, riders)
                for tree in trees
                for riders in itertools.product(range(3), repeat=len(tree) + 1)
                if 1 + len(tree) + sum(riders) <= len(seconds)
            ]
        )
    best = max(evaluate(chosen, rates, seconds, 1)[0] for chosen in itertools.product(*choices))
    machine = solve(rates, seconds)
    assert machine.rate == pytest.approx(best, rel=1e-9)
    chosen = [(tree, machine.riders(tree)) for tree in machine.tree_S]
    assert evaluate(chosen, rates, seconds, 1)[0] == pytest.approx(best, rel=1e-9)
    worse = evaluate([((), (2,)), *chosen[1:]], rates, [s**3 for s in seconds], 1)[0]
    assert worse < best, "planted: dearer rows"


def test_the_rate_is_that_of_a_long_run():
    """Tokens per second of a simulated machine, texts that end now and then included."""
    seconds = [1.0 + 0.01 * rows for rows in range(24)]
    machine = solve(RATES, seconds)
    coins, state, tokens, spent = random.Random(1), 0, 0.0, 0.0
    for _ in range(30_000):
        tree = machine.tree_S[state]
        riders, reach = machine.riders(tree), reaches(tree, RATES)
        spent += seconds[len(tree) + sum(riders)]
        place = coins.choices(range(len(reach)), ends(tree, reach))[0]
        tokens += 1 + Draft.chosen(range(len(tree)), tree).depth_N[place - 1] if place else 1
        state = 0 if coins.random() < ppd_trees._ENDS else riders[place]
    assert tokens / spent == pytest.approx(machine.rate, rel=0.02)


def test_rows_follow_their_price():
    def rows(machine):
        tree = machine.tree_S[RIDERS]
        return 1 + len(tree) + machine.chains * sum(machine.riders(tree))

    free, flat = solve(RATES, [1.0] * 24), solve(RATES, [1.0 + 0.02 * i for i in range(24)])
    steep = solve(RATES, [1.0 + 0.15 * i for i in range(24)])
    assert 24 >= rows(free) > rows(flat) > rows(steep) > 1
    assert free.rate > flat.rate > steep.rate > 1
    hopeless = solve(((0.02,), (0.01,), (0.01,)), [1.0 + 0.15 * i for i in range(24)])
    assert hopeless.riders(()) == (0,) and hopeless.rate == pytest.approx(1.0), "plain decoding"
    pairs = solve(RATES, [1.0] * 24, chains=2)
    assert rows(pairs) <= 24 and free.rate > pairs.rate > 1
    cliff = solve(RATES, [1.0] * 8 + [3.0] * 16)
    assert rows(cliff) <= 8
    larger = tuple([ROOT] * 40)
    assert sum(free.riders(larger)) == RIDERS, "a tree that the user wants so large"
    assert sum(free.riders(larger, 1)) == 1


def test_passes_are_timed_with_a_clock(target):
    """A clock that ticks once per call, and a pass takes one tick whatever its rows."""
    ticks = itertools.count()
    before = target.clock.count
    seconds = pass_seconds(target, clock=lambda: float(next(ticks)))
    assert target.clock.count > before + 14
    assert seconds == [1.0] * ppd_trees.MOST_ROWS


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    out = tmp_path_factory.mktemp("ppd")
    objective = PpdObjective.build(PpdTraining(), target, half(target))
    objective.ranks.count_SB += torch.tensor([5.0, *[1.0] * 10], dtype=torch.float64)
    objective.save(out, {})
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_is_plain_text_in_either_dtype(folder, dtype):
    engine = Engine.load("tiny", dtype=dtype, drafter="none")
    settings = {"max_new_tokens": 40, "ignore_eos": True}
    prompts = [TEXT, TEXT[:3], [7] * 70]
    plain = engine.generate(prompts, drafter="none", **settings)
    for spec in (f"ppd[model={folder} rows=24]", f"ppd[model={folder} rows=40 tree=3x3x2]"):
        fast = engine.generate(prompts, drafter=spec, **settings)
        assert [r.tokens for r in fast] == [r.tokens for r in plain]
        assert sum(r.counters.drafted for r in fast) > 100
    timed = engine.generate(prompts, drafter=f"ppd[model={folder}]", **settings)
    assert [r.tokens for r in timed] == [r.tokens for r in plain], "rows by their price here"


def test_trees_shaped_by_timing_promise_no_text_of_a_seed(folder):
    engine = Engine.load("tiny", dtype="float32", drafter="none")
    assert not engine.method(f"ppd[model={folder}]").deterministic
    assert engine.method(f"ppd[model={folder} rows=24]").deterministic


def test_what_is_read(target, folder, tmp_path):
    prompts = read_prompts(str(folder), target)
    assert prompts.embed_KEH.shape == (RIDERS, 1, target.hidden_size)
    assert prompts.rate_KB[0] == pytest.approx([1 / 3, *[1 / 15] * 9])
    config = json.loads((folder / "config.json").read_text())
    weights = (folder / "model.safetensors").read_bytes()
    for change, said in (
        ({"riders": 4}, "'prompts' has shape"),
        ({"ensemble": None}, "'prompts' has shape"),
        ({"draft_vocab_size": 7}, "draft_vocab_size is 7"),
        ({"method": "medusa"}, "medusa"),
        ({"acceptance": [[0.5]]}, "acceptance of 1 of 3 riders"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        (tmp_path / "model.safetensors").write_bytes(weights)
        with pytest.raises(ModelError, match=said):
            read_prompts(str(tmp_path), target)


def test_what_cannot_be_is_said(folder):
    with pytest.raises(ValueError, match="rows must be at least 3, got 2"):
        PpdConfig(rows=2)
    engine = Engine(TableTarget.random(0), drafter="none")
    with pytest.raises(ModelError, match="needs embeddings"):
        engine.generate([1, 2], drafter=f"ppd[model={folder}]")
    with pytest.raises(SpecError, match="rows"):
        Engine.load("tiny").generate([1, 2], drafter=f"ppd[model={folder} rows=few]")
