"""Kangaroo: one computation per row, an adapter cache in step, laws as recorded, two exits.

What every drafter owes in float32 (text, laws, budgets, stops, seeds, batches) is in
``tests/conformance``.
"""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace import Engine, ModelError, SpecError
from outpace.cache.base import Lease
from outpace.coins import KeyedCoins, Stream
from outpace.drafters import trained
from outpace.drafters.base import Request
from outpace.drafters.shallow import Doubt, ShallowRows
from outpace.methods.early_exit.adapter_rows import AdapterRows
from outpace.methods.early_exit.kangaroo_drafter import Kangaroo, KangarooConfig
from outpace.methods.early_exit.kangaroo_objective import KangarooObjective, KangarooTraining
from outpace.models.passes import PassRows
from outpace.models.tiny import tiny
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.train.align import DRAFT_MODEL, Aligned
from outpace.train.batches import Batch
from outpace.tree.growth import Branch, DraftRow
from outpace.tree.shapes import budget
from outpace.types import ROOT, Budget, Draft, Drawn, Feed, Outcome, Shape, Signals, Verdict
from tests.drafters.support import count_rows, lacking, without_hand_over, written_off_start

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42, 43, 44], [77]]
TEXT = [5, 9, 11, 40, 7, 150, 5, 9, 12, 77, 8]
LONG = {"max_new_tokens": 14, "ignore_eos": True, "seed": 3}
EXIT = 4


def adapter(target, folder, vocab=None, layer=EXIT):
    config = KangarooTraining(exit_layer=layer)
    return written_off_start(KangarooObjective.build(config, target, vocab), folder)


@pytest.fixture(scope="module")
def target():
    return tiny(layers=6)


@pytest.fixture(scope="module")
def known(target):
    return lacking(target, 7)


@pytest.fixture(scope="module")
def objective(target, known, tmp_path_factory):
    return adapter(target, tmp_path_factory.mktemp("adapter"), known)


@pytest.fixture(scope="module")
def engine(target):
    return Engine(target, drafter="none")


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTPACE_DATA", str(tmp_path / "data"))


def loaded(objective, threshold=0.0):
    config = KangarooConfig(model=str(objective.folder), threshold=threshold, quantize=None)
    return Kangaroo.load(config, objective.target)


def tokens(results):
    return [one.tokens for one in results]


def test_the_text_is_plain_text_in_bfloat16_too(known, tmp_path):
    target = tiny(layers=6, dtype=torch.bfloat16)
    engine = Engine(target, drafter="none")
    adapter(target, tmp_path / "a", known)
    unknown = frozenset(range(0, target.vocab_size, 7))  # nothing that it can draft
    for more in ({}, {"temperature": 0.8}, {"temperature": 0.8, "allowed_tokens": unknown}):
        settings = {**LONG, **more, "reproducible": True}
        plain = tokens(engine.generate(PROMPTS, drafter="none", **settings))
        for shape in ("", "tree=3x2x1") if len(more) < 2 else ("",):
            spec = f"kangaroo[model={tmp_path / 'a'} threshold=0 {shape}]"
            fast = engine.generate(PROMPTS, drafter=spec, **settings)
            assert tokens(fast) == plain
            assert len(more) == 2 or sum(one.counters.accepted for one in fast) > 0


@pytest.mark.parametrize(
    ("spec", "temperature"),
    [("threshold=0", 0.9), ("threshold=0 tree=3x2x1", 0.0), ("tree=dynamic:8:0", 0.9)],
)
def test_every_layer_runs_once_per_drafted_token(engine, target, objective, monkeypatch, spec, temperature):
    rows = count_rows(monkeypatch, target)
    spec = f"kangaroo[model={objective.folder} {spec}]"
    settings = {**LONG, "temperature": temperature, "reproducible": False}
    results = engine.generate(PROMPTS, drafter=spec, **settings)
    passed = sum(one.counters.passes + one.counters.drafted for one in results)
    prompt = sum(map(len, PROMPTS))
    assert rows == [prompt + passed] * target.num_layers
    # The count can fail: without the hand-over, rows below the exit are computed again.
    without_hand_over(monkeypatch, engine.method(spec).drafter)
    rows[:] = [0] * target.num_layers
    again = engine.generate(PROMPTS, drafter=spec, **settings)
    assert tokens(again) == tokens(results) and rows[0] > rows[-1] == prompt + passed


