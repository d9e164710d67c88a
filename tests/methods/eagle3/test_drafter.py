"""EAGLE heads: the network against a plain one, its bookkeeping, and what a draft leaves."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from outpace import Engine
from outpace.cache.dense import DenseCache
from outpace.coins import KeyedCoins, Stream
from outpace.drafters import feature_rows
from outpace.drafters.base import Request
from outpace.drafters.features import TrainedConfig
from outpace.law import VocabMap
from outpace.methods.eagle3.drafter import Eagle3
from outpace.methods.eagle3.net import EagleNet
from outpace.methods.eagle3.objective import Eagle3 as Objective
from outpace.methods.eagle3.objective import Eagle3Config as Training
from outpace.models import few_rows, plan
from outpace.models.attention import Attention, Span
from outpace.models.decoder import Decoder
from outpace.models.memory import MemoryCheckpoint
from outpace.models.passes import PassRows
from outpace.models.products import works
from outpace.models.tiny import tiny
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.train.align import EAGLE, Aligned
from outpace.tree.growth import Branch, DraftRow
from outpace.tree.shapes import parse_shape
from outpace.types import ROOT, Budget, Draft, Drawn, Feed, Outcome, Scored, Verdict
from tests.methods.eagle3.oracle import Oracle, random_tensors, shape_for
from tests.train.texts import written

TEXT = [5, 9, 11, 40, 7, 150, 5, 9, 12, 77, 8]


@pytest.fixture(scope="module")
def target():
    return tiny()


def tied():
    """The tiny model with one matrix for embedding and head."""
    plain = tiny()
    config = replace(plain.config, tied_head=True)
    tensors = {name: plain.checkpoint.tensor(name) for name in config.tensor_shapes()}
    return Decoder.load(MemoryCheckpoint(config, tensors, name="tied"), dtype=torch.float32)


def every(target, step=2):
    """Every ``step``-th token."""
    return torch.arange(0, target.vocab_size, step)


def made(target, packed=True, quantize=None, **flags):
    """A drafter with a random head, and the oracle of the same head."""
    ids = every(target)
    shape = shape_for(target, draft_vocab=len(ids), **flags)
    tensors = random_tensors(shape)
    net = EagleNet(shape, tensors, target, id_D=ids, packed=packed, quantize=quantize)
    return Eagle3(net, ids if shape.fused else None), Oracle(shape, tensors, target)


def scored(target, taps, text):
    """A pass of the target over a text."""
    cache = target.new_cache()
    return target.score([Feed.chain(cache.open(), text)], cache, taps=taps)


def show(drafter, state, target, text, start=0, stop=None):
    """Let a drafter see the rows of ``text[start:stop]``, forced."""
    stop = len(text) if stop is None else stop
    passed = scored(target, drafter.traits.taps, text[:stop])
    rows = tuple(range(start, stop))
    drafter.observe(
        [state],
        [Outcome(Draft(), passed.of(0), Verdict((), ()), tuple(text[start:stop]), rows, start, forced=True)],
    )


def begun(drafter, target, text, cuts=()):
    """A state that saw all of a text but the pending token, in pieces."""
    state = drafter.begin(Request(prompt=tuple(text)))
    borders = [0, *cuts, len(text) - 1]
    for start, stop in pairwise(borders):
        show(drafter, state, target, text, start, stop)
    return state


def expected(oracle, target, text, guesses, start=0):
    """Logits after the pending token and after each of a chain of guesses."""
    oracle.keys, oracle.values = [], []
    taps = scored(target, frozenset(oracle.shape.taps), text).of(0).taps
    for t in range(start, len(text) - 1):
        features = [taps[name][t].float() for name in oracle.shape.taps]
        a, logits = oracle.row(text[t + 1], oracle.fuse(features), t)
    out = [logits]
    for i, token in enumerate(guesses):
        a, logits = oracle.row(token, a, len(text) - 1 + i)
        out.append(logits)
    return torch.stack(out)


def chain_logits(drafter, state, text, guesses):
    """The drafter's own, level by level."""
    drafter.forget(state)
    out = []
    for i in range(len(guesses) + 1):
        nodes = (ROOT,) if i == 0 else (i - 1,)
        branch = Branch(state, text, nodes, guesses[:i], list(range(-1, i - 1)))
        out.append(drafter.expand([branch])[0])
    return torch.cat(out)


