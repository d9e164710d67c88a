"""Block drafter: its network against plain arithmetic, laws, bookkeeping, and what is refused."""

import json
from itertools import pairwise

import pytest
import torch

from outpace import Engine
from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.drafters.features import TrainedConfig
from outpace.errors import ModelError
from outpace.methods.dflash.drafter import STOCK, Dflash
from outpace.methods.dflash.net import BlockNet
from outpace.methods.dflash.objective import DflashObjective, DflashTraining
from outpace.models.products import works
from outpace.models.tiny import tiny
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import Branch, DraftRow
from outpace.tree.shapes import budget, parse_shape, table
from outpace.types import ROOT, Budget, Draft, Drawn, Feed, Outcome, Scored, Verdict
from tests.methods.dflash.oracle import SLOTS, block, half, random_file

TEXT = [5, 9, 11, 40, 7, 150, 5, 9, 12, 77, 8]
LONG = [(7 * i * i + 3) % 250 for i in range(80)]
WIDE = Budget(30, 9, shape=parse_shape("3x2x1x1"))


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def drafter(target):
    return Dflash(random_file(target), target)


def scored(drafter, target, text):
    """A pass of the target over a text."""
    cache = target.new_cache()
    return target.score([Feed.chain(cache.open(), text)], cache, taps=drafter.traits.taps)


def show(drafter, state, target, text, start=0, rows=None):
    """Let a drafter see a pass; what was committed are the rows given."""
    rows = tuple(range(start, len(text))) if rows is None else rows
    fed = tuple(text[row] for row in rows)
    passed = scored(drafter, target, text).of(0)
    drafter.observe([state], [Outcome(Draft(), passed, Verdict((), ()), fed, rows, start)])


def begun(drafter, target, text, cuts=()):
    """A state that saw all of a text but the pending token, in pieces."""
    state = drafter.begin(Request(prompt=tuple(text)))
    for start, stop in pairwise([0, *cuts, len(text) - 1]):
        show(drafter, state, target, text[:stop], start)
    return state


def logits(drafter, states, texts):
    for state in states:
        drafter.forget(state)
    branches = [Branch(s, t, (ROOT,), [], []) for s, t in zip(states, texts, strict=True)]
    return drafter.blocks(branches).clone()


def said(drafter, target, text, **planted):
    """The oracle's logits [S, D] after a text whose last token is pending."""
    file = drafter.file
    taps = scored(drafter, target, text[:-1]).of(0).taps
    y = block(file.shape, file.tensors, target, taps, text[-1], **planted)
    return target.head(y)[:, file.vocab.to_target_D]


def proposed(drafter, states, texts, budget, drawn=Drawn.CHOSEN, temperature=0.0, seed=3):
    params = SamplingParams(temperature=temperature, seed=seed).resolved(None)
    rows = [
        DraftRow(
            state,
            text,
            budget,
            KeyedCoins(seed, len(text) - 1, Stream.DRAFT),
            Warp(params, text, frozenset(), 10**6),
            drawn,
        )
        for state, text in zip(states, texts, strict=True)
    ]
    with torch.no_grad():
        return drafter.propose(rows)


KINDS = {
    "seeds": {},
    "masks": {"mask": 7, "from_anchor": False},
    "masks, from the anchor": {"mask": 7},
    "causal": {"mask": 7, "from_anchor": False, "causal": True},
}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "torch"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_network_computes_what_its_formulas_say(target, layers, packed, kind):
    drafter = Dflash(random_file(target, layers, **KINDS[kind]), target)
    if not packed:
        drafter.net = BlockNet(drafter.file.shape, drafter.file.tensors, target, packed=False)
    assert drafter.net._plan.ready is (packed and works())
    wanted = said(drafter, target, TEXT)
    got = logits(drafter, [begun(drafter, target, TEXT)], [TEXT])[0]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    # Planted: positions one off, rows that do not see the whole block, another pending token,
    # another token long before. The comparison tells all of them.
    other = said(drafter, target, [*TEXT[:-1], 9]), said(drafter, target, [6, *TEXT[1:]])
    causal = kind != "causal"
    planted = said(drafter, target, TEXT, late=1), said(drafter, target, TEXT, causal=causal)
    for wrong in (*other, *planted):
        assert float((wrong - wanted).abs().max()) > 1e-2


