"""Hybrid: who is asked, what is learned, one node for one token, and what is refused."""

from dataclasses import replace

import pytest
import torch

from outpace import Engine, registry
from outpace.analysis.growths import TableDrafter
from outpace.analysis.tables import World
from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.drafters.worth import Chances
from outpace.errors import SpecError
from outpace.law import Law
from outpace.methods.hybrid.drafter import DOUBT, Hybrid, Table
from outpace.methods.hybrid.union import Joint
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.types import ROOT, Budget, Draft, Drawn, Outcome, Scored, Verdict
from tests.methods.hybrid.test_law import Text

TOKENS = (0, 1, 0)


class Sure(Text):
    """A chain of one token, as sure as is asked."""

    def __init__(self, *own):
        self.own, self.parents = own, tuple(range(-1, len(own) - 1))

    def propose(self, rows):
        return [Draft.chosen((2,) * len(self.own), None, Chances(self.own, 1.0)) for _ in rows]


def world(favourite, chance):
    """One in which the head gives a token a chance everywhere, and the others the rest."""
    q = torch.full((3,), (1 - chance) / 2, dtype=torch.float64)
    q[favourite] = chance
    return World(0, q_edit=lambda law: Law(q))


def asked(hybrid, state=None, chain=False, nodes=8):
    state = hybrid.begin(Request(prompt=TOKENS)) if state is None else state
    params = SamplingParams(temperature=0.0).resolved(None)
    row = DraftRow(
        state,
        TOKENS,
        Budget(nodes, nodes),
        KeyedCoins(0, 2, Stream.DRAFT),
        Warp(params, TOKENS, frozenset(), 3),
        Drawn.CHOSEN,
        chain=chain,
    )
    return state, hybrid.propose([row])[0]


def test_the_head_is_asked_where_the_text_is_not_sure():
    for own, head in (((0.97, 0.9), False), ((0.5, 0.5), True), ((), True)):
        hybrid = Hybrid(Sure(*own), TableDrafter(world(0, 0.7)))
        state, draft = asked(hybrid)
        assert state.asked is head and len(draft) > 0
        assert any(token == 0 for token in draft.token_N) is head


def test_one_token_is_one_node_whoever_says_it():
    hybrid = Hybrid(Sure(0.5), TableDrafter(world(2, 0.8)))
    state, draft = asked(hybrid)
    roots = [draft.token_N[n] for n, parent in enumerate(draft.parent_N) if parent == ROOT]
    assert roots.count(2) == 1 and state.planted.said_N[0] == pytest.approx(0.8, abs=1e-3)
    assert Joint().chance(0.5, 0.8) > 0.5 > Joint().chance(0.5, 0.1)


def test_a_head_below_the_text_is_reached_through_it():
    hybrid = Hybrid(Sure(0.6), TableDrafter(world(0, 0.6)))
    _, draft = asked(hybrid)
    paths = {draft.path_tokens(n) for n in range(len(draft))}
    assert paths >= {(0,), (0, 0), (2,), (2, 0)}


@pytest.mark.parametrize("nodes", [0, 1, 2])
def test_a_head_may_take_fewer_nodes_than_the_text_has(nodes):
    class Small(TableDrafter):
        def propose(self, rows):
            return super().propose([replace(row, budget=Budget(nodes, nodes)) for row in rows])

    state, draft = asked(Hybrid(Sure(0.5, 0.5, 0.5), Small(world(2, 0.8))))
    assert state.asked and draft.token_N == (2,) * (nodes or 3)
    assert (state.planted.said_N[0] > 0.0) is (nodes > 0), "what the head said is learned from"


def test_where_chains_alone_are_checked_one_of_them_drafts():
    for own, first in (((0.9,) * 4, 2), ((0.2,), 0)):
        hybrid = Hybrid(Sure(*own), TableDrafter(world(0, 0.9)))
        _, draft = asked(hybrid, chain=True)
        assert draft.parent_N == tuple(range(-1, len(draft) - 1)) and draft.token_N[0] == first