FLAGS = [
    {},
    {"residual_normed": True},
    {"output_normed": True},
    {"joint_norm": True},
    {"each_norm": True},
    {"fused": False, "taps": ("hidden.-1",)},
    {"fused": False, "fc_bias": True, "taps": ("hidden.-1",)},
]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "torch"])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(flags) or "plain")
def test_the_head_computes_what_its_formulas_say(target, flags, packed):
    drafter, oracle = made(target, packed, **flags)
    assert drafter.net._plans[True].ready is (packed and works())
    state = begun(drafter, target, TEXT)
    guesses = [4, 8, 200]
    wanted = expected(oracle, target, TEXT, guesses)
    got = chain_logits(drafter, state, TEXT, guesses)
    tolerance = 3e-5 if flags.get("fused", True) else 3e-4  # no norms: larger numbers
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
    for change in (5, 9):  # an earlier token and a guess matter: the comparison is not blind
        other = [change if t == TEXT[3] else t for t in TEXT] if change == 5 else TEXT
        changed = expected(oracle, target, other, guesses if change == 5 else [4, 9, 200])
        assert float((changed - wanted).abs().max()) > 1e-2


def test_training_and_drafting_give_the_same_logits(target, tmp_path):
    """The network that is trained, unrolled over a batch, is the one that drafts."""
    taps = ("hidden.2", "hidden.1", "hidden.-1")
    batch = written(target, 3, seed=1, new=12, taps=taps)
    ids = every(target)
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[ids] = torch.arange(len(ids))
    objective = Objective.build(Training(), target, VocabMap(ids, feed_V))
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
            parameter.copy_(parameter.bfloat16())  # as files hold them
    objective.save(tmp_path / "head", {})
    drafter = Eagle3.load(TrainedConfig(model=str(tmp_path / "head"), quantize=None), target)
    assert drafter.net.shape.taps == ("hidden.2", "hidden.1", "hidden.1")
    aligned = Aligned(batch, EAGLE)
    depths, apart = 3, 0.0
    with torch.no_grad():
        outs = [objective.module.lm_head(out) for out in objective.unroll(batch, aligned, depths)]
    for b, a in ((0, 0), (0, 4), (1, 3), (2, 6)):
        row = int(aligned.place_BA[b, a])
        text = batch.token_BT[b, : row + 2].tolist()
        after = batch.token_BT[b, row + 2 : row + depths + 1].tolist()
        state = drafter.begin(Request(prompt=tuple(text)))
        shown = {tap: batch.feature[tap][b, : row + 1].float() for tap in taps}
        rows = tuple(range(row + 1))
        one = Scored(torch.zeros(0, 1), (0, 0), shown, (0, row + 1))
        forced = Outcome(Draft(), one, Verdict((), ()), tuple(text[:-1]), rows, 0, forced=True)
        drafter.observe([state], [forced])
        got = chain_logits(drafter, state, text, after)
        drafter.end(state)
        for depth, out in enumerate(outs):
            torch.testing.assert_close(got[depth], out[b, a], atol=1e-4, rtol=1e-4)
            apart = max(apart, float((got[depth] - out[b, a + 1]).abs().max()))
    assert apart > 0.5, "a neighbouring row would be seen"


CUTS = [(), (3,), (1, 2, 5), tuple(range(1, len(TEXT) - 1))]


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_one_go_and_token_by_token_are_the_same_bits(target, quantize):
    drafter, _ = made(target, quantize=quantize)
    logits = [chain_logits(drafter, begun(drafter, target, TEXT, cuts), TEXT, [4, 8]) for cuts in CUTS]
    for other in logits[1:]:
        assert torch.equal(other, logits[0])
    # With a draft after every token the rows go through the head one by one.
    state = drafter.begin(Request(prompt=tuple(TEXT)))
    for stop in range(1, len(TEXT)):
        show(drafter, state, target, TEXT, stop - 1, stop)
        last = chain_logits(drafter, state, TEXT[: stop + 1], [4, 8])
    assert torch.equal(last, logits[0])