@pytest.mark.parametrize("tree", ["chain", "3x2x1x1", "dynamic:8:0"])
def test_recorded_laws_are_those_of_the_rows(target, drafter, tree):
    """q of every group is the softmax, at the temperature, of the row of its depth."""
    shape = budget(tree, 30, 4).shape
    (draft,) = proposed(
        drafter, [begun(drafter, target, TEXT)], [TEXT], Budget(30, 9, shape=shape), Drawn.IID, 0.8
    )
    assert max(draft.depth_N) == SLOTS and len(draft.groups) >= SLOTS, "no deeper than a block"
    law_SD = (said(drafter, target, TEXT) / 0.8).softmax(-1)
    apart = 0.0
    for group in draft.groups:
        depth, law = len(draft.path(group.parent)), draft.laws[group.law]
        assert torch.equal(law.id_S, drafter.file.vocab.to_target_D)
        torch.testing.assert_close(law.prob_S, law_SD[depth], atol=1e-5, rtol=1e-3)
        apart = max(apart, float((law.prob_S - law_SD[(depth + 1) % SLOTS]).abs().max()))
    assert apart > 0.01, "planted: the law of another row would be seen"


def test_one_pass_of_the_network_per_draft_however_deep(target, drafter, monkeypatch):
    passes, real = [], drafter.net.run
    monkeypatch.setattr(drafter.net, "run", lambda *a: passes.append(a) or real(*a))
    texts = [TEXT, TEXT[:4]]
    states = [begun(drafter, target, text) for text in texts]
    drafts = proposed(drafter, states, texts, WIDE)
    assert len(passes) == 1 and all(max(d.depth_N) == SLOTS for d in drafts)