def test_levels_of_a_dynamic_tree_are_priced_by_the_weights_that_they_read(engine, target, objective):
    (level,) = loaded(objective).traits.level_D
    assert level == pytest.approx(EXIT / target.num_layers, abs=0.05)
    spec = f"kangaroo[model={objective.folder} threshold=0 tree=dynamic"
    priced = engine.generate(PROMPTS, drafter=f"{spec}]", **LONG)
    filled = engine.generate(PROMPTS, drafter=f"{spec}:8:0]", **LONG)
    deep = [sum(one.counters.drafted_at[1:]) for results in (priced, filled) for one in results]
    assert sum(deep[:3]) < sum(deep[3:])


def states_of(drafter, text):
    """States after the exit of a fresh pass over a text."""
    cache = drafter.target.new_cache()
    scored = drafter.target.score([Feed.chain(cache.open(), text)], cache, taps=drafter.traits.taps)
    return scored.taps[drafter.tap]


def in_step(drafter, state, text):
    """Whether the adapter's cache and what waits are those of the committed text, to the bit."""
    held, start = drafter.cache.length(state.slot), state.start
    if [*drafter.cache.ids(state.slot), *state.ids] != text[start:]:
        return False
    states, cache = states_of(drafter, text)[start:], drafter.rows.adapter.new_cache()
    rows = PassRows([Feed.chain(cache.open(), text[start:], want=())], cache, 1)
    drafter.rows.adapter.run(rows, cache, [start], states)
    waiting = torch.cat([torch.empty(0, states.shape[1]), *state.waiting])
    return torch.equal(waiting, states[held:]) and all(
        torch.equal(store[0, state.slot :][:1, :held].flatten(), other[0, :1, :held].flatten())
        for store, other in zip(drafter.cache.by_row, cache.by_row, strict=True)
    )


def watch(drafter, monkeypatch):
    """(whether all is in step, rows that the cache gained, outcome) of every commit from now on."""
    texts, alive, seen, real = {}, [], [], drafter.observe

    def observing(states, outcomes):
        before = [drafter.cache.length(state.slot) for state in states]
        real(states, outcomes)
        alive.extend(states)
        for state, outcome, held in zip(states, outcomes, before, strict=True):
            text = texts.setdefault(id(state), [])
            text += outcome.fed
            grown = drafter.cache.length(state.slot) - held
            seen.append((in_step(drafter, state, text), grown, outcome))

    monkeypatch.setattr(drafter, "observe", observing)
    return seen


@pytest.mark.parametrize(
    ("spec", "temperature"), [("", 0.9), ("tree=dynamic:8:0 tree_size=6", 0.0), ("tree=2x2x1", 0.9)]
)
def test_the_adapter_cache_is_in_step_after_every_commit(engine, objective, monkeypatch, spec, temperature):
    spec = f"kangaroo[model={objective.folder} threshold=0 {spec}]"
    settings = {**LONG, "temperature": temperature}
    seen = watch(engine.method(spec).drafter, monkeypatch)
    right = engine.generate(PROMPTS, drafter=spec, **settings)
    assert len(seen) > 20 and all(same for same, _, _ in seen)
    # Keys that drafts made are kept: nothing that was accepted is read again, but the last token.
    assert sum(grown for _, grown, outcome in seen if not outcome.forced) > 10
    drafted = [outcome for _, _, outcome in seen if len(outcome.draft)]
    assert any(len(o.verdict.kept) < max(o.draft.depth_N) for o in drafted), "some were refused"
    assert any(len(o.verdict.kept) > 0 for o in drafted), "some were accepted"
    # Planted: of a draft the row of its first node stays, whether it was accepted or not.
    real = AdapterRows._keep

    def stale(self, state, outcome):
        return real(self, state, replace(outcome, row_F=(0, 1) if len(outcome.draft) else ()))

    seen.clear()
    monkeypatch.setattr(AdapterRows, "_keep", stale)
    wrong = engine.generate(PROMPTS, drafter=spec, **settings)
    assert not all(same for same, _, _ in seen), "the comparison is not blind"
    assert temperature or tokens(wrong) == tokens(right), "yet nothing is lost"


def show(drafter, state, text, start, stop):
    """Let a drafter see the rows of ``text[start:stop]``, forced."""
    cache = drafter.target.new_cache()
    passed = drafter.target.score([Feed.chain(cache.open(), text[:stop])], cache, taps=drafter.traits.taps)
    rows = tuple(range(start, stop))
    forced = Outcome(
        Draft(), passed.of(0), Verdict((), ()), tuple(text[start:stop]), rows, start, forced=True
    )
    drafter.observe([state], [forced])


