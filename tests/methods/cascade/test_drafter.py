"""Cascades: exact laws by enumeration, levels that share the work, text that is taken back."""

from dataclasses import astuple, dataclass, field, replace

import pytest

from outpace import Engine, SpecError
from outpace.analysis.tables import RIGHT
from outpace.cache.base import shared_prefix
from outpace.drafters.ahead import CoinsAhead
from outpace.drafters.base import Drafter, Request
from outpace.drafters.worth import Chances
from outpace.law import Law
from outpace.methods.cascade import guesses, lenient
from outpace.methods.cascade.choice import Belief, Mean, choose
from outpace.methods.cascade.drafter import Cascade, CascadeConfig, read_k
from outpace.methods.lookup.automaton import SuffixAutomaton
from outpace.methods.lookup.max_gram import MaxGram, MaxGramConfig
from outpace.models.tiny import TableTarget
from outpace.params import SamplingParams
from outpace.tree.shapes import CHAIN, widths
from outpace.types import Budget, Draft, Outcome, Verdict
from outpace.verifiers.chain import Chain
from outpace.verifiers.rules import probs
from tests.drafters.support import Telling

PROMPT = (0, 1, 0)


@dataclass
class Mood:
    refused: int = 0


class Echo(Drafter[Mood]):
    """A lookup that goes on from the last token, in steps that depend on what was refused."""

    Config = Mood

    def __init__(self, vocab):
        self.vocab = vocab

    @classmethod
    def load(cls, config, target):
        return cls(target.vocab_size)

    def begin(self, request):
        return Mood()

    def propose(self, rows):
        out = []
        for row in rows:
            size = min(row.budget.max_nodes, row.budget.max_depth)
            step_ = 1 + row.state.refused
            last = row.tokens[-1]
            out.append(Draft.chosen([(last + (i + 1) * step_) % self.vocab for i in range(size)]))
        return out

    def observe(self, states, outcomes):
        for state, outcome in zip(states, outcomes, strict=True):
            if outcome.draft.token_N:
                gone = [t for n, t in enumerate(outcome.draft.token_N) if n not in outcome.verdict.kept]
                state.refused = gone[-1] + 1 if gone else 0


class Boasting(Echo):
    """It is sure of itself behind every other token."""

    def propose(self, rows):
        drafts = super().propose(rows)
        sure = [0.9 if row.tokens[-1] % 2 else 0.1 for row in rows]
        return [
            replace(draft, memo=Chances((chance,) * len(draft), 1.0))
            for draft, chance in zip(drafts, sure, strict=True)
        ]


def frozen(belief):
    kept = tuple((level, mean.value, mean.weight) for level, mean in sorted(belief.kept.items()))
    return kept, astuple(belief.tail), astuple(belief.size)


def revived(known):
    kept, tail, size = known
    return Belief({level: Mean(*mean) for level, *mean in kept}, Mean(*tail), Mean(*size))


@dataclass
class Case:
    """A request that is told in every way it can go."""

    k: str | None
    models: int = 1
    lookup: bool = True
    verifier: str = "tree"
    vocab: int = 2
    length: int = 3
    shape: object = CHAIN
    lenience: float = 1.0
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    edit: object = lambda cascade: None

    def __post_init__(self):
        self.target = TableTarget.random(3, self.vocab)
        tables = [TableTarget.random(20 + i, self.vocab) for i in range(self.models)]
        echo = Echo if self.k else Boasting
        lookup = echo(self.vocab) if self.lookup else None
        self.cascade = Cascade(tables, lookup, None if self.k is None else read_k(self.k), self.lenience)
        self.edit(self.cascade)
        size = len(self.shape.parent_N or ()) or 8
        self.told = Telling(
            self.target,
            self.cascade,
            PROMPT,
            self.length,
            RIGHT[self.verifier],
            Budget(size, size, shape=self.shape),
            self.params,
        )
        self.drafted = self.accepted = 0.0

    def error(self):
        """Largest error of the law of the emitted tokens."""
        return self.told.error(self._on, ((), 0, frozenset()))

    def _on(self, state, fate):
        emitted, told, _ = state
        refused, believed = told or (0, None)
        row = self.told.begin(fate, emitted)
        mine = row.members["d"].state
        if believed:
            mine.belief = revived(believed)
        if emitted:
            self.told.read(row)
            if mine.reading is not None:
                mine.reading.state.refused = refused
            outcome = self.told.step(row)
            self.drafted += fate.weight * len(outcome.draft)
            self.accepted += fate.weight * len(outcome.verdict.kept)
        else:
            self.told.prefill(row)
        mood = 0 if mine.reading is None else mine.reading.state.refused
        told = mood, None if mine.belief is None else frozen(mine.belief)
        emitted, live = self.told.end(row)
        return emitted, told, live