def seen(draft, emitted):
    kept = draft.path_of(emitted)
    none = Scored(torch.zeros(0, 1), (0, 0))
    return Outcome(draft, none, Verdict(kept, emitted), emitted, tuple(range(len(emitted))), 2)


def test_stated_chances_are_corrected_by_what_was_kept():
    hybrid = Hybrid(Sure(0.8), TableDrafter(world(0, 0.6)))
    state, draft = asked(hybrid)
    for _ in range(40):
        hybrid.observe([state], [seen(draft, (0, 1))])
        state, draft = asked(hybrid, state)
    assert state.table.chance(0.8) < 0.2 and state.table.chance(0.1) == pytest.approx(0.1)
    mark = hybrid.mark(state)
    hybrid.observe([state], [seen(draft, (2, 1))])
    assert hybrid.rewind(state, mark).table.chance(0.8) != state.table.chance(0.8)
    table = Table()
    for turn in range(2000):
        table.learn(0.8, turn % 2 == 0)
    assert table.chance(0.8) == pytest.approx(0.5, abs=0.02) and DOUBT > 0


def test_joint_chances_converge():
    """Where the head is always right and the text never, the head decides."""
    joint = Joint()
    for _ in range(300):
        joint.learn(0.7, 0.9, True)
        joint.learn(0.7, 0.1, False)
    assert joint.chance(0.7, 0.9) > 0.8 and joint.chance(0.7, 0.1) < 0.2


def test_what_cannot_be_joined_is_said():
    engine = Engine.load("tiny", drafter="none")
    for spec, message in (
        ("hybrid[lookup=recycling head=draft_model[model=tiny]]", "recycling states no chances"),
        ("hybrid[head=suffix]", "suffix expands no nodes"),
        ("hybrid[lookup=suffix+recycling head=suffix]", "lookup must be one drafter"),
    ):
        with pytest.raises(SpecError, match=message):
            engine.method(spec)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("head", ["draft_model[model=tiny]", "draft_model[model=tiny layers=1]"])
def test_processors_are_asked_about_texts_that_they_allow_alone(head, temperature):
    prompt = (5, 9, 11, 7, 5, 9, 30, 8, 5, 9, 11, 2, 5, 9, 31, 6, 5)
    answer = [9, 40, 5, 9, 41, 5, 9, 42]

    def one_text(tokens, logits):
        said = list(tokens[len(prompt) :])
        assert said == answer[: len(said)], "nothing may follow a text that is forbidden"
        found = torch.full_like(logits, -torch.inf)
        found[answer[len(said)]] = 0.0
        return found

    settings = {"temperature": temperature, "max_new_tokens": len(answer) - 1, "processors": (one_text,)}
    engine = Engine.load("tiny", drafter=f"hybrid[lookup=prompt_lookup head={head}]", dtype="float32")
    assert list(engine.generate(prompt, SamplingParams(**settings)).tokens) == answer[:-1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "head", ["early_exit", "early_exit[model=trained]", "kangaroo[model=other threshold=0]"]
)
def test_a_head_in_the_targets_slots_hands_its_work_on(tmp_path, monkeypatch, head, temperature):
    """The text's guesses have low numbers, and may be fed after the head's own."""
    monkeypatch.chdir(tmp_path)
    engine = Engine.load("tiny", drafter="none", dtype="float32")
    for folder, name in (("trained", "early_exit"), ("other", "kangaroo")):
        kind = registry.load("objective", name)
        kind.build(kind.Config(), engine.target, None).save(tmp_path / folder, {})
    params = SamplingParams(
        temperature=temperature, seed=0, max_new_tokens=24, allowed_tokens={1, 3, 4}, ignore_eos=True
    )
    prompt, said = [3, 1, 4, 1, 3, 3, 1, 4, 4, 1, 3, 1, 4, 1, 3, 3, 1], {"reproducible": True}
    plain = engine.generate(prompt, params, drafter="none", **said)
    found = engine.generate(prompt, params, drafter=f"hybrid[lookup=suffix head={head}]", **said)
    assert found.tokens == plain.tokens
    engine.generate(prompt, params, drafter=f"hybrid[lookup=suffix head={head}]", reproducible=False)
