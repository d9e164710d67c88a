"""Early exit: nothing is computed twice, laws are those drawn from, the text is the target's."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace import Engine, ModelError, SpecError
from outpace.cache.base import Lease
from outpace.coins import KeyedCoins, Stream
from outpace.drafters import trained
from outpace.drafters.base import Request, Traits
from outpace.drafters.shallow import ShallowRows, reordered
from outpace.machine import Machine, Member
from outpace.methods.early_exit.adapter_rows import AdapterRows
from outpace.methods.early_exit.drafter import EarlyExit, EarlyExitConfig
from outpace.methods.early_exit.exits import Belief, pick
from outpace.methods.early_exit.objective import EarlyExitObjective, EarlyExitTraining
from outpace.models.tiny import tiny
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.step import step
from outpace.train.align import DRAFT_MODEL, Aligned
from outpace.train.batches import Batch
from outpace.tree.growth import Branch, DraftRow
from outpace.tree.shapes import budget
from outpace.types import ROOT, Budget, Draft, Drawn, Feed, Outcome, Verdict
from tests.drafters.support import count_rows, lacking, without_hand_over, written_off_start

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42, 43, 44], [77]]
LONG = {"max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def target():
    return tiny(layers=6)


@pytest.fixture(scope="module")
def engine(target):
    return Engine(target, drafter="none")


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTPACE_DATA", str(tmp_path / "data"))


SPECS = [
    "early_exit[layer=4]",
    "early_exit",
    "early_exit[layer=5 tree=3x2x1]",
    "early_exit[layer=5 tree=[-1,-1,0,0,2,2,5]]",
    "early_exit[layer=4 tree=dynamic:8:0 tree_size=6]",
    "early_exit[exits=2+4+5 tree_size=3]",
    "early_exit[layer=5 tree_size=8 policy=confidence]",
]


@pytest.mark.parametrize("spec", SPECS)
def test_the_text_is_plain_text(engine, spec):
    for more in ({"seed": 5}, {"temperature": 0.8, "seed": 5, "reproducible": True}):
        plain = engine.generate(PROMPTS, drafter="none", **LONG, **more)
        fast = engine.generate(PROMPTS, drafter=spec, **LONG, **more)
        assert [one.tokens for one in fast] == [one.tokens for one in plain]
        assert sum(one.counters.accepted for one in fast) > 0
        single = engine.generate(PROMPTS[0], drafter=spec, **LONG, **more)
        assert single.tokens == fast[0].tokens and single.counters == fast[0].counters


@pytest.mark.parametrize(
    "spec",
    [
        "early_exit[layer=4 threshold=0]",
        "early_exit[layer=5 tree=3x2x1 threshold=0]",
        "early_exit[model=FOLDER threshold=0]",
        "early_exit[model=FOLDER tree=3x2x1 threshold=0]",
    ],
)
def test_every_layer_runs_once_per_drafted_token(engine, target, layer_exit, monkeypatch, spec):
    spec = spec.replace("FOLDER", str(layer_exit.folder))
    rows = count_rows(monkeypatch, target)
    results = engine.generate(PROMPTS, drafter=spec, **LONG)
    passed = sum(one.counters.passes + one.counters.drafted for one in results)
    prompt = sum(len(one) for one in PROMPTS)
    assert rows == [prompt + passed] * target.num_layers
    # The count can fail: without the hand-over, rows below the exit are computed again.
    without_hand_over(monkeypatch, engine.method(spec).drafter)
    rows[:] = [0] * target.num_layers
    again = engine.generate(PROMPTS, drafter=spec, **LONG)
    assert [one.tokens for one in again] == [one.tokens for one in results]
    assert rows[0] > rows[-1] == prompt + passed


def leased(target, texts, asked, drawn=Drawn.CHOSEN, temperature=0.0):
    """Rows for a drafter, each with a slot that holds its text but for the pending token."""
    cache, rows = target.new_cache(), []
    params = SamplingParams(temperature=temperature, seed=1).resolved(None)
    for text in texts:
        slot = cache.open()
        target.score([Feed.chain(slot, text[:-1], want=())], cache)
        cache.keep(slot, range(len(text) - 1))
        coins = KeyedCoins(1, len(text) - 1, Stream.DRAFT)
        warp = Warp(params, text, frozenset(), target.vocab_size)
        rows.append(DraftRow([Belief()], text, asked, coins, warp, drawn, Lease(cache, slot)))
    return rows


def proposed(drafter, rows):
    rows = [replace(row, state=drafter.begin(None)) for row in rows]
    return rows, drafter.propose(rows)


TEXT = [5, 9, 11, 5, 9, 11, 5, 9, 40]


@pytest.mark.parametrize("drawn", [Drawn.CHOSEN, Drawn.IID, Drawn.DISTINCT])
@pytest.mark.parametrize("tree", ["chain", "3x2x1", "[-1,-1,0,0,2,2,5]", "dynamic:2"])
def test_verification_goes_on_where_the_draft_stopped(target, tree, drawn):
    """Logits are, bit for bit, those of a pass that knows of no draft; nothing else is in the tail.

    Dynamic trees of chosen tokens leave out nodes that were expanded: their rows must go.
    """
    drafter = EarlyExit(target, [4], threshold=0.0)
    asked = budget(tree, 7 if tree == "chain" else None, 4)
    temperature = 0.0 if drawn is Drawn.CHOSEN else 0.9
    for text in (TEXT, [77, 3]):
        rows, (draft,) = proposed(drafter, leased(target, [text], asked, drawn, temperature))
        cache, slot = rows[0].lease.cache, rows[0].lease.slot
        covered = len(draft.resume.row_K)
        feed = Feed.tree(slot, text[-1], draft)
        assert tuple(cache.slot(slot).tail_ids) == feed.token_J[:covered]
        assert 1 < covered <= len(draft) or "dynamic" in tree
        cache.check_integrity()
        logits = target.score([feed], cache).logits_TV
        (fresh,) = leased(target, [text], asked)
        plain = Feed(fresh.lease.slot, feed.token_J, feed.parent_J)
        assert torch.equal(logits, target.score([plain], fresh.lease.cache).logits_TV)


def test_nodes_left_out_leave_the_tail(target):
    """A tree of chosen tokens may drop nodes that it has expanded; here 0 and its child 2."""
    (row,) = leased(target, [TEXT], Budget(3, 3))
    cache, slot = row.lease.cache, row.lease.slot
    rows = ShallowRows(row.lease, 4)

    def expand(nodes, tokens, parents):
        feed = rows.feed(Branch(None, TEXT, nodes, tokens, parents))
        scored = target.score([feed], cache, layers=4, taps=frozenset({"hidden.4"}))
        rows.hidden.append(scored.taps["hidden.4"])

    expand((ROOT,), [], [])
    expand((0, 1), [10, 20], [-1, -1])
    expand((2, 3), [10, 20, 11, 21], [-1, -1, 0, 1])
    draft = rows.finish(Draft.chosen([20, 21, 22], [-1, 0, 1]), [1, 3, 4])
    assert cache.slot(slot).tail_ids == [TEXT[-1], 20, 21] and len(draft.resume.row_K) == 3
    feed = Feed.tree(slot, TEXT[-1], draft)
    logits = target.score([feed], cache).logits_TV
    (fresh,) = leased(target, [TEXT], Budget(3, 3))
    plain = Feed(fresh.lease.slot, feed.token_J, feed.parent_J)
    assert torch.equal(logits, target.score([plain], fresh.lease.cache).logits_TV)


def test_the_laws_are_those_of_the_exit(target):
    drafter = EarlyExit(target, [3], threshold=0.0)
    _, (draft,) = proposed(drafter, leased(target, [TEXT], budget("2x2x1", None, 4), Drawn.DISTINCT, 0.9))
    first = target.variant(layers=range(3))
    seen = 0
    for group in draft.groups:
        path = [*TEXT, *draft.path_tokens(group.parent)]
        cache = first.new_cache()
        feed = Feed.chain(cache.open(), path, want=(len(path) - 1,))
        law = (first.score([feed], cache).logits_TV[0] / 0.9).softmax(0)
        torch.testing.assert_close(draft.laws[group.law].prob_S, law, atol=1e-5, rtol=1e-4)
        seen += 1
    assert seen == 7


def test_without_a_lease_nothing_is_drafted(target):
    drafter = EarlyExit(target, [3], threshold=0.0)
    (row,) = leased(target, [TEXT], Budget(4, 4))
    (draft,) = drafter.propose([replace(row, state=drafter.begin(None), lease=None)])
    assert len(draft) == 0 and draft.resume is None


def test_what_a_drafter_leaves_in_the_tail_without_a_draft_is_dropped(engine, monkeypatch):
    drafter = engine.method("early_exit[layer=3]").drafter
    real = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda rows: [Draft() for _ in real(rows)])
    plain = engine.generate(PROMPTS, drafter="none", **LONG)
    silent = engine.generate(PROMPTS, drafter="early_exit[layer=3]", **LONG)
    assert [one.tokens for one in silent] == [one.tokens for one in plain]
    assert sum(one.counters.drafted for one in silent) == 0


@pytest.mark.parametrize("taps", [frozenset(), frozenset({"hidden.1"})])
def test_nothing_is_resumed_while_somebody_else_reads_features(engine, target, monkeypatch, taps):
    """The pass that resumes at layer 3 could not give ``hidden.1``."""
    method = engine.method("early_exit[layer=3]")
    reader = engine.method("none").drafter
    monkeypatch.setattr(reader, "traits", Traits(taps=taps))
    (row,) = leased(target, [TEXT], Budget(3, 3))
    cache = row.lease.cache
    both = {"early_exit": method.drafter, "none": reader}
    members = {
        name: Member(drafter.begin(Request(prompt=())), Budget(3, 3), method.verifier)
        for name, drafter in both.items()
    }
    running = SimpleNamespace(
        number=0,
        tokens=list(TEXT),
        slot=row.lease.slot,
        warp=row.warp,
        policy_state=None,
        members=members,
        coins=lambda stream: row.coins,
        verifier=method.verifier,
        room=lambda: Budget(3, 3),
        cut=lambda verdict: verdict,
        failed=False,
        extend=lambda outcome: None,
    )
    (outcome,) = step(Machine(target, cache, both, method.policy), [running])
    assert len(outcome.draft) and bool(taps) == (outcome.draft.resume is None)
    assert outcome.scored.taps.keys() == taps


def test_nodes_can_be_put_in_another_order():
    draft = Draft.chosen([10, 11, 12, 13], [-1, -1, 0, 1])
    other = reordered(draft, [1, 3, 0, 2])
    assert other.token_N == (11, 13, 10, 12) and other.parent_N == (-1, 0, -1, 2)
    assert [group.nodes for group in other.groups] == [(2, 0), (3,), (1,)]
    assert [group.parent for group in other.groups] == [-1, 2, 0]
    assert reordered(draft, range(4)) is draft


def test_what_was_never_judged_counts_for_nothing():
    belief = Belief()
    belief.learn(accepted=2, depth=5, censored=False)
    assert (belief.a, belief.b) == (3.0, 2.0)  # one failure, not three
    belief = Belief()
    belief.learn(accepted=2, depth=5, censored=True)
    assert (belief.a, belief.b) == (3.0, 1.0)
    law = Belief(8.0, 2.0).law()
    grid = (torch.arange(64) + 0.5) / 64
    assert float((law.prob_S * grid).sum()) == pytest.approx(0.8, abs=0.01)


def test_the_exit_that_pays_is_found():
    """The deep exit guesses better, the early one is cheaper; what is better by far wins."""

    def share(beliefs):
        coins = [KeyedCoins(3, i, Stream.DRAFT) for i in range(200)]
        return sum(pick(beliefs, [0.2, 0.6], 4, coin) for coin in coins) / 200

    assert share([Belief(2, 60), Belief(60, 6)]) > 0.95
    assert share([Belief(50, 10), Belief(60, 6)]) < 0.05
    assert 0.05 < share([Belief(), Belief()]) < 0.95
    assert pick([Belief()], [0.2], 4, None) == 0


def test_sequences_learn_for_themselves(engine):
    spec = "early_exit[exits=1+5]"
    texts = [[i, i + 1] for i in range(4)]
    settings = {"temperature": 0.7, "seed": 2, "max_new_tokens": 20, "ignore_eos": True}
    batch = [one.tokens for one in engine.generate(texts, drafter=spec, **settings)]
    single = [engine.generate(one, drafter=spec, **settings).tokens for one in texts[::-1]]
    assert batch == single[::-1]


def write_exit(target, folder, layer=4, d2t=None, **tensors):
    tensors = {"norm.weight": target.checkpoint.tensor("model.norm.weight", torch.float32), **tensors}
    if d2t is not None:
        tensors["d2t"] = d2t
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "method": "early_exit",
        "target": target.name,
        "target_digest": target.digest,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "layer": layer,
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_a_trained_exit_is_used(engine, target, tmp_path):
    size = target.hidden_size
    write_exit(target, tmp_path / "same", **{"linear.weight": torch.zeros(size, size)})
    own = engine.generate(PROMPTS, drafter="early_exit[layer=4]", **LONG)
    same = engine.generate(PROMPTS, drafter=f"early_exit[model={tmp_path / 'same'}]", **LONG)
    assert [one.counters for one in same] == [one.counters for one in own]
    # A matrix changes the guesses and not the text; a part of the vocabulary is all it drafts.
    known = torch.tensor([i for i in range(target.vocab_size) if i % 2])
    write_exit(
        target,
        trained.home("early_exit", target),
        d2t=known - torch.arange(len(known)),
        **{"linear.weight": torch.randn(size, size, generator=torch.Generator().manual_seed(0))},
    )
    found = EarlyExit.load(EarlyExitConfig(), target)
    assert found.head is not None and found.layers == (4,)
    _, drafts = proposed(found, leased(target, [TEXT, [77, 3]], Budget(3, 3)))
    assert all(token % 2 for draft in drafts for token in draft.token_N)
    assert all(len(draft) == 3 for draft in drafts)
    assert EarlyExit.load(EarlyExitConfig(layer=4), target).head is None


def test_what_does_not_fit_is_said(engine, target, tmp_path):
    with pytest.raises(ModelError, match="6 layers of 6 are not the first few"):
        EarlyExit.load(EarlyExitConfig(layer=6), target)
    for spec, words in (
        ("layer=2 exits=2+3", "exclude each other"),
        ("layer=0", "at least 1"),
        ("exits=3", "two numbers or more"),
        ("exits=3+x", "two numbers or more"),
    ):
        with pytest.raises(SpecError, match=words):
            engine.generate([1, 2], drafter=f"early_exit[{spec}]")
    write_exit(target, tmp_path / "a", layer=6)
    with pytest.raises(ModelError, match="layer is 6, need 1 to 5"):
        EarlyExit.load(EarlyExitConfig(model=str(tmp_path / "a")), target)
    write_exit(target, tmp_path / "b", **{"norm.weight": torch.ones(3)})
    with pytest.raises(ModelError, match="holds tensors of shapes"):
        EarlyExit.load(EarlyExitConfig(model=str(tmp_path / "b")), target)


def trained_layer(target, folder, layer=4):
    """A layer over a part of the vocabulary."""
    config = EarlyExitTraining(exit_layer=layer)
    return written_off_start(EarlyExitObjective.build(config, target, lacking(target, 7)), folder)


@pytest.fixture(scope="module")
def layer_exit(target, tmp_path_factory):
    return trained_layer(target, tmp_path_factory.mktemp("layer"))


def with_layer(objective):
    return EarlyExit.load(EarlyExitConfig(model=str(objective.folder), threshold=0), objective.target)


def test_a_trained_layer_changes_the_guesses_and_not_the_text(tmp_path):
    target = tiny(layers=6, dtype=torch.bfloat16)
    engine = Engine(target, drafter="none")
    trained_layer(target, tmp_path / "a")
    for more in ({"seed": 5}, {"temperature": 0.8, "seed": 5, "reproducible": True}):
        plain = engine.generate(PROMPTS, drafter="none", **LONG, **more)
        for shape in ("", "tree=3x2x1", "tree=dynamic:8:0 tree_size=6"):
            spec = f"early_exit[model={tmp_path / 'a'} {shape}]"
            fast = engine.generate(PROMPTS, drafter=spec, **LONG, **more)
            assert [one.tokens for one in fast] == [one.tokens for one in plain]
            assert sum(one.counters.accepted for one in fast) > 0


def learned_law(objective, text, temperature):
    """What the network in training says behind a text, over its own columns."""
    target, tap, size = objective.target, f"hidden.{objective.layer}", len(text) + 1
    cache = target.new_cache()
    fed = [*text, 0]  # the last row learns nothing, so a token more is needed
    feature = target.score([Feed.chain(cache.open(), fed)], cache, taps=frozenset({tap})).taps
    batch = Batch(
        token_BT=torch.tensor([fed]),
        length_B=torch.tensor([size]),
        answer_BT=torch.ones(1, size, dtype=torch.bool),
        feature={tap: feature[tap][None]},
    )
    with torch.no_grad():
        y_H = objective.outputs(batch, Aligned(batch, DRAFT_MODEL))[0, -1]
        return (objective.head() @ y_H / temperature).softmax(0)


def laws_apart(engine, objective, monkeypatch, spec):
    """Largest difference between laws recorded and those of the network, over a generation."""
    drafter, seen = engine.method(spec).drafter, []
    real = drafter.propose

    def watching(rows):
        texts = [list(row.tokens) for row in rows]
        drafts = real(rows)
        seen.extend(zip(texts, drafts, strict=True))
        return drafts

    monkeypatch.setattr(drafter, "propose", watching)
    settings = {"temperature": 0.9, "seed": 3, "max_new_tokens": 10, "ignore_eos": True}
    results = engine.generate(PROMPTS, drafter=spec, reproducible=False, **settings)
    assert 0 < sum(one.counters.accepted for one in results) < sum(one.counters.drafted for one in results)
    apart, columns = 0.0, objective.vocab.to_target_D
    for text, draft in seen:
        for group in draft.groups:
            law = draft.laws[group.law]
            wanted = learned_law(objective, [*text, *draft.path_tokens(group.parent)], 0.9)
            apart = max(apart, float((law.at(columns) - wanted).abs().max()))
    monkeypatch.undo()
    return apart


@pytest.mark.parametrize("shape", ["", "tree=2x2x1"])
def test_laws_are_those_that_were_trained_after_every_commit(engine, layer_exit, monkeypatch, shape):
    """Its keys are those of the committed text and of the path, whatever was accepted before."""
    spec = f"early_exit[model={layer_exit.folder} quantize=none threshold=0 {shape}]"
    assert laws_apart(engine, layer_exit, monkeypatch, spec) < 1e-5
    # Planted: of a draft the row of its first node stays, whether it was accepted or not.
    real = AdapterRows._keep

    def stale(self, state, outcome):
        return real(self, state, replace(outcome, row_F=(0, 1) if len(outcome.draft) else ()))

    monkeypatch.setattr(AdapterRows, "_keep", stale)
    assert laws_apart(engine, layer_exit, monkeypatch, spec) > 1e-3


def show(drafter, state, text):
    """Let a drafter see all but the last token of a text, forced."""
    cache, count = drafter.target.new_cache(), len(text) - 1
    passed = drafter.target.score([Feed.chain(cache.open(), text[:-1])], cache, taps=drafter.traits.taps)
    forced = Outcome(
        Draft(), passed.of(0), Verdict((), ()), tuple(text[:-1]), tuple(range(count)), 0, forced=True
    )
    drafter.observe([state], [forced])


def test_a_trained_layer_can_go_back_and_gives_its_slot_back(target, layer_exit):
    drafter = with_layer(layer_exit)
    assert drafter.traits.taps == {"hidden.4"} and drafter.layers == (4,)
    (row,) = leased(target, [TEXT], Budget(3, 3))
    state = drafter.begin(Request(prompt=tuple(TEXT)))
    show(drafter, state, TEXT)
    row = replace(row, state=state)
    before = drafter.clock.count
    (draft,) = drafter.propose([row])
    assert len(draft) == 3 and drafter.clock.count == before + 3, "a pass per depth"
    mark = drafter.mark(state)
    state.beliefs[0].learn(accepted=3, depth=3, censored=False)
    drafter.rows.begin_at(state, None)
    (other,) = drafter.propose([row])
    state = drafter.rewind(state, mark)
    assert state.beliefs[0] == Belief()
    show(drafter, state, TEXT)
    (again,) = drafter.propose([row])
    assert again.token_N == draft.token_N != other.token_N, "without the text it guesses otherwise"
    drafter.end(state)
    assert not drafter.rows.cache._slots
    (unleased,) = drafter.propose([replace(row, state=drafter.begin(None), lease=None)])
    assert len(unleased) == 0 and unleased.resume is None


def test_a_trained_layer_that_does_not_fit_is_said(layer_exit, target, tmp_path):
    config = json.loads((layer_exit.folder / "config.json").read_text())
    tensors = load_file(layer_exit.folder / "model.safetensors")

    def refused(words, tensors=tensors, **changes):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=words):
            EarlyExit.load(EarlyExitConfig(model=str(tmp_path)), target)

    refused("layer is 6, need 1 to 5", layer=6)
    refused("fields are not right", decoder={})
    refused("look at norm.weight", tensors={**tensors, "norm.weight": torch.ones(3)})
    less = {name: one for name, one in tensors.items() if "down_proj" not in name}
    refused("look at mlp.down_proj.weight", tensors=less)