def with_verifier(verifier):
    def edit(cascade):
        for level in cascade.models:
            level.verifier = verifier

    return edit


SETTINGS = SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4)
CASES = {
    "vertical": Case("2/2"),
    "both": Case("1,2/1"),
    "three levels": Case("2,1,1/1,1/1", models=2),
    "model below a model": Case("2/2", models=2, lookup=False),
    "three tokens": Case("2,1/1", vocab=3, length=2),
    "penalties": Case("2/2", params=SETTINGS),
    "chain": Case("2,1/2", verifier="chain"),
    "block": Case("2,1/2", verifier="block"),
    "k_seq": Case("2,1/2", verifier="k_seq"),
    "traversal": Case("2,1/1", verifier="traversal"),
    "greedy_plus_one": Case("2,1/2", verifier="greedy_plus_one"),
    "spechub": Case("2,1/2", shape=widths((2, 1)), verifier="spechub"),
    "match": Case("2,1/2", verifier="match"),
    "coupled": Case("2,1/2", verifier="coupled"),
    "coupled, three levels": Case("2/1,1/1", models=2, verifier="coupled"),
    "leaders": Case("2,1/1", shape=widths((2, 1)), vocab=3, length=2),
    "leaders, drawn again": Case("1,1/1", shape=widths((2, 1)), vocab=3, length=2, verifier="k_seq"),
    "leaders, coupled": Case("2,1/1", shape=widths((2, 1)), verifier="coupled"),
    "greedy": Case(
        "2,1/2", vocab=3, length=6, params=SamplingParams(temperature=0.0, repetition_penalty=1.5)
    ),
    "lenient": Case("2,1/2", lenience=2.0),
    "lenient, three tokens": Case("2/2", vocab=3, length=2, lenience=1.3),
    "lenient, model below a model": Case("2/2", models=2, lookup=False, lenience=1.5),
    "lenient, three levels": Case("2,1/1,1/1", models=2, lenience=3.0),
    "lenient, leaders": Case("2,1/1", shape=widths((2, 1)), vocab=3, length=2, lenience=2.0),
    "lenient, coupled": Case("2,1/2", verifier="coupled", lenience=2.0),
    "lenient, greedy": Case(
        "2,1/2",
        vocab=3,
        length=6,
        lenience=3.0,
        params=SamplingParams(temperature=0.0, repetition_penalty=1.5),
    ),
    "lenient, greedy, three levels": Case(
        "3,1/2/1", models=2, vocab=4, length=8, lenience=2.0, params=SamplingParams(temperature=0.0)
    ),
    "chosen": Case(None),
    "chosen, three levels": Case(None, models=2),
    "chosen, no lookup": Case(None, lookup=False),
    "chosen, leaders": Case(None, shape=widths((2, 1)), vocab=3, length=2),
    "chosen, coupled": Case(None, verifier="coupled"),
    "chosen, lenient": Case(None, models=2, lenience=2.0),
    "chosen, greedy": Case(None, vocab=3, length=6, params=SamplingParams(temperature=0.0)),
    "inner block": Case("1/2", models=2, lookup=False, length=4, edit=with_verifier(RIGHT["block"])),
    "inner traversal": Case("1,1/2", edit=with_verifier(RIGHT["traversal"])),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_emitted_has_the_targets_law(name):
    case = CASES[name]
    assert case.error() < 1e-12
    assert case.drafted > case.accepted > 0, (case.drafted, case.accepted)


def handed_up_by_the_lookup(self, outcome, real=guesses.Guesses.extend):
    """The law of the inner draft, where one was kept, and not that of the level."""
    verdict = outcome.verdict
    wrong = [
        Law.one_hot(token, law.prob_S.dtype) if i < len(verdict.kept) else law
        for i, (token, law) in enumerate(zip(verdict.emitted, verdict.laws, strict=True))
    ]
    real(self, replace(outcome, verdict=replace(verdict, laws=tuple(wrong))))


def handed_up_by_the_model_below(self, outcome, real=guesses.Guesses.extend):
    draft, verdict = outcome.draft, outcome.verdict
    laws = list(verdict.laws)
    for i, node in enumerate(verdict.kept[: len(laws)]):
        group = next(g for g in draft.groups if node in g.nodes)
        if group.law is not None:
            laws[i] = draft.laws[group.law]
    real(self, replace(outcome, verdict=replace(verdict, laws=tuple(laws))))


def strict_laws(p, q, token, lenience, size, real=lenient.review):
    """The level's own distribution is handed up, as if it had not been lenient."""
    chance, rest, _ = real(p, q, token, lenience, size)
    return chance, rest, p


def leftovers_of_the_strict(p, q, token, lenience, size, real=lenient.review):
    """What was refused leniently is drawn anew as if it had been refused strictly."""
    chance, _, whole = real(p, q, token, lenience, size)
    return chance, p, whole


class Unresidual(Chain):
    """After a refusal it draws from p itself and not from what is left of it."""

    def judge(self, draft, laws, coins, *, want_laws=False):
        verdict = super().judge(draft, laws, coins, want_laws=want_laws)
        if len(verdict.kept) == len(draft):
            return verdict
        last = verdict.laws[-1]
        token = coins.choose(last, 99, -1)
        return replace(verdict, emitted=(*verdict.emitted[:-1], token))


def unlikely_ones_dropped(self, real=guesses.Guesses.draft):
    """The last guess is taken back if it turned out unlikely."""
    if self.laws and self.laws[-1] is not None:
        token = self.tokens[-1]
        if probs(self.laws[-1], (token,))[token] < 0.5:
            self.tokens.pop()
            self.laws.pop()
    return real(self)


class OneForAll(CoinsAhead):
    """The keys name neither level nor place."""

    def flip(self, prob, *key):
        return self.outer.flip(prob, *key)

    def choose(self, law, *key):
        return self.outer.choose(law, *key)


class OfThePlace(CoinsAhead):
    """Keyed by the inner position: guessed again at the next step, a place has the same coin."""

    def _always(self):
        place = self.outer.position + self.ahead
        return replace(self.outer, position=1 << 20), (self.level, place, int(self.stream))

    def flip(self, prob, *key):
        coins, first = self._always()
        return coins.flip(prob, *first, *key)

    def choose(self, law, *key):
        coins, first = self._always()
        return coins.choose(law, *first, *key)


PLANTED = {
    "law of the lookup": (Case("2/2"), ("extend", handed_up_by_the_lookup), None),
    "law of the model below": (
        Case("2/2", models=2, lookup=False),
        ("extend", handed_up_by_the_model_below),
        None,
    ),
    "no residual": (Case("2/2", edit=with_verifier(Unresidual())), None, None),
    "dropped by what it is": (Case("2/1"), ("draft", unlikely_ones_dropped), None),
    "one coin for all": (Case("2", lookup=False), None, OneForAll),
    "coins of the place alone": (Case("2/1", length=4), None, OfThePlace),
}


@pytest.mark.parametrize("wrong", [strict_laws, leftovers_of_the_strict])
def test_wrong_laws_of_a_lenient_level_are_caught(wrong, monkeypatch):
    monkeypatch.setattr(lenient, "review", wrong)
    assert Case("2/2", models=2, lookup=False, lenience=1.5).error() > 1e-3


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_caught(name, monkeypatch):
    case, method, coins = PLANTED[name]
    if method is not None:
        monkeypatch.setattr(guesses.Guesses, *method)
    if coins is not None:
        monkeypatch.setattr(guesses, "CoinsAhead", coins)
    assert case.error() > 1e-3


def test_the_tables_are_not_the_targets():
    for name, case in CASES.items():
        laws = [model.model.law_after((0, 1)) for model in case.cascade.models]
        far = [float((law - case.target.law_after((0, 1))).abs().sum()) for law in laws]
        assert min(far) > 0.05, name


# Levels ---------------------------------------------------------------------------------------

DRAFT = "draft_model[model=tiny layers=1]"
PERIOD = [5, 9, 11, 14]
PROMPTS = [PERIOD * 5, [40, 41, 42, 43, 44, 40, 41, 42]]
GREEDY = {"max_new_tokens": 32, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", drafter="none", dtype="float32")


def run(engine, spec, prompts=PROMPTS, **settings):
    """Tokens, passes of the target, and passes of the draft models."""
    clock = engine.method(spec).drafter.clock
    before = clock.count
    results = engine.generate(prompts, drafter=spec, **{**GREEDY, **settings})
    passes = max(result.counters.passes for result in results)
    return [result.tokens for result in results], passes, clock.count - before


def test_the_lookup_saves_passes_of_the_model(engine):
    few = frozenset({3, 1, 4})
    prompts = [[3, 1, 4, 1] * 6]
    plain, passes, alone = run(engine, f"cascade[levels={DRAFT} k=5]", prompts, allowed_tokens=few)
    same, as_many, helped = run(
        engine, f"cascade[levels={DRAFT}+max_gram k=5/10]", prompts, allowed_tokens=few
    )
    assert plain == same and helped < 0.8 * alone and as_many <= passes + 2
    expected = engine.generate(prompts, drafter="none", allowed_tokens=few, **GREEDY)
    assert plain == [expected[0].tokens]


def test_a_model_level_alone_drafts_as_the_draft_model_does(engine):
    for settings in ({}, {"temperature": 0.0, "repetition_penalty": 1.4}):
        alone = run(engine, f"{DRAFT[:-1]} tree=chain tree_size=4]", **settings)
        level = run(engine, f"cascade[levels={DRAFT} k=4]", **settings)
        assert alone == level, "as many passes of either model, too"


def test_the_tail_lengthens_the_draft(engine):
    lengths = []
    for k in ("3/3", "3,8/3"):
        spec = f"cascade[levels={DRAFT}+max_gram k={k}]"
        results = engine.generate(PROMPTS[:1], drafter=spec, **GREEDY)
        lengths.append(results[0].counters.drafted)
    assert lengths[1] > lengths[0]


def test_a_batch_is_drafted_together(engine):
    spec = f"cascade[levels={DRAFT}+max_gram k=4/6]"
    together = run(engine, spec, PROMPTS * 2)
    apart = [run(engine, spec, [prompt]) for prompt in PROMPTS]
    assert (
        together[0] == [tokens for tokens, *_ in (*apart, *apart)]
        or together[0] == [apart[0][0][0], apart[1][0][0]] * 2
    )
    assert together[2] < apart[0][2] + apart[1][2]


def test_guesses_that_were_refused_count_as_unread(engine):
    unread = []
    engine.listeners.append(lambda record: unread.extend(row.num_uncached for row in record.rows))
    engine.generate(PROMPTS[1], drafter=f"cascade[levels={DRAFT}+max_gram k=5]", **GREEDY)
    engine.listeners.pop()
    assert len(unread) > 5 and min(unread) >= 0


def test_no_slot_stays_open_and_the_lookup_keeps_no_guess(engine):
    spec = f"cascade[levels={DRAFT}+max_gram k=4,4/6]"
    cascade = engine.method(spec).drafter
    seen = []
    real = cascade.lookup.drafter.observe

    def watching(states, outcomes):
        real(states, outcomes)
        seen.append(states[0])

    cascade.lookup.drafter.observe = watching
    result = engine.generate(PROMPTS[0], drafter=spec, **GREEDY)
    del cascade.lookup.drafter.observe
    assert seen[-1].automaton.tokens == [*PROMPTS[0], *result.tokens]
    assert all(not level.cache.real._slots for level in cascade.models)


def test_the_lookup_learns_from_the_level_that_judged_it(engine):
    spec = f"cascade[levels={DRAFT}+max_gram[bigram=false] k=4/6]"
    lookup = engine.method(spec).drafter.lookup.drafter
    doubts = []
    real = lookup.end
    lookup.end = lambda state: (doubts.append(state.trust.doubt), real(state))
    engine.generate([3, 1, 4, 1] * 6, drafter=spec, **GREEDY)
    assert doubts and doubts[0] != 1.0


def test_leaders_are_the_models_best_and_each_has_a_tail(engine):
    spec = f"cascade[levels={DRAFT}+max_gram k=2,2/3 tree=3x1x1x1]"
    cascade = engine.method(spec).drafter
    drafts = []
    real = cascade.propose
    cascade.propose = lambda rows: drafts.extend(real(rows)) or drafts[-len(rows) :]
    engine.generate(PROMPTS[0], drafter=spec, **GREEDY)
    del cascade.propose
    fans = [len(draft.groups_of[-1][0].nodes) for draft in drafts if len(draft) > 3]
    assert fans and max(fans) == 3
    tails = [d for d in drafts if any(p >= 0 and d.depth_N[p] == 1 and p > 0 for p in d.parent_N)]
    assert tails, "the lookup goes on from a rival"


def test_the_text_decides_which_level_begins():
    belief, shares = Belief(), (0.1,)

    def sure(chance, size=6):
        return Draft.chosen(list(range(size)), memo=Chances((chance,) * size, 1.0))

    assert choose(sure(0.95), belief, shares, True, 32) is None, "the lookup alone"
    model_first = choose(sure(0.2), belief, shares, True, 32)
    assert model_first[0] > 0 and model_first[1] > 0
    assert choose(Draft(), belief, (0.9,), False, 32) == (0, 0), "nobody pays"
    for _ in range(40):
        outcome = Outcome(
            Draft.chosen([5, 6], memo=guesses.Origin((1, 1), (1.0, 1.0))), None, Verdict((), (7,)), (), (), 0
        )
        belief.learn(outcome)
    assert choose(sure(0.3, 1), belief, shares, True, 32) is None, "a model that is never right rests"


def test_a_text_that_repeats_itself_leaves_the_model_alone(engine):
    few = frozenset({3, 1, 4})
    prompts = [[3, 1, 4, 1] * 6]
    fixed, passes, model = run(engine, f"cascade[levels={DRAFT}+max_gram k=1,8]", prompts, allowed_tokens=few)
    chosen, fewer, rested = run(engine, f"cascade[levels={DRAFT}+max_gram]", prompts, allowed_tokens=few)
    assert fixed == chosen and rested < 0.5 * model and fewer <= passes + 1


# Parts ----------------------------------------------------------------------------------------


def test_tokens_are_taken_back_without_trace():
    def everything(a):
        return [
            list(a.tokens),
            [dict(d) for d in a.next],
            list(a.link),
            list(a.length),
            list(a.newest),
            list(a.count),
            a.last,
        ]

    parted = 0
    for seed in range(60):
        text = [(seed * i * i + i // 3) % (2 + seed % 3) for i in range(30)]
        automaton = SuffixAutomaton(text[: seed % 20])
        before = everything(automaton)
        states = len(automaton.next)
        mark = automaton.mark()
        automaton.extend(text[10:])
        parted += len(automaton.next) - states > 20
        automaton.rewind(mark)
        assert everything(automaton) == before
        automaton.extend(text)
        fresh = SuffixAutomaton([*text[: seed % 20], *text])
        assert everything(automaton) == everything(fresh)
    assert parted > 10, "states were parted and put together again"


def test_a_lookup_without_a_rewind_of_its_own_is_copied():
    echo, max_gram = Echo(3), MaxGram(MaxGramConfig())
    state = echo.begin(Request(prompt=(1,)))
    mark = echo.mark(state)
    state.refused = 2
    assert echo.rewind(state, mark).refused == 0
    other = max_gram.begin(Request(prompt=(1, 2, 1), num_cached=3))
    mark = max_gram.mark(other)
    other.automaton.extend([2, 2])
    other.trust.doubt = 3.0
    assert max_gram.rewind(other, mark) is other
    assert other.automaton.tokens == [1, 2, 1] and other.trust.doubt == 1.0


def test_common_prefixes():
    for a, b, n in (([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 5, 3], 1), ([1], [1], 1)):
        assert shared_prefix(a, b) == shared_prefix(b, a) == n


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("cascade[levels=max_gram]", "max_gram is no language model"),
        (f"cascade[levels=max_gram+{DRAFT}]", "max_gram is no language model"),
        (f"cascade[levels={DRAFT}+lookahead+suffix]", "lookahead is no language model"),
        (f"cascade[levels={DRAFT}+]", "empty part"),
        (f"cascade[levels={DRAFT[:-1]} tree=2x1]]", "tree, which the whole decides"),
        (f"cascade[levels={DRAFT}+max_gram k=0/3]", "not all 0"),
        (f"cascade[levels={DRAFT}+max_gram k=3/x]", "rows of whole numbers"),
        (f"cascade[levels={DRAFT}+max_gram k=3,4,5]", "too many numbers in row 1 for 2 levels"),
        (f"cascade[levels={DRAFT}+max_gram k=3/4/5]", "too many rows in row 3 for 2 levels"),
    ],
)
def test_levels_that_do_not_fit_are_refused(engine, spec, says):
    with pytest.raises(SpecError, match=says):
        engine.generate(PROMPTS[0], drafter=spec, **GREEDY)


def test_the_default_k():
    assert CascadeConfig(levels="a+b").k is None
    assert CascadeConfig().levels == "draft_model+max_gram"
    engine = Engine.load("tiny", drafter=f"cascade[levels={DRAFT}+suffix]")
    stages = engine.method(engine.drafter).drafter.staged.stages
    assert [quota for _, quota in stages] == [1, 8]
