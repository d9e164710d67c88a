"""Several drafters in one tree: merging, picking before drawing, and what each member is told."""

import math
from dataclasses import replace

import pytest
import torch

from outpace import Engine, SpecError
from outpace.analysis.enumeration import EnumeratingCoins, fates
from outpace.analysis.tables import RIGHT
from outpace.coins import Stream
from outpace.drafters.base import Request
from outpace.drafters.worth import Chances
from outpace.law import Law
from outpace.methods.draft_model.drafter import DraftModel
from outpace.methods.lookup.prompt_lookup import PromptLookup, PromptLookupConfig
from outpace.methods.lookup.suffix import Suffix, SuffixConfig
from outpace.methods.select.drafter import Select, SelectConfig
from outpace.methods.select.forest import chances, merge
from outpace.models.tiny import TableTarget
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.types import Budget, Draft, Drawn
from outpace.verifiers.base import TargetLaws

WIDE = Budget(20, 20)


def sure(tokens, own, parents=None):
    return Draft.chosen(tokens, parents, memo=Chances(tuple(own), 1.0))


def branches(draft):
    """Every node as its path."""
    return {draft.path_tokens(node) for node in range(len(draft))}


# Merging --------------------------------------------------------------------------------------


def test_common_prefixes_are_shared_and_siblings_ordered_by_chance():
    long, short = sure([1, 2, 3], [0.9, 0.6, 0.9]), sure([1, 4], [0.6, 0.5])
    forest = merge([short, long], [0, 0], WIDE, True).draft
    assert branches(forest) == {(1,), (1, 2), (1, 2, 3), (1, 4)}
    assert [forest.token_N[n] for n in forest.groups_of[0][0].nodes] == [2, 4]
    assert all(group.drawn is Drawn.CHOSEN for group in forest.groups)


def test_agreement_is_no_second_vote_and_a_rival_is_right_only_where_the_surer_is_wrong():
    one, again, other = sure([1], [0.6]), sure([1], [0.4]), sure([2], [0.5])
    assert merge([one, again], [0, 0], WIDE, True).worth == pytest.approx(1.6)
    assert merge([one, again, other], [0, 0, 0], WIDE, True).worth == pytest.approx(1.8)
    # What one drafter says of two guesses was meant for both.
    both = sure([1, 2], [0.6, 0.3], [-1, -1])
    assert merge([both], [0], WIDE, True).worth == pytest.approx(1.9)


def test_the_budget_and_the_price_of_rows_limit_a_forest():
    many = [sure([i, 10 + i, 20 + i], [0.3, 0.9, 0.9]) for i in range(9)]
    forest = merge(many, [0] * 9, WIDE, True)
    assert 4 <= len(forest.draft) < 27 and forest.worth > 1
    assert len(merge(many, [0] * 9, Budget(5, 2), True).draft) == 5
    assert max(merge(many, [0] * 9, Budget(9, 2), True).draft.depth_N) <= 2
    nothing = merge([sure([1], [0.01]), Draft()], [0, 0], WIDE, True)
    assert len(nothing.draft) == 0 and nothing.worth == 1.0


def test_without_branches_it_is_the_likeliest_path():
    long, short = sure([1, 2, 3], [0.5, 0.9, 0.9]), sure([4, 5], [0.6, 0.5])
    path_ = merge([long, short], [0, 0], WIDE, False).draft
    assert path_.token_N == (4, 5) and path_.parent_N == (-1, 0)


def test_a_drafter_without_an_opinion_is_judged_by_its_record():
    tree = Draft.chosen([1, 2, 3], [-1, -1, 0])
    assert chances(tree, 0.8) == pytest.approx([0.8, 0.28, 0.8])
    assert chances(sure([1, 2], [0.5, 0.5]), 0.8) == pytest.approx([0.5, 0.5])


def test_a_draft_that_is_wanted_whole_stays_the_object_that_it_was():
    one = sure([1, 2], [0.9, 0.9])
    assert merge([Draft(), one], [0, 0], WIDE, True).draft is one


def test_paths():
    tree = Draft.chosen([1, 2, 3, 1], [-1, -1, 0, 2])
    assert tree.path_of((1, 3, 1, 7)) == (0, 2, 3)
    assert tree.path_of((2, 3)) == (1,)
    assert tree.path_of((9,)) == Draft().path_of((1,)) == ()


# The law --------------------------------------------------------------------------------------

V = 3
TARGET, TABLE = TableTarget.random(1, V), TableTarget.random(9, V)
TEXT = (0, 1, 0, 1)


class Laws(TargetLaws):
    def __init__(self, draft):
        self.draft = draft

    def law(self, node):
        return Law(TARGET.law_after((*TEXT, *self.draft.path_tokens(node))))


def error(cost, after=lambda draft: draft):
    """Largest error of the law of one step's first two tokens; how often each member drafted."""
    members = [DraftModel(TABLE, V), PromptLookup(PromptLookupConfig())]
    drafter = Select(SelectConfig(members="a+b", cost=cost), members)
    warp = Warp(SamplingParams(temperature=1.0).resolved(None), TEXT, frozenset(), V)
    found = torch.zeros(V, V, dtype=torch.float64)
    drawn = [0, 0]

    def run(fate):
        state = drafter.begin(Request(prompt=TEXT, num_cached=len(TEXT)))
        row = DraftRow(
            state, list(TEXT), Budget(2, 2), EnumeratingCoins(fate, 0, 3, Stream.DRAFT), warp, Drawn.DISTINCT
        )
        (draft,) = drafter.propose([row])
        drafter.end(state)
        drawn[bool(draft.laws)] += 1
        judging = EnumeratingCoins(fate, 0, 3, Stream.JUDGE)
        return RIGHT["tree"].judge(after(draft), Laws(draft), judging).emitted

    for fate, (first, *more) in fates(run):
        law = TARGET.law_after((*TEXT, first))
        if more:
            found[first, more[0]] += fate.weight
        else:
            found[first] += fate.weight * law
    truth = torch.stack([TARGET.law_after(TEXT)[a] * TARGET.law_after((*TEXT, a)) for a in range(V)])
    return float((found - truth).abs().max()), drawn