def begun(drafter, text, cuts=(), held=0):
    """A state that saw the committed part of a text, in pieces."""
    state = drafter.begin(Request(prompt=tuple(text), num_cached=held))
    for start, stop in pairwise([held, *cuts, len(text) - 1]):
        if stop > start:
            show(drafter, state, text, start, stop)
    return state


def leased(drafter, states, texts, asked, drawn=Drawn.CHOSEN, temperature=0.0, seed=1):
    """Rows for a drafter, each with a slot that holds its text but for the pending token."""
    target, rows = drafter.target, []
    cache = target.new_cache()
    params = SamplingParams(temperature=temperature, seed=seed).resolved(None)
    for state, text in zip(states, texts, strict=True):
        slot = cache.open()
        if len(text) > 1:
            target.score([Feed.chain(slot, text[:-1], want=())], cache)
            cache.keep(slot, range(len(text) - 1))
        coins = KeyedCoins(seed, len(text) - 1, Stream.DRAFT)
        warp = Warp(params, text, frozenset(), target.vocab_size)
        rows.append(DraftRow(state, text, asked, coins, warp, drawn, Lease(cache, slot)))
    return rows


def chain_logits(drafter, state, text, guesses):
    """The drafter's own, level by level; the draft is left behind, as one that nobody saw."""
    (row,) = leased(drafter, [state], [text], Budget(9, 9))
    drafter.rows.ready(state, len(text) - 1)
    state.rows = ShallowRows(row.lease, drafter.layer)
    out = []
    for i in range(len(guesses) + 1):
        branch = Branch(state, text, (i - 1,) if i else (ROOT,), guesses[:i], [*range(-1, i - 1)])
        out.append(drafter.expand([branch])[0])
    return torch.cat(out)


def learned_logits(objective, text):
    """What the network in training says at every row of a text but the last, [T - 1, D]."""
    target, tap, size = objective.target, f"hidden.{objective.layer}", len(text)
    cache = target.new_cache()
    feature = target.score([Feed.chain(cache.open(), text)], cache, taps=frozenset({tap})).taps
    batch = Batch(
        token_BT=torch.tensor([text]),
        length_B=torch.tensor([size]),
        answer_BT=torch.ones(1, size, dtype=torch.bool),
        feature={tap: feature[tap][None]},
    )
    with torch.no_grad():
        return (objective.outputs(batch, Aligned(batch, DRAFT_MODEL)) @ objective.head().T)[0]


def test_one_go_and_piece_by_piece_are_the_same_bits(objective):
    drafter = loaded(objective)
    whole = chain_logits(drafter, begun(drafter, TEXT), TEXT, [4, 8])
    pieces = begun(drafter, TEXT, (1, 2, 5))
    assert torch.equal(chain_logits(drafter, pieces, TEXT, [4, 8]), whole)
    # With a draft after every token the rows go through the adapter one by one.
    state = drafter.begin(Request(prompt=tuple(TEXT)))
    for stop in range(1, len(TEXT)):
        show(drafter, state, TEXT, stop - 1, stop)
        last = chain_logits(drafter, state, TEXT[: stop + 1], [4, 8])
    assert torch.equal(last, whole)
    # A long prompt goes through the adapter when it comes.
    text = (TEXT * 16)[:150]
    one, other = begun(drafter, text), begun(drafter, text, (40, 41, 100))
    for state in (one, other):
        assert in_step(drafter, state, text[:-1])
    assert drafter.cache.length(one.slot) == len(text) - 1 and not one.ids
    assert torch.equal(*(chain_logits(drafter, each, text, [4, 8]) for each in (one, other)))