def test_nodes_of_several_levels_at_once(target, drafter):
    """Whoever grows the tree may ask for nodes of different depths in one call."""
    state = begun(drafter, target, TEXT)
    drafter.forget(state)
    with torch.no_grad():
        whole = drafter.expand([Branch(state, TEXT, (ROOT,), [], [])])[0]
        got, _ = drafter.expand([Branch(state, TEXT, (1, 2), [4, 6, 10], [ROOT, ROOT, 0])])
    wanted = said(drafter, target, TEXT)
    torch.testing.assert_close(whole[0], wanted[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got, wanted[1:3], atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not works(), reason="C cannot be compiled for this machine")
def test_rounded_weights_give_nearly_the_same_laws(target, drafter):
    rounded = Dflash(random_file(target), target, "int8")
    both = [logits(one, [begun(one, target, TEXT)], [TEXT])[0].softmax(-1) for one in (drafter, rounded)]
    assert 0 < float((both[0] - both[1]).abs().sum(-1).max()) / 2 < 0.03


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_drafts_what_single_sequences_do_bit_for_bit(dtype, quantize):
    target = tiny(dtype=dtype)
    drafter = Dflash(random_file(target), target, quantize)
    texts = [TEXT, TEXT[2:7], TEXT[:2], LONG]
    states = [begun(drafter, target, text) for text in texts]
    batch = logits(drafter, states, texts)
    for state, text, one in zip(states, texts, batch, strict=True):
        assert torch.equal(logits(drafter, [state], [text])[0], one)
    assert len({tuple(one.argmax(-1).tolist()) for one in batch}) == len(texts)


def test_pieces_and_dropped_drafts_change_nothing(target, drafter):
    whole = logits(drafter, [begun(drafter, target, LONG)], [LONG])
    state = begun(drafter, target, LONG, cuts=(1, 3, 40, 76))
    (first,) = proposed(drafter, [state], [LONG], WIDE, Drawn.IID, 0.9)
    proposed(drafter, [state], [LONG], Budget(2, 1), Drawn.IID, 0.9, seed=8)
    (again,) = proposed(drafter, [state], [LONG], WIDE, Drawn.IID, 0.9)
    assert (again.token_N, again.parent_N) == (first.token_N, first.parent_N)
    assert torch.equal(logits(drafter, [state], [LONG]), whole)
    mark = drafter.mark(state)
    longer = [*LONG, 4, 6]
    show(drafter, state, target, longer[:-1], len(LONG) - 1)
    later = logits(drafter, [state], [longer])
    assert not torch.equal(later, whole)
    assert torch.equal(later, logits(drafter, [begun(drafter, target, longer)], [longer]))
    assert torch.equal(logits(drafter, [drafter.rewind(state, mark)], [LONG]), whole)


def test_rows_of_a_kept_path_need_not_be_neighbours(target, drafter):
    """After a tree the features of the kept rows count, and those of the others do not."""
    state = drafter.begin(Request(prompt=tuple(TEXT)))
    kept = (0, 2, 5)
    show(drafter, state, target, TEXT, rows=kept)
    text = [*(TEXT[row] for row in kept), 33]
    got = logits(drafter, [state], [text])[0]
    taps = {name: one.clone() for name, one in scored(drafter, target, TEXT).of(0).taps.items()}
    file = drafter.file
    for rows, same in ((kept, True), ((0, 1, 2), False), ((0, 2, 4), False)):
        part = {name: one[list(rows)] for name, one in taps.items()}
        y = block(file.shape, file.tensors, target, part, 33)
        wanted = target.head(y)[:, file.vocab.to_target_D]
        assert torch.allclose(got, wanted, atol=1e-3) == same


def test_without_features_there_is_no_draft(target, drafter):
    state = begun(drafter, target, TEXT)
    assert len(proposed(drafter, [state], [[*TEXT, 3]], WIDE)[0]) == 0, "a row was not shown"
    unseen = Outcome(Draft(), Scored(torch.zeros(0, 1), (0, 0)), Verdict((), ()), (8,), (0,), 10)
    drafter.observe([state], [unseen])
    assert len(proposed(drafter, [state], [[*TEXT, 3]], WIDE)[0]) == 0
    show(drafter, state, target, [*TEXT, 3, 9], start=12)  # features come again, later
    assert len(proposed(drafter, [state], [[*TEXT, 3, 9, 4]], WIDE)[0]) > 0
    slots = len(drafter.cache._slots)
    drafter.end(state)
    assert len(drafter.cache._slots) == slots - 1


def test_the_calibrated_tree_stands_in_for_the_stock_one(target):
    """Its first nodes are the likeliest, so they are those of a smaller tree."""
    tree = table([-1, 0, 1, -1, 3, 2, -1, -1])
    drafter = Dflash(random_file(target, tree=tree), target)
    state = begun(drafter, target, TEXT)
    for shape, size, paths in (
        (STOCK, None, [1, 1, 2, 2, 3]),
        (STOCK, 3, [1, 2, 3]),
        (STOCK, 4, [1, 1, 2, 3]),
        ("2x1", None, [1, 1, 2, 2]),
        ("chain", 3, [1, 2, 3]),
    ):
        (draft,) = proposed(drafter, [state], [TEXT], budget(shape, size, 4))
        assert sorted(draft.depth_N) == paths, (shape, size)
    plain = Dflash(random_file(target), target)
    (draft,) = proposed(plain, [begun(plain, target, TEXT)], [TEXT], budget(STOCK, 4, 4))
    assert sorted(draft.depth_N) == [1, 1, 2, 3], "the first nodes of the stock tree, which are deep"


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """A drafter folder whose network was moved away from its start."""
    torch.manual_seed(0)
    config = DflashTraining(rows="seeds", slots=3, layers=1)
    objective = DflashObjective.build(config, target, half(target))
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    out = tmp_path_factory.mktemp("net") / "dflash"
    objective.save(out, {})
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_text_is_plain_text_in_any_dtype(dtype, folder):
    engine = Engine.load("tiny", dtype=dtype, drafter="none")
    settings = {"max_new_tokens": 24, "ignore_eos": True}
    prompts = [TEXT, TEXT[:3], LONG]
    plain = engine.generate(prompts, drafter="none", **settings)
    for tree in ("", " tree=3x2x1", " tree=chain verifier=match"):
        fast = engine.generate(prompts, drafter=f"dflash[model={folder}{tree}]", **settings)
        assert [r.tokens for r in fast] == [r.tokens for r in plain]
        assert sum(r.counters.accepted for r in fast) > 0


def test_what_cannot_be_read_is_said(target, folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    weights = (folder / "model.safetensors").read_bytes()
    for number, (wrong, message) in enumerate(
        (
            ({"slots": 0}, "slots of at least 1"),
            ({"taps": []}, "need taps"),
            ({"slots": 4}, r"'slots.weight' has shape \[3, 64\], its config needs \[4, 64\]"),
            ({"taps": ["hidden.1"]}, "'fc.weight' has shape"),
            ({"draft_vocab_size": 5}, "draft_vocab_size is 5"),
            ({"tree": [-1, 5]}, "need an earlier node"),
            ({"decoder": {}}, "the decoder's fields are not right"),
            ({"target_digest": "0", "target_likeness": None}, r"was trained for tiny \(0\)"),
            ({"method": "medusa"}, "method 'medusa', not 'dflash'"),
        )
    ):
        path = tmp_path / str(number)
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**config, **wrong}))
        (path / "model.safetensors").write_bytes(weights)
        with pytest.raises(ModelError, match=message):
            Dflash.load(TrainedConfig(model=str(path)), target)