def test_sequences_of_a_batch_do_not_feel_each_other(target):
    for quantize in (None, "int8"):
        drafter, _ = made(target, quantize=quantize)
        texts = [TEXT, TEXT[2:7], TEXT[:4]]
        alone = [chain_logits(drafter, begun(drafter, target, text), text, [4])[0] for text in texts]
        states = [begun(drafter, target, text) for text in texts]
        branches = [Branch(s, text, (ROOT,), [], []) for s, text in zip(states, texts, strict=True)]
        assert torch.equal(drafter.expand(branches)[0], torch.stack(alone))


def test_rounded_weights_give_nearly_the_same_laws(target):
    if not works():
        pytest.skip("C cannot be compiled for this machine")
    logits = []
    for quantize in (None, "int8"):
        drafter, _ = made(target, quantize=quantize)
        logits.append(chain_logits(drafter, begun(drafter, target, TEXT), TEXT, [4, 8]))
        assert (drafter.net._own_head.nbytes < drafter.net._own_head.plain_nbytes()) is bool(quantize)
    apart = (logits[0].softmax(-1) - logits[1].softmax(-1)).abs().sum(-1) / 2
    assert 0 < float(apart.max()) < 0.06, "its head has four bits"


def test_vectors_are_read_from_the_targets_head_where_it_holds_them():
    target = tied()
    lent, own = (made(target, quantize="int8")[0] for _ in range(2))
    if lent.net._vectors is None:
        pytest.skip("C cannot be compiled for this machine")
    own.net._vectors, own.net._embed = None, target.embed
    own.net._plans = {features: own.net._plan(features) for features in (True, False)}
    both = [chain_logits(one, begun(one, target, TEXT), TEXT, [4, 8, 200]) for one in (lent, own)]
    assert torch.equal(*both)
    state = begun(lent, target, TEXT)
    with pytest.raises(IndexError, match="got 5 to 999"):
        lent.expand([Branch(state, [*TEXT[:-1], 999], (ROOT,), [], [])])


def test_a_long_prompt_goes_through_the_head_when_it_comes(target, monkeypatch):
    monkeypatch.setattr(Eagle3, "most_waiting", 32)  # what waits longer is read by the next draft
    drafter, _ = made(target)
    text = (TEXT * 16)[:150]
    whole, pieces = begun(drafter, target, text), begun(drafter, target, text, (40, 41, 100))
    assert drafter.cache.length(whole.slot) == len(text) - 2 and len(whole.ids) == 1
    assert len(pieces.ids) == 1 and drafter.cache.length(pieces.slot) == len(text) - 2
    one, other = (chain_logits(drafter, state, text, [4, 8]) for state in (whole, pieces))
    assert torch.equal(one, other)


@pytest.mark.skipif(not works(), reason="needs compiled code")
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(flags) or "plain")
def test_reading_apart_stores_the_same_keys_and_values(target, flags, quantize):
    """Without queries, and bit for bit what a pass stores that has them."""
    net = made(target, quantize=quantize, **flags)[0].net
    width = target.config.hidden_size * (len(net.taps) if net.shape.fused else 1)
    feature_TF = torch.randn(len(TEXT), width, generator=torch.Generator().manual_seed(7))
    stored = []
    for want in ((), (len(TEXT) - 1,)):
        cache = net.new_cache()
        feed = Feed.chain(cache.open(), TEXT, want=want)
        net.run(PassRows([feed], cache, 1), cache, [3], feature_TF, features=True)
        stored.append([one[:, :, : len(TEXT)] for one in cache.by_row])
    for apart, whole in zip(*stored, strict=True):
        assert torch.equal(apart, whole) and float(apart.abs().min()) > 0


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_a_long_text_is_read_before_a_draft(monkeypatch, tree):
    """A draft is the same, read apart or in the pass of its first level."""
    text, drafts, target = (TEXT * 8)[:80], [], tied()
    for most in (32, 1000):
        monkeypatch.setattr(feature_rows, "_APART", most)
        drafter, _ = made(target)
        state = begun(drafter, target, text)
        rows = rows_for(drafter, [state], [text], Budget(9, 3, shape=parse_shape(tree)), Drawn.CHOSEN, 0.0)
        drafts += drafter.propose(rows)
        assert drafter.cache.length(state.slot) == (len(text) - 2 if works() and most == 32 else 0)
    assert drafts[0].token_N == drafts[1].token_N and drafts[0].parent_N == drafts[1].parent_N


