import random

import pytest

from outpace.config import MethodSpec
from outpace.drafters.base import Request
from outpace.engine.method import SingleMethod
from outpace.errors import SpecError
from outpace.methods.lookup.reference import Reference, ReferenceConfig
from outpace.models.load import load_target
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import budget as budget_of
from outpace.types import Budget, Draft, Drawn, Outcome, Verdict

PROMPT = (900, 901)
ROOMY = Budget(32, 32)


class Running:
    """A drafter on one sequence."""

    def __init__(self, reference=None, prompt=PROMPT, **settings):
        self.drafter = Reference(ReferenceConfig(**settings))
        given = None if reference is None else tuple(reference)
        self.state = self.drafter.begin(Request(prompt=tuple(prompt), reference=given))

    def propose(self, budget=ROOMY):
        row = DraftRow(self.state, PROMPT, budget, None, None, Drawn.CHOSEN)
        return self.drafter.propose([row])[0]

    def emit(self, *tokens):
        """Tokens that no draft had."""
        verdict = Verdict((), tokens)
        self.drafter.observe([self.state], [Outcome(Draft(), None, verdict, (), (), 0)])

    def passes(self, text, budget=ROOMY):
        """Write a text as a target would that wants exactly this one; count the passes."""
        at = count = 0
        while at < len(text):
            draft = self.propose(budget)
            kept = draft.path_of(tuple(text[at:-1]))
            verdict = Verdict(tuple(kept), tuple(text[at : at + len(kept) + 1]))
            self.drafter.observe([self.state], [Outcome(draft, None, verdict, (), (), 0)])
            at, count = at + len(verdict.emitted), count + 1
        return count


REFERENCE = list(range(10, 60))


def test_a_supplied_text_is_followed_from_its_first_token():
    running = Running(REFERENCE)
    first = running.propose().token_N
    assert len(first) >= 6 and list(first) == REFERENCE[: len(first)]
    running.emit(*REFERENCE[:20])
    later = running.propose().token_N
    assert len(later) > len(first) and list(later) == REFERENCE[20 : 20 + len(later)]
    running.emit(*REFERENCE[20:])
    assert running.propose().token_N == (), "nothing is known beyond its end"


@pytest.mark.parametrize(
    ("output", "want"),
    [
        ([10, 11, 12, 99], 14),  # replaced: one place further on
        ([10, 11, 12, 99, 13], 14),  # put in: the next token shows it
        ([10, 11, 12, 99, 13, 14], 15),
        ([10, 11, 12, 14], 15),  # left out
        ([10, 11, 12, 17], 18),
        ([10, 11, 12, 97, 98, 99, 30, 31], 32),  # somewhere else altogether
        ([10, 11, 12, 97, 98, 99, 16], 17),  # one token is enough where it is near
    ],
)
def test_the_place_is_found_again_after_an_edit(output, want):
    running = Running(REFERENCE)
    running.emit(*output)
    draft = running.propose(Budget(3, 3)).token_N
    assert draft and list(draft) == REFERENCE[want - 10 : want - 10 + len(draft)]


def passes_of_a_sentence(output, begins=lambda token: True, tree=None):
    """Passes that an edited version of tokens 10 to 29 takes."""
    running = Running(range(10, 30))
    running.state.begins = begins
    return running.passes(output, Budget(32, 32) if tree is None else budget_of(tree, None, 0))


@pytest.mark.parametrize(
    "output",
    [
        [*range(10, 16), 99, *range(17, 30)],  # replaced
        [*range(10, 16), *range(17, 30)],  # left out
        [*range(10, 16), 17, 16, *range(18, 30)],  # two changed places
        [*range(10, 16), 99, *range(16, 30)],  # put in
    ],
)
def test_an_edit_costs_a_pass_or_two(output):
    assert passes_of_a_sentence(output) <= 4
    both = "2x" + "x".join("1" * 20)  # the two likeliest kinds of edit at once
    assert passes_of_a_sentence(output, tree=both) <= 3