def test_rows_that_were_never_shown_are_left_out_and_positions_stay(objective):
    drafter = loaded(objective)
    whole = chain_logits(drafter, begun(drafter, TEXT), TEXT, [4])
    part = begun(drafter, TEXT, held=4)
    assert part.start == 4 and in_step(drafter, part, TEXT[:-1])
    # After a gap, and with nothing seen at all, rows begin with the pending token.
    gap, blank = begun(drafter, TEXT[:4]), drafter.begin(Request(prompt=tuple(TEXT)))
    said = [chain_logits(drafter, each, TEXT, [4]) for each in (part, gap, blank)]
    assert gap.start == blank.start == len(TEXT) - 1 and torch.equal(said[1], said[2])
    for one, other in ((said[0], whole), (said[1], whole), (said[0], said[1])):
        assert float((one - other).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("tree", "drawn"),
    [
        ("chain", Drawn.IID),
        ("3x2x1", Drawn.DISTINCT),
        ("[-1,-1,0,0,2,2,5]", Drawn.CHOSEN),
        ("dynamic:2", Drawn.CHOSEN),
        ("dynamic:2", Drawn.IID),
    ],
)
def test_verification_goes_on_where_the_draft_stopped(target, objective, tree, drawn):
    """Logits are, bit for bit, those of a pass that knows of no draft; so are the states."""
    drafter = loaded(objective)
    asked = budget(tree, 7 if tree == "chain" else None, 4)
    temperature = 0.0 if drawn is Drawn.CHOSEN else 0.9
    for text in (TEXT, [77]):
        state = begun(drafter, text)
        (row,) = leased(drafter, [state], [text], asked, drawn, temperature)
        (draft,) = drafter.propose([row])
        cache, slot = row.lease.cache, row.lease.slot
        covered = len(draft.resume.row_K)
        feed = Feed.tree(slot, text[-1], draft)
        assert tuple(cache.slot(slot).tail_ids) == feed.token_J[:covered]
        assert 1 < covered <= len(draft) or "dynamic" in tree
        own = drafter.cache.slot(state.slot)
        assert tuple(own.tail_ids) == (*state.ids, *feed.token_J[:covered])
        cache.check_integrity()
        scored = target.score([feed], cache, taps=drafter.traits.taps)
        (fresh,) = leased(drafter, [state], [text], asked)
        plain = Feed(fresh.lease.slot, feed.token_J, feed.parent_J)
        again = target.score([plain], fresh.lease.cache, taps=drafter.traits.taps)
        assert torch.equal(scored.logits_TV, again.logits_TV)
        assert torch.equal(scored.taps[drafter.tap], again.taps[drafter.tap])


@pytest.mark.parametrize(("tree", "drawn"), [("chain", Drawn.IID), ("2x2x1", Drawn.DISTINCT)])
def test_recorded_laws_are_those_of_the_adapter(objective, known, tree, drawn):
    """q of every group is the softmax, at the temperature, of what training computes there."""
    drafter, asked = loaded(objective), budget(tree, 3 if tree == "chain" else None, 4)
    rows = leased(drafter, [begun(drafter, TEXT)], [TEXT], asked, drawn, 0.9)
    (draft,) = drafter.propose(rows)
    assert len(draft.groups) == (3 if tree == "chain" else 7)
    for group in draft.groups:
        path = [*TEXT, *draft.path_tokens(group.parent), 0]
        before, wanted = (learned_logits(objective, path)[-2:] / 0.9).softmax(1)
        law = draft.laws[group.law]
        assert torch.equal(law.id_S, known.to_target_D)
        torch.testing.assert_close(law.prob_S, wanted, atol=1e-5, rtol=2e-3)
        assert float((law.prob_S - before).abs().max()) > 0.01, "a shift would be seen"


def test_the_second_exit_keeps_the_token_that_it_doubts(objective):
    """A chain ends after the first token below the threshold, with that token, or at its budget."""
    threshold, lengths = 0.03, set()
    for seed in range(8):
        drafts = []
        for drafter in (loaded(objective, threshold), loaded(objective)):
            state = begun(drafter, TEXT)
            rows = leased(drafter, [state], [TEXT], Budget(6, 6), Drawn.IID, 0.6, seed)
            drafts += drafter.propose(rows)
        short, long = drafts
        q = [law.prob(token) for law, token in zip(long.laws, long.token_N, strict=True)]
        doubted = next((i for i, prob in enumerate(q) if prob < threshold), 5)
        assert short.token_N == long.token_N[: doubted + 1], "dropping it would be shorter by one"
        lengths.add(len(short))
    assert len(long) == 6 and len(lengths) > 2
    sure = Signals(torch.ones(3, dtype=torch.int64), torch.tensor([0.1, 0.5, 0.9]))
    assert Doubt(0.5).more(sure).tolist() == [False, True, True]
    assert Doubt(0.5, Doubt(0.8)).more(sure).tolist() == [False, False, True]