@pytest.mark.parametrize(
    "key,first,cached,known", [("", 5, 64, 64), ("", 5, 70, 64), ("other", 5, 64, 0), ("", 6, 64, 0)]
)
def test_rows_of_a_prefix_come_from_who_read_it(target, key, first, cached, known):
    """A text whose first tokens no pass shows is followed as if they had been shown, as far as pieces go."""
    drafter, _ = made(target)
    text = (TEXT * 8)[:80]
    reader = begun(drafter, target, text)
    whole = chain_logits(drafter, reader, text, [4, 8])
    drafter.cache.keep(reader.slot, range(reader.lead))
    drafter.end(reader)
    state = drafter.begin(Request(prompt=(first, *text[1:]), num_cached=cached, key=key))
    assert drafter.cache.length(state.slot) == known
    show(drafter, state, target, text, cached, len(text) - 1)
    assert drafter.end_of(state) == len(text) - 1  # rows stand where they would
    logits = chain_logits(drafter, state, text, [4, 8])
    assert torch.equal(logits, whole) is (known == cached)
    # Rows behind a gap belong to no prefix.
    drafter.cache.keep(state.slot, range(state.lead))
    held = len(drafter._prefixes)
    drafter.end(state)
    assert len(drafter._prefixes) == held


def test_rows_that_were_never_shown_are_left_out_and_positions_stay(target, monkeypatch):
    drafter, oracle = made(target, packed=False)
    held = 4
    state = drafter.begin(Request(prompt=tuple(TEXT), num_cached=held))
    show(drafter, state, target, TEXT, held, len(TEXT) - 1)
    seen, real = [], drafter.net._layer.rotation.at
    monkeypatch.setattr(drafter.net._layer.rotation, "at", lambda at: seen.append(at) or real(at))
    got = chain_logits(drafter, state, TEXT, [4])
    wanted = expected(oracle, target, TEXT, [4], start=held)
    torch.testing.assert_close(got, wanted, atol=3e-5, rtol=3e-5)
    assert seen[0][: len(TEXT) - 1 - held] == list(range(held, len(TEXT) - 1))
    assert seen[1][0] == len(TEXT) - 1
    assert float((wanted - expected(oracle, target, TEXT, [4])).abs().max()) > 1e-2


def test_compiled_rows_have_the_same_positions(target, monkeypatch):
    drafter, _ = made(target)
    if not drafter.net._plans[True].ready:
        pytest.skip("C cannot be compiled for this machine")
    seen, real = [], plan.Plan.run
    watched = lambda self, *given: seen.append(given[3].positions) or real(self, *given)  # noqa: E731
    monkeypatch.setattr(plan.Plan, "run", watched)
    held = 4
    state = drafter.begin(Request(prompt=tuple(TEXT), num_cached=held))
    show(drafter, state, target, TEXT, held, len(TEXT) - 1)
    chain_logits(drafter, state, TEXT, [4])
    assert [list(at) for at in seen] == [list(range(held, len(TEXT) - 1)), [len(TEXT) - 1]]


def test_branches_of_a_tree_do_not_see_each_other(target):
    drafter, oracle = made(target)
    state = begun(drafter, target, TEXT)
    #   root -+- 4 -+- 10
    #         |     +- 12
    #         +- 6 --- 14
    tokens, parents = [4, 6, 10, 12, 14], [ROOT, ROOT, 0, 0, 1]
    drafter.forget(state)
    drafter.expand([Branch(state, TEXT, (ROOT,), [], [])])
    first, _ = drafter.expand([Branch(state, TEXT, (0, 1), tokens[:2], parents[:2])])
    second, _ = drafter.expand([Branch(state, TEXT, (2, 3, 4), tokens, parents)])
    got = torch.cat([first, second])
    for node, path in enumerate(([4], [6], [4, 10], [4, 12], [6, 14])):
        alone = chain_logits(drafter, state, TEXT, path)[-1]
        assert torch.equal(got[node], alone), path
        wanted = expected(oracle, target, TEXT, path)[-1]
        torch.testing.assert_close(got[node], wanted, atol=3e-5, rtol=3e-5)
    # Planted: a row that saw its uncle would be told apart.
    length = len(TEXT) - 1
    expected(oracle, target, TEXT, [4, 6])
    oracle.keys, oracle.values = oracle.keys[:length], oracle.values[:length]
    a = torch.zeros(target.hidden_size)
    blind, seeing = (oracle.row(10, a, length + 1, sees)[1] for sees in (range(length), range(length + 1)))
    assert float((blind - seeing).abs().max()) > 1e-3


