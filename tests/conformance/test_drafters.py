"""Contracts that every registered drafter keeps. A new method is tested before its author
writes a line; one that needs settings adds a row to SPECS.
"""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from outpace import Engine, SamplingParams, registry
from outpace.cache.base import KVCache, Lease
from outpace.coins import KeyedCoins, Stream
from outpace.config import MethodSpec
from outpace.drafters.base import Request
from outpace.engine.requests import GenerationRequest
from outpace.errors import SpecError
from outpace.models.base import TREE
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.tree.mask import is_chain
from outpace.types import Budget, Draft, Drawn, Feed, Outcome, Verdict
from tests.conformance.specs import specs, write_files

METHODS = specs()
PROMPTS = [
    [5, 9, 11, 5, 9, 11, 5, 9],
    [40, 41, 42, 43, 44, 40, 41, 42],
    [77],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3],
]
GREEDY = {"max_new_tokens": 24, "ignore_eos": True}
FEW = frozenset({3, 1, 4})
"""With these tokens alone the text runs in circles, which lookups can guess."""


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", drafter="none", dtype="float32")


@pytest.fixture(scope="module")
def plain(engine):
    return [r.tokens for r in engine.generate(PROMPTS, drafter="none", **GREEDY)]


@pytest.fixture(scope="module")
def plainly(engine):
    """What plain decoding answers; each question is computed once."""
    known = {}

    def ask(prompts, params, **more):
        key = repr((prompts, params, more))
        if key not in known:
            known[key] = tokens(engine.generate(prompts, params, drafter="none", **more))
        return known[key]

    return ask