def test_defaults_are_those_of_the_paper(objective, engine):
    drafter = loaded(objective, None)
    shapes = Shape(), budget("2x2", None, 4).shape, budget("dynamic", 6, 4).shape
    assert [drafter._threshold(shape) for shape in shapes] == [0.6, 0.4, 0.4]
    assert engine.method(f"kangaroo[model={objective.folder}]").budget.max_nodes == 6
    assert loaded(objective, 0.0)._threshold(Shape()) == 0.0


def test_a_text_that_is_taken_back(objective):
    drafter, longer = loaded(objective), (TEXT * 8)[:60]
    state = begun(drafter, TEXT)
    before = chain_logits(drafter, state, TEXT, [4])
    mark = drafter.mark(state)
    show(drafter, state, longer, 10, 60)
    assert in_step(drafter, state, longer) and drafter.cache.length(state.slot) == 60
    state = drafter.rewind(state, mark)
    assert in_step(drafter, state, TEXT[:-1])
    assert torch.equal(chain_logits(drafter, state, TEXT, [4]), before)
    # A gap between costs the rows before it; those behind it are not taken for them.
    show(drafter, state, longer, 10, 50)
    mark = drafter.mark(state)
    show(drafter, state, (TEXT * 20)[:120], 60, 120)
    state = drafter.rewind(state, mark)
    assert state.start is None and not drafter.cache.length(state.slot)


def test_a_draft_of_depth_d_counts_d_passes_and_needs_a_lease(objective):
    drafter, texts = loaded(objective), [TEXT, TEXT[:5], TEXT[:6], TEXT[:7]]
    states = [begun(drafter, text) for text in texts]
    rows = leased(drafter, states, texts, Budget(4, 4))
    rows[0], rows[1] = replace(rows[0], lease=None), replace(rows[1], budget=Budget(0, 0))
    before = drafter.clock.count
    drafts = drafter.propose(rows)
    assert [len(draft) for draft in drafts] == [0, 0, 4, 4]
    assert [draft.resume is None for draft in drafts] == [True, True, False, False]
    assert drafter.clock.count == before + 4 and drafter.clock.seconds > 0
    for state in states:
        drafter.end(state)
    assert not drafter.cache._slots


def test_the_head_is_the_targets_and_in_no_file(target, objective, known):
    tensors = load_file(objective.folder / "model.safetensors")
    largest = max(one.numel() for name, one in tensors.items() if name not in ("d2t", "t2d"))
    assert largest == target.hidden_size**2, "no head, no embedding"
    drafter = loaded(objective)
    assert len(drafter._id_D) == len(known.to_target_D)
    # Without a reduced vocabulary the whole head is used; the name alone finds what was trained.
    adapter(target, trained.home("kangaroo", target))
    found = Kangaroo.load(KangarooConfig(quantize=None), target)
    whole = chain_logits(found, begun(found, TEXT), TEXT, [])
    part = chain_logits(drafter, begun(drafter, TEXT), TEXT, [])
    assert found._id_D is None and whole.shape == (1, target.vocab_size)
    torch.testing.assert_close(whole[:, known.to_target_D], part, atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_said(engine, target, objective, tmp_path):
    with pytest.raises(ModelError, match=r"no trained kangaroo for .*outpace train kangaroo"):
        Kangaroo.load(KangarooConfig(), target)
    with pytest.raises(SpecError, match=r"threshold must be in \[0, 1\], got 1.5"):
        engine.generate([1, 2], drafter="kangaroo[threshold=1.5]")
    config = json.loads((objective.folder / "config.json").read_text())
    tensors = load_file(objective.folder / "model.safetensors")

    def refused(words, tensors=tensors, **changes):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=words):
            Kangaroo.load(KangarooConfig(model=str(tmp_path)), target)

    refused("layer is 6, need 1 to 5", layer=6)
    refused("layer is None", layer=None)
    refused("holds a drafter of method 'eagle3', not 'kangaroo'", method="eagle3")
    refused("was trained for", target_digest="0", target_likeness=None)
    refused("fields are not right", decoder={})
    refused("look at norm.weight", tensors={**tensors, "norm.weight": torch.ones(3)})
    refused("look at lm_head.weight", tensors={**tensors, "lm_head.weight": torch.ones(3)})
    less = {name: one for name, one in tensors.items() if "o_proj" not in name}
    refused("look at self_attn.o_proj.weight", tensors=less)