def rows_for(drafter, states, texts, budget, drawn, temperature, seed=3):
    params = SamplingParams(temperature=temperature, seed=seed).resolved(None)
    return [
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


@pytest.mark.parametrize("drawn", [Drawn.CHOSEN, Drawn.IID, Drawn.DISTINCT])
@pytest.mark.parametrize("tree", ["chain", "3x2x1", "dynamic"])
def test_dropped_drafts_leave_no_trace(target, drawn, tree):
    """Drafts that nobody saw, then a commit: as if they had never been."""
    drafter, _ = made(target)
    temperature = 0.0 if drawn is Drawn.CHOSEN else 0.9
    budget = Budget(9, 3, shape=parse_shape(tree))
    small = Budget(2, 1, shape=parse_shape("2"))
    texts = [TEXT, TEXT[2:7]]
    clean, used = ([begun(drafter, target, text) for text in texts] for _ in range(2))
    with torch.no_grad():
        first = drafter.propose(rows_for(drafter, clean, texts, budget, drawn, temperature))
        for other in (small, budget, small):
            drafter.propose(rows_for(drafter, used, texts, other, drawn, temperature, seed=9))
        again = drafter.propose(rows_for(drafter, used, texts, budget, drawn, temperature))
        assert [d.token_N for d in again] == [d.token_N for d in first]
        assert all(first) and sum(map(len, first)) > 2
        drafter.propose(rows_for(drafter, used[::-1], texts[::-1], small, drawn, temperature))
        longer = [[*text, 30, 31] for text in texts]
        for states in (clean, used):
            for state, text in zip(states, longer, strict=True):
                show(drafter, state, target, text, len(text) - 3, len(text) - 1)
        ends = [
            drafter.propose(rows_for(drafter, states, longer, budget, drawn, temperature))
            for states in (clean, used)
        ]
    for one, other in zip(*ends, strict=True):
        assert (one.token_N, one.parent_N) == (other.token_N, other.parent_N)
        for law, twin in zip(one.laws, other.laws, strict=True):
            assert torch.equal(law.prob_S, twin.prob_S)
    lengths = [drafter.cache.length(state.slot) for state in (*clean, *used)]
    assert lengths[:2] == lengths[2:]


@pytest.mark.parametrize("tree", ["chain", "3x2x1"])
def test_recorded_laws_are_those_of_the_head(target, tree):
    """q of every group is the softmax, at the temperature, of the oracle's logits there."""
    drafter, oracle = made(target)
    state = begun(drafter, target, TEXT)
    budget = Budget(9, 3, shape=parse_shape(tree))
    with torch.no_grad():
        rows = rows_for(drafter, [state], [TEXT], budget, Drawn.IID, 0.8)
        (draft,) = drafter.propose(rows)
    assert len(draft.groups) >= 3
    for group in draft.groups:
        path = list(draft.path_tokens(group.parent))
        law = draft.laws[group.law]
        wanted = (expected(oracle, target, TEXT, path)[-1] / 0.8).softmax(0)
        assert torch.equal(law.id_S, every(target))
        torch.testing.assert_close(law.prob_S, wanted, atol=1e-5, rtol=1e-3)


def test_a_draft_of_depth_d_costs_d_passes(target):
    drafter, _ = made(target)
    states = [begun(drafter, target, TEXT), begun(drafter, target, TEXT[:4])]
    before = drafter.clock.count
    with torch.no_grad():
        drafts = drafter.propose(rows_for(drafter, states, [TEXT, TEXT[:4]], Budget(4, 4), Drawn.CHOSEN, 0.0))
    assert [len(d) for d in drafts] == [4, 4] and drafter.clock.count == before + 4


def test_without_features_there_is_no_draft(target):
    drafter, _ = made(target)
    empty = drafter.begin(Request(prompt=tuple(TEXT)))
    gap = drafter.begin(Request(prompt=tuple(TEXT)))
    show(drafter, gap, target, TEXT, 0, 3)
    full = begun(drafter, target, TEXT)
    budget, states = Budget(3, 3), [empty, gap, full]
    with torch.no_grad():
        drafts = drafter.propose(rows_for(drafter, states, [TEXT] * 3, budget, Drawn.CHOSEN, 0.0))
    assert [len(d) for d in drafts] == [0, 0, 3]
    # What comes after a gap is a new start, not a continuation.
    show(drafter, gap, target, TEXT, 5, len(TEXT) - 1)
    assert gap.start == 5
    for state in states:
        drafter.end(state)
    assert not drafter.cache._slots


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_that_the_head_cannot_say(target, temperature, tmp_path):
    """Only odd tokens are allowed and the head knows even ones: nothing breaks."""
    ids = every(target)
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[ids] = torch.arange(len(ids))
    Objective.build(Training(), target, VocabMap(ids, feed_V)).save(tmp_path / "head", {})
    engine = Engine(target, drafter="none")
    settings = {
        "max_new_tokens": 12,
        "ignore_eos": True,
        "temperature": temperature,
        "seed": 4,
        "allowed_tokens": frozenset({1, 3, 5, 7}),
        "reproducible": True,
    }
    for tree in ("", " tree=2x2", " tree=dynamic"):
        spec = f"eagle3[model={tmp_path / 'head'}{tree}]"
        fast = engine.generate(TEXT, drafter=spec, **settings)
        assert fast.tokens == engine.generate(TEXT, drafter="none", **settings).tokens


CASES = [
    # base, parents of the tail (0 follows the text), first row of the pass
    (5, [-1], 0),
    (64, [-1, 0, 1], 0),
    (300, [-1, 0, 1, 2, 3], 3),
    (127, [-1], 0),
    (130, [-1, 0, 0, 0, 1, 1, 3], 4),
    (61, [-1, 0, 0, 1, 2], 1),
    (250, [-1, 0, 0, 1, 1], 3),
]


@pytest.mark.parametrize("base,parents,first", CASES)
def test_attention_of_few_rows_is_that_of_many_bit_for_bit(target, base, parents, first):
    heads = replace(target._shape, group=3, kv=3, width=16)
    coins = torch.Generator().manual_seed(base)
    cache, many = (DenseCache(1, heads.kv, heads.width) for _ in range(2))
    for one in (cache, many):
        slot = one.open()
        one.append(slot, [0] * base, range(-1, base - 1))
        one.keep(slot, range(base))
        one.append(slot, [0] * len(parents), parents)
    for mine, other in zip(cache.by_row, many.by_row, strict=True):
        mine.copy_(torch.randn(mine.shape, generator=coins))
        other.copy_(mine)
    depths = many.slot(slot).tail_depths
    chain = depths == list(range(len(depths)))
    span = Span(slot, 0, range(base + first, base + len(parents)), base, parents, depths, chain)
    assert few_rows.is_few([span])
    rows = max(len(span.stored), 4)
    head = torch.zeros(rows, heads.queries + 2 * heads.kv, heads.width)
    head[: len(span.stored)] = torch.randn(len(span.stored), *head.shape[1:], generator=coins)
    attend = Attention(many, [span], rows, heads, frozenset({None}), torch.float32)
    attend.head_TXD.copy_(head)
    wanted = attend(0, None)[: len(span.stored)]
    got = few_rows.attend_few(cache, span, head, heads, torch.float32)
    assert torch.equal(got[: len(span.stored)], wanted)
    assert all(map(torch.equal, cache.by_row, many.by_row))
    assert bool(got.isfinite().all())


def test_the_bits_of_attention_can_be_told_apart(target, monkeypatch):
    """Sums over other blocks round otherwise, so equal bits say something."""
    heads, base = replace(target._shape, group=3, kv=3, width=16), 300
    coins = torch.Generator().manual_seed(1)
    outs = []
    for block in (128, 64):
        monkeypatch.setattr(few_rows, "BLOCK", block)
        cache = DenseCache(1, heads.kv, heads.width)
        slot = cache.open()
        cache.append(slot, [0] * (base + 1), range(-1, base))
        coins.manual_seed(1)
        for store in cache.by_row:
            store.copy_(torch.randn(store.shape, generator=coins))
        head = torch.randn(4, heads.queries + 2 * heads.kv, heads.width, generator=coins)
        span = Span(slot, 0, range(base, base + 1), base, [-1], [0], True)
        outs.append(few_rows.attend_few(cache, span, head, heads, torch.float32)[0])
    assert not torch.equal(*outs)
    torch.testing.assert_close(*outs)