def test_a_replaced_word_ends_where_the_next_one_begins():
    output = [*range(10, 16), 99, *range(19, 30)]  # 16, 17 and 18 are one word

    def begins(token):
        return token not in (17, 18)

    assert passes_of_a_sentence(output, begins) <= 3 < passes_of_a_sentence(output)


def test_nearer_places_win_and_longer_suffixes_outweigh_the_distance():
    far = [1, 2, 3, 50, 60]
    near = [7, 8, 9, 3, 70, 71]
    running = Running([*near, *range(100, 110), *far])
    running.emit(7, 8, 9, 55, 3)
    assert running.propose(Budget(1, 1)).token_N == (70,)
    running = Running([*near, *range(100, 110), *far])
    running.emit(7, 8, 9, 55, 1, 2, 3)
    assert running.propose(Budget(1, 1)).token_N == (50,)


def test_a_template_takes_the_other_hypotheses():
    running = Running(REFERENCE)
    running.emit(10, 11, 12, 99)
    draft = running.propose(budget_of("2x1x1", None, 0))
    roots = [draft.token_N[node] for node in draft.groups_of[-1][0].nodes]
    assert roots == [14, 13]  # one token was replaced, or one was put in
    assert {draft.path_tokens(n)[-1] - draft.path_tokens(n)[0] for n in range(len(draft))} >= {1}
    running.emit(13)
    assert running.propose(Budget(1, 1)).token_N == (14,)


def test_drafts_go_on_after_an_edit_and_end_after_several():
    running = Running(REFERENCE)
    running.emit(*REFERENCE[:3], 99)
    after_one = len(running.propose())
    running.emit(98)
    assert running.propose().memo.own_N[0] < 0.5 < running.propose().memo.own_N[1]
    running.emit(*REFERENCE[5:30])
    assert 6 < after_one < len(running.propose())
    lost = Running(REFERENCE)
    lost.emit(*range(500, 520))
    assert lost.propose().token_N == ()


def test_an_edited_text_takes_few_passes():
    coins = random.Random(5)
    reference = [coins.randrange(1000) for _ in range(400)]
    output = list(reference)
    for place in range(20, 400, 40):
        kind = place // 40 % 3
        output[place : place + (kind != 1)] = [[2000], [2001], []][kind]
    emitted = len(output) / Running(reference).passes(output)
    assert emitted > 6, emitted
    assert len(output) / Running(reference).passes([3000 + t for t in output]) < 1.1
    assert len(reference) / Running(reference).passes(reference) > 15


def test_without_a_reference_the_prompt_and_the_output_so_far_are_followed():
    prompt = [900, *range(10, 60), 901]
    running = Running(prompt=prompt)
    assert running.propose().token_N == ()
    running.emit(10, 11)
    assert running.propose(Budget(3, 3)).token_N == (12, 13, 14)
    running.emit(700, 701, 702, 700, 701)
    assert running.propose(Budget(2, 2)).token_N == (702, 700)
    circle = Running(prompt=[900])
    circle.emit(*[5, 6] * 8)
    assert circle.propose(Budget(5, 5)).token_N == (5, 6, 5, 6, 5), "a loop goes round"
    silent = Running(prompt=prompt, source="request")
    silent.emit(10, 11, 12)
    assert silent.propose().token_N == ()
    supplied = Running([1, 2, 3], prompt=prompt, source="request")
    assert supplied.propose(Budget(2, 2)).token_N == (1, 2)


def test_a_text_that_joins_its_reference_matches_no_end_of_itself():
    coins = random.Random(1)
    running = Running(prompt=[1])
    for _ in range(300):
        running.emit(coins.randrange(4))
        for place in running.state.places:
            assert place.at < len(running.state.reference)
        draft = running.propose(Budget(4, 4))
        assert all(token in range(5) for token in draft.token_N)


def test_an_empty_reference_drafts_nothing():
    running = Running([])
    assert running.propose().token_N == ()
    running.emit(5, 6, 7)
    assert running.propose().token_N == ()


def test_bad_settings_are_refused():
    with pytest.raises(SpecError, match="source must be prompt or request, got file"):
        SingleMethod(MethodSpec.parse("reference[source=file]"), load_target("tiny"))