@pytest.fixture(scope="module", autouse=True)
def files(engine, plain, tmp_path_factory):
    """Tests run in a folder with the files that the specs name."""
    folder = tmp_path_factory.mktemp("files")
    write_files(
        engine.target, folder, [[*prompt, *text] for prompt, text in zip(PROMPTS, plain, strict=True)]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def tokens(results):
    return [result.tokens for result in results]


@pytest.mark.parametrize("spec", METHODS)
def test_greedy_text_is_plain_text_in_any_batch(engine, plain, plainly, spec):
    circles = SamplingParams(**GREEDY, allowed_tokens=FEW)
    params = [SamplingParams(**GREEDY)] * len(PROMPTS) + [circles]
    prompts = [*PROMPTS, PROMPTS[-1]]
    batch = engine.generate(prompts, params, drafter=spec)
    assert tokens(batch)[:-1] == plain
    single = [engine.generate(*pair, drafter=spec) for pair in zip(prompts, params, strict=True)]
    assert tokens(single) == tokens(batch)
    assert [single[-1].tokens] == plainly(prompts[-1:], circles)
    # Not vacuous: it drafts, and something of it is accepted, unless it is the baseline, or its policy
    # finds that drafts cost more than they bring, as those of a model by itself do.
    drafted = sum(r.counters.drafted for r in batch)
    accepted = sum(r.counters.accepted for r in batch)
    if engine.method(spec).policy.deterministic:
        assert (drafted > 0) == (accepted > 0) == (spec != "none")
    for result in batch:
        counters = result.counters
        assert counters.new_tokens == 24 and counters.accepted <= counters.drafted
        assert 22 <= counters.passes + counters.accepted <= 24, "accepted + 1 per pass"


@pytest.mark.parametrize(
    "draft", ["kangaroo[model=small.kangaroo]", "early_exit[model=small.early_exit]", "early_exit"]
)
def test_what_drafts_in_the_targets_slots_is_refused_where_none_is_lent(engine, draft):
    for spec in (f"graph[draft={draft}]", f"graph[draft=ouroboros[draft={draft}]]"):
        with pytest.raises(SpecError, match="draft must be one drafter with a model and a cache"):
            engine.method(spec)


def needs(spec):
    kind = registry.load("drafter", MethodSpec.parse(spec).name)
    return kind.traits.needs if hasattr(kind, "traits") else frozenset()


@pytest.fixture(scope="module")
def chains():
    """A target that cannot check trees, and says so."""
    engine = Engine.load("tiny", drafter="none", dtype="float32")
    score = engine.target.score

    def of_chains(feeds, *args, **more):
        assert all(is_chain([row - feed.parent_J[0] - 1 for row in feed.parent_J]) for feed in feeds)
        return score(feeds, *args, **more)

    engine.target.can -= {TREE}
    engine.target.score = of_chains
    return engine


@pytest.mark.parametrize(
    "spec",
    [
        *(s for s in METHODS if "tree=" not in s and TREE not in needs(s)),
        # The draft model takes chains alone, too.
        "ouroboros[draft=draft_model[model=tiny] length=3 phrases=3 faster=true]",
    ],
)
def test_a_target_that_checks_chains_alone_is_given_chains(chains, plain, spec):
    assert tokens(chains.generate(PROMPTS, drafter=spec, **GREEDY)) == plain


def test_a_tree_for_such_a_target_is_refused_at_once(chains):
    with pytest.raises(SpecError, match="tiny checks chains only, not tree=3x1; use tree=chain"):
        chains.generate(PROMPTS, drafter="recycling[tree=3x1]", **GREEDY)


SOME = {**GREEDY, "allowed_tokens": frozenset(range(40, 52))}
"""Few enough tokens for the text to repeat itself, so that penalties bite."""
FEATURES = {
    "repetition": {"repetition_penalty": 5.0},
    "presence": {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    "bias": {"logit_bias": {41: 9.0, 45: -9.0}},
    "banned": {"banned_tokens": frozenset(range(0, 60, 2))},
}


@pytest.mark.parametrize("spec", METHODS)
def test_every_sampling_feature_works_at_temperature_0(engine, plainly, spec):
    (without,) = plainly(PROMPTS[1:2], SamplingParams(**SOME))
    params = [SamplingParams(**SOME, **feature) for feature in FEATURES.values()]
    prompts = [PROMPTS[1]] * len(params)
    expected = plainly(prompts, params)
    assert without not in expected, "each feature changes the text"
    assert tokens(engine.generate(prompts, params, drafter=spec)) == expected


SAMPLED = {"temperature": 0.9, "seed": 11, "max_new_tokens": 20, "ignore_eos": True}


def clocked(engine, spec):
    """Whether the plans depend on what passes take."""
    return not engine.method(spec).policy.deterministic


@pytest.mark.parametrize("spec", METHODS)
def test_same_seed_same_text_whatever_the_batch(engine, spec):
    # Without position-keyed coins, plans that depend on clocks would change the text.
    settings = {**SAMPLED, "reproducible": None if clocked(engine, spec) else False}
    batch = tokens(engine.generate(PROMPTS, drafter=spec, **settings))
    single = [engine.generate(p, drafter=spec, **settings).tokens for p in reversed(PROMPTS)]
    assert batch == single[::-1]
    other = engine.generate(PROMPTS[0], drafter=spec, **{**settings, "seed": 12})
    assert other.tokens != batch[0]


@pytest.mark.parametrize("spec", [m for m in METHODS if "verifier" not in m])
@pytest.mark.parametrize("more", [{}, {"top_k": 12, "top_p": 0.9, "repetition_penalty": 1.2}])
def test_reproducible_text_is_that_of_plain_decoding(engine, plainly, spec, more):
    settings = {**SAMPLED, **more}
    expected = plainly(PROMPTS, SamplingParams(**settings), reproducible=True)
    assert tokens(engine.generate(PROMPTS, drafter=spec, **settings)) == expected, "by default"


@pytest.mark.parametrize("spec", METHODS)
def test_end_of_sequence_inside_a_draft(engine, plain, spec):
    """Stopping at each token of the plain text in turn gives exactly that prefix."""
    stops = plain[0][1:12]
    params = [SamplingParams(**GREEDY, stop_token_ids=frozenset({stop})) for stop in stops]
    results = engine.generate([PROMPTS[0]] * len(params), params, drafter=spec)
    for stop, result in zip(stops, results, strict=True):
        first = plain[0].index(stop)
        assert result.tokens == plain[0][: first + 1]
        assert result.finish_reason == "stop"
        assert result.counters.accepted <= max(first, 0)


@pytest.mark.parametrize("spec", METHODS)
def test_length_and_context_end_the_text(engine, plainly, spec):
    for length in (1, 2, 3, 7):
        result = engine.generate(PROMPTS[0], drafter=spec, max_new_tokens=length, ignore_eos=True)
        assert len(result.tokens) == length and result.finish_reason == "length"
    context = engine.target.max_positions
    prompt = (PROMPTS[0] * context)[: context - 9]
    longer = SamplingParams(max_new_tokens=50, ignore_eos=True)
    result = engine.generate(prompt, longer, drafter=spec)
    assert len(prompt) + len(result.tokens) == context
    assert [result.tokens] == plainly([prompt], longer) and result.finish_reason == "length"


@pytest.fixture
def slots(monkeypatch):
    """Cache -> its slots in use, of all caches from now on: also those of drafters in drafters."""
    held = {}
    taken, given_back = KVCache.open, KVCache.close

    def open_(cache):
        slot = taken(cache)
        held.setdefault(cache, set()).add(slot)
        return slot

    def close(cache, slot):
        given_back(cache, slot)
        held[cache].remove(slot)

    monkeypatch.setattr(KVCache, "open", open_)
    monkeypatch.setattr(KVCache, "close", close)
    return held


def in_use(slots):
    return {type(cache).__name__: used for cache, used in slots.items() if used}


HOLDERS = ["cascade", "ouroboros", "graph", "select", "cross_vocabulary", "auto", "early_exit"]
"""Methods that hold slots in caches of their parts."""


@pytest.mark.parametrize("name", HOLDERS)
def test_a_drafter_that_keeps_its_slots_is_seen(engine, slots, name, monkeypatch):
    """Planted: nothing is given back."""
    spec = next(s for s in METHODS if (s.partition("[")[0] == name and "draft_model" in s) or "model=" in s)
    for one in engine.method(spec).members.values():
        monkeypatch.setattr(one.drafter, "end", lambda state: None)
    with closing(engine.stream(PROMPTS, drafter=spec, **GREEDY)) as stream:
        next(stream)
    assert not engine.cache._slots and in_use(slots)
    for cache, used in slots.items():
        for slot in [*used]:
            cache.close(slot)


@pytest.mark.parametrize("spec", METHODS)
def test_a_cancelled_request_leaves_nothing_behind(engine, plain, slots, spec):
    stream = engine.stream(PROMPTS, drafter=spec, **GREEDY)
    for _ in range(6):
        next(stream)
    assert engine.cache in slots and in_use(slots)
    stream.close()
    assert not in_use(slots)
    assert engine.generate(PROMPTS[1], drafter=spec, **GREEDY).tokens == plain[1]


@pytest.mark.parametrize("spec", METHODS)
def test_streamed_pieces_make_the_whole(engine, plain, spec):
    pieces = [()] * len(PROMPTS)
    texts = [""] * len(PROMPTS)
    results = [None] * len(PROMPTS)
    for chunk in engine.stream(PROMPTS, drafter=spec, **GREEDY):
        pieces[chunk.index] += chunk.tokens
        texts[chunk.index] += chunk.text
        results[chunk.index] = results[chunk.index] or chunk.result
    assert pieces == plain
    assert texts == [result.text for result in results]


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_cache_equals_a_fresh_prefill_after_every_commit(engine, spec, temperature):
    """The next law from the kept cache is the next law from a new cache with the same text."""
    target, checked = engine.target, []

    def compare(record):
        fresh, whole, last = target.new_cache(), [], []
        for slot, state in engine.cache._slots.items():
            assert not state.tail_ids
            row = next(r for r in running if r.slot == slot)
            assert engine.cache.ids(slot) == row.tokens[:-1]
            length = engine.cache.length(slot)
            whole.append(Feed.chain(fresh.open(), row.tokens, want=(length,)))
            last.append(Feed.chain(slot, row.tokens[-1:]))
        if last:
            expected = target.score(whole, fresh).logits_TV.clone()
            again = target.score(last, engine.cache).logits_TV
            torch.testing.assert_close(again, expected, atol=2e-4, rtol=2e-4)
        for feed in last:
            engine.cache.drop(feed.slot)
            checked.append(feed.slot)
        engine.cache.check_integrity()

    settings = {"temperature": temperature, "seed": 3, "max_new_tokens": 14, "ignore_eos": True}
    method = engine.method(spec)
    params = SamplingParams(**settings).resolved(None)
    running = [
        engine.start_sequence(
            GenerationRequest(prompt=tuple(p), params=params, seed=3),
            engine.cache.open(),
            method,
            method.verifier,
        )
        for p in PROMPTS
    ]
    engine.listeners.append(compare)
    try:
        for _ in engine.chunks(running, method):
            pass
    finally:
        engine.listeners.clear()
    assert len(checked) >= 8


def proposal_rows(target, drafter, drawn, budget, temperature, texts):
    rows, cache = [], target.new_cache()
    params = SamplingParams(temperature=temperature, seed=1).resolved(None)
    for text in texts:
        state = drafter.begin(Request(prompt=tuple(text)))
        lease = Lease(cache, cache.open())
        feed = Feed.chain(lease.slot, text[:-1], want=())
        shown = target.score([feed], cache, taps=drafter.traits.taps).of(0)
        forced = Outcome(
            Draft(),
            shown,
            Verdict((), (text[-1],)),
            tuple(text[:-1]),
            tuple(range(len(text) - 1)),
            0,
            forced=True,
        )
        drafter.observe([state], [forced])
        cache.keep(lease.slot, range(len(text) - 1))
        rows.append(
            DraftRow(
                state,
                text,
                budget,
                KeyedCoins(1, len(text) - 1, Stream.DRAFT),
                Warp(params, text, frozenset(), 10**6),
                drawn,
                lease,
            )
        )
    return rows


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("drawn", [Drawn.CHOSEN, Drawn.IID, Drawn.DISTINCT])
def test_budgets_are_kept_and_dropped_drafts_forgotten(engine, spec, drawn):
    """Any budget is respected, and proposing again after a dropped draft gives the same draft."""
    method = engine.method(spec)
    temperature = 0.0 if drawn is Drawn.CHOSEN else 0.9
    texts = [PROMPTS[0], PROMPTS[3], PROMPTS[0][:2]]
    for nodes, depth in ((0, 0), (1, 1), (3, 2), (4, 9), (9, 3)):
        asked = method.preferred.budget
        budget = Budget(min(nodes, asked.max_nodes), depth, shape=asked.shape)
        with torch.no_grad():
            rows = proposal_rows(engine.target, method.preferred.drafter, drawn, budget, temperature, texts)
            first = method.preferred.drafter.propose(rows)
            again = method.preferred.drafter.propose(rows)
        for draft, twin in zip(first, again, strict=True):
            assert len(draft) <= budget.max_nodes
            assert max(draft.depth_N, default=0) <= depth
            assert all(0 <= t < engine.target.vocab_size for t in draft.token_N)
            assert (draft.token_N, draft.parent_N) == (twin.token_N, twin.parent_N)
            for law in draft.laws:
                assert float(law.prob_S.sum()) == pytest.approx(1.0, abs=1e-5)
            if temperature == 0.0:
                assert all(group.drawn is Drawn.CHOSEN for group in draft.groups)
        for row in rows:
            method.preferred.drafter.end(row.state)


def num_uncached(engine, spec, drafter):
    """Before its first draft, and after a draft of which nothing was kept; None: no draft came."""
    text = list(PROMPTS[0])
    with torch.no_grad():
        asked = engine.method(spec).preferred.budget
        budget = Budget(min(3, asked.max_nodes), 2, shape=asked.shape)
        (row,) = proposal_rows(engine.target, drafter, Drawn.CHOSEN, budget, 0.0, [text])
        before = drafter.num_uncached(row.state, text)
        (draft,) = drafter.propose([row])
        draft = replace(draft, resume=None)  # a pass of its own for all rows
        if row.lease is not None:
            row.lease.cache.drop(row.lease.slot)
        feed = Feed.tree(row.lease.slot, text[-1], draft)
        scored = engine.target.score([feed], row.lease.cache, taps=drafter.traits.taps).of(0)
        refused, start = Verdict((), (7,)), len(text) - 1
        drafter.observe([row.state], [Outcome(draft, scored, refused, (text[-1],), (0,), start)])
        after = drafter.num_uncached(row.state, [*text, 7])
        drafter.end(row.state)
    return before, after if len(draft) else None, len(text)


@pytest.mark.parametrize("spec", METHODS)
def test_a_drafter_tells_how_much_it_has_to_read(engine, spec):
    before, after, length = num_uncached(engine, spec, engine.method(spec).preferred.drafter)
    assert 0 <= before <= 3 * length, "some have several models"
    if after is not None and not spec.startswith("select"):  # one member guesses, the others wait
        assert 0 <= after <= 3, "a draft has read the text"


@pytest.mark.parametrize("spec", METHODS)
def test_a_drafter_that_needs_a_slot_lent_says_so(engine, spec):
    """It drafts little or nothing without one; all others draft the same."""
    method = engine.method(spec)
    budget = Budget(min(4, method.preferred.budget.max_nodes), 3, shape=method.preferred.budget.shape)
    with torch.no_grad():
        rows = proposal_rows(engine.target, method.preferred.drafter, Drawn.CHOSEN, budget, 0.0, [PROMPTS[0]])
        lent = method.preferred.drafter.propose(rows)[0].token_N
        alone = method.preferred.drafter.propose([replace(row, lease=None) for row in rows])[0].token_N
    assert (alone != lent) == method.preferred.drafter.traits.uses_target_cache
    for row in rows:
        method.preferred.drafter.end(row.state)