def test_the_law_of_the_output_is_the_targets_whoever_drafts():
    sampled, drawn = error(cost=0.0)
    assert sampled < 1e-12 and drawn[1] > 0 == drawn[0]
    chosen, drawn = error(cost=100.0)
    assert chosen < 1e-12 and drawn[0] > 0 == drawn[1]


def test_picking_after_drawing_is_caught():
    """The planted bug: a sampled draft is thrown away if the lookup's looks better."""

    def regret(draft):
        if draft.laws and draft.laws[0].prob(draft.token_N[0]) < 0.4:
            return Draft.chosen([0])
        return draft

    assert error(cost=0.0, after=regret)[0] > 1e-3


# Members --------------------------------------------------------------------------------------

DRAFT = "draft_model[model=tiny layers=1]"
SETTINGS = {"max_new_tokens": 40, "ignore_eos": True}
CIRCLES = {**SETTINGS, "allowed_tokens": frozenset({3, 1, 4})}


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", drafter="none", dtype="float32")


def watched(engine, spec, prompt, **settings):
    """The result, and every draft with the outcome that the members were told."""
    method = engine.method(spec).drafter
    told = [[] for _ in method.members]
    reals = [member.observe for member in method.members]
    for log, member, real in zip(told, method.members, reals, strict=True):
        member.observe = lambda states, outcomes, log=log, real=real: (
            log.extend(outcomes),
            real(states, outcomes),
        )
    try:
        return engine.generate(prompt, drafter=spec, **settings), told
    finally:
        for member in method.members:
            del member.observe


def test_members_learn_from_their_own_guesses(engine):
    spec = "select[members=suffix+prompt_lookup[max_ngram=2]]"
    result, told = watched(engine, spec, [3, 1, 4, 1] * 5, **CIRCLES)
    assert result.counters.accepted > 0
    for outcomes in told:
        emitted = [t for outcome in outcomes for t in outcome.verdict.emitted]
        assert tuple(emitted) == result.tokens
        own = [o for o in outcomes if isinstance(o.draft.memo, Chances)]
        assert own
        for outcome in own:
            kept = outcome.draft.path_tokens(outcome.verdict.kept[-1]) if (outcome.verdict.kept) else ()
            assert kept == outcome.verdict.emitted[: len(kept)]


def test_it_accepts_at_least_as_much_as_each_member(engine):
    prompt = [3, 1, 4, 1] * 5
    passes = {
        spec: engine.generate(prompt, drafter=spec, **CIRCLES).counters.passes
        for spec in ("suffix", "recycling", "select[members=suffix+recycling]")
    }
    *members, both = passes.values()
    assert both <= min(members)


def test_a_sampling_member_drafts_where_lookups_are_silent(engine):
    spec = f"select[members=suffix+{DRAFT} cost=0.05]"
    clock = engine.method(spec).drafter.clock
    result, told = watched(engine, spec, [77], temperature=1.0, seed=4, **SETTINGS)
    assert clock.count > 10 and clock.seconds > 0
    assert any(outcome.draft.laws for outcome in told[1])
    dear = f"select[members=suffix+{DRAFT} cost=50]"
    _, told = watched(engine, dear, [77], temperature=1.0, seed=4, **SETTINGS)
    assert not any(outcome.draft.laws for outcome in told[1])
    assert engine.method(dear).drafter.clock.count <= 1 < result.counters.passes


def test_a_sampling_member_that_is_silent_is_picked_no_more(engine, monkeypatch):
    monkeypatch.setattr(DraftModel, "propose", lambda self, rows: [Draft() for _ in rows])
    spec = f"select[members=suffix+{DRAFT} cost=0.05]"
    result = engine.generate([77], drafter=spec, temperature=0, **CIRCLES)
    assert result.counters.accepted > 0, "the lookup drafts in its place"


def test_its_own_state_can_be_taken_back():
    drafter = Select(
        SelectConfig(members="a+b"), [Suffix(SuffixConfig()), PromptLookup(PromptLookupConfig())]
    )
    state = drafter.begin(Request(prompt=(1, 2, 1), num_cached=3))
    mark = drafter.mark(state)
    state.members[0].automaton.extend([5])
    state.members[1].tokens.append(5)
    state.records[0].rate = 0.9
    back = drafter.rewind(state, mark)
    assert back.members[0].automaton.tokens == back.members[1].tokens == [1, 2, 1]
    assert math.isclose(back.records[0].rate, 0.4)
    assert replace(back.records[0]) == back.records[0]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("select[members=suffix]", "two or more"),
        ("select[members=suffix+suffix]", "two or more different"),
        ("select[members=suffix+]", "empty part"),
        ("select[members=suffix+recycling cost=-1]", "cost must be at least 0"),
        ("select[members=suffix+recycling[tree=3x1]]", "tree, which the whole decides"),
        ("select[members=suffix+auto]", "auto chooses among drafters"),
    ],
)
def test_bad_members_are_refused(engine, spec, says):
    with pytest.raises(SpecError, match=says):
        engine.method(spec)
