"""Ouroboros: where phrases come from, where they go, what they save, and exact laws with them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from outpace import Engine, ModelError, SpecError
from outpace.analysis.tables import RIGHT
from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.methods.draft_model.drafter import DraftModel
from outpace.methods.ouroboros.drafter import Ouroboros, OuroborosConfig
from outpace.methods.ouroboros.phrases import Phrases, Pool, discarded
from outpace.models.tiny import TableTarget
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import parse_shape
from outpace.types import ROOT, Budget, Draft, Drawn, Group, Law, Outcome, Verdict
from tests.drafters.support import Telling

# Phrases ---------------------------------------------------------------------------------------


def test_the_pool_gives_what_came_behind_the_same_two_tokens_first_and_the_newest():
    pool = Pool(tokens=2, per_token=3)
    for before, phrase in ((1, [5, 6]), (2, [7, 7]), (1, [8, 8])):
        pool.add(before, 9, phrase)
    assert pool.behind(1, 9, 5) == [(8, 8), (5, 6), (7, 7)]
    assert pool.behind(2, 9, 2) == [(7, 7), (8, 8)]
    pool.add(1, 9, [5, 6, 4])  # known, once it is cut: now the newest
    pool.add(3, 9, [4, 4])
    assert pool.behind(1, 9, 5) == [(5, 6), (8, 8), (4, 4)] and len(pool) == 3
    assert pool.behind(1, 8, 5) == []


def test_the_pool_forgets_the_tokens_that_were_longest_unused():
    pool = Pool(tokens=2, per_token=2, size=3)
    for token in (1, 2, 1, 3):
        pool.add(0, token, [token, len(pool)])
    assert len(pool) == 3 and pool.behind(0, 2, 5) == []
    assert len(pool.behind(0, 1, 5)) == 2 and len(pool.behind(0, 3, 5)) == 1


def test_a_text_is_read_in_any_pieces():
    text, pools = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], []
    for pieces in ([text], [[token] for token in text], [text[:4], text[4:5], text[5:]]):
        tail, pool = [], Pool(tokens=3, per_token=4)
        for piece in pieces:
            pool.read(tail, piece)
        pools.append(pool._behind)
    assert pools[0] == pools[1] == pools[2]
    assert pools[0][1] == {(4, 1, 5): 3, (5, 9, 2): 4} and 3 not in pools[0]


def test_refused_rows_give_phrases_where_they_agree_with_each_other():
    #  7 -+- 10 -- 11 -- 12        20 was kept; the rest was refused
    #     +- 20 -- 21 -- 22
    draft = Draft.chosen([10, 20, 11, 21, 12, 22], [ROOT, ROOT, 0, 1, 2, 3])
    rows = {ROOT: 20, 0: 11, 1: 30, 2: 12, 3: 22, 4: 13, 5: 23}
    best_J = [rows[node] for node in range(ROOT, len(draft))]
    found = list(discarded(draft, best_J, (1,), pending=7, most=3))
    assert found == [
        (7, 10, (11, 12, 13)),
        (10, 11, (12, 13)),
        (20, 21, (22, 23)),
    ]  # behind 12 and 22 there is one prediction alone
    assert next(discarded(draft, best_J, (1,), 7, most=2)) == (7, 10, (11, 12))
    best_J[1] = 99  # behind 10 the target wanted something else: nothing to go on from
    assert [phrase for _, token, phrase in discarded(draft, best_J, (1,), 7, 3) if token == 10] == []


def test_phrases_hang_behind_a_leaf_and_share_their_beginnings():
    phrases, pool = Phrases(tokens=3, per_token=8, most=3), Pool(tokens=3, per_token=8)
    for phrase in ([1, 2, 3], [1, 2, 4], [5, 1, 1], [1, 9, 9]):
        pool.add(0, 7, phrase)
    start = Draft(
        (6, 7), (ROOT, ROOT), (Group(ROOT, Drawn.DISTINCT, (0, 1), 0),), (Law.one_hot(6),), memo="mine"
    )
    draft = phrases.lengthened(start, 1, [0, 7], pool, room=20, depth=9)
    assert [draft.path_tokens(node)[1:] for node in range(2, len(draft))] == [
        (1,),
        (1, 9),
        (1, 9, 9),
        (5,),
        (5, 1),
        (5, 1, 1),
        (1, 2),
        (1, 2, 4),
    ]
    assert draft.groups[:1] == start.groups and draft.memo == "mine"
    assert all(group.drawn is Drawn.CHOSEN for group in draft.groups[1:])
    for room, depth, most in ((4, 9, 4), (20, 1, 2), (0, 9, 0), (20, 0, 0)):
        short = phrases.lengthened(start, 1, [0, 7], pool, room=room, depth=depth)
        assert len(short) == 2 + most and max(short.depth_N) <= 1 + depth
    assert phrases.lengthened(start, 0, [0, 6], pool, 20, 9) is start


# Budgets ---------------------------------------------------------------------------------------


def made(vocab=4, seed=5, **settings):
    drafter = DraftModel(TableTarget.random(seed, vocab), vocab)
    return Ouroboros(OuroborosConfig(**settings), drafter)


def asked(drafter, budget, text=(0, 1, 2, 3, 1, 2, 0, 1, 2), vocab=4):
    state = drafter.begin(Request(prompt=text, num_cached=len(text)))
    warp = Warp(SamplingParams(temperature=0.0).resolved(None), text, frozenset(), vocab)
    coins = KeyedCoins(7, len(text) - 1, Stream.DRAFT)
    (draft,) = drafter.propose([DraftRow(state, text, budget, coins, warp, Drawn.CHOSEN)])
    return state, draft


class Never:
    def more(self, signals):
        return signals.q_F > 2


@pytest.mark.parametrize("faster", [False, True])
def test_the_draft_models_draft_comes_first_and_phrases_behind_it(faster):
    for seed in range(20):
        drafter = made(length=3, faster=faster, tokens=2)
        text = (*((seed * k * k + k) % 4 for k in range(40)), 0, 1, 2)
        alone = asked(made(faster=False, length=9), Budget(9, 9), text)[0].draft.token_N
        state, draft = asked(drafter, Budget(32, 32), text)
        written = len(state.draft)
        assert draft.token_N[:written] == state.draft.token_N == alone[:written]
        assert 3 <= written <= (5 if faster else 3), "phrases may add to the last step"
        if len(draft) > written:
            break
    else:
        pytest.fail("no phrase was found")
    assert min(draft.depth_N[written:]) == written + 1
    assert max(draft.depth_N) <= written + 2 and len(draft) <= written + 6
    stopped = asked(drafter, Budget(32, 32, stop=Never()), text)[1]
    assert len(stopped) == 1, "no phrases behind a draft that a rule has stopped"


def test_a_dynamic_tree_leaves_room_for_phrases():
    drafter = made(length=2, faster=False)
    budget = Budget(12, 6, shape=parse_shape("dynamic"))
    state, draft = asked(drafter, budget)
    assert len(state.draft) <= 9 < len(draft) <= 12 and max(state.draft.depth_N) <= 2
    assert max(draft.depth_N) > 2


# Laws ------------------------------------------------------------------------------------------

PROMPT = (0, 1, 0, 0, 1, 1, 0)


def law_error(verifier, faster, plant=lambda state, draft: draft, length=4, temperature=1.0):
    """Largest error of the law of a whole text, over every way that the coins can fall."""
    target = TableTarget.random(3, 2)
    drafter = made(vocab=2, seed=20, length=1, phrases=1, tokens=2, faster=faster)
    real = drafter.propose
    drafter.propose = lambda rows: [
        plant(row.state, draft) for row, draft in zip(rows, real(rows), strict=True)
    ]
    told = Telling(
        target,
        drafter,
        PROMPT,
        length,
        RIGHT[verifier],
        Budget(5, 5),
        SamplingParams(temperature=temperature),
    )
    hung = []

    def whole(_, fate):
        row = told.begin(fate)
        told.prefill(row)
        while row.missing:
            hung.append(len(told.step(row).draft) > 1)
        return told.end(row)

    error = told.error(whole, ((), frozenset()))
    assert any(hung), "phrases were hung"
    return error


@pytest.mark.parametrize("faster", [False, True])
@pytest.mark.parametrize("verifier", ["tree", "block", "coupled"])
def test_what_is_emitted_has_the_targets_law(verifier, faster):
    assert law_error(verifier, faster, length=3) < 1e-12


def taken_back(state, draft):
    """What was drawn is dropped if the phrase behind it says something else."""
    return Draft() if len(draft) > 1 and draft.token_N[1] != draft.token_N[0] else draft


def said_to_be_drawn(state, draft):
    """A phrase that says it was drawn from the law of the draft model."""
    if len(draft) < 2 or not draft.laws:
        return draft
    groups = [replace(g, drawn=Drawn.DISTINCT, law=0) if g.law is None else g for g in draft.groups]
    return replace(draft, groups=tuple(groups))


@pytest.mark.parametrize("plant", [taken_back, said_to_be_drawn])
def test_planted_mistakes_are_caught(plant):
    assert law_error("tree", False, plant) > 1e-3


# On a model ------------------------------------------------------------------------------------

DRAFT = "draft_model[model=tiny layers=1]"
PROMPTS = [[5, 9, 11, 14] * 5, [40, 41, 42, 43, 44, 40, 41, 42], [3, 1, 4, 1] * 6]
GREEDY = {"max_new_tokens": 48, "ignore_eos": True, "allowed_tokens": frozenset(range(30))}


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", drafter="none", dtype="float32")


def run(engine, spec, prompts=PROMPTS):
    """Texts, passes of the target, and passes of the draft model."""
    clock = engine.method(spec).drafter.clock
    before = clock.count
    results = [engine.generate(prompt, drafter=spec, **GREEDY) for prompt in prompts]
    passes = sum(one.counters.passes for one in results)
    return [one.tokens for one in results], passes, clock.count - before


@pytest.mark.parametrize("draft", [DRAFT, "draft_model[model=tiny]"])
def test_it_emits_as_much_per_pass_as_its_draft_model_and_runs_that_less(engine, draft):
    plain, passes, drafting = run(engine, f"{draft[:-1]} tree=chain tree_size=4]")
    text, fewer, less = run(engine, f"ouroboros[draft={draft} length=4 phrases=3 faster=true]")
    same, as_few, slower = run(engine, f"ouroboros[draft={draft} length=4 phrases=3]")
    assert text == plain == same
    assert fewer <= passes and as_few <= passes and less < slower <= drafting
    if draft != DRAFT:  # drafts that are kept whole, behind which phrases count
        assert fewer < 0.95 * passes and as_few < 0.95 * passes


def test_phrases_of_refused_rows_are_used(engine, monkeypatch):
    spec = f"ouroboros[draft={DRAFT} length=5 phrases=3]"
    pools = []
    drafter = engine.method(spec).drafter
    monkeypatch.setattr(
        drafter, "end", lambda state, real=drafter.end: (pools.append(state.pool), real(state))
    )
    (text,), *_ = run(engine, spec, PROMPTS[:1])
    whole = [*PROMPTS[0], *text]
    known = {tuple(whole[i : i + 4]) for i in range(len(whole))}
    found = [(token, *phrase) for token, behind in pools[0]._behind.items() for phrase in behind]
    assert any(phrase not in known and len(phrase) > 2 for phrase in found)
    assert any(phrase in known for phrase in found)


def test_shared_phrases_serve_the_next_request(engine):
    spec = f"ouroboros[draft={DRAFT} shared=true tokens=5]"
    cold = run(engine, spec, PROMPTS[1:2])
    warm = run(engine, spec, PROMPTS[1:2])
    assert warm[0] == cold[0] and warm[1] + warm[2] < cold[1] + cold[2]


def test_phrases_are_shared_within_a_key():
    phrases = Phrases(3, 16, 3, shared=True)
    first, same, other = (phrases.begin(Request(prompt=(1,), key=key)) for key in ("a", "a", "b"))
    assert first is same and first is not other


def test_the_draft_model_is_told_of_its_own_guesses_alone():
    drafter = made(length=2, faster=False)
    state, draft = asked(drafter, Budget(12, 12))
    assert len(draft) > 2
    told = []
    drafter.draft.observe = lambda states, outcomes: told.extend(outcomes)
    scored = SimpleNamespace(logits_TV=TableTarget.random(1, 4).law_after(()).expand(3, -1))
    verdict = Verdict((0, 1, 2), (*draft.token_N[:3], 1))
    outcome = Outcome(draft, scored, verdict, (2, *draft.token_N[:3]), (0, 1, 2, 3), 8)
    drafter.observe([state], [outcome])
    assert told[0].draft.token_N == draft.token_N[:2] and told[0].verdict.kept == (0, 1)
    assert told[0].verdict.emitted == verdict.emitted and told[0].row_F == (0, 1, 2, 3)
    drafter.observe([state], [outcome])  # it is not the last proposal any more
    assert told[1].draft is draft


def test_bad_settings_are_refused(engine):
    for spec, error, words in (
        ("ouroboros[length=0]", SpecError, "length must be at least 1, got 0"),
        ("ouroboros[tokens=1]", SpecError, "tokens must be at least 2, got 1"),
        ("ouroboros[draft=max_gram]", SpecError, "draft must be one drafter that has a distribution"),
        (f"ouroboros[draft={DRAFT}+{DRAFT}]", SpecError, "must be one drafter"),
        (f"ouroboros[draft={DRAFT[:-1]} tree=2x2]]", SpecError, "says tree"),
        ("ouroboros", ModelError, "no trained draft_model for tiny"),
    ):
        with pytest.raises(error, match=words):
            engine.generate([9, 2, 3, 9, 4, 5, 9, 6, 7, 9, 8, 4], drafter=spec, allowed_tokens=frozenset({9}))
