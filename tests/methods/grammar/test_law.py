"""Drafts of what a grammar spells out keep the law, counted exactly; known-wrong ways are caught."""

from copy import copy
from dataclasses import replace

import pytest

from outpace import SamplingParams
from outpace.analysis.law import CAUGHT
from outpace.analysis.sequence_law import Mood, MoodyDrafter, SequenceCase
from outpace.analysis.tables import RIGHT
from outpace.methods.grammar.drafter import Grammar, _State
from outpace.models.thinking import Place as Begun
from outpace.models.thinking import Section, Thinking
from outpace.sampling import Warp
from outpace.tree.shapes import parse_shape, widths
from outpace.types import Draft, Law
from tests.methods.grammar.toy import Words

TREES = ("match", "tree", "traversal", "k_seq", "coupled")
CHAINS = ("chain", "block")
SHAPES = {
    "chain": {},
    "tree": {"shape": widths((2, 1))},
    "dynamic": {"shape": parse_shape("dynamic"), "nodes": 4},
}


class Spelled(MoodyDrafter):
    """The grammar drafter around one that draws."""

    follows = False
    drafted = 0

    def propose(self, rows):
        # What it draws is recorded as drawn from q under the rules: q and p go through one warp.
        inner = copy(self)
        inner.propose = super().propose
        grammar = Grammar(inner)
        grammar._follows = self.follows
        own = [replace(row, state=_State(Mood(row.state.refused))) for row in rows]
        drafts = grammar.propose(own)
        type(self).drafted += sum(map(len, drafts))
        return drafts


class Behind(Spelled):
    """The other drafter reads what is spelled, and goes on behind it."""

    follows = True


def case(drafter, shape, warp=Warp, **rule):
    params = SamplingParams(temperature=1.0, **(rule or {"grammar": Words()}))
    return SequenceCase(
        drafter=drafter, vocab=4, length=4, depth=3, params=params, warp=warp, **SHAPES[shape]
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafter", [Spelled, Behind])
def test_the_law_is_that_of_the_mask(drafter, shape):
    drafter.drafted = 0
    for name in TREES + (CHAINS if shape == "chain" else ()):
        assert replace(case(drafter, shape), length=3).error(RIGHT[name]) < 1e-12, name
    assert drafter.drafted > 0


def thinking(budget, start=(0,), end=(1,), closing=None, grammar=None):
    section = Section(start, end, closing or end, budget, again=grammar is None)
    return Thinking(section, Begun(1), 4, grammar)


RULES = {
    "none left": thinking(0),
    "a budget": thinking(2),
    "an end of two": thinking(2, end=(2, 3)),
    "a message": thinking(1, closing=(3, 1)),
    "then a grammar": thinking(1, grammar=Words()),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", [MoodyDrafter, Spelled, Behind])
def test_a_budget_of_thinking_keeps_the_law(drafter, rule):
    for shape, name in (("chain", "chain"), ("chain", "coupled"), ("chain", "block"), ("dynamic", "tree")):
        tried = replace(case(drafter, shape, grammar=RULES[rule]), length=3, depth=2)
        assert tried.error(RIGHT[name]) < 1e-12, name


class OfTheRoot(Warp):
    """Planted: one mask per step, that of the committed text, at every node."""

    def _rule(self, path):
        return super()._rule(())


class Injected(Warp):
    """Planted: where the text is fixed, its usual spelling is taken without being judged."""

    def law(self, logits_V, path=(), id_V=None):
        usual = self.expects(path) if self.deep else ()
        return Law.one_hot(usual[0], logits_V.dtype) if usual else super().law(logits_V, path, id_V)

    deep = True


@pytest.mark.parametrize("drafter", [MoodyDrafter, Spelled])
@pytest.mark.parametrize("rule", [Words(), RULES["a budget"], RULES["an end of two"]])
def test_a_mask_of_another_node_is_caught(drafter, rule):
    right = replace(case(drafter, "chain", grammar=rule), length=3)
    wrong = replace(right, warp=OfTheRoot)
    assert right.error(RIGHT["chain"]) < 1e-12
    assert wrong.error(RIGHT["chain"]) > CAUGHT


def test_text_that_is_written_without_being_judged_is_caught():
    assert case(Spelled, "chain", warp=Injected).error(RIGHT["chain"]) > CAUGHT


class DropsDraws(MoodyDrafter):
    """Planted: draws without the rules, and leaves out what they forbid."""

    def propose(self, rows):
        out = []
        for row in rows:
            free = Warp(SamplingParams(temperature=1.0), (), frozenset(), 4)
            (draft,) = super().propose([replace(row, warp=free)])
            keep = 0
            while keep < len(draft) and row.warp.allows(draft.token_N[:keep], draft.token_N[keep]):
                keep += 1
            out.append(
                Draft(draft.token_N[:keep], draft.parent_N[:keep], draft.groups[:keep], draft.laws[:keep])
            )
        return out


def test_dropping_a_draw_that_is_forbidden_is_caught():
    assert case(DropsDraws, "chain").error(RIGHT["chain"]) > CAUGHT
